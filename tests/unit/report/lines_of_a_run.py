"""Lines as a run writes them, for tests."""

from __future__ import annotations

import os
import socket
from typing import Any

OPTIONS = {
    "sync": "softsync:1",
    "engine": "local",
    "learners": 2,
    "batch_size": 8,
    "epochs": 4,
    "examples": 100,
    "model": "Net",
    "parameters": 1234,
    "machine": "box",
}


def start(**changes: Any) -> dict[str, Any]:
    found = {"kind": "start", "time": 1000.0, "seconds": 0.0, "run": OPTIONS, "resumed": None}
    return {**found, "pid": os.getpid(), "host": socket.gethostname(), **changes}


def epoch(number: int, *, accuracy: float, loss: float = 0.5, seconds: float | None = None) -> dict[str, Any]:
    return {
        "kind": "epoch",
        "time": 1000.0 + number,
        "seconds": number + 1.0 if seconds is None else seconds,
        "epoch": number,
        "version": 10 * (number + 1),
        "examples": 100 * (number + 1),
        "loss": loss,
        "losses": {"0": loss, "1": loss},
        "metrics": {"loss": loss / 2, "accuracy": accuracy},
    }


def statistics(
    seconds: float, *, version: int, states: tuple[str, ...] = ("computing", "computing")
) -> dict[str, Any]:
    return {
        "kind": "statistics",
        "time": 1000.0 + seconds,
        "seconds": seconds,
        "version": version,
        "gradients": 2 * version,
        "dropped": 0,
        "examples": 16 * version,
        "staleness": {"mean": 0.75, "max": 2, "histogram": {"0": 10, "1": 25, "2": 5}},
        "missing": [1],
        "learners": [
            {"rank": rank, "state": state, "steps": version + rank, "loss": 0.25}
            for rank, state in enumerate(states)
        ],
    }


def event(kind: str, what: str, *, seconds: float = 2.5, rank: int | None = None) -> dict[str, Any]:
    return {
        "kind": "event",
        "time": 1002.5,
        "seconds": seconds,
        "event": kind,
        "what": what,
        "rank": rank,
        "details": {},
    }


def end(how: str = "finished", **changes: Any) -> dict[str, Any]:
    return {**statistics(5.0, version=40), "kind": "end", "how": how, "throughput": 321.0, **changes}


def whole() -> list[dict[str, Any]]:
    """A run of four epochs in which a learner was lost."""
    return [
        start(),
        statistics(0.5, version=2),
        epoch(0, accuracy=0.5, loss=2.0),
        statistics(1.5, version=12),
        epoch(1, accuracy=0.75, loss=1.0),
        event("lost", "lost: its process (pid 7) ended with SIGKILL", rank=1),
        epoch(2, accuracy=0.875),
        statistics(3.5, version=32, states=("computing", "lost")),
        epoch(3, accuracy=0.8125),
        event("checkpoint", "checkpoint of version 40: x", seconds=4.9),
        end(),
    ]
