"""The image sets: digits ship with the package (CC BY 4.0, see digits.LICENCE.txt); MNIST, Fashion-MNIST and CIFAR-10 are read from
files that the user has, as their sources give them or in one npz archive.

CIFAR-10's batches are pickles; `_Batches` reads them without being able to call anything but the making of an array.
"""

from __future__ import annotations

import gzip
import pickle
import zlib
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import TensorDataset

from syncline.data.images import SPLITS, Arrays, Images, check_choice, find, make, read_npz
from syncline.errors import UsageError

EVERY = 5  # the fifth, tenth, … image of each class is for testing
HIGHEST = 16.0  # pixels count the black of 4×4


def digits(split: str = "train") -> TensorDataset:
    """8×8 digits as float32 (1, 8, 8) in 0…1 with their class: 1,442 for training, 355 for testing.

    The split is fixed: in the order of the file, every fifth image of each class is in the test set, so that the
    classes are as frequent in both. The same writers are in both.
    """
    check_choice("split", split, SPLITS)
    with resources.files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images, labels = archive["images"], archive["labels"]
    chosen = np.full(len(labels), split == "train")
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[EVERY - 1 :: EVERY]] = split == "test"
    return TensorDataset(
        torch.from_numpy(images[chosen]).unsqueeze(1).float().div_(HIGHEST),
        torch.from_numpy(labels[chosen]).long(),
    )


IDX_PARTS = {"train": "train", "test": "t10k"}
MAGIC = {"images": 0x803, "labels": 0x801}  # unsigned bytes in three dimensions, in one
SIDE = 28
MNIST_SOURCE = "put the four files there, https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz and so on"
FASHION_SOURCE = (
    "put the four files there, https://github.com/zalandoresearch/fashion-mnist has them in data/fashion"
)


def mnist(
    folder: str | Path, split: str = "train", *, pixels: str = "unit", floats: bool = False
) -> Images | TensorDataset:
    """MNIST, 60,000 and 10,000 images (1, 28, 28): the IDX files (.gz or not) in a folder, or `mnist.npz`.

    `pixels`: "unit" gives 0…1, "centred" 0…255 minus the mean image of the training set. `floats` converts once
    instead of per batch.
    """
    read = partial(_mnist_arrays, below=("raw", "MNIST/raw"), archive="mnist", hint=MNIST_SOURCE)
    return make(folder, split, read, pixels=pixels, floats=floats, hint=MNIST_SOURCE)


def fashion_mnist(
    folder: str | Path, split: str = "train", *, pixels: str = "unit", floats: bool = False
) -> Images | TensorDataset:
    """Fashion-MNIST: files and arguments as for `mnist`; the archive is `fashion-mnist.npz`."""
    below = ("raw", "FashionMNIST/raw")
    read = partial(_mnist_arrays, below=below, archive="fashion-mnist", hint=FASHION_SOURCE)
    return make(folder, split, read, pixels=pixels, floats=floats, hint=FASHION_SOURCE)


def _mnist_arrays(place: Path, split: str, *, below: tuple[str, ...], archive: str, hint: str) -> Arrays:
    if place.is_file():
        return read_npz(place, split, (SIDE, SIDE))
    packed = find(place, (), (f"{archive}.npz",))
    files = {what: find(place, below, idx_names(split, what)) for what in MAGIC}
    missing = [what for what, file in files.items() if file is None]
    if missing and packed is not None:
        return read_npz(packed, split, (SIDE, SIDE))
    if missing:
        raise UsageError(
            f"no {archive} {split} {missing[0]} in {place}: looked for {', '.join(idx_names(split, missing[0]))} "
            f"there and in {', '.join(below)}, and for {archive}.npz; {hint}"
        )
    arrays = {what: read_idx(file, MAGIC[what]) for what, file in files.items() if file is not None}
    if arrays["images"].shape[1:] != (SIDE, SIDE):
        raise UsageError(
            f"{files['images']}: images are {arrays['images'].shape[1:]}, expected {SIDE}×{SIDE}"
        )
    if len(arrays["images"]) != len(arrays["labels"]):
        raise UsageError(
            f"{place}: {len(arrays['images'])} {split} images but {len(arrays['labels'])} labels"
        )
    return arrays


def idx_names(split: str, what: str) -> list[str]:
    """The names under which a file of the set is found, as its sources write them."""
    stem, kind = f"{IDX_PARTS[split]}-{what}", f"idx{3 if what == 'images' else 1}-ubyte"
    plain = [f"{stem}-{kind}", f"{stem}.{kind}"]
    return [*plain, *(f"{name}.gz" for name in plain)]


def read_idx(file: Path, magic: int) -> np.ndarray:
    """The array of an IDX file of unsigned bytes."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    found = int.from_bytes(raw[:4], "big")
    if len(raw) < 4 or found != magic:
        raise UsageError(
            f"{file}: not an IDX file of this kind: it must begin with 0x{magic:08x}, got 0x{found:08x}"
        )
    head = 4 + 4 * (magic & 0xFF)
    shape = tuple(int.from_bytes(raw[at : at + 4], "big") for at in range(4, head, 4))
    expected = head + int(np.prod(shape, dtype=object))
    if len(raw) != expected:
        state = "truncated" if len(raw) < expected else "too long"
        raise UsageError(f"{file}: {state}: {shape} takes {expected:,} bytes, the file has {len(raw):,}")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape).copy()


CIFAR_FILES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_ARCHIVE = "cifar10.npz"
CIFAR_SHAPE = (3, 32, 32)
CIFAR_SOURCE = "unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz there"


def cifar10(
    folder: str | Path, split: str = "train", *, pixels: str = "unit", floats: bool = False
) -> Images | TensorDataset:
    """CIFAR-10, 50,000 and 10,000 images (3, 32, 32): the official python batches in a folder, or `cifar10.npz`.

    `pixels`: "unit" gives 0…1, "centred" 0…255 minus the mean image of the training set, as `cifar10_full` wants
    them. `floats` converts once instead of per batch.
    """
    return make(folder, split, _cifar_arrays, pixels=pixels, floats=floats, hint=CIFAR_SOURCE)


def _cifar_arrays(place: Path, split: str) -> Arrays:
    packed = place if place.is_file() else find(place, (), (CIFAR_ARCHIVE,))
    if packed is not None:
        arrays = read_npz(packed, split, (32, 32, 3))
        first = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2).contiguous()  # faster than numpy's
        return {**arrays, "images": first.numpy()}
    files = {name: find(place, (CIFAR_FOLDER,), (name,)) for name in CIFAR_FILES[split]}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise UsageError(
            f"no CIFAR-10 {split} set in {place}: looked for {', '.join(missing)} there and in {CIFAR_FOLDER}, "
            f"and for {CIFAR_ARCHIVE}; {CIFAR_SOURCE}"
        )
    batches = [read_batch(file) for file in files.values() if file is not None]
    return {key: np.concatenate([batch[key] for batch in batches]) for key in ("images", "labels")}


def read_batch(file: Path) -> Arrays:
    """Images and labels of one official batch."""
    try:
        with file.open("rb") as stream:
            batch = _Batches(stream, encoding="bytes").load()
        if not isinstance(batch, dict):
            raise pickle.UnpicklingError(f"it holds {type(batch).__name__}, not a dict")
        # keys as the original's; copies written by Python 3 have texts
        content = {
            key.encode() if isinstance(key, str) else bytes(key): value for key, value in batch.items()
        }
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
    return {"images": pixels.reshape(-1, *CIFAR_SHAPE), "labels": np.array(labels, np.int64)}


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
