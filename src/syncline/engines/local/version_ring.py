"""A table's ring of versions in shared memory: shards write their parts of its places, readers copy them for themselves (M13).

A word for each shard and place says which version lies there; a reader looks at it before and after. Not responsible for
who may read what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import Tensor

from syncline.engines.local.exchange import LINE, WordsLike, lines
from syncline.ports import WRITTEN
from syncline.table.layout import Layout

Segments = list[Tensor]
UNREAD = -1  # place of a version in a shard that is not looked at


class Words:
    """For each shard and place: the version that lies there."""

    def __init__(self, cells: WordsLike, base: int, *, shards: int, places: int) -> None:
        self._cells, self._places = cells, range(places)
        self._first = [base + shard * lines(places) for shard in range(shards)]

    @staticmethod
    def words(shards: int, places: int) -> int:
        return shards * lines(places)

    def offer(self, shard: int, place: int, version: int) -> None:
        cell = self._first[shard] + place
        self._cells.store(cell, version + 1)
        if version == WRITTEN:
            self._cells.load(cell)  # what is written into the place comes after it

    def find(self, shard: int, version: int) -> int | None:
        """The place of a version."""
        first, load = self._first[shard], self._cells.load
        for place in self._places:
            if load(first + place) == version + 1:
                return place
        return None

    def held(self, shard: int) -> dict[int, int]:
        """All its versions, and where they lie."""
        first, load = self._first[shard], self._cells.load
        return {load(first + place) - 1: place for place in self._places}

    def lies(self, version: int, where: Iterable[tuple[int, int]]) -> bool:
        """It still lies there, in these shards, each with its place: what was copied is whole."""
        load, cells = self._cells.load, [self._first[shard] + place for shard, place in where]
        for cell in cells:
            load(cell)  # all that was copied was read before the words are
        return set(map(load, cells)) <= {version + 1}


class Marks:
    """For each shard: its newest version, wherever that can be read; and which of its places are to be left alone for a while."""

    def __init__(self, cells: WordsLike, base: int, *, shards: int, places: int) -> None:
        self._cells, self._places = cells, places
        self._newest = [base + LINE * shard for shard in range(shards)]
        self._kept = [base + LINE * shards + lines(places) * shard for shard in range(shards)]

    @staticmethod
    def words(shards: int, places: int) -> int:
        return LINE * shards + Words.words(shards, places)

    def clear(self) -> None:
        """Legal while no shard is there."""
        for shard, newest in enumerate(self._newest):
            self._cells.store(newest, 0)
            for place in range(self._places):
                self.keep(shard, place, False)

    def reach(self, shard: int, version: int) -> None:
        self._cells.store(self._newest[shard], version + 1)

    def reached(self, shard: int) -> int:
        return self._cells.load(self._newest[shard]) - 1

    def ahead(self, shard: int) -> int:
        """Of the slowest shard, in versions."""
        load = self._cells.load
        return load(self._newest[shard]) - min(map(load, self._newest))

    def keep(self, shard: int, place: int, kept: bool) -> None:
        """Somebody reads there slowly; one writer says so. It is a wish: whoever reads looks afterwards whether it was heard."""
        self._cells.store(self._kept[shard] + place, kept)

    def kept(self, shard: int, place: int) -> bool:
        return bool(self._cells.load(self._kept[shard] + place))


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
                self._gather(entry, shard, places[shard])
            found.append(self._gathered[entry])
        return found

    def _gather(self, entry: int, shard: int, place: int) -> None:
        part = self._layout.parts[shard]
        mine, theirs = part.segments(self._scratch), part.segments(self._ring[place])
        for piece in part.pieces:
            if piece.entry == entry:
                cut = slice(piece.position, piece.position + piece.stop - piece.start)
                mine[piece.segment][cut].copy_(theirs[piece.segment][cut])

    def hold(self, version: int, places: Sequence[int]) -> bool:
        """It still lies there, in all shards that were read."""
        return self._words.lies(version, [each for each in enumerate(places) if each[1] != UNREAD])
