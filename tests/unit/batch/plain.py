"""Batch methods over plain numpy arrays, cut into parts as shards cut them: the reference executor of the tests."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from syncline.batch import commands as c

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


@dataclass
class Plain:
    """Named vectors in `parts` parts; dots are added part by part, in float64."""

    objective: Objective
    vectors: tuple[str, ...]
    start: np.ndarray
    parts: int = 1
    evaluations: int = 0
    trips: int = 0
    seen: list[tuple[float, np.ndarray]] = field(default_factory=list)  # loss and x of every evaluation

    def __post_init__(self) -> None:
        self.shards = [
            {name: np.zeros_like(part) for name in self.vectors} | {"x": part.copy()}
            for part in np.array_split(self.start, self.parts)
        ]

    def whole(self, name: str) -> np.ndarray:
        return np.concatenate([shard[name] for shard in self.shards])

    def run(self, program: c.Program) -> dict[str, float]:
        c.check(program, self.vectors)
        self.trips += 1
        got: dict[str, float] = {}
        with np.errstate(all="ignore"):
            for command in program:
                got |= self._carry_out(command)
        assert tuple(got) == c.results(program)
        return got

    def _carry_out(self, command: c.Command) -> dict[str, float]:
        match command:
            case c.Evaluate(at, gradient, loss):
                return {loss: self._evaluate(at, gradient)}
            case c.Dot(name, a, b):
                parts = [float(np.dot(s[a].astype(np.float64), s[b].astype(np.float64))) for s in self.shards]
                return {name: sum(parts)}
            case c.Largest(name, a):
                return {name: float(np.max([np.max(np.abs(s[a]), initial=0.0) for s in self.shards]))}
        for shard in self.shards:
            change(shard, command)
        return {}

    def _evaluate(self, at: str, gradient: str) -> float:
        self.evaluations += 1
        loss, g = self.objective(self.whole(at))
        self.seen.append((loss, self.whole(at)))
        for shard, part in zip(self.shards, np.array_split(g, self.parts), strict=True):
            shard[gradient][:] = part
        return loss


def change(v: dict[str, np.ndarray], command: c.Command) -> None:
    match command:
        case c.Copy(to, of):
            v[to][:] = v[of]
        case c.Swap(a, b):
            v[a], v[b] = v[b], v[a]
        case c.Fill(to, value):
            v[to][:] = value
        case c.Scale(to, by):
            v[to] *= by
        case c.Axpy(to, by, of):
            v[to] += by * v[of]
        case c.Multiply(to, of):
            v[to] *= v[of]
        case c.Combine(to, terms):
            v[to][:] = sum(by * v[of] for by, of in terms)
        case _:
            raise AssertionError(command)


@dataclass
class Outcome:
    end: c.End | None  # None: stopped after `most` iterations
    x: np.ndarray
    records: list[c.Record]
    states: list[c.State]
    plain: Plain
    saved: list[list[dict[str, np.ndarray]]]  # the shards at the end of every iteration


def drive(
    method: c.BatchMethod,
    objective: Objective,
    start: Iterable[float],
    *,
    parts: int = 1,
    state: c.State | None = None,
    shards: list[dict[str, np.ndarray]] | None = None,
    most: int = 2000,
    keep: bool = False,
) -> Outcome:
    """From the start, or from a state with the shards as they were, to the end or through `most` iterations."""
    plain = Plain(objective, tuple(method.vectors), np.asarray(start), parts)
    if shards is not None:
        plain.shards = copy.deepcopy(shards)
    outcome = Outcome(None, plain.whole("x"), [], [], plain, [])
    steps = method(state)
    try:
        said = next(steps)
        while len(outcome.records) < most:
            if isinstance(said, c.Iteration):
                outcome.records.append(said.record)
                outcome.states.append(said.state)
                if keep:
                    outcome.saved.append(copy.deepcopy(plain.shards))
                said = steps.send({})
            else:
                said = steps.send(plain.run(said))
    except StopIteration as stop:
        outcome.end = stop.value
    outcome.x = plain.whole("x")
    return outcome
