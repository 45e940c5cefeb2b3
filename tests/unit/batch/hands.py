"""A coordinator, its shards and its learners by hand: messages arrive in any order that channels allow."""

import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from syncline.batch import commands as c
from syncline.batch import messages as m
from syncline.batch.coordinator import Coordinator, slots_of, window_of
from syncline.batch.portions import Cancel, Portions, Samples
from tests.unit.batch.plain import change

SIZE = 6  # of vectors


class Hands:
    """Least squares on rows of a matrix: an example is a row. Every party handles one message at a time, chosen at random."""

    def __init__(
        self,
        method: c.BatchMethod,
        rows: np.ndarray,
        *,
        seed: int,
        shards: int = 2,
        learners: int = 3,
        portion: int = 3,
        deterministic: bool = False,
        limit: int = 8,
        sizes: Any = None,
    ) -> None:
        self.random = random.Random(seed)
        self.rows, self.portion, self.shards = rows, portion, shards
        window = window_of(learners) if deterministic else None
        self.coordinator = Coordinator(
            method,
            Samples(len(rows), portion, sizes),
            shards=shards,
            slots=slots_of(learners, deterministic=deterministic),
            portions=Portions(deterministic=deterministic, window=window),
            limit=limit,
        )
        self.names = tuple(method.vectors)
        self.inboxes: dict[tuple[str, int], deque[Any]] = {("shard", s): deque() for s in range(shards)}
        self.replies: deque[Any] = deque()
        self.slots: dict[int, np.ndarray] = {}
        self.iterations: list[m.Reached] = []
        self.saved: list[list[dict[str, np.ndarray]]] = []
        self.over: m.Over | None = None
        self.sums = 0
        self.restart()
        for learner in range(learners):
            self.join(learner)
        self.do(self.coordinator.begin())

    def restart(self, saved: list[dict[str, np.ndarray]] | None = None) -> None:
        """New shards, with these vectors."""
        cuts = np.array_split(np.arange(SIZE), self.shards)
        self.parts = [{name: np.zeros(len(cut)) for name in self.names} for cut in cuts]
        if saved is not None:
            self.parts = [{name: value.copy() for name, value in part.items()} for part in saved]
        for shard in range(self.shards):
            self.inboxes["shard", shard].clear()
        self.replies = deque(each for each in self.replies if not isinstance(each, m.Ran | m.Added))

    @property
    def x(self) -> np.ndarray:
        return np.concatenate([part["x"] for part in self.parts])

    def do(self, actions: Iterable[m.Action]) -> None:
        for action in actions:
            if isinstance(action, m.Run | m.Add):
                for shard in range(self.shards):
                    self.inboxes["shard", shard].append(action)
            elif isinstance(action, m.Give | Cancel):
                if ("learner", action.learner) in self.inboxes:
                    self.inboxes["learner", action.learner].append(action)
            elif isinstance(action, m.Reached):
                self.iterations.append(action)
                self.saved.append([{n: v.copy() for n, v in part.items()} for part in self.parts])
                self.do(self.coordinator.proceed())
            else:
                self.over = action

    def join(self, learner: int) -> None:
        self.inboxes["learner", learner] = deque()
        self.do(self.coordinator.join(learner))

    def kill(self, learner: int) -> None:
        del self.inboxes["learner", learner]
        self.replies = deque(r for r in self.replies if not (isinstance(r, tuple) and r[0] == learner))
        self.do(self.coordinator.leave(learner))

    def step(self) -> None:
        """One message is handled, by anybody."""
        busy = [party for party, inbox in self.inboxes.items() if inbox]
        choice = self.random.choice([*busy, *([("coordinator", 0)] if self.replies else [])])
        if choice[0] == "coordinator":
            self._hear(self.replies.popleft())
        elif choice[0] == "shard":
            self._carry_out(choice[1], self.inboxes[choice].popleft())
        else:
            self._compute(choice[1], self.inboxes[choice])

    def run(self, most: int = 100_000) -> "Hands":
        for _ in range(most):
            if self.over is not None:
                return self
            self.step()
        raise AssertionError("it never ends")

    def _hear(self, reply: Any) -> None:
        if isinstance(reply, m.Ran):
            self.do(self.coordinator.ran(reply))
        elif isinstance(reply, m.Added):
            self.do(self.coordinator.added(reply))
        else:
            learner, message = reply
            heard = self.coordinator.answered if isinstance(message, m.Answered) else self.coordinator.dropped
            self.do(heard(learner, message))

    def _carry_out(self, shard: int, message: Any) -> None:
        v = self.parts[shard]
        if isinstance(message, m.Add):
            part = np.array_split(self.slots[message.slot], self.shards)[shard]
            v[message.to] = part.copy() if message.first else v[message.to] + part
            self.replies.append(m.Added(shard, message.slot))
            return
        measured = []
        for command in message.commands:
            if isinstance(command, c.Dot):
                measured.append(float(v[command.a] @ v[command.b]))
            elif isinstance(command, c.Largest):
                measured.append(float(np.max(np.abs(v[command.a]), initial=0.0)))
            else:
                change(v, command)
        self.replies.append(m.Ran(shard, message.number, tuple(measured)))

    def _compute(self, learner: int, inbox: deque[Any]) -> None:
        message = inbox.popleft()
        if isinstance(message, Cancel):  # answered before
            return
        cancel = next(
            (each for each in inbox if isinstance(each, Cancel) and each.task == message.task), None
        )
        if cancel is not None:
            inbox.remove(cancel)
            self.replies.append((learner, m.Dropped(message.evaluation, message.task)))
            return
        low, high = message.start * self.portion, min(message.stop * self.portion, message.batch.examples)
        rows = self.rows[low:high]
        error = rows @ self.x - 1
        self.slots[message.slot] = rows.T @ error
        self.sums += 1
        answer = m.Answered(message.evaluation, message.task, float(error @ error) / 2, len(rows))
        self.replies.append((learner, answer))
