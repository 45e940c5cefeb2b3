"""A learner's second copy of a table, filled beside its computation with what has come down (R8): in `step` pointers are swapped.

`protocols.tree_down.Buffers` says which copy is whose. Not responsible for how versions come into the ring, nor for when to swap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.engines.local.version_ring import Reader
from syncline.protocols.tree_down import Buffers

LEAST = (
    4 << 20
)  # bytes of a table: smaller ones are copied in the step, in less time than a thread takes to begin
LOOK = 0.001  # seconds between looks at the ring
SHARE = 3  # it rests for so many times as long as a copy took: the learner needs the memory's bandwidth, too
TORN = 4  # copies in a row that were overtaken: one is to be delivered


def swappable(parameters: Sequence[Tensor]) -> bool:
    """Large enough, in memory of their own on the host, as they would be made anew."""
    return (
        sum(parameter.nbytes for parameter in parameters) >= LEAST
        and all(parameter.device.type == "cpu" for parameter in parameters)
        and all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in parameters)
        and all(parameter.is_contiguous() for parameter in parameters)
    )


class VersionFlow:
    """One table's; a thread of the learner's fills the copy that it does not compute on."""

    def __init__(self, reader: Reader, parameters: Sequence[Tensor], version: int) -> None:
        self._reader, self._buffers = reader, Buffers(version)
        self._spare = [torch.empty_like(parameter) for parameter in parameters]
        self._lock = threading.Lock()  # of the buffers' state, never held while anything is copied
        self._torn = 0
        self._closed = threading.Event()
        threading.Thread(target=self._main, name="syncline-flow", daemon=True).start()

    @property
    def overtaken(self) -> bool:
        return self._torn >= TORN

    def close(self) -> None:
        self._closed.set()

    def has(self, version: int) -> None:
        """The parameters were read in another way."""
        with self._lock:
            self._buffers.version = max(self._buffers.version, version)
            self._torn = 0

    def swap(self, parameters: Sequence[Tensor]) -> int | None:
        """The version that they have from now on; None: they have it already."""
        with self._lock:
            before, version = self._buffers.version, self._buffers.swap()
            if version == before:
                return None
            for index, parameter in enumerate(parameters):
                if _shared(parameter):  # whoever looks sees the new version, as after a step of plain PyTorch
                    parameter.data.copy_(self._spare[index])
                else:
                    parameter.data, self._spare[index] = self._spare[index], parameter.data
            return version

    # -- on the thread -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _main(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            self._fill()
            self._closed.wait(max(LOOK, SHARE * (time.monotonic() - began)))

    def _fill(self) -> None:
        with self._lock:
            newest = max(self._buffers.version, self._buffers.next or 0)
            if not self._buffers.room or (found := self._reader.newest(newest)) is None:
                return
            version, places = found
            self._buffers.begin(version)
        torch._foreach_copy_(self._spare, self._reader.sources(places))
        with self._lock:
            if self._reader.hold(version, places):
                self._buffers.complete()
                self._torn = 0
            else:
                self._buffers.drop()
                self._torn += 1


def _shared(parameter: Tensor) -> bool:
    """Others hold its storage: views, or a graph that was not run backwards yet."""
    storage = parameter.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2
