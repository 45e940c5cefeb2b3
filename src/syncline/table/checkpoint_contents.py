"""What files hold of one table, for whoever goes on with it: a shard reads its part, a learner among equals all of it.

Not responsible for whether the files are whole (`checkpoints.find`), nor for accounts (the manifest has them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from syncline.table.checkpoints import Checkpoint, kept_whole, own_options, whole
from syncline.table.layout import Layout
from syncline.table.nested_optimizers import Kept
from syncline.table.optimizer_template import OptimizerTemplate


def table_file(table: int, shard: int) -> str:
    return f"table{table}-shard{shard}.safetensors"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a table's files are: in a checkpoint, or (None) among the first values that shards have written."""

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
        """The optimizer with this state."""
        if self.state is None:
            return template
        return dataclasses.replace(template, state=self.state, own=self.own, kept=self.kept)


def read_content(
    source: Source, folder: Path, layout: Layout, entries: Sequence[int] | None = None
) -> Content:
    """Of these entries, or all; files are mapped, and what is not asked for is not read."""
    checkpoint = Checkpoint(folder, 0, {})
    names = [table_file(source.table, shard) for shard in range(source.shards)]
    parts = [(checkpoint.tensors(name), checkpoint.notes(name)) for name in names]
    own = [own_options(notes) for _, notes in parts]
    kept = [kept_whole(tensors, notes) for tensors, notes in parts]
    values, state = whole(layout, parts, entries)
    return Content(values, state if source.folder else None, own[0], kept[0])
