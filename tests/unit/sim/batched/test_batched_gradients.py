"""Promises made together: what is joined, what is stacked, that a loss is read when it is there, and shards that share a fold."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from syncline.sim.batched.batched_gradients import BatchedGradients, Loss, LossLog
from syncline.sim.batched.lazy_gradients import Own, Promise
from syncline.sim.batched.objective import SimTask
from syncline.sim.batched.vmap_gradients import plain
from syncline.sim.random_states import Random
from syncline.table.accumulator import Taken
from syncline.table.layout import lay_out


def squares(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0]).square().mean()


class Together:
    """A computer, and promises at versions whose weights are all alike; `calls` are the batches of each computation."""

    def __init__(self, shards: int = 1) -> None:
        torch.manual_seed(0)
        model = nn.Linear(5, 400)
        self.layout, _ = lay_out(model, [model.parameters()], cuttable=True, shards=shards)
        self.task = SimTask(model, squares, self.layout, TensorDataset(torch.randn(60, 5)))
        self.computer = BatchedGradients(
            self.task, learners=4, draws=False, convolutions="grouped", graphs=False
        )
        self.calls: list[tuple[str, int]] = []
        for name in ("joined", "stacked"):
            program: Any = getattr(self.computer, name)
            run = program._run
            program._run = lambda versions, batches, *rest, name=name, run=run: (
                self.calls.append((name, len(batches))), run(versions, batches, *rest)
            )  # fmt: skip
        self.versions: dict[int, Any] = {}

    def promise(self, version: int, *examples: int) -> Promise:
        held = self.versions.setdefault(version, self.computer.versions.get(version))
        for segment in held.segments:
            segment.fill_(0.1 * version)
        promise = Promise(held, torch.tensor(examples), len(examples), Own(0, Random(), []))
        self.computer.promise(promise)
        return promise

    def mean(self, *taken: Taken) -> list[Tensor]:
        """As plain gradients have it."""
        total = sum(each.examples for each in taken)
        found = [
            (plain(self.task, each.gradient.version.segments, each.gradient.indices)[1], each)
            for each in taken
        ]
        return [
            sum(each.examples / total * each.damping * segments[index] for segments, each in found)  # type: ignore[misc]
            for index in range(len(found[0][0]))
        ]


def take(promise: Promise, damping: float = 1.0) -> Taken:
    return Taken(promise, promise.size, damping, 0, 0)


@pytest.mark.parametrize(("versions", "calls"), [
    ([1, 1, 1, 1], [("joined", 4)]),  # lockstep: all at one version
    ([1, 2, 3, 4], [("stacked", 4)]),  # all that are outstanding, at once
])  # fmt: skip
def test_a_fold_joins_what_is_of_one_version_and_stacks_the_rest(
    versions: list[int], calls: list[Any]
) -> None:
    together = Together()
    taken = [
        take(together.promise(version, 2 * i, 2 * i + 1), 1 / (i + 1)) for i, version in enumerate(versions)
    ]
    wanted = together.mean(*taken)
    made = together.computer.fold(together.layout.parts[0], taken)
    torch.testing.assert_close(made.segments, wanted)
    assert made.present == (True, True)
    assert len(together.computer.stacked.rows.free) == 64, "what is folded is kept no longer"
    assert [call for call in together.calls if call[0] == calls[0][0]] == calls


def test_what_was_stacked_for_one_fold_is_there_for_the_next() -> None:
    together = Together()
    promises = [together.promise(version, version) for version in range(6)]
    for promise in promises:
        made = together.computer.fold(together.layout.parts[0], [take(promise)])
        torch.testing.assert_close(made.segments, together.mean(take(promise)))
    assert together.calls == [("stacked", 6)], "six folds, one computation"
    assert len(together.computer.stacked.rows.free) == 64, "and none of its rows is kept"


def test_nobody_computes_what_nobody_holds() -> None:
    together = Together()
    kept, lost = together.promise(1, 1), together.promise(2, 2)
    del lost
    together.computer.fold(together.layout.parts[0], [take(kept)])
    assert sum(count for _, count in together.calls) == 1


def test_shards_fold_one_mean_that_is_made_once() -> None:
    together = Together(shards=2)
    taken = [take(together.promise(version, version)) for version in (1, 2, 3)]
    wanted = together.mean(*taken)
    cuts = [together.computer.fold(part, taken) for part in together.layout.parts]
    for part, made in zip(together.layout.parts, cuts, strict=True):
        torch.testing.assert_close(made.segments, part.segments(wanted))
    assert together.calls == [("stacked", 3)], "and added up without a further computation"


def test_what_a_learner_made_for_itself_is_its_own() -> None:
    together = Together()
    promise = together.promise(1, 1, 2)
    mine = together.computer.make(promise)
    assert together.computer.make(promise) is mine
    for segment in mine.segments:
        segment.mul_(3.0)  # as one that pushes sums does
    made = together.computer.fold(together.layout.parts[0], [take(promise)])
    torch.testing.assert_close(made.segments, mine.segments)


def test_a_loss_is_computed_when_somebody_reads_it() -> None:
    together = Together()
    promises = [together.promise(version, version, version + 1) for version in (1, 2)]
    wanted = [float(plain(together.task, each.version.segments, each.indices)[0]) for each in promises]
    assert not together.calls
    assert [float(each.loss) for each in promises] == pytest.approx(wanted)
    assert together.calls == [("stacked", 2)]


def test_a_loss_that_is_no_number_raises_the_alarm_with_its_learner() -> None:
    together, heard = Together(), list[Any]()
    together.computer.alarm = lambda rank, loss: heard.append(rank)
    promise = together.promise(1, 1)
    for segment in promise.version.segments:
        segment.fill_(float("inf"))
    assert not float(promise.loss) < float("inf") and heard == [0]


# -- the log of losses ---------------------------------------------------------------------------------------


class Thing:
    """Something that can be referred to weakly."""


def test_losses_are_read_many_at_a_time() -> None:
    log, thing = LossLog(torch.device("cpu"), room=3), Thing()
    reads: list[int] = []
    read = log.read
    log.read = lambda: (reads.append(1), read())[1]  # type: ignore[method-assign]

    def need(promise: Any) -> None:
        log.values[log.place(losses[-1])] = 9.0

    losses = [Loss(log, weakref.ref(thing), need) for _ in range(6)]  # type: ignore[arg-type]
    for number, loss in enumerate(losses[:5]):
        log.values[log.place(loss)] = float(number)
    assert [float(loss) for loss in losses[:5]] == [0, 1, 2, 3, 4]
    assert len(reads) == 2
    assert float(losses[5]) == 9.0  # computed because somebody asked
    gone = Loss(log, weakref.ref(Thing()), need)  # type: ignore[arg-type]
    assert float(gone) != float(gone)
