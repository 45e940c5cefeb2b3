"""Objects between processes: code by cloudpickle, tensors and arrays once, in shared memory.

`pack` collects all bulk data of an object into one anonymous file; every process that unpacks it maps that file
privately (copy on write), so a data set given to eight learners lies in memory once. Of a storage only the part that
its tensors use travels; tensors of one storage stay so. With `mapped`, what lies in a file already is not
collected but mapped from there, in the way it is mapped here: shared memory and `r+` stay shared, `r` and `c` as they are
(`mappings`). Tensors of modules and those that require gradients are never shared. Regions and bells travel by
descriptor. What of a run's task cannot travel is named, before a process starts. Not responsible for sockets.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _rebuild_tensor_v2

from syncline.engines.local.file_mappings import FilePlace, Piece, find_files
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.run import RunSpec
from syncline.errors import UsageError
from syncline.learn.gradient_ways import Supervised

ALIGN = 64
INLINE = 16384  # bytes of bulk data that travel in the message itself


@dataclasses.dataclass(slots=True)
class Parcel:
    """A packed object: its pickle, its bulk data, its descriptors."""

    pickled: bytes
    inline: bytes
    fds: list[int] = dataclasses.field(default_factory=list)  # the bulk file first, if there is one
    bulk: int = -1  # size of the bulk file, -1: none
    made: int = 0  # how many of the descriptors packing made

    def close(self) -> None:
        """Close the descriptors that packing made."""
        for fd in self.fds[: self.made]:
            os.close(fd)
        self.bulk, self.made = -1, 0


@dataclasses.dataclass(slots=True)
class _Memory:
    """Memory that travels, and which of its bytes are used."""

    view: memoryview
    low: int = 0
    high: int = 0
    plain: bool = False  # one of pickle's own buffers, which it asks for in their order
    trained: bool = False

    def use(self, low: int, high: int) -> None:
        low -= low % ALIGN  # whatever its tensors' types are
        self.low, self.high = (min(self.low, low), max(self.high, high)) if self.high else (low, high)

    @property
    def used(self) -> memoryview:
        return self.view[self.low : self.high]


class _Source(NamedTuple):
    """Where the used bytes of a memory are found, and what position in that memory they begin at."""

    size: int
    low: int
    plain: bool
    place: FilePlace | None  # None: in the bulk data


class _Reference(NamedTuple):
    """Stands in a pickle for memory that travels beside it."""

    kind: str
    number: int
    dtype: torch.dtype | None = None


def _out_of_band(memories: list[_Memory], buffer: pickle.PickleBuffer) -> bool:
    try:
        view = buffer.raw()
    except BufferError:  # not contiguous: let pickle copy it
        return True
    memories.append(_Memory(view, 0, view.nbytes, plain=True))
    return False


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, *, mapped: bool) -> None:
        self.memories: list[_Memory] = []
        self.fds: list[int] = []
        self._mapped = mapped
        self._known: dict[tuple[int, int], int] = {}
        # not a method of its own: in a cycle it would hold all it packed until the collector comes
        super().__init__(file, protocol=5, buffer_callback=partial(_out_of_band, self.memories))

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Reference):
            return tuple(obj)
        if isinstance(obj, (Region, WakeUp)):
            self.fds.append(obj.fd)
            size = obj.nbytes if isinstance(obj, Region) else None
            return ("bell" if size is None else "region", len(self.fds) - 1, size)
        if isinstance(obj, torch.storage.TypedStorage) and obj._untyped_storage.device.type == "cpu":
            return ("typed", self._whole(obj._untyped_storage), obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return ("untyped", self._whole(obj), None)
        if self._mapped and isinstance(obj, (nn.Module, Tensor)):
            self._note_trained(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor:
            return self._reduce_tensor(obj)
        if type(obj) in (np.ndarray, np.memmap):
            return self._reduce_array(obj)
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        reduced = tensor.__reduce_ex__(5)
        if reduced[0] is not _rebuild_tensor_v2 or tensor.device.type != "cpu":
            return reduced
        memory, index = self._storage(tensor.untyped_storage())
        if tensor.numel():
            start = int(tensor.storage_offset()) * tensor.itemsize
            memory.use(*_bounds(start, tensor.shape, tensor.stride(), tensor.itemsize, tensor.itemsize))
        return _rebuild_tensor, (_Reference("tensor", index, tensor.dtype), *reduced[1][1:])

    def _reduce_array(self, array: np.ndarray) -> Any:
        owner = _map_under(array) if self._mapped and array.nbytes else None
        if owner is None:
            # a memmap without its file, as arithmetic leaves it: else pickle would take its bytes into the message
            return (_as_memmap, (array.view(np.ndarray),)) if type(array) is np.memmap else NotImplemented
        base = _address(owner)
        memory, index = self._memory((base, len(owner)), lambda: memoryview(owner))
        start = array.ctypes.data - base
        memory.use(*_bounds(start, array.shape, array.strides, 1, array.itemsize))
        kept = {key: value for key, value in getattr(array, "__dict__", {}).items() if key != "_mmap"}
        layout = (array.shape, array.dtype, start, array.strides, array.flags.writeable)
        return _rebuild_array, (_Reference("array", index), type(array), layout, kept)

    def _note_trained(self, obj: nn.Module | Tensor) -> None:
        if isinstance(obj, nn.Module):
            trained = [*obj.parameters(recurse=False), *obj.buffers(recurse=False)]
        else:
            trained = [obj] if isinstance(obj, nn.Parameter) or obj.requires_grad else []
        for tensor in trained:
            with suppress(RuntimeError, ValueError, NotImplementedError):  # it has no memory of its own
                if tensor.device.type == "cpu":
                    self._storage(tensor.untyped_storage())[0].trained = True

    def _whole(self, storage: torch.UntypedStorage) -> int:
        memory, index = self._storage(storage)
        memory.use(0, storage.nbytes())
        return index

    def _storage(self, storage: torch.UntypedStorage) -> tuple[_Memory, int]:
        def view() -> memoryview:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            return memoryview(flat.numpy())  # type: ignore[arg-type]

        return self._memory((storage.data_ptr(), storage.nbytes()), view)

    def _memory(self, key: tuple[int, int], view: Callable[[], memoryview]) -> tuple[_Memory, int]:
        if key not in self._known or key[1] == 0:
            self.memories.append(_Memory(view()))
            self._known[key] = len(self.memories) - 1
        return self.memories[self._known[key]], self._known[key]


def _map_under(array: np.ndarray) -> mmap.mmap | None:
    """The memory map that an array looks at."""
    below: Any = array
    while isinstance(below, (np.ndarray, memoryview)):
        below = below.base if isinstance(below, np.ndarray) else below.obj
    return below if isinstance(below, mmap.mmap) else None


def _bounds(start: int, shape: Any, strides: Any, unit: int, item: int) -> tuple[int, int]:
    """The bytes that a view covers, with strides in units of so many bytes."""
    reach = [(int(n) - 1) * int(step) * unit for n, step in zip(shape, strides, strict=True)]
    return start + sum(min(far, 0) for far in reach), start + sum(max(far, 0) for far in reach) + item


def _address(buffer: Any) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def pack(obj: Any, *, mapped: bool = False) -> Parcel:
    """An object's values as they are now; `mapped`: except for what lies in files, which is mapped from there."""
    file = io.BytesIO()
    pickler = _Pickler(file, mapped=mapped)
    pickler.dump(obj)
    memories = pickler.memories
    pieces = []
    for memory in memories if mapped else ():
        used = memory.used
        pieces.append(Piece(_address(used) if used.nbytes else 0, used.nbytes, memory.trained))
    files = find_files(pieces)
    places = files.places if mapped else [None] * len(memories)
    sources, buffers = [], []
    for memory, place in zip(memories, places, strict=True):
        sources.append(_Source(memory.used.nbytes, memory.low, memory.plain, place))
        if place is None:
            buffers.append(memory.used)
    head = pickle.dumps((file.getvalue(), sources, files.mappings))
    parcel = Parcel(head, b"", files.descriptors, -1, len(files.descriptors))
    if sum(buffer.nbytes for buffer in buffers) <= INLINE:
        parcel.inline = b"".join(bytes(buffer) + bytes(-buffer.nbytes % ALIGN) for buffer in buffers)
    else:
        try:
            fd, parcel.bulk = _write_bulk(buffers)
        except BaseException:
            parcel.close()
            raise
        parcel.fds, parcel.made = [fd, *parcel.fds], parcel.made + 1
    parcel.fds += pickler.fds
    return parcel


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
    def __init__(
        self, pickled: bytes, sources: list[_Source], bulk: Any, areas: list[mmap.mmap], fds: list[int]
    ) -> None:
        self._sources, self._fds = sources, fds
        self._places: list[tuple[Any, int]] = []  # where the memories have arrived
        self._storages: dict[int, torch.UntypedStorage] = {}
        position = 0
        for source in sources:
            if source.place is not None:
                self._places.append((areas[source.place.mapping], source.place.position))
            else:
                self._places.append((bulk, position))
                position += -(-source.size // ALIGN) * ALIGN
        plain = [self._view(index) for index, source in enumerate(sources) if source.plain]
        super().__init__(io.BytesIO(pickled), buffers=plain)

    def _view(self, index: int) -> memoryview:
        area, position = self._places[index]
        return memoryview(area)[position : position + self._sources[index].size]

    def persistent_load(self, pid: Any) -> Any:
        kind, index, detail = pid
        if kind == "region":
            return Region(detail, self._fds[index])
        if kind == "bell":
            return WakeUp(self._fds[index])
        if kind == "array":  # what it can look at, and where its memory map would begin in that
            area, position = self._places[index]
            return area, position - self._sources[index].low
        if index not in self._storages:
            self._storages[index] = _as_tensor(self._view(index)).untyped_storage()
        storage = self._storages[index]
        if kind == "untyped":
            return storage
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=detail, _internal=True)
        return typed if kind == "typed" else (typed, self._sources[index].low)


