"""Objects between processes: code by cloudpickle, tensors and arrays once, in shared memory.

`pack` collects all bulk data of an object into one anonymous file; every process that unpacks it maps that file
privately (copy on write), so a data set given to eight learners lies in memory once. Regions and bells
travel by descriptor. Not responsible for sockets.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from syncline.engines.local.memory import Bell, Region

ALIGN = 64
INLINE = 16384  # bytes of bulk data that travel in the message itself


@dataclass(slots=True)
class Parcel:
    """A packed object: its pickle, its bulk data, its descriptors."""

    pickled: bytes
    sizes: list[int]
    inline: bytes
    fds: list[int] = field(default_factory=list)  # the bulk file first, if there is one
    bulk: int = -1  # size of the bulk file, -1: none

    def close(self) -> None:
        """Close the descriptor that packing made."""
        if self.bulk >= 0 and self.fds:
            os.close(self.fds[0])
            self.bulk = -1


def _out_of_band(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    try:
        buffers.append(buffer.raw())
    except BufferError:  # not contiguous: let pickle copy it
        return True
    return False


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[memoryview] = []
        self.places: list[int] = []  # which buffers are storages; pickle itself counts only the others
        self.fds: list[int] = []
        self._storages: dict[tuple[int, int], int] = {}
        self._keep: list[Any] = []
        # not a method of its own: in a cycle it would hold all it packed until the collector comes
        super().__init__(file, protocol=5, buffer_callback=partial(_out_of_band, self.buffers))

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Region):
            self.fds.append(obj.fd)
            return ("region", len(self.fds) - 1, obj.nbytes)
        if isinstance(obj, Bell):
            self.fds.append(obj.fd)
            return ("bell", len(self.fds) - 1)
        if isinstance(obj, torch.storage.TypedStorage) and obj._untyped_storage.device.type == "cpu":
            return ("typed", self._storage(obj._untyped_storage), obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return ("untyped", self._storage(obj))
        return None

    def _storage(self, storage: torch.UntypedStorage) -> int:
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._storages or storage.nbytes() == 0:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._keep.append(flat)
            self._storages[key] = len(self.buffers)
            self.buffers.append(memoryview(flat.numpy()))  # type: ignore[arg-type]
            self.places.append(len(self.buffers) - 1)
        return self._storages[key]


def pack(obj: Any) -> Parcel:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    buffers = pickler.buffers
    sizes = [buffer.nbytes for buffer in buffers]
    head = pickle.dumps((file.getvalue(), pickler.places))
    if sum(sizes) <= INLINE:
        inline = b"".join(bytes(buffer) + bytes(-buffer.nbytes % ALIGN) for buffer in buffers)
        return Parcel(head, sizes, inline, pickler.fds)
    fd, total = _write_bulk(buffers)
    return Parcel(head, sizes, b"", [fd, *pickler.fds], total)


def _write_bulk(buffers: list[memoryview]) -> tuple[int, int]:
    total = sum(-(-buffer.nbytes // ALIGN) * ALIGN for buffer in buffers)
    fd = os.memfd_create("syncline-cargo", os.MFD_CLOEXEC)
    os.ftruncate(fd, total)
    with mmap.mmap(fd, total) as area:
        position = 0
        for buffer in buffers:
            area[position : position + buffer.nbytes] = buffer.cast("B")
            position += -(-buffer.nbytes // ALIGN) * ALIGN
    return fd, total


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: list[Any], plain: list[Any], fds: list[int]) -> None:
        super().__init__(file, buffers=plain)
        self._buffers, self._fds = buffers, fds
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, index, *rest = pid
        if kind == "region":
            return Region(rest[0], self._fds[index])
        if kind == "bell":
            return Bell(self._fds[index])
        if index not in self._storages:
            self._storages[index] = _as_tensor(self._buffers[index]).untyped_storage()
        storage = self._storages[index]
        if kind == "untyped":
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=rest[0], _internal=True)


def _as_tensor(buffer: Any) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)


def unpack(parcel: Parcel) -> Any:
    """The object again; the parcel's descriptors belong to it from now on."""
    fds = parcel.fds
    if parcel.bulk >= 0:
        area = mmap.mmap(fds[0], parcel.bulk, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fds[0])
        fds = fds[1:]
        buffers = memoryview(area)
    else:
        buffers = memoryview(bytearray(parcel.inline))
    pieces, position = [], 0
    for size in parcel.sizes:
        pieces.append(buffers[position : position + size])
        position += -(-size // ALIGN) * ALIGN
    pickled, places = pickle.loads(parcel.pickled)
    plain = [piece for index, piece in enumerate(pieces) if index not in set(places)]
    return _Unpickler(io.BytesIO(pickled), pieces, plain, fds).load()
