"""The states of a learner's random generators as bytes, and back: torch, its GPU, numpy, random.

Plain numbers, so that checkpoints hold no pickle.
"""

from __future__ import annotations

import random
import struct

import numpy as np
import torch

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
    torch.set_rng_state(_bytes(parts[0]))
    if parts[1] and device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(parts[1]), device)
    tail = struct.calcsize("<iid")
    keys = np.frombuffer(parts[2][:-tail], dtype="<u4")
    np.random.set_state(("MT19937", keys, *struct.unpack("<iid", parts[2][-tail:])))
    version, has_normal, normal = struct.unpack("<i?d", parts[4])
    words = tuple(int(word) for word in np.frombuffer(parts[3], dtype="<u4"))
    random.setstate((version, words, normal if has_normal else None))


def _bytes(part: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(part), dtype=torch.uint8)
