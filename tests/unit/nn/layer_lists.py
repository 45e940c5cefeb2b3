"""Layers as data, that tests make nets of."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]


def data(*shape: int) -> Record:
    return {"name": "data", "type": "input", "shape": list(shape)}


def classifier(**changes: Any) -> list[Record]:
    return [
        data(4),
        {"name": "label", "type": "label"},
        {"name": "fc1", "type": "dense", "units": 6},
        {"name": "act", "type": "tanh"},
        {"name": "fc2", "type": "dense", "units": 3, **changes},
        {"name": "loss", "type": "cross_entropy"},
    ]
