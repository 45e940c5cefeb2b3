"""A run as its lines tell it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from rich.console import Console

from syncline.errors import UsageError
from syncline.report.html_page import page
from syncline.report.run_panel import comparison, panel
from syncline.report.run_record import ENDED, MOST_SAMPLES, RunRecord, better, judged, learners_of, read_run
from syncline.report.run_text import event_line, summary
from tests.unit.made_up import spoiled
from tests.unit.report.lines_of_a_run import OPTIONS, end, epoch, event, start, statistics, whole


def fed(lines: list[dict[str, Any]]) -> RunRecord:
    record = RunRecord(Path("runs/a"))
    for line in lines:
        record.feed(line)
    return record


def test_a_finished_run() -> None:
    record = fed(whole())
    assert record.state == "finished" and record.progress == 1.0
    assert [value for _, _, value in record.metric("test accuracy")] == [0.5, 0.75, 0.875, 0.8125]
    assert record.metric("loss")[1] == (2.0, 2.0, 1.0)
    assert record.metrics == ["test loss", "test accuracy"]
    assert record.histogram == {0: 10, 1: 25, 2: 5}
    assert [each["event"] for each in record.faults] == ["lost"]
    assert record.throughput == 321.0


def test_a_running_one_has_rates_and_progress() -> None:
    record = fed([start(), statistics(1.0, version=5), statistics(3.0, version=15)])
    assert record.state == "running"
    assert record.rate("version") == 5.0
    assert record.learner_rates() == {0: 5.0, 1: 5.0}
    assert record.progress == pytest.approx(16 * 15 / 400)


def test_a_run_whose_process_is_not_there_is_gone() -> None:
    assert fed([start(pid=2**22 - 1)]).state == "gone"
    assert fed([start(host="another", time=1.0)]).state == "gone"
    assert fed([start(), end("failed", error="x")]).state == "failed"


def test_the_time_of_a_resumed_simulated_run_goes_on() -> None:
    simulated = {**OPTIONS, "engine": "sim"}
    resumed = {"version": 10, "epoch": 1}
    lines = [start(run=simulated), epoch(0, accuracy=0.5, seconds=4.0), epoch(1, accuracy=0.6, seconds=8.0)]
    lines += [start(run=simulated, resumed=resumed), epoch(1, accuracy=0.7, seconds=7.0)]
    record = fed(lines)
    assert [each["seconds"] for each in record.epochs] == [4.0, 7.0] and record.seconds == 7.0
    lines += [start(run=OPTIONS, resumed={"version": 20, "epoch": 2}), epoch(2, accuracy=0.7, seconds=1.0)]
    assert fed(lines).seconds == 8.0, "a real clock starts at nothing"


def test_seconds_are_virtual_where_they_are_simulated(tmp_path: Path) -> None:
    for engine, took in (("local", None), ("sim", 12.5)):
        record = RunRecord(tmp_path)
        (tmp_path / "run.json").write_text('{"took": 12.5}')
        record.feed(start(run={**OPTIONS, "engine": engine}))
        assert (record.virtual, record.took) == (engine == "sim", took)
        (tmp_path / "run.json").write_text('{"took": "long"}')
        assert record.took is None


def test_resumed_runs_forget_what_came_after_the_checkpoint() -> None:
    lines = [
        start(),
        epoch(0, accuracy=0.5),
        epoch(1, accuracy=0.6),
        statistics(2.5, version=25),
        end("stopped"),
    ]
    lines += [start(resumed={"version": 10, "epoch": 1}), epoch(1, accuracy=0.7, seconds=1.0)]
    record = fed(lines)
    assert record.state == "running"
    assert [value for _, _, value in record.metric("test accuracy")] == [0.5, 0.7]
    assert record.epochs[1]["seconds"] == 6.0, "time goes on where the first session ended"
    assert not record.samples


def test_the_record_stays_small() -> None:
    record = fed([start(), *(statistics(float(n), version=n) for n in range(3 * MOST_SAMPLES))])
    assert len(record.samples) <= MOST_SAMPLES
    assert record.samples[0]["version"] == 0 and record.samples[-1]["version"] == 3 * MOST_SAMPLES - 1


def test_a_learner_that_has_ended_is_in_the_newest_statistics_only() -> None:
    states = ("computing", *ENDED)
    record = fed([start(), *(statistics(float(n), version=n, states=states) for n in range(9))])
    assert [len(learners_of(sample)) for sample in record.samples] == [1] * 8 + [len(states)]


DAMAGE: list[dict[str, Any]] = [
    {},
    {"kind": 3},
    {"kind": "epoch"},
    {"kind": "statistics", "version": "x"},
    {"kind": "start", "run": 7, "resumed": "x", "pid": "y"},
    {"kind": "end", "version": 3, "staleness": {"histogram": {"x": "y"}}, "learners": [1, {"rank": "z"}]},
    {"kind": "event", "seconds": "late", "what": None},
    {"kind": "best", "value": None},
]


@settings(max_examples=400)
@seed(12)
@given(st.integers(0, len(whole()) - 1), st.data())
def test_a_damaged_line_is_left_out_and_what_is_left_is_shown(number: int, data: st.DataObject) -> None:
    lines = whole()
    lines[number] = data.draw(spoiled(lines[number]))
    record = fed(lines)
    assert len(record.damage) <= 1
    Console(file=io.StringIO()).print(panel(record), comparison([record, record]))
    assert [summary(record), record.state, page(record), *map(event_line, record.faults)]


@pytest.mark.parametrize("line", DAMAGE, ids=str)
def test_strange_lines_do_no_harm(line: dict[str, Any]) -> None:
    record = fed([*whole()[:-1], line])
    assert record.state and record.metrics and record.faults
    assert isinstance(record.histogram, dict) and record.throughput >= 0
    assert isinstance(record.learner_rates(), dict)


def test_reading_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        read_run(tmp_path)
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, whole())) + '\n{"kind":"epo')
    assert read_run(tmp_path).state == read_run(tmp_path / "events.jsonl").state == "finished"
    (tmp_path / "events.jsonl").write_text("nothing of ours\n")
    with pytest.raises(UsageError, match="holds no run"):
        read_run(tmp_path)


def test_what_is_best() -> None:
    assert judged({"loss": 0.5, "accuracy": 0.9}) == ("accuracy", 0.9)
    assert judged({"loss": 0.5, "f1": 0.9}) == ("loss", 0.5)
    assert judged({"f1": 0.9}) == ("f1", 0.9)
    assert judged({}) is None
    assert better("accuracy", 0.9, 0.8) and not better("accuracy", 0.8, 0.8) and better("loss", 0.1, 0.2)
    assert better("loss", 0.1, None) and not better("loss", float("nan"), None)


def test_events_that_are_no_faults() -> None:
    assert fed([start(), event("warning", "w"), event("joined", "joined", rank=3)]).faults == []
