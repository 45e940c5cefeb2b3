"""MNIST and Fashion-MNIST from files that the user has: IDX, plain or compressed, or one npz archive."""

from __future__ import annotations

import gzip
import zlib
from functools import partial
from pathlib import Path

import numpy as np
from torch.utils.data import TensorDataset

from syncline.data.images import Arrays, Images, find, make, read_npz
from syncline.errors import UsageError

PARTS = {"train": "train", "test": "t10k"}
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
    read = partial(_arrays, below=("raw", "MNIST/raw"), archive="mnist", hint=MNIST_SOURCE)
    return make(folder, split, read, pixels=pixels, floats=floats, hint=MNIST_SOURCE)


def fashion_mnist(
    folder: str | Path, split: str = "train", *, pixels: str = "unit", floats: bool = False
) -> Images | TensorDataset:
    """Fashion-MNIST: files and arguments as for `mnist`; the archive is `fashion-mnist.npz`."""
    below = ("raw", "FashionMNIST/raw")
    read = partial(_arrays, below=below, archive="fashion-mnist", hint=FASHION_SOURCE)
    return make(folder, split, read, pixels=pixels, floats=floats, hint=FASHION_SOURCE)


def _arrays(place: Path, split: str, *, below: tuple[str, ...], archive: str, hint: str) -> Arrays:
    if place.is_file():
        return read_npz(place, split, (SIDE, SIDE))
    packed = find(place, (), (f"{archive}.npz",))
    files = {what: find(place, below, idx_names(split, what)) for what in MAGIC}
    for what, file in files.items():
        if file is None and packed is None:
            raise UsageError(
                f"no {archive} {split} {what} in {place}: looked for {', '.join(idx_names(split, what))} "
                f"there and in {', '.join(below)}, and for {archive}.npz; {hint}"
            )
    if None in files.values() and packed is not None:
        return read_npz(packed, split, (SIDE, SIDE))
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
    stem, kind = f"{PARTS[split]}-{what}", f"idx{3 if what == 'images' else 1}-ubyte"
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
