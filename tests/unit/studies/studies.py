"""Rows of a study that nobody ran: error falls with time as in the papers."""

from __future__ import annotations

from typing import Any

from syncline.studies.grid import Grid, Point, StudyRow, asked

SYNCS = ("hardsync", "softsync:1", "async")


def row(point: Point, **changes: Any) -> StudyRow:
    sigma = {"hardsync": 0.0, "softsync:1": (point.learners - 1) / point.learners}.get(
        point.sync, point.learners - 1.0
    )
    seconds = 1000.0 / point.learners * (1 + 4 / point.batch_size)
    known: dict[str, Any] = {
        "epochs": 5.0,
        "seconds": seconds,
        "updates": 100,
        "gradients": 100,
        "dropped": 0,
        "mean_staleness": sigma,
        "max_staleness": int(2 * sigma),
        "test_error": 0.1 + 0.0001 * point.batch_size * point.learners + 0.001 * point.seed,
        "test_loss": 0.3,
        "loss": 0.2,
        "throughput": 5000 / seconds,
        "wall_seconds": 1.0,
        "commit": "abc",
        "version": "0.1.0",
    }
    return asked(point, **{**known, **changes})


def grid(**changes: Any) -> Grid:
    known: dict[str, Any] = {"syncs": SYNCS, "learners": (1, 4, 30), "batch_sizes": (4, 16, 128)}
    return Grid(**{**known, **changes})


def whole(**changes: Any) -> list[StudyRow]:
    return [row(point) for point in grid(**changes).points()[0]]
