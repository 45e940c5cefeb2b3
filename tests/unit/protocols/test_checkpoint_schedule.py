"""When checkpoints are cut: pure, with time and versions passed in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.protocols.checkpoint_schedule import CheckpointSchedule, JointCheckpointSchedule


def cuts(cadence: CheckpointSchedule, versions: range, *, written_after: int = 0) -> list[int]:
    """Versions that are cut, where writing one takes so many further versions."""
    found: list[int] = []
    for version in versions:
        if found and version - found[-1] > written_after:
            cadence.written()
        armed = cadence.armed
        if cadence.folded(version):
            assert armed  # random states were asked for the version before
            found.append(version)
    return found


@pytest.mark.parametrize("every", [2, 5, 7])
def test_every_so_many_versions(every: int) -> None:
    assert cuts(CheckpointSchedule(every), range(1, 50)) == list(range(every, 50, every))


def test_every_version_is_cut_if_the_disk_keeps_up_but_the_first() -> None:
    assert cuts(CheckpointSchedule(1), range(1, 8)) == [2, 4, 6]  # armed by the version before


def test_a_slow_disk_skips_but_never_falls_silent() -> None:
    assert cuts(CheckpointSchedule(3), range(1, 40), written_after=10) == [3, 15, 27, 39]


def test_one_is_cut_when_asked() -> None:
    cadence = CheckpointSchedule()
    assert cuts(cadence, range(1, 10)) == []
    cadence.ask()
    assert cuts(cadence, range(10, 20)) == [11]


def test_the_end_cuts_at_once_unless_one_is_being_written() -> None:
    cadence = CheckpointSchedule(5)
    assert cadence.begin() and not cadence.begin()
    cadence.written()
    assert cadence.begin()


@given(st.integers(1, 9), st.lists(st.integers(0, 3), max_size=60))
def test_never_two_at_a_time(every: int, happenings: list[int]) -> None:
    cadence, version, open_ = CheckpointSchedule(every), 0, False
    for what in happenings:
        if what == 0:
            cadence.ask()
        elif what == 1 and open_:
            cadence.written()
            open_ = False
        else:
            version += 1
            if cadence.folded(version):
                assert not open_
                open_ = True


def test_learners_among_equals_cut_after_the_versions_that_are_due() -> None:
    cadence = JointCheckpointSchedule(every=3, seconds=None, now=0.0)
    found = []
    for version in range(1, 10):
        assert not cadence.wishes(1e9)
        cadence.applied(version, wished=False)
        if cadence.take(0.0):
            found.append(version)
    assert found == [3, 6, 9]


def test_only_what_all_have_heard_makes_a_cut() -> None:
    """The first learner's clock is nobody else's: its wish counts when it comes with an update, at all of them."""
    first, other = (JointCheckpointSchedule(every=None, seconds=60.0, now=0.0) for _ in range(2))
    assert not first.wishes(59.0) and first.wishes(60.0)
    assert not first.take(61.0)
    for cadence in (first, other):
        cadence.applied(7, wished=True)
        assert cadence.take(62.0) and not cadence.take(70.0)
    assert not first.wishes(121.0) and first.wishes(122.0)
