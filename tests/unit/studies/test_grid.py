"""The points of a study, and how its options are read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.dial import Course
from syncline.errors import DialError, UsageError
from syncline.studies.grid import Grid, Point, parse_dials, parse_numbers, splits_of

numbers = st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True).map(tuple)
dials = st.lists(
    st.sampled_from(["hardsync", "softsync:1", "softsync:3", "async", "ssp:2", "backup:2", "delayed:1"]),
    min_size=1,
    max_size=4,
    unique=True,
).map(tuple)


@given(dials, numbers, numbers, st.sampled_from([(0,), (0, 1)]))
def test_every_combination_is_a_point_or_left_out_with_its_reason(
    syncs: tuple[str, ...], learners: tuple[int, ...], sizes: tuple[int, ...], seeds: tuple[int, ...]
) -> None:
    grid = Grid(syncs=syncs, learners=learners, batch_sizes=sizes, seeds=seeds)
    try:
        points, skipped = grid.points()
    except DialError:
        possible = [any(_fits(sync, count) for count in learners) for sync in syncs]
        assert not all(possible)
        return
    each = len(sizes) * len(seeds)
    assert len(points) + each * len(skipped) == len(syncs) * len(learners) * each
    assert len(set(points)) == len(points)
    assert all(_fits(point.sync, point.learners) for point in points)
    assert not any(_fits(sync, learners) for sync, learners, _ in skipped)
    assert [p for s in syncs for p in points if p.sync == s] == points, "dial by dial"


def _fits(sync: str, learners: int) -> bool:
    try:
        Course.of(sync).first.check(learners, 1)
    except DialError:
        return False
    return True


def test_more_parts_than_learners_are_left_out_and_said() -> None:
    points, skipped = Grid(syncs=("softsync:4",), learners=(2, 4), batch_sizes=(8,)).points()
    assert [point.learners for point in points] == [4]
    assert "n = 4 with 2 learners" in skipped[0][2]
    with pytest.raises(DialError, match="n = 4 with 2 learners"):
        Grid(syncs=("softsync:4",), learners=(2,), batch_sizes=(8,)).points()


def test_options_of_a_dial_stay_with_it() -> None:
    text = "hardsync,downpour:push=2,fetch=3,local_lr=0.1, async:rate=given ,hardsync until 1 then softsync:1"
    assert parse_dials(text) == (
        "hardsync",
        "downpour:push=2,fetch=3,local_lr=0.1",
        "async:rate=given",
        "hardsync until 1 then softsync:1",
    )
    assert parse_dials("softsync,softsync:1") == ("softsync:1",), "once"
    with pytest.raises(DialError, match="did you mean 'hardsync'"):
        parse_dials("hardsink")
    with pytest.raises(UsageError, match="empty name"):
        parse_dials("hardsync,,async")


def test_a_reference_batch_is_for_dials_in_lockstep() -> None:
    assert parse_dials("hardsync,delayed:2,softsync:1,hardsync:reference_batch=64", 128) == (
        "hardsync:reference_batch=128",
        "delayed:2,reference_batch=128",
        "softsync:1",
        "hardsync:reference_batch=64",
    )


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0", "-1,2", "1.5"])
def test_numbers_are_whole(text: str) -> None:
    with pytest.raises(UsageError, match=r"--learners .*: expected whole numbers of at least 1"):
        parse_numbers("--learners", text)
    assert parse_numbers("--seeds", "0,3,0", least=0) == (0, 3)


def test_the_parts_of_a_fold() -> None:
    def splits(sync: str) -> int | None:
        return splits_of(Point(sync=sync, learners=6, batch_size=1))

    assert [splits(each) for each in ("hardsync", "softsync:2", "async", "backup:1")] == [None, 2, 6, None]
