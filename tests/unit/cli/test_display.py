"""What the panel and the plain lines say of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from syncline.cli.display import panel
from syncline.cli.plain_output import duration, epoch_line, event_line, headline, next_steps
from syncline.report.run_record import RunRecord
from tests.unit.report.lines_of_a_run import OPTIONS, epoch, event, start, statistics, whole


def fed(lines: list[dict[str, Any]]) -> RunRecord:
    record = RunRecord(Path("runs/a"))
    for line in lines:
        record.feed(line)
    return record


def shown(record: RunRecord, width: int = 110, **changes: Any) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(panel(record, **changes))
    return console.export_text()


def test_a_running_run() -> None:
    lines = [start(), epoch(0, accuracy=0.5), statistics(1.0, version=5), statistics(2.0, version=8)]
    text = shown(fed([*lines, statistics(3.0, version=15)]), note="stopping")
    assert "epoch 2/4" in text and "60 %" in text and "ETA" in text and "stopping" in text
    assert "test accuracy 50.00 %" in text and "version 15" in text and "updates/s 5" in text
    assert "mean 0.75, max 2" in text and "62 %" in text and "█" in text


def test_learners_by_line() -> None:
    states = ("waits for version 16", "computing", "lost", "waits for version 16")
    text = shown(fed([start(), statistics(1.0, version=5), statistics(2.0, version=15, states=states)]))
    rows = [line for line in text.splitlines() if "/s" in line or "lost" in line]
    assert any("waits for learner 1" in row for row in rows)
    assert any("computing" in row and "10.0/s" in row for row in rows)
    assert any("lost" in row and "10.0/s" not in row for row in rows)


def test_many_learners_and_a_small_terminal() -> None:
    states = ("computing",) * 40 + ("waits for version 16",) * 24
    text = shown(fed([start(), statistics(1.0, version=5, states=states)]), width=60)
    assert "and 48 more: 24 computing, 24 waits for" in text
    assert len(text.splitlines()) < 40


def test_wide_histograms_end_with_the_rest() -> None:
    line = statistics(1.0, version=5)
    line["staleness"]["histogram"] = {str(sigma): 10 for sigma in range(20)}
    text = shown(fed([start(), line]))
    assert "5+" in text and "75 %" in text


def test_warnings_are_whole_and_below_the_events() -> None:
    said = "learner 0: 'weight' was changed in place between two steps: " + "with servers that is lost " * 8
    lines = [event("warning", said), event("lost", "lost: ended with SIGKILL", rank=1)]
    text = shown(fed([start(), statistics(1.0, version=5), *lines]), width=70)
    words = " ".join(text.replace("│", " ").split())
    assert said.strip() in words and words.index("SIGKILL") < words.index("'weight' was changed")


def test_before_anything_was_heard() -> None:
    text = shown(fed([start()]))
    assert "epoch 1/4" in text and "ETA –" in text and "loss –" in text


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