def _as_tensor(buffer: memoryview) -> Tensor:
    if not buffer:
        return torch.empty(0, dtype=torch.uint8)
    if not buffer.readonly:
        return torch.frombuffer(buffer, dtype=torch.uint8)
    with warnings.catch_warnings():  # it is read-only where it comes from, too
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _rebuild_tensor(memory: tuple[torch.TypedStorage, int], offset: int, size: Any, *rest: Any) -> Tensor:
    storage, low = memory
    first = offset - low // storage._element_size() if 0 not in size else 0
    return _rebuild_tensor_v2(storage, first, size, *rest)  # type: ignore[no-any-return]


def _rebuild_array(memory: tuple[Any, int], kind: type, layout: Any, kept: dict[str, Any]) -> np.ndarray:
    area, zero = memory
    shape, dtype, start, strides, writeable = layout
    array: np.ndarray = np.ndarray.__new__(kind, shape, dtype, area, zero + start, strides)
    if not writeable:
        array.flags.writeable = False
    if kind is np.memmap:
        array.__dict__.update(kept, _mmap=area)
    return array


def _as_memmap(array: np.ndarray) -> np.ndarray:
    return array.view(np.memmap)


def unpack(parcel: Parcel) -> Any:
    """The object again; the parcel's descriptors belong to it from now on."""
    fds = parcel.fds
    bulk: Any = bytearray(parcel.inline)
    if parcel.bulk >= 0:
        bulk = mmap.mmap(fds[0], parcel.bulk, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fds[0])
        fds = fds[1:]
    pickled, sources, mappings = pickle.loads(parcel.pickled)
    unnamed = sum(mapping.path is None for mapping in mappings)
    given = iter(fds[:unnamed])
    areas = [mapping.map(next(given) if mapping.path is None else None) for mapping in mappings]
    return _Unpickler(pickled, sources, bulk, areas, fds[unnamed:]).load()


