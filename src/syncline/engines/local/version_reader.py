"""A learner's side of a table's versions in shared memory (M13): reading one, and a second copy filled with what comes unasked (R8).

`protocols.tree_down.Buffers` says which copy is whose. Not responsible for who may read what, how versions come into the ring, nor
for when copies are swapped.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.engines.local.exchange import Words
from syncline.protocols.tree_down import Buffers
from syncline.table.layout import Layout

Segments = list[Tensor]
UNREAD = -1  # place of a version in a shard that is not looked at
LEAST = 4 << 20  # bytes of a table: smaller ones are copied in the step, before a thread would have begun
LOOK = 0.001  # seconds between looks at the ring
SHARE = 3  # it rests for so many times as long as a copy took: the learner needs the memory's bandwidth, too
TORN = 4  # copies in a row that were overtaken: one is to be delivered


class Reader:
    """A learner's side; `scratch` is memory of its own, for entries whose parts lie in different places.

    With `reads`, spans of each entry's elements, it looks only at shards that hold some of them.
    """

    def __init__(
        self,
        layout: Layout,
        ring: Sequence[Segments],
        words: Words,
        scratch: Segments,
        reads: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self._layout, self._ring, self._words, self._scratch = layout, ring, words, scratch
        flat = layout.parameters
        self._views = [flat.views(segments) for segments in ring]
        self._gathered = flat.views(scratch)
        owners: dict[int, set[int]] = defaultdict(set)
        for shard, part in enumerate(layout.parts):
            for piece in part.pieces:
                wanted = ((piece.start, piece.stop),) if reads is None else reads[piece.entry]
                if any(low < piece.stop and piece.start < high for low, high in wanted):
                    owners[piece.entry].add(shard)
        self._owners = [sorted(owners[entry]) for entry in range(len(flat.entries))]
        every = range(layout.shards)
        self._shards = list(every) if reads is None else sorted(set().union(*owners.values()))

    def choose(self, released: int) -> tuple[int, list[int]] | None:
        """The version that was released, or where that is gone the newest that all shards have; and where it lies."""
        places = [UNREAD] * self._layout.shards
        for shard in self._shards:
            if (place := self._words.find(shard, released)) is None:
                return self.newest(released - 1)
            places[shard] = place
        return released, places

    def newest(self, beyond: int) -> tuple[int, list[int]] | None:
        """The newest that all shards have, if it is newer than that; and where it lies."""
        held = {shard: self._words.held(shard) for shard in self._shards}
        version = max(set.intersection(*map(set, held.values())), default=beyond)
        if version <= beyond:
            return None
        places = [UNREAD] * self._layout.shards
        for shard, lies in held.items():
            places[shard] = lies[version]
        return version, places

    def sources(self, places: Sequence[int]) -> list[Tensor]:
        """One view per parameter."""
        used = set(places) - {UNREAD}
        if len(used) == 1:
            return self._views[used.pop()]
        found = []
        for entry, owners in enumerate(self._owners):
            lies = {places[shard] for shard in owners} or {0}
            if len(lies) == 1:
                found.append(self._views[lies.pop()][entry])
                continue
            for shard in owners:
                part = self._layout.parts[shard]
                mine, theirs = part.segments(self._scratch), part.segments(self._ring[places[shard]])
                for piece in part.pieces:
                    if piece.entry == entry:
                        cut = slice(piece.position, piece.position + piece.stop - piece.start)
                        mine[piece.segment][cut].copy_(theirs[piece.segment][cut])
            found.append(self._gathered[entry])
        return found

    def hold(self, version: int, places: Sequence[int]) -> bool:
        """It still lies there, in all shards that were read."""
        return self._words.lies(version, [each for each in enumerate(places) if each[1] != UNREAD])


# -- versions that come unasked (R8) --------------------------------------------------------------------------


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
