"""Models as safetensors: each loads into the plain module with one line.

    model.load_state_dict(safetensors.torch.load_file("runs/…/model.safetensors"))

Names of tied parameters are all written. A file is there in whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from syncline.table.checkpoints import CheckpointError, write_tensors

MODEL, BEST = "model.safetensors", "best.safetensors"


def whole_state(model: nn.Module | None, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `model.load_state_dict` expects: with what is not trained, without what is not kept."""
    if model is None:
        return dict(state)
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {name: state.get(name, value) for name, value in own.items()}


def save(path: Path, state: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Write beside, then rename; raises CheckpointError."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_tensors(temporary, state, {key: str(value) for key, value in notes.items()})
    try:
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def best_so_far(folder: Path) -> tuple[str, float] | None:
    """The metric and value that best.safetensors was kept for."""
    try:
        with safe_open(folder / BEST, "pt") as file:
            notes = file.metadata() or {}
        return notes["metric"], float(notes["value"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
