"""CIFAR-10 from the official python batches, or from one npz archive.

The batches are pickles; `_Batches` reads them without being able to call anything but the making of an array.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import TensorDataset

from syncline.data.images import Arrays, Images, find, make, read_npz
from syncline.errors import UsageError

FILES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
BELOW = ("cifar-10-batches-py",)
ARCHIVE = "cifar10.npz"
SHAPE = (3, 32, 32)
HINT = "unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz there"


def cifar10(
    folder: str | Path, split: str = "train", *, pixels: str = "unit", floats: bool = False
) -> Images | TensorDataset:
    """CIFAR-10, 50,000 and 10,000 images (3, 32, 32): the official python batches in a folder, or `cifar10.npz`.

    `pixels`: "unit" gives 0…1, "centred" 0…255 minus the mean image of the training set, as `cifar10_full` wants
    them. `floats` converts once instead of per batch.
    """
    return make(folder, split, _arrays, pixels=pixels, floats=floats, hint=HINT)


def _arrays(place: Path, split: str) -> Arrays:
    packed = place if place.is_file() else find(place, (), (ARCHIVE,))
    if packed is not None:
        arrays = read_npz(packed, split, (32, 32, 3))
        first = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2).contiguous()  # faster than numpy's
        return {**arrays, "images": first.numpy()}
    files = {name: find(place, BELOW, (name,)) for name in FILES[split]}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise UsageError(
            f"no CIFAR-10 {split} set in {place}: looked for {', '.join(missing)} there and in {BELOW[0]}, "
            f"and for {ARCHIVE}; {HINT}"
        )
    batches = [read_batch(file) for file in files.values() if file is not None]
    return {key: np.concatenate([batch[key] for batch in batches]) for key in ("images", "labels")}


def read_batch(file: Path) -> Arrays:
    """Images and labels of one official batch."""
    try:
        with file.open("rb") as stream:
            batch = _Batches(stream, encoding="bytes").load()
        content = {bytes(key): value for key, value in _as_bytes(batch).items()}
        pixels, labels = content[b"data"], content[b"labels"]
    except Exception as error:  # a damaged pickle raises almost anything
        reason = str(error) or type(error).__name__
        raise UsageError(f"{file}: not an official CIFAR-10 python batch: {reason}") from error
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        raise UsageError(f"{file}: data must be uint8 of shape (N, 3072)")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise UsageError(f"{file}: labels must be a list of whole numbers")
    if len(labels) != len(pixels):
        raise UsageError(f"{file}: {len(pixels)} images but {len(labels)} labels")
    return {"images": pixels.reshape(-1, *SHAPE), "labels": np.array(labels, np.int64)}


def _as_bytes(batch: Any) -> dict[bytes, Any]:
    """Keys as the original's; copies written by Python 3 have texts."""
    if not isinstance(batch, dict):
        raise pickle.UnpicklingError(f"it holds {type(batch).__name__}, not a dict")
    return {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}


class _Marker:
    """Stands for the class of arrays in a pickle, and can do nothing."""


def _reconstruct(*_: Any) -> np.ndarray:
    """An array to be filled by the state that follows, whatever was asked for."""
    return np.empty(0, np.uint8)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 of Python 3 writes bytes."""
    return text.encode("latin1")


def _dtype(code: Any, *_: Any) -> np.dtype[Any]:
    if code not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"it holds an array of {code!r}, not of bytes")
    return np.dtype("u1", copy=True)  # a copy: the state that follows is written into it


class _Batches(pickle.Unpickler):
    """Only what a batch consists of: dicts, lists, numbers, texts and arrays of bytes."""

    _ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): _Marker,
        ("numpy", "dtype"): _dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch needs") from None
