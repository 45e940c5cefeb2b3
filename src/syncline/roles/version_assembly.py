"""Puts the shards' parts of one version together again: tensors by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from syncline.messages import WeightsPart
from syncline.table.layout import Layout


class Assembly:
    """Collects the parts of tagged versions, over all tables."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], dict[int, WeightsPart]] = {}

    def add(self, part: WeightsPart) -> None:
        self._parts.setdefault((part.tag, part.table), {})[part.shard] = part

    def complete(self, tag: str, layouts: dict[int, Layout]) -> bool:
        return all(
            len(self._parts.get((tag, table), {})) == layout.shards for table, layout in layouts.items()
        )

    def take(self, tag: str, layouts: dict[int, Layout]) -> dict[int, tuple[int, dict[str, Tensor]]]:
        """Table to (version, tensors by name)."""
        taken = {}
        for table, layout in layouts.items():
            parts = self._parts.pop((tag, table))
            versions = {part.version for part in parts.values()}
            if len(versions) != 1:
                raise AssertionError(f"{tag}: shards of table {table} report versions {sorted(versions)}")
            taken[table] = (versions.pop(), assemble(layout, parts.values()))
        return taken


def assemble(layout: Layout, parts: Iterable[WeightsPart]) -> dict[str, Tensor]:
    """Parameters, tied names and buffers of one version."""
    flat = layout.parameters
    segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
    buffers: list[Tensor] | None = None
    for part in parts:
        for target, values in zip(layout.parts[part.shard].segments(segments), part.segments, strict=True):
            target.copy_(values)
        buffers = part.buffers if part.buffers is not None else buffers
    tensors = {entry.name: view for entry, view in zip(flat.entries, flat.views(segments), strict=True)}
    for alias, name in layout.aliases:
        if name in tensors:
            tensors[alias] = tensors[name]
    if buffers is not None:
        tensors.update({e.name: b for e, b in zip(layout.buffers.entries, buffers, strict=True)})
    return tensors
