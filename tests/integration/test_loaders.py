"""`session.loader` (M7): how far ahead it reads, which calls mean the same loader, how long it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, IterableDataset, default_collate

import syncline as sl
from syncline.errors import LearnerError
from syncline.learn.loader import identity
from tests.integration.small_runs import launched, points, step

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAYS = [("local", "servers"), ("sim", "servers"), ("local", "allreduce"), ("sim", "allreduce")]
ways = pytest.mark.parametrize("engine, topology", WAYS)


class Rows(Dataset[Tensor]):
    """Read one by one: what a thread reads ahead."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.size:
            raise IndexError
        return torch.full((4,), float(index))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), float(index)) for index in range(8))


def begin(session: sl.Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, session.optimizer(model, partial(SGD, lr=0.0))


# -- reading ahead -------------------------------------------------------------------------------------------


def reads_several(session: sl.Session, ahead: int) -> list[list[list[int]]]:
    """Examples by loader and epoch, of loaders that are read at once."""
    model, optimizer = begin(session)
    loaders = [session.loader(Rows(600), batch_size=1, ahead=ahead) for _ in range(3)]
    seen: list[list[list[int]]] = [[[], []] for _ in loaders]
    for epoch in range(2):
        for batches in zip(*loaders, strict=True):
            for each, batch in zip(seen, batches, strict=True):
                each[epoch].append(int(batch[0, 0]))
            step(model, optimizer, batches[0])
    return seen


@pytest.mark.sweep(3)
@ways
@pytest.mark.parametrize("ahead", [255, 100_000])
def test_several_loaders_read_as_far_ahead_as_is_wished(engine: str, topology: str, ahead: int) -> None:
    result = launched(
        reads_several, ahead, learners=2, sync="hardsync", engine=engine, topology=topology, seed=3
    )
    for loader in range(3):
        for epoch in range(2):
            given = [index for rank in range(2) for index in result.returned[rank][loader][epoch]]
            assert sorted(given) == list(range(600))
    assert result.updates == 600


def asks(session: sl.Session, data: Dataset[Any], ahead: Any) -> None:
    session.loader(data, batch_size=2, ahead=ahead)


@pytest.mark.parametrize("topology", ["servers", "allreduce"])
@pytest.mark.parametrize("data", [Rows(8), points(8), Stream()], ids=["rows", "tensors", "stream"])
@pytest.mark.parametrize("ahead", [-1, 1.5, True, "2"])
def test_an_impossible_ahead_is_refused_in_one_line(topology: str, data: Any, ahead: Any) -> None:
    with pytest.raises(LearnerError) as caught:
        launched(asks, data, ahead, learners=2, sync="hardsync", engine="sim", topology=topology)
    assert (
        str(caught.value)
        .splitlines()[-1]
        .endswith(
            f"ahead must be a whole number of at least 0, the batches that are read before they are needed, got {ahead!r}"
        )
    )


# -- which loader --------------------------------------------------------------------------------------------


def doubled(items: list[Tensor]) -> Tensor:
    return 2 * default_collate(items)


def collates(session: sl.Session) -> tuple[list[float], list[float], bool, bool, int]:
    """Values of two loaders of one data set, and whether calls that mean the same gave the same."""
    data = Rows(8)
    model, optimizer = begin(session)
    plain = session.loader(data, batch_size=2)
    other = session.loader(data, batch_size=2, collate=doubled)
    seen: tuple[list[float], list[float]] = ([], [])
    for found, loader in zip(seen, (plain, other), strict=True):
        for batch in loader:
            found += batch[:, 0].tolist()
            step(model, optimizer, batch)
    written = [session.loader(data, batch_size=2, collate=lambda items: doubled(items)) for _ in range(2)]
    bound = [session.loader(data, batch_size=2, collate=partial(reduced, power=power)) for power in (2, 2, 3)]
    ahead = session.loader(data, batch_size=2, collate=doubled, ahead=7)
    return (
        sorted(seen[0]),
        sorted(seen[1]),
        written[0] is written[1] and bound[0] is bound[1] and ahead is other,
        bound[1] is bound[2] or written[0] is other,
        other.ahead,
    )


def reduced(items: list[Tensor], power: int) -> Tensor:
    return default_collate(items) ** power


@ways
def test_another_collate_of_the_same_data_is_another_loader(engine: str, topology: str) -> None:
    result = launched(collates, learners=1, sync="hardsync", engine=engine, topology=topology)
    plain, twice, same, mixed_up, ahead = result.returned[0]
    assert plain == [float(index) for index in range(8)]
    assert twice == [2.0 * index for index in range(8)]
    assert same and not mixed_up
    assert ahead == 7


def test_functions_are_told_apart_by_their_code_and_by_what_they_captured() -> None:
    first, second = object(), object()

    def making(captured: object) -> Callable[[list[Any]], Any]:
        return lambda items: (captured, items)

    def by_default(items: list[Any], *, taken: object = first) -> Any:
        return taken, items

    assert identity(making(first)) == identity(making(first))
    assert identity(making(first)) != identity(making(second))
    assert identity(partial(making, first)) == identity(partial(making, first))
    assert identity(partial(making, first)) != identity(partial(making, second))
    assert identity([].append) != identity([].append)  # of two lists
    assert identity(by_default) != identity(default_collate) != identity(None)


# -- its length ----------------------------------------------------------------------------------------------


def steps_of_an_epoch(session: sl.Session, size: int, batch: dict[str, int], policy: str) -> tuple[int, int]:
    """The length that a schedule goes by, and the steps that the loop makes; a schedule that is stepped further raises."""
    model, optimizer = begin(session)
    loader = session.loader(points(size), policy=policy, **batch)
    schedule = OneCycleLR(optimizer, max_lr=0.1, steps_per_epoch=len(loader), epochs=2)
    steps = 0
    for _ in range(2):
        for x, _ in loader:
            step(model, optimizer, x)
            schedule.step()
            steps += 1
    return len(loader), steps


@pytest.mark.filterwarnings("ignore:learners .* disagree")  # over servers some have no part in the last round
@pytest.mark.parametrize(
    "engine, topology, policy, size, learners",
    [(*way, "ledger", 26, 3) for way in WAYS]
    + [
        ("sim", topology, policy, size, learners)
        for topology in ("servers", "allreduce")
        for policy in ("ledger", "partition", "sample")
        for size, learners in [(24, 1), (24, 2), (25, 4)]
    ],
)
def test_a_loader_is_as_long_as_a_loop_over_it(
    engine: str, topology: str, policy: str, size: int, learners: int
) -> None:
    result = launched(
        steps_of_an_epoch,
        size,
        {"batch_size": 4},
        policy,
        learners=learners,
        sync="hardsync",
        engine=engine,
        topology=topology,
    )
    longest = -(-size // (4 * learners))
    assert [length for length, _ in result.returned] == [longest] * learners
    assert max(steps for _, steps in result.returned) == 2 * longest == result.updates


def test_unequal_shares_of_a_joint_batch_are_one_round_long() -> None:
    result = launched(
        steps_of_an_epoch,
        24,
        {"global_batch_size": 8},
        "ledger",
        learners=3,
        sync="hardsync",
        engine="sim",
        topology="allreduce",
    )
    assert set(result.returned) == {(3, 6)}


def lengths(session: sl.Session) -> int:
    begin(session)
    return len(session.loader(points(40), batch_size=4))


def test_where_batches_go_to_whoever_asks_a_loader_is_as_long_as_the_mean_loop() -> None:
    result = launched(lengths, learners=3, sync="async", engine="sim")
    assert result.returned == [4, 4, 4]
