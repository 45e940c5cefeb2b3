"""What stores: the versions of a shard's part, in a small ring of places (M13).

The next version is made in place where nobody can be reading the newest, and beside it otherwise, so that readers copy for
themselves. Only the store knows which. Not responsible for who reads, nor for optimizer state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from syncline.table.layout import DTYPES, Layout

WRITTEN = -1  # in place of a version: that place is being written, or never was
PLACES = 3  # of a ring, where no dial needs older versions


def places_for(delay: int) -> int:
    """Where lockstep learners run k versions ahead: k + 1 to read and one to write; and k more, since as many updates follow
    at once where the dial changes, while the slowest still reads the oldest."""
    return max(PLACES, 2 * delay + 2)


class VersionMemory(ABC):
    """A ring of places for versions of a shard's part. The shard writes them; who may read one copies it meanwhile.

    Engines implement it, and the seam (`ports`) names it with the rest.
    """

    places: list[list[Tensor]]  # segments of the part
    others: Sequence[Tensor] = ()  # tensors of the model that no update changes, whole

    @abstractmethod
    def offer(self, place: int, version: int) -> None:
        """This place holds that version, to be read; `WRITTEN`: nothing from here on."""

    @abstractmethod
    def being_read(self) -> bool:
        """Somebody may be copying what was offered."""

    def kept(self, place: int) -> bool:
        """Somebody reads there for long: others are written first."""
        return False


class OwnMemory(VersionMemory):
    """A ring that nobody else sees; whoever reads does so between two steps."""

    def __init__(self, layout: Layout, shard: int, places: int, device: torch.device | str = "cpu") -> None:
        part, flat = layout.parts[shard], layout.parameters
        self.places = [
            [
                torch.zeros(high - low, dtype=DTYPES[flat.dtypes[segment]], device=device)
                for segment, low, high in part.slices
            ]
            for _ in range(places)
        ]

    def offer(self, place: int, version: int) -> None:
        pass

    def being_read(self) -> bool:
        return False


class OnePlace(OwnMemory):
    """One place in memory that is there already, of a whole table."""

    def __init__(self, layout: Layout, shard: int, weights: Sequence[Tensor]) -> None:
        self.places = [layout.parts[shard].segments(weights)]


class Store:
    """Of one shard; its first place holds the present version. `movable`: the next one can be made in any place."""

    def __init__(self, memory: VersionMemory, version: int, *, movable: bool) -> None:
        self._memory, self._places, self._movable = memory, memory.places, movable
        self._held = [WRITTEN] * len(self._places)  # versions by place
        self._newest = 0
        self.segments = self._places[0]  # where the newest version lies, and the next is to be made
        self._keep = False
        self.version = version
        for place in range(1, len(self._places)):
            self._mark(place, WRITTEN)
        self._mark(0, version)

    def keep(self, older: bool) -> None:
        """Older versions stay readable beside the newest, as many as there are places for."""
        self._keep = older and len(self._places) > 1

    def of(self, version: int) -> list[Tensor]:
        """A version that is kept."""
        return self._places[self._held.index(version)]

    def prepare(self) -> None:
        """The next version is about to be made in `segments`, which have the newest one's values."""
        newest, memory, held = self._newest, self._memory, self._held
        if len(self._places) > 1 and (self._keep or memory.being_read() or memory.kept(newest)):
            others = [each for each in range(len(held)) if each != newest]
            if not self._keep:
                others = [each for each in others if not memory.kept(each)] or others
            other = min(others, key=held.__getitem__)
            self._mark(other, WRITTEN)
            copy_segments(self._places[other], self.segments)
            if self._movable:
                self._newest, self.segments = other, self._places[other]
                return
            self._mark(other, self.version)
        self._mark(newest, WRITTEN)

    def complete(self) -> None:
        """The next version is made."""
        self.version += 1
        self._mark(self._newest, self.version)

    def fill(self, values: Sequence[Tensor]) -> None:
        """Other values for the present version."""
        self._mark(self._newest, WRITTEN)
        copy_segments(self.segments, values)
        self._mark(self._newest, self.version)

    def _mark(self, place: int, version: int) -> None:
        self._held[place] = version
        self._memory.offer(place, version)


def fill(segments: Sequence[Tensor], layout: Layout, shard: int, values: Mapping[int, Tensor]) -> None:
    """A shard's part of these values, by entry."""
    part = layout.parts[shard]
    views = part.views(list(segments), layout.parameters.entries)
    for piece, view in zip(part.pieces, views, strict=True):
        view.copy_(values[piece.entry].detach().reshape(-1)[piece.start : piece.stop].view_as(view))


def copy_segments(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for a, b in zip(into, source, strict=True):
        a.copy_(b)
