"""What a shard asks of the memory that its versions lie in (M13); engines implement it, and the seam names it with the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

WRITTEN = -1  # in place of a version: that place is being written, or never was


class VersionMemory(ABC):
    """A ring of places for versions of a shard's part. The shard writes them; who may read one copies it meanwhile."""

    places: list[list[Tensor]]  # segments of the part

    @abstractmethod
    def offer(self, place: int, version: int) -> None:
        """This place holds that version, to be read; `WRITTEN`: nothing from here on."""

    @abstractmethod
    def being_read(self) -> bool:
        """Somebody may be copying what was offered."""

    def kept(self, place: int) -> bool:
        """Somebody reads there for long: others are written first."""
        return False
