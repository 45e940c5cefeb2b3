"""A learner's second copy (R8): filled on a thread, swapped by pointer, of one version always."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.engines.local.version_reader import LEAST, TORN, VersionFlow, swappable

SIZES = (700, 1800)  # floats, of two parameters


class Ring:
    """In place of the shards' versions: each is a number, in every value."""

    def __init__(self) -> None:
        self.version, self.torn = 0, False

    def newest(self, beyond: int) -> tuple[int, list[int]] | None:
        return (self.version, [0]) if self.version > beyond else None

    def sources(self, places: Sequence[int]) -> list[Tensor]:
        return [torch.full((size,), float(self.version)) for size in SIZES]

    def hold(self, version: int, places: Sequence[int]) -> bool:
        return not self.torn and version == self.version


def until(ready: Callable[[], Any]) -> Any:
    while not (found := ready()):  # else the test's time is over
        time.sleep(0.001)
    return found


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in SIZES]


@pytest.fixture
def flow(ring: Ring, parameters: list[nn.Parameter]) -> Iterator[VersionFlow]:
    made = VersionFlow(ring, parameters, 0)  # type: ignore[arg-type]
    yield made
    made.close()


def values(parameters: Sequence[Tensor]) -> set[float]:
    return {value for parameter in parameters for value in parameter.tolist()}


def test_what_has_come_is_swapped_in_by_pointer(
    flow: VersionFlow, ring: Ring, parameters: list[nn.Parameter]
) -> None:
    assert flow.swap(parameters) is None and values(parameters) == {0.0}
    for version in (1, 4):
        before = [parameter.data_ptr() for parameter in parameters]
        ring.version = version
        assert until(lambda: flow.swap(parameters)) == version and values(parameters) == {float(version)}
        assert [parameter.data_ptr() for parameter in parameters] != before
    assert flow.swap(parameters) is None


def test_memory_that_others_look_at_stays_the_parameters(
    flow: VersionFlow, ring: Ring, parameters: list[nn.Parameter]
) -> None:
    view, ring.version = parameters[0].detach()[:3], 1
    assert until(lambda: flow.swap(parameters)) == 1
    assert view.tolist() == [1.0, 1.0, 1.0] and values(parameters) == {1.0}


def test_what_was_read_in_another_way_is_not_gone_back_from(
    flow: VersionFlow, ring: Ring, parameters: list[nn.Parameter]
) -> None:
    ring.version = 1
    until(lambda: flow._buffers.next == 1)
    flow.has(2)
    assert flow.swap(parameters) is None
    ring.version = 3
    assert until(lambda: flow.swap(parameters)) == 3


def test_copies_that_were_overtaken_count_for_nothing_and_one_is_asked_for(
    flow: VersionFlow, ring: Ring, parameters: list[nn.Parameter]
) -> None:
    ring.torn, ring.version = True, 1
    until(lambda: flow.overtaken)
    assert flow._torn >= TORN and flow.swap(parameters) is None and values(parameters) == {0.0}
    ring.torn = False
    assert until(lambda: flow.swap(parameters)) == 1 and not flow.overtaken


def test_small_tables_and_memory_that_is_a_part_of_another_are_copied_in_the_step() -> None:
    large = torch.zeros(LEAST // 4)
    assert swappable([large]) and not swappable([large[1:]]) and not swappable([torch.zeros(10)])
    assert not swappable([torch.zeros(2, LEAST // 4).t()])
