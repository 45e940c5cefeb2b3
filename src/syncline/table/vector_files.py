"""Named vectors in a checkpoint's files, as a table's weights and optimizer state are: by piece, for any number of shards.

Not responsible for when, nor for the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from safetensors import SafetensorError, safe_open
from torch import Tensor

from syncline.table.checkpoints import CheckpointError, piece_tensors
from syncline.table.layout import Layout, Part
from syncline.table.vectors import Vectors

_PIECE = re.compile(r"(?:p|s)/(?P<entry>\d+)/(?P<start>\d+)(?:/(?P<name>[^/]*))?")


def vector_tensors(layout: Layout, shard: int, vectors: Vectors) -> dict[str, Tensor]:
    """One shard's, by the names they have in the file; nothing is copied."""
    part = layout.parts[shard]
    views = {name: part.views(vectors[name], layout.parameters.entries) for name in vectors.names}
    states = {
        (piece.entry, piece.start, piece.stop): {
            name: views[name][index] for name in vectors.names if name != "x"
        }
        for index, piece in enumerate(part.pieces)
    }
    return piece_tensors(part, views["x"], states)[0]


def read_vectors(folder: Path, files: Iterable[str], layout: Layout, shard: int, vectors: Vectors) -> None:
    """Fill one shard's from the files of all that wrote them; only what overlaps is read.

    Vectors that nobody wrote stay zero: those of a longer history are not in use yet.
    """
    part = layout.parts[shard]
    size = sum(piece.stop - piece.start for piece in part.pieces)
    filled: dict[str, int] = {"x": 0}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as content:
                for key in content.keys():  # noqa: SIM118 - it is no mapping
                    name, entry, start = _parsed(folder / file, key)
                    filled.setdefault(name, 0)
                    for target, low in _targets(part, vectors, name, entry):
                        filled[name] += _fill(target, low, content.get_tensor(key).reshape(-1), start)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / file} cannot be read: {error}") from error
    lacking = [name for name, count in filled.items() if name in vectors.names and count != size]
    if lacking:
        raise CheckpointError(
            f"{folder} lacks parts of the vectors {', '.join(lacking)}: it was made by another model"
        )


def _parsed(file: Path, key: str) -> tuple[str, int, int]:
    """The vector, the entry of the layout, and the first element of it."""
    found = _PIECE.fullmatch(key)
    if found is None:
        raise CheckpointError(f"{file}: {key!r} is no piece of a vector")
    return unquote(found["name"] or "x"), int(found["entry"]), int(found["start"])


def _targets(part: Part, vectors: Vectors, name: str, entry: int) -> list[tuple[Tensor, int]]:
    """Where a vector's values of that entry lie here, and the first element of it there."""
    if name not in vectors.names:
        return []
    return [
        (
            vectors[name][piece.segment][piece.position : piece.position + piece.stop - piece.start],
            piece.start,
        )
        for piece in part.pieces
        if piece.entry == entry
    ]


def _fill(target: Tensor, low: int, values: Tensor, start: int) -> int:
    """Elements that both have; how many these are comes back."""
    first, last = max(low, start), min(low + len(target), start + len(values))
    if first < last:
        target[first - low : last - low] = values[first - start : last - start]
    return max(0, last - first)
