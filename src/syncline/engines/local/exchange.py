"""The exchange: what processes of one machine say through shared memory (M11).

Every word has one writer. A record is written first and committed last, by storing one counter; a reader that sees the
counter sees the record. No locks, nothing to clean up after a death. Built on `SharedWords`' operations alone, so
that tests can run it over every interleaving.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

from syncline.table.store import WRITTEN

LINE = 8  # words in a cache line: words of different writers do not share one
RECORD = 16  # words
KEEP, DELIVERED = 1, 2  # in the last word of a reply


class WordsLike(Protocol):
    def load(self, cell: int) -> int: ...

    def store(self, cell: int, value: int) -> None: ...

    def write(self, cell: int, packed: bytes) -> None: ...

    def read(self, cell: int, nbytes: int) -> bytes: ...


def lines(words: int) -> int:
    """As many words, in whole cache lines."""
    return -(-words // LINE) * LINE


class Ring:
    """Records from one writer to one or more readers, in order; a full ring refuses.

    Without readers of its own it is an outbox: records stay for whoever reads them next and keeps the place itself. Its writer is
    known to have few that are still needed: it asks nobody for room.
    """

    def __init__(
        self, cells: WordsLike, base: int, *, capacity: int, form: struct.Struct, readers: int = 1
    ) -> None:
        if form.size > RECORD * 8:
            raise ValueError(f"a record of {form.size} bytes does not fit into {RECORD * 8}")
        self._cells, self._form, self._capacity = cells, form, capacity
        self._head = base
        self._tails = [base + LINE * (1 + reader) for reader in range(readers)]
        self._records = base + LINE * (1 + readers)

    @staticmethod
    def words(capacity: int, readers: int = 1) -> int:
        return LINE * (1 + readers) + RECORD * capacity

    def push(self, record: Sequence[int | float]) -> bool:
        """The writer's."""
        load = self._cells.load
        head = load(self._head)
        if head - min(map(load, self._tails), default=head) >= self._capacity:
            return False
        self._cells.write(self._records + RECORD * (head % self._capacity), self._form.pack(*record))
        self._cells.store(self._head, head + 1)
        return True

    def pop(self, reader: int = 0) -> tuple[int | float, ...] | None:
        """A reader's."""
        tail = self._cells.load(self._tails[reader])
        if tail == self._cells.load(self._head):
            return None
        packed = self._cells.read(self._records + RECORD * (tail % self._capacity), self._form.size)
        self._cells.store(self._tails[reader], tail + 1)
        return self._form.unpack(packed)

    @property
    def written(self) -> int:
        """How many records so far."""
        return self._cells.load(self._head)

    def read(self, index: int) -> tuple[int | float, ...]:
        """One of the last records, of an outbox."""
        cell = self._records + RECORD * (index % self._capacity)
        return self._form.unpack(self._cells.read(cell, self._form.size))


class Replies:
    """For each shard: the last ticket of one learner that it released, and what to read; and the last that was read."""

    def __init__(self, cells: WordsLike, base: int, *, shards: int) -> None:
        self._cells = cells
        self._places = [base + LINE * shard for shard in range(shards)]
        self._read = base + LINE * shards

    @staticmethod
    def words(shards: int) -> int:
        return LINE * (shards + 1)

    def has_read(self, number: int) -> None:
        """The learner has copied what it was released to with this ticket, or needs nothing of it."""
        self._cells.store(self._read, number + 1)

    def reads(self, number: int) -> bool:
        """It may still be copying."""
        return self._cells.load(self._read) <= number

    def release(self, shard: int, number: int, version: int, dial: int = 0, flags: int = 0) -> None:
        place = self._places[shard]
        self._cells.store(place + 1, version)
        self._cells.store(place + 2, dial)
        self._cells.store(place + 3, flags)
        self._cells.store(place, number + 1)  # the commit word: 0 is nothing yet

    def of(self, shard: int) -> tuple[int, int, int, int]:
        """What one shard has released last, for whoever passes it on: its ticket + 1, then version, dial and flags."""
        load, place = self._cells.load, self._places[shard]
        while True:
            count = load(place)
            found = (count, load(place + 1), load(place + 2), load(place + 3))
            if load(place) == count:
                return found

    def released(self, number: int) -> tuple[int, int, int] | None:
        """Version, dial and flags, once every shard has released this ticket; the leading shard's words count."""
        load = self._cells.load
        for place in self._places:
            if load(place) <= number:
                return None
        first = self._places[0]
        version = load(first + 1)
        for place in self._places[1:]:
            if load(place + 1) != version:
                versions = [load(each + 1) for each in self._places]
                raise AssertionError(f"shards released ticket {number} with versions {versions}")
        return version, load(first + 2), load(first + 3)


class Drafts:
    """For each shard and slot: the last ticket whose draft in that slot it needs no more."""

    def __init__(self, cells: WordsLike, base: int, *, shards: int, slots: int) -> None:
        self._cells = cells
        self._places = [base + shard * lines(slots) for shard in range(shards)]

    @staticmethod
    def words(shards: int, slots: int) -> int:
        return shards * lines(slots)

    def free(self, shard: int, slot: int, number: int) -> None:
        self._cells.store(self._places[shard] + slot, number + 1)

    def of(self, shard: int, slot: int) -> int:
        """The last ticket + 1 that one shard has freed there."""
        return self._cells.load(self._places[shard] + slot)

    def freed(self, slot: int, number: int) -> bool:
        """No shard needs this ticket's draft."""
        load = self._cells.load
        return all(load(place + slot) > number for place in self._places)


class Shares:
    """Numbers that each shard tells all others, by round: gradient norms of one fold."""

    def __init__(self, cells: WordsLike, base: int, *, sizes: Sequence[int]) -> None:
        self._cells, self._sizes = cells, list(sizes)
        self._counters = [base + LINE * shard for shard in range(len(sizes))]
        self._places = []
        position = base + LINE * len(sizes)
        for size in sizes:
            self._places.append(position)
            position += 2 * lines(size)  # two rounds: a fast shard may be one ahead

    @staticmethod
    def words(sizes: Sequence[int]) -> int:
        return LINE * len(sizes) + 2 * sum(map(lines, sizes))

    def clear(self) -> None:
        """The rounds begin again; legal while no shard is there."""
        for counter in self._counters:
            self._cells.store(counter, 0)

    def tell(self, shard: int, number: int, values: Sequence[float]) -> None:
        place = self._places[shard] + number % 2 * lines(self._sizes[shard])
        self._cells.write(place, struct.pack(f"{len(values)}d", *values))
        self._cells.store(self._counters[shard], number)

    def of(self, shard: int) -> tuple[int, list[float]]:
        """The last round that one shard has told of, and its values."""
        number = self._cells.load(self._counters[shard])
        return number, self._values(shard, number)

    def _values(self, shard: int, number: int) -> list[float]:
        size = self._sizes[shard]
        place = self._places[shard] + number % 2 * lines(size)
        return list(struct.unpack(f"{size}d", self._cells.read(place, size * 8)))

    def all(self, number: int) -> list[list[float]] | None:
        """Everybody's values of this round, once all are there."""
        if any(self._cells.load(counter) < number for counter in self._counters):
            return None
        return [self._values(shard, number) for shard in range(len(self._sizes))]


# -- a table's ring of versions: shards write their parts of its places, readers copy them for themselves (M13) -------


class Words:
    """For each shard and place: the version that lies there. A reader looks at the word before and after it copies."""

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
