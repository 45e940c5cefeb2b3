"""A node's own ring of versions of a table: each comes there once, and all learners of the node read it there.

A word for each place says which version lies there, of which servers; readers look at it before and after (M13). The node's
agent writes. Not responsible for which versions come (courier.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from syncline.engines.local.shared_memory import PAGE, Region, SharedWords

SHARED = 1 << 16  # bytes from which on a version goes through the mirror: below, one hop less counts for more
MIRRORED = 1 << 8  # added to the place of a version that lies in the mirror


@dataclass(frozen=True, slots=True)
class MirrorOf:
    """A learner asks its agent for the memory of a table's."""

    table: int
    nbytes: int  # of a version
    places: int


class Mirror:
    """One table's."""

    def __init__(self, nbytes: int, places: int, region: Region | None = None) -> None:
        assert places <= PAGE // 8
        size = -(-nbytes // PAGE) * PAGE
        self.region = region or Region(PAGE + places * size)
        self._cells, memory = SharedWords(self.region), self.region.tensor()
        self.places: list[Tensor] = [memory[PAGE + place * size :][:nbytes] for place in range(places)]

    def begin(self, place: int) -> Tensor:
        """Another version comes here: until it is offered nothing does."""
        self._cells.store(place, 0)
        self._cells.load(place)  # what is written comes after it
        return self.places[place]

    def offer(self, place: int, generation: int, version: int) -> None:
        self._cells.store(place, _word(generation, version))

    def holds(self, place: int, generation: int, version: int) -> bool:
        self._cells.load(place)  # all that was copied was read before the word is
        return self._cells.load(place) == _word(generation, version)

    def newest(self, generation: int, least: int) -> tuple[int, int] | None:
        """The newest version of these servers and its place, if it is not older than that."""
        word, place = max((self._cells.load(place), place) for place in range(len(self.places)))
        return (word - _word(generation, 0), place) if word >= _word(generation, least) else None


def _word(generation: int, version: int) -> int:
    return (generation << 40) + version + 1
