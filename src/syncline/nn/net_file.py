"""Nets in safetensors files, with their layers beside the tensors: one loads without the job that trained it, and no pickle.

    save_net(net, "net.safetensors")
    net = load_net("runs/…/model.safetensors")

A file's layers can name types that are built in or registered here; nothing is imported because a file says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from syncline.errors import UsageError
from syncline.nn.net import Net
from syncline.table.checkpoints import write_tensors

LAYERS = "layers"  # in the file's metadata


def layer_notes(model: nn.Module | None) -> dict[str, str]:
    """What a file says about a model beside its tensors: a net's layers."""
    return {LAYERS: json.dumps(model.records)} if isinstance(model, Net) else {}


def save_net(net: Net, path: str | Path) -> None:
    """All tensors by name, tied ones by all their names."""
    if not isinstance(net, Net):
        raise UsageError(f"save_net is for a Net, got {type(net).__name__}; use safetensors.torch.save_model")
    write_tensors(Path(path), net.state_dict(), layer_notes(net))


def load_net(path: str | Path) -> Net:
    """The net of a file, made anew and filled."""
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata() or {}
        if LAYERS not in notes:
            raise UsageError(f"{path} holds no layers: it was not saved by save_net or a run of a net")
        records: Any = json.loads(notes[LAYERS])
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read as a net: {' '.join(str(error).split())}") from error
    try:
        net = Net(records)
        net.load_state_dict(tensors)
    except (UsageError, RuntimeError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error
    return net
