"""The account of weights: a plain fold beside the shards', one log for all of them, and whole versions for readers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.messages import log
from syncline.protocols.folding import Ticket
from syncline.protocols.sequence import Fold
from syncline.sim.invariants.loader_accounts import Broken
from syncline.sim.invariants.values import KEPT, Values
from tests.unit.sim.small_world import layout_of

LAYOUT = layout_of(2)
RATE = 0.5


def memory(value: float = 0.0) -> list[Tensor]:
    flat = LAYOUT.parameters
    segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
    for view in flat.views(segments):
        view.fill_(value)
    return segments


def account(kind: Any = torch.optim.SGD, clip: bool = False, **options: Any) -> Values:
    template: Any = SimpleNamespace(kind=kind, options=[options])
    return Values(LAYOUT, template, memory(1.0), 0, clip)


def ticket(learner: int, count: int = 4, weight: float = 1.0) -> Ticket:
    return Ticket(learner, learner, 1, 0, 1, count, weight=weight)


def entry(version: int = 1, **changes: Any) -> log.Fold:
    return log.Fold(0, 0, 1, 0, version, 1.0)._replace(**changes)


def shard(index: int, value: float, version: int = 1) -> Any:
    part = LAYOUT.parts[index]
    return SimpleNamespace(version=version, part=part, weights=part.segments(memory(value)))


def folded(values: Values, *tickets: Ticket, factor: float = 1.0, version: int = 1) -> Values:
    """Learner n has published a gradient of n + 1 everywhere."""
    for each in tickets:
        gradients = LAYOUT.parameters.views(memory(each.learner + 1.0))
        values.published(each.learner, 1, gradients, [True] * len(gradients))
    weights = [ticket.count for ticket in tickets]
    values.folded(Fold(version, tickets, tickets[0], factor), weights, [{"lr": RATE}])
    return values


@pytest.mark.parametrize(("tickets", "factor", "made"), [
    ((ticket(0),), 1.0, 1 - RATE * 1),
    ((ticket(0), ticket(2)), 1.0, 1 - RATE * 2),
    ((ticket(0, count=3), ticket(2, count=1)), 1.0, 1 - RATE * 1.5),  # a mean over examples
    ((ticket(0), ticket(2, weight=0.5)), 1.0, 1 - RATE * 1.25),  # damped by its staleness
    ((ticket(1),), 0.25, 1 - RATE * 0.25 * 2),
])  # fmt: skip
def test_an_update_is_the_mean_of_its_gradients(
    tickets: tuple[Ticket, ...], factor: float, made: float
) -> None:
    values = folded(account(), *tickets, factor=factor)
    for index in (0, 1):
        values.carried_out(index, entry(), shard(index, made))
    values.read(0, 1, LAYOUT.parameters.views(memory(made)))
    with pytest.raises(Broken, match=r"shard 0 made version 1 0\.1 away from the mean"):
        folded(account(), *tickets, factor=factor).carried_out(0, entry(), shard(0, made + 0.1))
    values.over()


def test_parameters_without_a_gradient_stay() -> None:
    values = account()
    gradients = LAYOUT.parameters.views(memory(1.0))
    values.published(0, 1, gradients, [False] * len(gradients))
    values.folded(Fold(1, (ticket(0),), ticket(0), 1.0), [1], [{"lr": RATE}])
    values.carried_out(0, entry(), shard(0, 1.0))


@pytest.mark.parametrize("values", [
    account(torch.optim.Adam), account(clip=True), account(momentum=0.9), account(weight_decay=0.1)
])  # fmt: skip
def test_what_it_cannot_recompute_stands_as_the_shards_made_it(values: Values) -> None:
    folded(values, ticket(0))
    for index in (0, 1):
        values.carried_out(index, entry(), shard(index, 7.0))
    values.read(0, 1, LAYOUT.parameters.views(memory(7.0)))


def test_weights_that_were_put_stand_until_all_shards_have_them() -> None:
    values = account()
    put = log.PutValues(0, 0, 1, 0, 1)
    values.carried_out(0, put, shard(0, 1.0))
    folded(values, ticket(0))
    values.carried_out(0, entry(), shard(0, 9.0))
    values.carried_out(1, put, shard(1, 1.0))
    values.carried_out(1, entry(), shard(1, 9.0))
    folded(values, ticket(0), version=2)
    with pytest.raises(Broken, match="away from the mean"):
        values.carried_out(0, entry(2), shard(0, 9.0, 2))


def test_all_shards_carry_out_one_log() -> None:
    values = folded(account(), ticket(0))
    values.carried_out(1, entry(), shard(1, 1 - RATE))
    with pytest.raises(Broken, match="shard 0 carries out"):
        values.carried_out(0, entry(factor=0.5), shard(0, 1 - RATE))
    other = folded(account(), ticket(0))
    other.carried_out(0, log.Free(0, 2, 3), shard(0, 1.0))
    with pytest.raises(Broken, match="shard 1 carries out GiveState"):
        other.carried_out(1, log.GiveState(0, 2, 3), shard(1, 1.0))  # as a tuple it is equal
    left = folded(account(), ticket(0))
    left.carried_out(0, entry(), shard(0, 1 - RATE))
    with pytest.raises(Broken, match="shard 1 never carried out Fold"):
        left.over()


def test_readers_get_one_whole_version() -> None:
    values = folded(account(), ticket(0))
    values.carried_out(0, entry(), shard(0, 1 - RATE))
    whole = LAYOUT.parameters.views(memory(1 - RATE))
    with pytest.raises(Broken, match=r"which shards \[1\] have not made"):
        values.read(3, 1, whole)
    values.carried_out(1, entry(), shard(1, 1 - RATE))
    values.read(3, 1, whole)
    whole[2][0] += 1
    with pytest.raises(Broken, match="learner 3 reads parameter 2 of version 1, and gets other weights"):
        values.read(3, 1, whole)
    with pytest.raises(Broken, match="shard 0 is at version 3, the log at 1"):
        folded(account(), ticket(0)).carried_out(0, entry(), shard(0, 1 - RATE, version=3))


def test_versions_are_kept_until_all_shards_have_made_them() -> None:
    values = account()
    for version in range(1, 2 * KEPT):
        folded(values, ticket(0), version=version)
    values.read(0, 0, LAYOUT.parameters.views(memory(5.0)))  # forgotten: nothing is compared
    with pytest.raises(Broken, match="which shards"):
        values.read(0, 1, LAYOUT.parameters.views(memory(5.0)))
