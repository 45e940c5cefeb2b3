"""Arrays in `.npy` files or `.npz` archives, read by memory map: larger than memory is fine.

A mapped array travels to the learners as the place where it lies; each maps the file for itself, and the system keeps one
copy. Members of an archive are mapped where they lie if they are stored (`np.savez`); compressed ones
(`np.savez_compressed`) have to be read into memory.
"""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from syncline.data.images import SPLITS, as_folder, check_choice
from syncline.errors import UsageError

LOCAL_HEADER = 30  # bytes before a zip member's name


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """Where an array lies in a file."""

    file: str
    size: int  # of the file and
    changed: int  # when, to notice that it is another file by now
    offset: int
    shape: tuple[int, ...]
    dtype: str
    order: str


class HeldArray:
    """An array in memory, or in a file: that is pickled as its place."""

    def __init__(self, array: np.ndarray, place: ArrayPlace | None = None) -> None:
        self.array, self._place = array, place

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return (HeldArray, (self.array,)) if self._place is None else (mapped, (self._place,))

    def take(self, index: Any) -> Tensor:
        """A copy in this machine's byte order."""
        array = np.asarray(self.array[index])
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True))


def mapped(place: ArrayPlace) -> HeldArray:
    stat = Path(place.file).stat()
    if (stat.st_size, stat.st_mtime_ns) != (place.size, place.changed):
        raise UsageError(f"{place.file} has changed since the data set was opened")
    if 0 in place.shape:
        return HeldArray(np.empty(place.shape, place.dtype), place)
    order: Any = place.order
    lies = {"offset": place.offset, "shape": place.shape, "order": order}
    return HeldArray(np.memmap(place.file, np.dtype(place.dtype), mode="r", **lies), place)


class ArrayData(Dataset[tuple[Tensor, ...]]):
    """Row i of every array; the first as float32 divided by `scale` if that is given, whole numbers of the others as int64."""

    def __init__(self, parts: Sequence[HeldArray], *, scale: float | None = None) -> None:
        self.parts, self.scale = list(parts), scale

    def __len__(self) -> int:
        return len(self.parts[0].array)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} rows")
        return self._rows(index)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Several at once (torch's protocol for batches)."""
        rows = self._rows(np.asarray(indices))
        return list(zip(*(part.unbind() for part in rows), strict=True))

    def _rows(self, index: Any) -> tuple[Tensor, ...]:
        first, *others = (part.take(index) for part in self.parts)
        if self.scale is not None:
            first = first.float() / self.scale
        return first, *(value if value.is_floating_point() else value.long() for value in others)


def arrays(
    folder: str | Path,
    split: str = "train",
    *,
    names: Sequence[str] | None = None,
    scale: float | None = None,
) -> ArrayData:
    """Arrays of equal length: `x_train` and `y_train` (or `names`) of a folder of .npy files, an .npz or one .npy.

    In a folder the names are files (`x_train.npy`), or members of the one .npz that it holds. `scale` turns
    the first array into float32 divided by it, as 255 for pixels.
    """
    check_choice("split", split, SPLITS)
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < float("inf")):
        raise UsageError(f"scale must be a number > 0, got {scale!r}")
    wanted = [f"x_{split}", f"y_{split}"] if names is None else names
    if isinstance(wanted, str) or not wanted or not all(isinstance(name, str) for name in wanted):
        raise UsageError(f"names must be a list of texts such as ['images', 'labels'], got {names!r}")
    place = as_folder(folder, "name a folder of .npy files, an .npz or an .npy")
    if place.is_file() and place.suffix == ".npy":
        parts: list[HeldArray] = [_npy(place)]
    elif place.is_file():
        parts = _members(place, wanted)
    else:
        parts = _folder(place, wanted)
    if any(part.array.ndim == 0 for part in parts):
        raise UsageError(f"{place}: an array is a single number, not a list of examples")
    if len({len(part.array) for part in parts}) > 1:
        lengths = ", ".join(f"{name} {len(part.array)}" for name, part in zip(wanted, parts, strict=True))
        raise UsageError(f"{place}: the arrays must be equally long: {lengths}")
    return ArrayData(parts, scale=scale)


def _folder(place: Path, wanted: Sequence[str]) -> list[HeldArray]:
    files = [place / f"{name}.npy" for name in wanted]
    if all(file.is_file() for file in files):
        return [_npy(file) for file in files]
    archives = sorted(place.glob("*.npz"))
    if len(archives) == 1:
        return _members(archives[0], wanted)
    missing = next(file.name for file in files if not file.is_file())
    found = ", ".join(sorted(entry.name for entry in place.iterdir())[:8]) or "nothing"
    raise UsageError(f"{place}: no {missing}, and not exactly one .npz; the folder has {found}")


def _npy(file: Path) -> HeldArray:
    with file.open("rb") as stream:
        return mapped(_place(stream, file, str(file), file.stat().st_size))


def _members(file: Path, wanted: Sequence[str]) -> list[HeldArray]:
    """Arrays of an archive: mapped where they are stored, read where they are compressed."""
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
            known = {Path(info.filename).stem: info for info in archive.infolist()}
            missing = [name for name in wanted if name not in known]
            if missing:
                raise UsageError(f"{file}: no array {missing[0]!r}; it has {', '.join(known) or 'none'}")
            packed = [known[name] for name in wanted if known[name].compress_type != zipfile.ZIP_STORED]
            if packed:
                warnings.warn(
                    f"{file}: {', '.join(info.filename for info in packed)} compressed, so read into memory "
                    f"({sum(info.file_size for info in packed):,} bytes); write the archive with np.savez to have it mapped",
                    stacklevel=3,
                )
            return [_member(archive, stream, file, known[name]) for name in wanted]
    except (zipfile.BadZipFile, OSError, EOFError, struct.error) as error:
        raise UsageError(f"{file}: not a readable npz archive: {error}") from error


def _member(archive: zipfile.ZipFile, stream: IO[bytes], file: Path, info: zipfile.ZipInfo) -> HeldArray:
    where = f"{file} ({info.filename})"
    if info.compress_type != zipfile.ZIP_STORED:
        try:
            with archive.open(info) as packed:
                return HeldArray(np.lib.format.read_array(packed, allow_pickle=False))
        except Exception as error:  # zlib and numpy raise many kinds on a damaged member
            raise UsageError(f"{where}: not a readable array: {error}") from error
    stream.seek(info.header_offset)
    name, extra = struct.unpack_from("<HH", stream.read(LOCAL_HEADER), 26)
    start = info.header_offset + LOCAL_HEADER + name + extra
    stream.seek(start)
    return mapped(_place(stream, file, where, start + info.file_size))


def _place(stream: IO[bytes], file: Path, where: str, end: int) -> ArrayPlace:
    """Read the header at the stream's position; the data lies behind it and must fit before `end`."""
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read[version](stream)
    except Exception as error:  # a damaged header is evaluated as a literal and may fail in many ways
        raise UsageError(f"{where}: not a .npy array: {error}") from error
    if dtype.kind not in "biuf":
        raise UsageError(f"{where}: arrays must hold numbers, got {dtype}")
    offset = stream.tell()
    needed = offset + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if needed > end:
        raise UsageError(
            f"{where}: truncated: {shape} of {dtype} ends at byte {needed:,}, the data at {end:,}"
        )
    stat = file.stat()
    return ArrayPlace(
        file=str(file.absolute()),
        size=stat.st_size,
        changed=stat.st_mtime_ns,
        offset=offset,
        shape=shape,
        dtype=dtype.str,
        order="F" if fortran else "C",
    )
