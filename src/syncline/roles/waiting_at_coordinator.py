"""Learners that wait at the coordinator: for its answer, for each other in a meeting, for others to open a table or loader too.

Says to the leading shard who waits for others here, and to learners whose loops differ who waits where. Not responsible
for deciding that: the leading shard runs that protocol, because it knows who waits at loaders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from syncline import messages as m
from syncline.errors import LoopError, UsageError
from syncline.ports import CoordinatorPort
from syncline.protocols.meetings import EPOCH, LOADER, STEP, TABLE, MeetingPlace


class WaitingLearners:
    """Who of `live` (learner -> rank) has asked for what."""

    def __init__(self, port: CoordinatorPort, live: Mapping[int, int]) -> None:
        self._port, self._live = port, live
        self._met: list[m.Met] = []  # meetings whose values are not all here
        self.asked: dict[int, Any] = {}  # learner -> the request it waits for
        self._opening: dict[int, MeetingPlace] = {}  # who waits for others to open the same
        self._news: dict[int, MeetingPlace | None] = {}  # what the shards have not heard of that
        self._told = 0  # how often they were
        self._refusals: dict[int, LoopError] = {}  # for learners that wait in a step, when they ask
        self.ending = False  # some have heard of the end, others not yet: they differ for no fault of theirs

    def reply(self, learner: int, answer: Any) -> None:
        self.leave(learner)
        self._port.reply(learner, answer)

    def leave(self, learner: int) -> None:
        """It waits no more."""
        self.asked.pop(learner, None)
        if self._opening.pop(learner, None):
            self._news[learner] = None

    def reset(self) -> None:
        """The shards are new ones: they have heard of nobody here."""
        self._met.clear()
        self._refusals.clear()
        self._news = dict(self._opening)

    # -- meetings ----------------------------------------------------------------------------------------

    def met(self, message: m.Met) -> None:
        """The leading shard says who met; what they brought may come later than its word."""
        self._met.append(message)
        self.try_met()

    def try_met(self) -> None:
        for met in list(self._met):
            brought = {learner: self.asked.get(learner) for learner in met.learners if learner in self._live}
            if all(isinstance(asked, m.MeanOf) for asked in brought.values()):
                self._met.remove(met)
                if met.others and not self.ending:
                    self._refuse_different(met)
                elif brought:
                    values = {self._live[learner]: asked.value for learner, asked in brought.items() if asked}
                    try:
                        answer: Any = mean_of(values)
                    except UsageError as error:
                        answer = m.Refused(error)
                    for learner in self.by_rank(brought):
                        self.reply(learner, answer)

    def by_rank(self, learners: Iterable[int]) -> list[int]:
        return sorted(learners, key=lambda learner: self._live[learner])

    # -- openings, and loops that differ -----------------------------------------------------------------

    def look(self, learner: int) -> None:
        """It has asked for something, or others have gone on: tell the leading shard who opens something and waits."""
        asked = self.asked.get(learner)
        if isinstance(asked, m.Open):
            self._opening[learner] = self._news[learner] = MeetingPlace(TABLE, asked.table)
        elif isinstance(asked, m.OpenLoader):
            self._opening[learner] = self._news[learner] = MeetingPlace(LOADER, asked.loader)
        self.tell()

    def tell(self) -> None:
        if self._news:
            news, self._news, self._told = self._news, {}, self._told + 1
            self._port.tell_shards(m.Opening(self._told, news))

    def standstill(self, question: m.Standstill) -> None:
        """Say yes where nobody has gone on, and nobody else is on its way."""
        if question.number == self._told and not self._live.keys() - question.learners:
            self._port.tell_shards(question)

    def _refuse_different(self, met: m.Met) -> None:
        places: dict[MeetingPlace | None, list[int]] = {}
        for learner, place in (*((each, None) for each in met.learners), *met.others.items()):
            if learner in self._live:
                places.setdefault(place, []).append(self._live[learner])
        problem = LoopError(differing({place: sorted(ranks) for place, ranks in places.items()}))
        opening = [learner for learner in met.others if learner in self._opening]
        for learner in self.by_rank([*(each for each in met.learners if each in self._live), *opening]):
            self.reply(learner, m.Refused(problem))
        if len(stepped := {place for place in met.others.values() if place.what == STEP}) > 1:
            self._refusals.update((each, problem) for each, place in met.others.items() if place in stepped)
            self._port.announce(m.Call())

    def answer_call(self, learner: int) -> None:
        """It waits in a step, and asks whether it is to go on waiting."""
        problem = self._refusals.pop(learner, None)
        self.reply(learner, m.Refused(problem) if problem else None)


def differing(places: Mapping[MeetingPlace | None, list[int]]) -> str:
    """Who waits where (None: in a meeting), by rank, and what to do."""
    where = ", ".join(f"learners {ranks} {_wait(place)}" for place, ranks in places.items())
    rules = []
    if any(place is not None and place.what in (TABLE, LOADER) for place in places):
        rules.append("open the same tables and loaders in the same order")
    if sum(place is not None and place.what == STEP for place in places) > 1:
        rules.append("step the same tables in the same order")
    if None in places:
        rules.append("call session.mean equally often")
    advice = ""
    if None in places and any(place is not None and place.what == EPOCH for place in places):
        advice = (
            "; learners have unequal numbers of batches: call it after the loop over a loader, not inside"
        )
    return (
        f"learners' loops differ, and all wait for each other: {where}. Every learner must "
        f"{' and '.join(rules)}{advice}."
    )


def _wait(place: MeetingPlace | None) -> str:
    if place is None:
        return "wait in session.mean"
    if place.what == EPOCH:
        return f"wait at loader {place.number} for its next epoch"
    if place.what == STEP:
        return f"wait in a step of table {place.number}"
    return f"open {place.what} {place.number}"


def brought(value: Any) -> Tensor:
    """As it travels."""
    held = value.detach().cpu() if isinstance(value, Tensor) else value
    try:
        if torch.is_complex(found := torch.as_tensor(held)):
            raise TypeError("complex")
        return found.to(torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"session.mean takes a number or a tensor of real numbers, got {what}") from error


def mean_of(values: Mapping[int, Tensor]) -> Tensor:
    """Of what each rank has brought, in their order."""
    ranks = sorted(values)
    shapes = {rank: tuple(values[rank].shape) for rank in ranks}
    if len(set(shapes.values())) > 1:
        said = ", ".join(f"learner {rank}: {shape}" for rank, shape in shapes.items())
        raise UsageError(f"session.mean: every learner must bring the same shape, got {said}")
    return torch.stack([values[rank] for rank in ranks]).mean(0)


def like(mean: Tensor, value: Any) -> Any:
    """As the learner gets it: a number, or a tensor of its own kind; the mean of whole numbers is a fraction."""
    if not isinstance(value, Tensor):
        return mean.item() if mean.dim() == 0 else mean.clone()
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    return mean.to(device=value.device, dtype=dtype, copy=True)
