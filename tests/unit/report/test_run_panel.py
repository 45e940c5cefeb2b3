"""What the panel says of a run."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from syncline.report.run_panel import panel
from syncline.report.run_record import RunRecord
from tests.unit.report.lines_of_a_run import end, epoch, event, start, statistics
from tests.unit.report.test_run_record import fed


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


def with_steps(seconds: float, version: int, *steps: int) -> dict[str, Any]:
    learners = [{"rank": rank, "state": "computing", "steps": each} for rank, each in enumerate(steps)]
    return {**statistics(seconds, version=version), "learners": learners}


def test_the_lag_of_a_new_learner_counts_from_when_it_joined() -> None:
    began = [start(), with_steps(1.0, 5, 90, 100), with_steps(2.0, 9, 180, 200)]
    assert fed(began).lags == {0: 20, 1: 0}
    resumed = [*began, start(resumed={"version": 9, "epoch": 0}), with_steps(0.5, 10, 185, 201, 1)]
    assert fed(resumed).lags == {0: 16, 1: 0, 2: 0}
    joined = [*resumed, with_steps(1.0, 12, 190, 210, 8, 2), with_steps(2.0, 30, 290, 310, 70, 105)]
    assert fed(joined).lags == {0: 20, 1: 0, 2: 40, 3: 4}
    assert " 40 " in shown(fed(joined)) and "310" not in shown(fed(joined))
    back = [*joined, start(resumed={"version": 9, "epoch": 0}), with_steps(0.5, 10, 185, 201, 1)]
    assert fed(back).lags == fed(resumed).lags, "what came after the checkpoint is forgotten"
    ended = {**end(), "learners": with_steps(3.0, 40, 300, 320, 100, 120)["learners"]}
    assert fed([*joined, ended]).lags == {0: 21, 1: 1, 2: 21, 3: 0}


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
