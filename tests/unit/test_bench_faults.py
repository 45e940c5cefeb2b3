"""The plumbing of the fault benchmarks: step times on disk, gaps, names on the command line. No test asserts a time."""

import threading
from pathlib import Path

import pytest

from benchmarks import ticks
from benchmarks.bench_cluster_faults import FAULTS, first_through, show
from benchmarks.bench_faults import Kill, kept, listed, strike


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


def test_survivors_are_watched_until_the_loss_is_noticed(tmp_path: Path) -> None:
    done, noticed, over = threading.Event(), threading.Event(), threading.Event()

    def steps() -> None:
        tick = ticks.Ticker(tmp_path, 0)
        while not over.wait(0.001):
            tick()

    def late() -> bool:
        """Not when it is asked for the first time."""
        seen = noticed.is_set()
        noticed.set()
        return seen

    thread = threading.Thread(target=steps)
    thread.start()
    assert ticks.wait_until(lambda: ticks.count(tmp_path, 0) > 5, limit_s=60)
    kill = strike(tmp_path, [0], done.set, limit_s=60, noticed=late)
    over.set()
    thread.join()
    assert done.is_set() and noticed.is_set() and kill.stall is not None and kill.ended == ()


def test_the_first_agent_is_behind_the_wire_and_rows_have_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    class Way:
        def through(self, address: tuple[str, int]) -> tuple[str, int]:
            return "wire", 1

    through = first_through(Way())  # type: ignore[arg-type]
    assert [through(("there", number)) for number in range(2)] == [("wire", 1), ("there", 1)]
    show("shard", [Kill(usual=0.01, stall=0.5, before=0.02), Kill(usual=0.01, stall=0.7, before=0.03)])
    assert capsys.readouterr().out.split() == ["shard", "2", "10.00", "0.60", "0.70", "0.03"]
    assert {"learner", "agent", "shard", "frozen-node", "cut-link"} <= set(FAULTS)
