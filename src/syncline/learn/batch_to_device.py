"""Batches of any shape: their tensors on a device.

Looked into are mappings (Hugging Face's `BatchEncoding` is one), lists, tuples, named tuples and data classes, also frozen
ones; what has a `to(device)` of its own moves itself. Containers come back as what they were; those without a tensor, and
everything else, untouched. Not responsible for reading batches.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors there. Copies from pageable memory have left it when this returns."""
    if device.type == "cpu":
        return batch
    return _moved(batch, device, lambda tensor: tensor.to(device, non_blocking=True))


class CopyStream:
    """Copies batches to a GPU on a stream of its own, ahead of their use; `begin` from any thread, `use` where they are computed on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begin(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """The batch there, soon."""
        with torch.cuda.stream(self._stream):
            moved = _moved(batch, self._device, self._copy)
            return moved, self._stream.record_event()

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # torch keeps such memory, and uses it again
        return tensor.to(self._device, non_blocking=True)

    def use(self, begun: tuple[Any, torch.cuda.Event]) -> Any:
        """What is computed from here on comes after the copy; its memory is not used again before that is done."""
        batch, copied = begun
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        for tensor in _tensors(batch):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return batch


def rows_of(tensor: Tensor, indices: Tensor, *, pinned: bool) -> Tensor:
    """These rows, wherever the tensor lies; `pinned`: in memory that a GPU copies from by itself."""
    if tensor.is_cuda:
        return tensor.index_select(0, indices.to(tensor.device, non_blocking=True))
    if pinned:
        room = torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
        return torch.index_select(tensor, 0, indices, out=room)
    return tensor[indices]


def _moved(batch: Any, device: torch.device, tensor: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return tensor(batch)
    if (move := _own_move(batch)) is not None:
        moved = move(device)
        return batch if moved is None else moved  # one that moves in place
    if not (parts := _parts(batch)):
        return batch
    moved = {key: _moved(value, device, tensor) for key, value in parts.items()}
    return batch if all(moved[key] is parts[key] for key in parts) else _with(batch, moved)


def _own_move(batch: Any) -> Callable[[torch.device], Any] | None:
    move = getattr(batch, "to", None)
    return move if callable(move) and not isinstance(batch, type) else None


def _parts(batch: Any) -> dict[Any, Any]:
    """What a container holds, by key, place or field."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, (list, tuple, UserList, deque)):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        return {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    return {}


def _with(batch: Any, parts: dict[Any, Any]) -> Any:
    """The same container with other contents."""
    if isinstance(batch, tuple):
        make = getattr(batch, "_make", type(batch))  # a named tuple's takes a sequence too
        return make(list(parts.values()))
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return type(batch)(parts)  # type: ignore[call-arg]
    clone = copy.copy(batch)
    for key, value in parts.items():
        if isinstance(batch, (MutableMapping, list, UserList, deque)):
            clone[key] = value
        else:
            object.__setattr__(clone, key, value)  # frozen ones too
    return clone


def _tensors(batch: Any) -> Iterator[Tensor]:
    """All of a batch's, in their order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    parts = _parts(batch)
    if not parts and _own_move(batch) is not None:
        parts = dict(getattr(batch, "__dict__", {}))
    for value in parts.values():
        yield from _tensors(value)
