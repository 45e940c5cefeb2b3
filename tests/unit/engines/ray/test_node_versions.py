"""A node's ring of versions, and which one its courier brings for whom."""

import os
from typing import Any

import pytest

from syncline.engines.local.shared_memory import Region
from syncline.engines.ray.node_versions import Mirror
from syncline.engines.ray.version_courier import Want, _Table

NBYTES, PLACES = 5000, 3


def test_a_version_can_be_read_from_when_it_is_offered_until_another_comes_in_its_place() -> None:
    mirror = Mirror(NBYTES, PLACES)
    mirror.begin(1).fill_(7)
    assert not mirror.holds(1, 0, 4) and mirror.newest(0, 0) is None
    mirror.offer(1, 0, 4)
    assert mirror.holds(1, 0, 4) and not mirror.holds(1, 0, 5) and not mirror.holds(0, 0, 4)
    mirror.begin(1)
    assert not mirror.holds(1, 0, 4)


def test_who_maps_it_sees_the_same_values_and_words() -> None:
    mirror = Mirror(NBYTES, PLACES)
    theirs = Mirror(NBYTES, PLACES, Region(mirror.region.nbytes, os.dup(mirror.region.fd)))
    for place in range(PLACES):
        mirror.begin(place).fill_(place)
        mirror.offer(place, 2, 10 + place)
    assert [int(values.max()) for values in theirs.places] == [0, 1, 2]
    assert [values.numel() for values in theirs.places] == [NBYTES] * PLACES
    assert theirs.newest(2, 11) == (12, 2) and theirs.newest(2, 13) is None


def test_versions_of_servers_that_are_gone_are_none_of_the_new_ones() -> None:
    mirror = Mirror(NBYTES, PLACES)
    mirror.offer(0, 0, 12)
    assert not mirror.holds(0, 1, 12) and mirror.newest(1, 0) is None
    mirror.offer(1, 1, 10)
    assert mirror.newest(1, 10) == (10, 1)


def table(*there: int, wants: list[Want] | None = None) -> _Table:
    nobody: Any = None
    return _Table(0, nobody, [], nobody, list(there), wants=[(nobody, want) for want in wants or []])


@pytest.mark.parametrize(
    ("version", "exact", "place"),
    [(5, True, 1), (4, True, None), (4, False, 2), (5, False, 1), (6, False, 2), (7, False, None)],
)
def test_lockstep_takes_the_very_version_and_others_a_newer_one_that_is_there(
    version: int, exact: bool, place: int | None
) -> None:
    assert table(-1, 5, 6).found(Want(0, 0, version, exact)) == place


def test_exact_versions_are_brought_in_their_order_and_of_the_others_only_the_last() -> None:
    exact, free = [Want(0, 0, 8, True), Want(0, 0, 7, True)], [Want(0, 0, 6, False), Want(0, 0, 9, False)]
    assert table(-1, wants=exact + free).next() == 7
    assert table(-1, wants=free).next() == 9
