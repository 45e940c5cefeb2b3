"""The plumbing of the fault benchmarks: step times on disk, gaps, names on the command line. No test asserts a time."""

from pathlib import Path

import pytest

from benchmarks import ticks
from benchmarks.bench_faults import kept, listed


def test_steps_are_counted_from_the_file(tmp_path: Path) -> None:
    assert ticks.times(tmp_path, 0) == []
    tick = ticks.Ticker(tmp_path, 0)
    for _ in range(3):
        tick()
    found = ticks.times(tmp_path, 0)
    assert len(found) == 3 and found == sorted(found)
    assert ticks.count(tmp_path, 0, since=found[0] - 1) == 3
    assert ticks.count(tmp_path, 0, since=found[-1]) == 0


def test_a_time_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    ticks.Ticker(tmp_path, 1)()
    with open(tmp_path / "1.times", "ab") as file:
        file.write(b"abc")
    assert len(ticks.times(tmp_path, 1)) == 1


def test_gaps() -> None:
    steps = [0.0, 1.0, 2.0, 3.0, 7.0, 8.0]
    assert ticks.usual_gap(steps, end=3.0) == 1.0
    assert ticks.largest_gap(steps, start=3.5, end=8.0) == (4.0, 7.0)
    assert ticks.largest_gap(steps, start=7.5, end=8.0) == (1.0, 8.0)


def test_nobody_steps_any_more() -> None:
    assert ticks.largest_gap([0.0, 1.0], start=1.5, end=11.0) == (10.0, 11.0)


def test_waiting_ends() -> None:
    assert ticks.wait_until(lambda: True, limit_s=0)
    assert not ticks.wait_until(lambda: False, limit_s=0)


@pytest.mark.parametrize(
    "text, names",
    [
        ("", []),
        ("hardsync,async", ["hardsync", "async"]),
        ("ssp:2 downpour:push=2;fetch=2", ["ssp:2", "downpour:push=2,fetch=2"]),
    ],
)
def test_names(text: str, names: list[str]) -> None:
    assert listed(text) == names


def test_rows_are_added_to_those_of_earlier_commands(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    for number in range(2):
        with kept(file, {"commit": str(number)}) as keep:
            keep({"row": number})
    assert '"row": 1' in file.read_text() and '"row": 0' in file.read_text()
