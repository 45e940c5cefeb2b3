"""Put the shards' parts of one version together again, as the model's state_dict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from syncline.messages import WeightsPart
from syncline.table.layout import Layout, as_state_dict


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

    def take(self, tag: str, layouts: dict[int, Layout]) -> dict[int, tuple[int, dict[str, Any]]]:
        """Return (version, state_dict) by table."""
        taken = {}
        for table, layout in layouts.items():
            parts = self._parts.pop((tag, table))
            versions = {part.version for part in parts.values()}
            if len(versions) != 1:
                raise AssertionError(f"{tag}: shards of table {table} report versions {sorted(versions)}")
            taken[table] = (versions.pop(), assemble(layout, parts.values()))
        return taken


def assemble(layout: Layout, parts: Iterable[WeightsPart]) -> dict[str, Any]:
    """Return the state_dict of one version."""
    flat = layout.parameters
    segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
    buffers: list[Tensor] | None = None
    others: list[Tensor] | None = None
    for part in parts:
        for target, values in zip(layout.parts[part.shard].segments(segments), part.segments, strict=True):
            target.copy_(values)
        buffers = part.buffers if part.buffers is not None else buffers
        others = part.others if part.others is not None else others
    return as_state_dict(
        layout, (flat, flat.views(segments)), (layout.buffers, buffers), (layout.others, others)
    )
