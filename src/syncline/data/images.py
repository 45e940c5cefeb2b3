"""Labelled images held as bytes, and what all readers of images share: splits, preprocessing, checks.

Pixels stay one byte each until a batch is read, a quarter of the memory of floats. Not responsible for file formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from syncline.dial import nearest
from syncline.errors import UsageError

SPLITS = ("train", "test")
PIXELS = ("unit", "centred")
CLASSES = 10  # of all sets that are read here
Arrays = dict[str, np.ndarray]  # images (N, H, W) or (N, C, H, W), labels (N,)


class Images(Dataset[tuple[Tensor, Tensor]]):
    """(image, class) pairs: images as float32 (C, H, W), (pixels − mean) / scale; classes as int64."""

    def __init__(
        self, pixels: Tensor, labels: Tensor, *, scale: float = 255.0, mean: Tensor | None = None
    ) -> None:
        if len(pixels) != len(labels):
            raise UsageError(f"{len(pixels)} images but {len(labels)} labels")
        self.pixels = pixels  # (N, C, H, W) uint8
        self.labels = labels  # (N,) int64
        self.scale, self.mean = scale, mean

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} images")
        return self._floats(self.pixels[index]), self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Several at once, converted together (torch's protocol for batches)."""
        chosen = torch.as_tensor(indices)
        images = self._floats(self.pixels[chosen])
        return list(zip(images.unbind(), self.labels[chosen].unbind(), strict=True))

    def floats(self) -> TensorDataset:
        """The same converted once: four times the memory, no work per batch."""
        return TensorDataset(self._floats(self.pixels), self.labels)

    def _floats(self, pixels: Tensor) -> Tensor:
        values = pixels.float()
        if self.mean is not None:
            values -= self.mean
        return values if self.scale == 1.0 else values.div_(self.scale)


def check_choice(what: str, value: object, known: Sequence[str]) -> None:
    """One of a few words, or an error that names the nearest."""
    if value not in known:
        names = ", ".join(map(repr, known))
        raise UsageError(f"{what} must be one of {names}, got {value!r}{nearest(value, known)}")


def as_folder(folder: object, hint: str) -> Path:
    """The user's path, which must exist; the hint says what to put there."""
    if not isinstance(folder, str | Path):
        raise UsageError(f"folder must be a path, got {folder!r}")
    path = Path(folder).expanduser()
    if not path.exists():
        raise UsageError(f"no folder or file {str(folder)!r} (looked for {path.absolute()}); {hint}")
    return path


def find(folder: Path, below: Iterable[str], names: Iterable[str]) -> Path | None:
    """The first of the names in the folder or in one of the folders below it."""
    for place in (folder, *(folder / inner for inner in below)):
        for name in names:
            if (place / name).is_file():
                return place / name
    return None


def read_npz(file: Path, split: str, shape: tuple[int, ...]) -> Arrays:
    """`x_{split}` and `y_{split}` of an archive, as uint8 images of this shape and labels."""
    wanted = (f"x_{split}", f"y_{split}")
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            missing = [name for name in wanted if name not in archive]
            if missing:
                raise UsageError(f"{file}: no array {missing[0]!r}; it has {', '.join(archive.files)}")
            images, labels = (archive[name] for name in wanted)
    except UsageError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many kinds on a damaged archive
        raise UsageError(f"{file}: not a readable npz archive: {error}") from error
    if images.shape[1:] != shape or images.dtype != np.uint8:
        raise UsageError(
            f"{file}: {wanted[0]} must be uint8 of shape {('N', *shape)}, got {images.dtype} {images.shape}"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise UsageError(
            f"{file}: {wanted[1]} must hold {len(images)} whole numbers, got {labels.dtype} {labels.shape}"
        )
    return {"images": images, "labels": labels}


def make(
    folder: str | Path,
    split: str,
    read: Callable[[Path, str], Arrays],
    *,
    pixels: str,
    floats: bool,
    hint: str,
) -> Images | TensorDataset:
    """The data set of one split, which `read` finds; the training set's mean centres pixels."""
    check_choice("split", split, SPLITS)
    check_choice("pixels", pixels, PIXELS)
    place = as_folder(folder, hint)
    arrays = read(place, split)
    labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < CLASSES):
        raise UsageError(
            f"{place}: labels must lie in 0 to {CLASSES - 1}, found {int(labels.min())} to {int(labels.max())}"
        )
    images = torch.from_numpy(np.ascontiguousarray(arrays["images"]))
    images = images.unsqueeze(1) if images.dim() == 3 else images  # (N, C, H, W)
    if pixels == "unit":
        made = Images(images, labels)
    else:
        train = arrays["images"] if split == "train" else read(place, "train")["images"]
        total = train.sum(0, dtype=np.int64)  # per pixel, over all images; sums of bytes are exact
        mean = torch.from_numpy(total / max(1, len(train))).float()
        made = Images(images, labels, scale=1.0, mean=mean.unsqueeze(0) if mean.dim() == 2 else mean)
    return made.floats() if floats else made
