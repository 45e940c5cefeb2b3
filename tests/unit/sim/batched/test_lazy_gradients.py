"""Promises, shared versions, and the plain way to make a gradient: each by itself, as its learner's own process would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.sim.batched.lazy_gradients import EachAlone, Own, Promise, PromisedLane, PromisedSlot, Versions
from syncline.sim.clock import Clock
from syncline.sim.random_states import Random
from syncline.table.accumulator import Taken
from syncline.table.layout import lay_out


class Model(nn.Module):
    """With dropout, a buffer that counts, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 3), nn.Parameter(torch.ones(2))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1  # type: ignore[operator]
        return nn.functional.dropout(self.linear(x), 0.5)


class Shop:
    """In a workshop's place: one model for all, whose data are the numbers of the examples."""

    device = torch.device("cpu")

    def __init__(self, *, shards: int = 1, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or Model()
        self.layout, self.tensors = lay_out(
            self.model, [self.model.parameters()], cuttable=True, shards=shards
        )
        self.plan = SimpleNamespace(way=self.way)
        self.computer = EachAlone(self)  # type: ignore[arg-type]

    def read(self, indices: Tensor) -> Tensor:
        return indices.float()[:, None].expand(-1, 4)

    def way(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    def version(self, value: float) -> Any:
        version = self.computer.versions.get(1)
        for segment in version.segments:
            segment.fill_(value)
        return version

    def own(self, rank: int) -> Own:
        states = Random()
        with states.drawn():
            torch.manual_seed(rank)
        return Own(rank, states, [torch.zeros(1)])

    def promise(self, version: Any, own: Own, *examples: int) -> Promise:
        promise = Promise(version, torch.tensor(examples), len(examples), own)
        self.computer.promise(promise)
        return promise


def alone(shop: Shop, value: float, rank: int, *steps: tuple[int, ...]) -> list[list[Tensor | None]]:
    """The gradients that a learner of this rank computes one after another on a model of its own."""
    model = Model()
    torch.manual_seed(rank)
    found = []
    for examples in steps:
        for parameter in model.parameters():
            parameter.data.fill_(value)
            parameter.grad = None
        shop.way(model, shop.read(torch.tensor(examples)))
        found.append([parameter.grad for parameter in model.parameters()])
    return found


def test_each_learner_draws_and_counts_for_itself_whoever_came_before() -> None:
    shop = Shop()
    before, version = torch.get_rng_state(), shop.version(2.0)
    first, second = shop.own(1), shop.own(2)
    promises = [
        shop.promise(version, first, 1, 2), shop.promise(version, second, 3), shop.promise(version, first, 4, 5)
    ]  # fmt: skip
    assert torch.equal(torch.get_rng_state(), before), "the caller's own"
    expected = alone(shop, 2.0, 1, (1, 2), (4, 5)), alone(shop, 2.0, 2, (3,))
    for promise, gradients in zip(promises, [expected[0][0], expected[1][0], expected[0][1]], strict=True):
        made = shop.computer.make(promise)
        assert made.present == [each is not None for each in gradients] and made.present.count(False) == 1
        for view, each in zip(made.views, gradients, strict=True):
            assert torch.equal(view, torch.zeros_like(view) if each is None else each)
    assert [float(promise.buffers[0]) for promise in promises] == [1.0, 1.0, 2.0]
    assert [float(own.buffers[0]) for own in (first, second)] == [2.0, 1.0]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_fold_is_the_mean_by_examples(shards: int) -> None:
    shop = Shop(shards=shards)
    version = shop.version(1.0)
    promises = [shop.promise(version, shop.own(rank), *range(count)) for rank, count in ((0, 1), (1, 3))]
    wanted = [
        (a.clone() + 3 * b) / 4
        for a, b in zip(*(shop.computer.make(each).views for each in promises), strict=True)
    ]
    made = []
    for part in shop.layout.parts:
        taken = [Taken(promise, promise.size, 1.0, 0, 0) for promise in promises]
        found = shop.computer.fold(part, taken)
        for piece, view, present in zip(part.pieces, found.views, found.present, strict=True):
            whole = wanted[piece.entry].flatten()[piece.start : piece.stop]
            torch.testing.assert_close(view.flatten() if present else torch.zeros_like(whole), whole)
            made.append(piece.stop - piece.start)
    assert sum(made) == sum(each.numel() for each in wanted)


def test_a_loss_that_is_no_number_raises_the_alarm() -> None:
    shop, heard = Shop(), list[Any]()
    shop.computer.alarm = lambda rank, loss: heard.append((rank, loss))
    shop.promise(shop.version(float("inf")), shop.own(3), 0, 1)
    assert [rank for rank, _ in heard] == [3] and heard[0][1] != heard[0][1]


def test_sparse_gradients_are_refused() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x[:, 0].long())

    shop = Shop(model=Sparse())
    own = shop.own(0)
    own.buffers.clear()
    with pytest.raises(UsageError, match="sparse"):
        shop.promise(shop.version(1.0), own, 1, 2)


# -- versions ------------------------------------------------------------------------------------------------


def test_a_version_is_kept_for_as_long_as_somebody_holds_it() -> None:
    layout = Shop().layout
    places: list[Any] = []
    versions = Versions(
        layout,
        lambda: places.append(1) or SimpleNamespace(segments=layout.parameters.new(torch.device("cpu"))),
    )
    held = versions.get(3)
    assert versions.get(3) is held is versions.wanted(3) and versions.wanted(4) is None and len(places) == 1
    own = versions.own(held.segments)
    own.segments[0].add_(1)
    assert not torch.equal(own.segments[0], held.segments[0])
    del held
    assert versions.wanted(3) is None


@pytest.mark.parametrize("waits", [True, False])
def test_a_shard_fills_its_part_of_a_version_once_and_not_what_a_step_will_fill(waits: bool) -> None:
    shop = Shop()
    computer: Any = SimpleNamespace(fills=lambda version: waits)
    lanes = [PromisedLane(computer, 2, 2, Clock()) for _ in range(2)]
    version = shop.version(1.0)
    filled = [lane.inbox(version, shard) for lane in lanes for shard in (0, 1)]
    assert [each is not None for each in filled] == ([False] * 4 if waits else [True, True, False, False])
    assert all(lane.arriving == {1: version} for lane in lanes)


def test_a_slot_shows_the_gradient_that_is_promised_in_it() -> None:
    shop = Shop()
    slot = PromisedSlot(shop.computer)
    slot.promise = shop.promise(shop.version(1.0), shop.own(0), 1)
    assert slot.mask.tolist() == [int(each) for each in slot.promise.gradient.present]  # type: ignore[union-attr]
    assert slot.gradients is slot.promise.gradient.views and float(slot.buffers[0]) == 1.0  # type: ignore[union-attr]
    assert slot.read_options() == []
    slot.write_options(b'[{"lr": 0.5}]')
    assert slot.read_options() == [{"lr": 0.5}] and slot.read_options() is slot.read_options()
