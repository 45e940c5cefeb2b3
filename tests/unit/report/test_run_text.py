"""A run in words: lines, the summary at its end, what to try next."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syncline.engines.simulated_times import LearnerTimes
from syncline.report.run_text import (
    account,
    counted,
    duration,
    epoch_line,
    event_line,
    headline,
    how,
    last_and_best,
    near,
    next_steps,
    print_line,
    summary,
)
from tests.unit.report.lines_of_a_run import OPTIONS, end, epoch, event, start, statistics, whole
from tests.unit.report.test_run_record import fed


def test_lines() -> None:
    record = fed(whole())
    assert headline(record) == "Net (1,234 parameters) · softsync:1 · 2 learners × batch 8 · 4 epochs"
    line = epoch_line(record, record.epochs[1])
    assert (
        line
        == "epoch 2/4  version 20  loss 1.0000  test loss 0.5  test accuracy 75.00 %  staleness 0.75  2.0 s"
    )
    assert event_line(event("raised", "raised: x\nTraceback\nValueError: y", rank=2)) == (
        "2.5 s  learner 2: raised: x ValueError: y"
    )
    assert [duration(each) for each in (1.25, 65, 3725)] == ["1.2 s", "1:05", "1:02:05"]


def test_what_to_try_next_is_another_dial() -> None:
    record = fed([start(run={**OPTIONS, "sync": "hardsync"})])
    commands = [command for command, _ in next_steps(record, ["syncline", "train", "job.toml"])]
    assert commands[0] == "syncline train job.toml --sync softsync:1"
    assert not any("hardsync" in command for command in commands)


def test_from_all_reduce_the_next_steps_lead_to_servers() -> None:
    record = fed([start(run={**OPTIONS, "sync": "hardsync", "topology": "allreduce:blocking"})])
    given = [("--topology", "allreduce"), ("--epochs", "3")]
    softly = next_steps(record, ["syncline", "train"], given)[0][0]
    assert softly == "syncline train --sync softsync:1 --topology servers --epochs 3"


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"model": None, "function": "loop"},
            "loop (1,234 parameters) · softsync:1 · 2 learners × batch 8 · 4 epochs",
        ),
        (
            {"epochs": None, "steps": 1},
            "Net (1,234 parameters) · softsync:1 · 2 learners × batch 8 · 1 update",
        ),
        ({"parameters": None, "batch_size": None, "epochs": 1}, "Net · softsync:1 · 2 learners · 1 epoch"),
        (
            {"engine": "sim", "cluster": "p775", "parameters": None},
            "Net · softsync:1 · 2 learners × batch 8 · 4 epochs · simulated on p775",
        ),
        (
            {"sync": "sandblaster", "epochs": None, "steps": 30, "parameters": None},
            "Net · sandblaster · 2 learners × batch 8 · 30 iterations",
        ),
    ],
)
def test_the_first_line_says_what_runs(options: dict[str, Any], words: str) -> None:
    assert headline(fed([start(run={**OPTIONS, **options})])) == words


def test_an_iteration_s_line_has_what_the_method_says_and_no_version() -> None:
    line = {**epoch(4, accuracy=0.75), "loss": "nan", "notes": {"step": 0.51234}, "metrics": {"loss": "-inf"}}
    record = fed([start(run={**OPTIONS, "sync": "sandblaster", "epochs": None, "steps": 30}), line])
    assert (
        epoch_line(record, record.epochs[0]) == "iteration 5/30  loss nan  test loss -inf  step 0.512  5.0 s"
    )


def test_the_best_of_a_metric_is_the_highest_accuracy_and_the_lowest_of_all_else() -> None:
    lines = [epoch(number, accuracy=each, loss=each) for number, each in enumerate((0.5, 0.875, 0.75))]
    record = fed([start(), *lines])
    assert last_and_best(record, "test accuracy") == "75.00 % (best 87.50 % after epoch 2)"
    assert last_and_best(record, "test accuracy", short=True) == "75.00 %"
    assert last_and_best(record, "test loss") == "0.375 (best 0.25 after epoch 1)"
    assert last_and_best(fed([start(), *lines[:2]]), "test accuracy") == "87.50 %", "the last is the best"
    assert last_and_best(record, "test recall") == "–"


def test_the_summary_says_how_good_how_stale_how_fast_and_what_went_wrong() -> None:
    rows = dict(summary(fed([*whole()[:-1], end(dropped=3)])))
    assert rows["training loss"] == "0.5" and rows["test accuracy"].startswith("81.25 %")
    assert rows["staleness"] == "mean 0.75, max 2, over 80 gradients, 3 dropped"
    assert rows["throughput"] == "321 examples/s, 40 updates"
    assert rows["faults"] == "1: 2.5 s  learner 1: lost: its process (pid 7) ended with SIGKILL"
    simulated = dict(summary(fed([start(run={**OPTIONS, "engine": "sim"}), end()])))
    assert simulated["throughput"] == "321 examples per virtual second, 40 updates"
    assert "faults" not in simulated and "dropped" not in simulated["staleness"]


@pytest.mark.parametrize(
    "lines, words",
    [
        (whole(), "finished: 4 epochs in 5.0 s"),
        ([start(), epoch(0, accuracy=0.5), end("stopped")], "stopped: 1 epoch in 5.0 s"),
        ([start(), end("failed", error="no luck")], "failed after 0 epochs in 5.0 s: no luck"),
        ([start(), statistics(65.0, version=2)], "running: 0 epochs in 1:05"),
        ([start(pid=2**22 - 1), statistics(2.0, version=2)], "ended without a word after 0 epochs in 2.0 s"),
        ([start(run={**OPTIONS, "engine": "sim"}), end()], "finished: 0 epochs in 5.0 s virtual"),
    ],
)
def test_how_a_run_stands(lines: list[dict[str, Any]], words: str) -> None:
    assert how(fed(lines)) == words


def test_where_virtual_time_went_is_in_parts_of_all_learners() -> None:
    rows = dict(account(LearnerTimes(compute=6.0, communication=2.0, waiting=2.0)))
    assert rows["learners' time"] == "60.0 % computing, 20.0 % communication, 20.0 % waiting"
    assert rows["overlap"].startswith("75.0 %")
    assert dict(account(LearnerTimes()))["learners' time"].startswith("0.0 % computing")


def test_an_option_that_a_next_step_changes_is_not_said_twice() -> None:
    record = fed([start(run={**OPTIONS, "sync": "hardsync"})])
    given = [("--sync", "hardsync"), ("--learners", "2"), ("--set", "a=b c"), ("--set", "d=1")]
    softly, free, *rest = [shlex.split(line) for line, _ in next_steps(record, ["syncline", "train"], given)]
    assert softly[2:] == ["--sync", "softsync:1", "--learners", "2", "--set", "a=b c", "--set", "d=1"]
    assert free[2:] == ["--sync", "async", "--learners", "4", "--set", "a=b c", "--set", "d=1"]
    assert [words[1] for words in rest] == ["compare", "presets"]
    batch = fed([start(run={**OPTIONS, "sync": "sandblaster"})])
    assert [line.split()[1] for line, _ in next_steps(batch, ["syncline", "train"])] == ["compare", "presets"]


def test_small_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert near(tmp_path / "runs" / "a") == "runs/a" and near(tmp_path.parent) == str(tmp_path.parent)
    assert [counted(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert [duration(each) for each in (59.94, 59.96, 119.6, 3599.7)] == [
        "59.9 s",
        "60.0 s",
        "2:00",
        "1:00:00",
    ]
    out = io.StringIO()
    print_line(Console(file=out, width=10), "[bold]what is here[/] may be copied")
    assert out.getvalue() == "[bold]what is here[/] may be copied\n"
