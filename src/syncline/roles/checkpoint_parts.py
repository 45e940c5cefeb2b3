"""Gathers the parts of a checkpoint that is being written, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline import messages as m
from syncline.table.checkpoints import Written


@dataclass(frozen=True, slots=True)
class Gathered:
    """All files of a cut were written, or one of them could not be."""

    cut: m.Cut
    files: list[Written]
    problem: str


@dataclass(slots=True)
class Cuts:
    """What has come in of the present cut; files may come before the leading shard's word."""

    cut: m.Cut | None = None
    saved: dict[str, m.Saved] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        return self.cut is not None or bool(self.saved)

    def add(self, message: m.Cut | m.Saved) -> None:
        if isinstance(message, m.Cut):
            self.cut = message
        else:
            self.saved[message.name] = message

    def complete(self) -> Gathered | None:
        """Once, when everything is there."""
        cut, saved = self.cut, self.saved
        if cut is None or set(cut.files) - saved.keys():
            return None
        self.cut, self.saved = None, {}
        files = [saved[name].written for name in cut.files]
        problems = [saved[name].problem for name in cut.files if saved[name].problem]
        return Gathered(cut, [file for file in files if file is not None], problems[0] if problems else "")