# -- a run's task --------------------------------------------------------------------------------------------


def pack_task(spec: RunSpec) -> tuple[Parcel, Parcel | None]:
    """What learners run, and the evaluator."""
    task = _packed(spec.task, list(_parts(spec)))
    if spec.evaluate is None:
        return task, None
    return task, _packed(spec.evaluate, [("evaluate", spec.evaluate)])


def _packed(whole: Any, parts: list[tuple[str, Any]]) -> Parcel:
    try:
        return pack(whole, mapped=True)
    except Exception as error:  # whatever the user's objects raise when they are pickled
        name = next((name for name, part in parts if not _travels(part)), "something")
        raise UsageError(
            f"{name} cannot travel to the learners' processes: {' '.join(str(error).split())}; what cannot be pickled has to be "
            "made there, inside the function that learners run (launch) or that makes the model (model=)"
        ) from error


def _parts(spec: RunSpec) -> Iterator[tuple[str, Any]]:
    for index, argument in enumerate(spec.task.arguments):
        if dataclasses.is_dataclass(argument):
            for part in dataclasses.fields(argument):
                value = getattr(argument, part.name)
                yield ("loss" if isinstance(value, Supervised) else part.name), value
        yield f"argument {index + 1}", argument
    yield from spec.task.keywords.items()
    yield getattr(spec.task.function, "__name__", "the function"), spec.task.function


def _travels(part: Any) -> bool:
    try:
        pack(part).close()
    except Exception:
        return False
    return True
