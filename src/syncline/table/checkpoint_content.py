"""Values and optimizer state of one table, read from the files of a checkpoint.

A shard reads its part, a learner over all-reduce reads all of the table. Not responsible for the files' format or their
verification (checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from syncline.table.checkpoints import GROUPS, WHOLE, Checkpoint, whole
from syncline.table.layout import Layout
from syncline.table.nested_optimizers import PREFIX, Kept
from syncline.table.optimizer_template import OptimizerTemplate, from_plain


def table_file(table: int, shard: int) -> str:
    return f"table{table}-shard{shard}.safetensors"


@dataclass(frozen=True, slots=True)
class Source:
    """Place of a table's files: in a checkpoint, or (None) among the first values that shards have written."""

    folder: str | None
    table: int
    shards: int  # that wrote them


@dataclass(frozen=True, slots=True)
class Content:
    """Values and optimizer state by entry; first values have no state but the template's."""

    values: dict[int, Tensor]
    state: dict[int, dict[str, Any]] | None
    own: list[dict[str, Any]]  # options that the optimizer itself has changed
    kept: Kept | None  # all of an optimizer that holds others

    def of(self, template: OptimizerTemplate) -> OptimizerTemplate:
        """Return the optimizer with this state."""
        if self.state is None:
            return template
        return replace(template, state=self.state, own=self.own, kept=self.kept)


def read_content(
    source: Source, folder: Path, layout: Layout, entries: Sequence[int] | None = None
) -> Content:
    """Read these entries, or all. Files are mapped, so other entries are not read."""
    checkpoint = Checkpoint(folder, 0, {})
    names = [table_file(source.table, shard) for shard in range(source.shards)]
    parts = [(checkpoint.tensors(name), checkpoint.notes(name)) for name in names]
    groups = [notes.pop(GROUPS, {}) for _, notes in parts]  # the same on all shards
    own = [
        {key: from_plain(value) for key, value in groups[0][str(number)].items()}
        for number in range(len(groups[0]))
    ]
    kept: Kept | None = None
    for tensors, notes in parts:
        if (found := notes.pop(WHOLE, None)) is not None:  # of an optimizer that is in one shard
            theirs = [name for name in tensors if name.startswith(PREFIX)]
            kept = kept or (found["optimizer"], {name: tensors.pop(name) for name in theirs})
    values, state = whole(layout, parts, entries)
    return Content(values, state if source.folder else None, own, kept)
