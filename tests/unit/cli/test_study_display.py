"""What a study shows while it runs, when it will end, and what it says at its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from syncline.cli.study_display import Progress, cost, last_words, panel, row_line
from syncline.studies.grid import Point, StudyRow, asked
from tests.unit.studies.studies import row, whole

POINTS = [Point(sync="softsync:1", learners=4, batch_size=16, seed=seed) for seed in range(4)]


def shown(progress: Progress, now: float, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(panel(progress, now))
    return console.export_text()


def said(rows: list[StudyRow], width: int = 90) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    last_words(rows, Path("out"), "virtual seconds", console)
    return console.export_text()


def test_a_study_under_way() -> None:
    progress = Progress(POINTS, before=6, began=10.0)
    assert "6/10 runs" in shown(progress, 10.0) and "ETA –" in shown(progress, 10.0)
    progress.started(POINTS[0], 10.0)
    progress.ended(row(POINTS[0]))
    progress.started(POINTS[1], 20.0)
    progress.moved(POINTS[1], 0.5, "epoch 1/2")
    progress.ended(asked(POINTS[2], error="no luck"))
    text = shown(progress, 25.0)
    assert "8/10 runs" in text and "1 failed" in text and "ETA 9.0 s" in text
    assert "softsync:1   λ 4   μ 16   seed 1   epoch 1/2   5.0 s" in text


def test_a_line_for_each_run() -> None:
    progress = Progress(POINTS)
    progress.ended(row(POINTS[0]))
    line = row_line(row(POINTS[0]), progress)
    assert line.startswith("1/4  softsync:1 λ 4 μ 16 seed 0:  test error 10.64 %  σ 0.75 (max 1)  312.5 s")
    assert "failed: no luck" in row_line(asked(POINTS[1], error="no luck"), progress)
    assert "training loss 0.2" in row_line(row(POINTS[1], test_error=None, test_loss=None), progress)


def test_the_end_names_the_best_the_fastest_and_the_groups() -> None:
    text = said([*whole(), asked(POINTS[0], error="no [luck]")])
    assert all(max(map(len, part.splitlines())) <= 90 for part in (text,))
    best, fastest, groups = (text.index(each) for each in ("lowest test error", "fastest,", "about equal μλ"))
    assert best < fastest < text.index("to choose from") < groups
    assert "(0, 4, 1)" in text[best:fastest] and "10.04 %" in text[best:fastest]
    assert "(29, 128, 30)" in text[fastest:groups] and "≈ 4096" in text[groups:]
    assert "failed: softsync:1 λ 4 μ 16 seed 0: no [luck]" in text and "out: tradeoff.csv" in text
    assert "over seeds" in said(whole(seeds=(0, 1))) and "over seeds" not in text


def test_of_times_only_there_is_only_the_fastest() -> None:
    text = said([row(each.point, test_error=None, test_loss=None, loss=None) for each in whole()])
    assert "fastest" in text and "lowest" not in text and "equal" not in text
    assert "out: tradeoff.csv" in said([])


# -- progress --------------------------------------------------------------------------------------------------


def test_progress_counts_and_foresees() -> None:
    points = [Point(sync="hardsync", learners=2, batch_size=32, seed=seed) for seed in range(4)]
    progress = Progress(points, before=3, began=100.0)
    assert (progress.done, progress.total, progress.part()) == (3, 7, 0.0)
    assert progress.remaining(100.0) is None
    progress.started(points[0], 100.0)
    progress.moved(points[0], 0.5, "epoch 1/2")
    assert progress.remaining(105.0) == pytest.approx(35.0), "an eighth took five seconds"
    progress.ended(row(points[0]))
    progress.started(points[1], 110.0)
    progress.ended(asked(points[1], error="no luck"))
    assert (progress.done, progress.failed, progress.part()) == (5, 1, 0.5) and not progress.running
    assert progress.remaining(120.0) == pytest.approx(20.0)
    progress.moved(points[3], 0.5, "was never started")
    assert progress.part() == 0.5


def test_small_batches_cost_more_of_an_epoch_and_large_quorums_more_of_an_update() -> None:
    small, large = (Point(sync="hardsync", learners=4, batch_size=size) for size in (4, 128))
    assert cost(small) > 5 * cost(large)
    one = Point(sync="async", learners=4, batch_size=4)
    assert cost(small, steps=True) == 4 * cost(one, steps=True)
