"""Models on their way: made where they are needed, copied, and refused where they have no values yet; and the states of a learner's
random generators (torch, its GPU, numpy, random) as bytes and back, plain numbers, so that checkpoints hold no pickle.

Not responsible for the tables that are made of models (table/layout.py).
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncline.errors import LayoutError, UsageError

_PARTS = struct.Struct("<5I")  # bytes of each part


def seed_random(seed: int) -> None:
    """All generators that a learner's code may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def pack_random(device: torch.device, main: torch.Tensor | None = None) -> bytes:
    """As they are now; `main` where torch's own is to be another."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, normal = random.getstate()
    parts = [
        (torch.get_rng_state() if main is None else main).numpy().tobytes(),
        torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b"",
        np.asarray(keys, dtype="<u4").tobytes() + struct.pack("<iid", position, has_gauss, gauss),  # type: ignore[arg-type]
        np.asarray(words, dtype="<u4").tobytes(),
        struct.pack("<i?d", version, normal is not None, normal or 0.0),
    ]
    return _PARTS.pack(*map(len, parts)) + b"".join(parts)


def unpack_random(packed: bytes, device: torch.device) -> None:
    parts, position = [], _PARTS.size
    for length in _PARTS.unpack_from(packed):
        parts.append(packed[position : position + length])
        position += length
    torch.set_rng_state(torch.frombuffer(bytearray(parts[0]), dtype=torch.uint8))
    if parts[1] and device.type == "cuda":
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(parts[1]), dtype=torch.uint8), device)
    tail = struct.calcsize("<iid")
    keys = np.frombuffer(parts[2][:-tail], dtype="<u4")
    np.random.set_state(("MT19937", keys, *struct.unpack("<iid", parts[2][-tail:])))
    version, has_normal, normal = struct.unpack("<i?d", parts[4])
    words = tuple(int(word) for word in np.frombuffer(parts[3], dtype="<u4"))
    random.setstate((version, words, normal if has_normal else None))


CPU = torch.device("cpu")


@dataclass(frozen=True)
class ModelFactory:
    """Makes the model that a plain script makes with this seed, wherever it is called; draws nothing from the caller's generators."""

    make: Callable[[], Any]
    seed: int

    def __call__(self, device: torch.device = CPU) -> nn.Module:
        before = pack_random(device)
        seed_random(self.seed)
        try:
            made = self.make()
        finally:
            unpack_random(before, device)
        if not isinstance(made, nn.Module):
            raise UsageError(
                f"model must be an nn.Module or a callable that makes one, got {type(made).__name__}"
            )
        return made


Model = nn.Module | ModelFactory


def made(model: Model, device: torch.device = CPU) -> nn.Module:
    """Itself, or what its factory makes."""
    return model if isinstance(model, nn.Module) else model(device)


def copied(model: nn.Module) -> nn.Module:
    """A copy, also of a module that keeps tensors which it computed (`nn.utils.weight_norm`): those it computes again."""
    try:
        return copy.deepcopy(model, memo=without_graph(model))
    except Exception:  # whatever an attribute of the user's raises when it is copied
        found: nn.Module = cloudpickle.loads(cloudpickle.dumps(model))
        return found


def without_graph(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy`: tensors that were computed, which it refuses, without their history."""
    kept = [value for module in model.modules() for value in vars(module).values()]
    return {
        id(value): value.detach().clone() for value in kept if isinstance(value, Tensor) and not value.is_leaf
    }


def refuse_unready(model: nn.Module) -> None:
    """Parameters and buffers without a shape, or without values."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if is_lazy(tensor):
            raise LayoutError(
                f"'{name}' of {type(model).__name__} is lazy and has no shape yet: run the model once on a batch before, or "
                "give a function that makes it and does so"
            )
        if tensor.is_meta:
            raise LayoutError(
                f"'{name}' of {type(model).__name__} is on the meta device and has no values: give a function that makes "
                "the model with values, for example by model.to_empty(device='cpu') and its initialisation"
            )
