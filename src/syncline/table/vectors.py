"""A shard's part of the named vectors of a batch method, and the commands on them (D6).

Vectors are lists of flat tensors, one per dtype. x lies where learners read it and is never moved. Work goes through memory
in pieces that fit a cache: a program's dots read each vector once. In a checkpoint's files they are as a table's weights and
optimizer state: by piece, for any number of shards. Not responsible for who says what, nor for the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from syncline.batch import commands as c
from syncline.table.checkpoints import Checkpoint, CheckpointError, piece_tensors, whole
from syncline.table.layout import Layout
from syncline.table.store import fill

CHUNK = 16384  # elements
Vector = list[Tensor]


class Vectors:
    """`x` is memory that is there; the others are made here, with zeros."""

    def __init__(self, names: Iterable[str], x: Vector) -> None:
        self._x = x
        self._named: dict[str, Vector] = {
            name: [torch.zeros_like(part) for part in x] for name in names if name != "x"
        }
        self._named["x"] = x
        self._wide: dict[str, Tensor] = {}  # pieces in float64, by name

    def __getitem__(self, name: str) -> Vector:
        return self._named[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._named)

    def add(self, to: str, values: Sequence[Tensor], *, first: bool) -> None:
        """to += values, or to = values."""
        for target, source in zip(self._named[to], values, strict=True):
            if first:
                target.copy_(source)
            else:
                target.add_(source)

    def run(self, commands: c.Program, before_each: Callable[[], None] = lambda: None) -> tuple[float, ...]:
        """Carry them out; what was measured comes back, in order."""
        measured: list[float] = []
        dots: list[c.Dot] = []
        for command in commands:
            before_each()
            if isinstance(command, c.Dot):
                dots.append(command)
                continue
            measured += self._dots(dots)
            dots = []
            if isinstance(command, c.Largest):
                measured.append(self._largest(self._named[command.a]))
            else:
                self._change(command)
        return (*measured, *self._dots(dots))

    # -- commands that measure -----------------------------------------------------------------------------

    def _dots(self, dots: Sequence[c.Dot]) -> list[float]:
        totals = [0.0] * len(dots)
        names = {name for dot in dots for name in (dot.a, dot.b)}
        for segment in range(len(self._x) if dots else 0):
            for low in range(0, len(self._x[segment]), CHUNK):
                wide = {name: self._piece(name, segment, low) for name in names}
                for i, dot in enumerate(dots):
                    totals[i] += float(torch.dot(wide[dot.a], wide[dot.b]))
        return totals

    def _piece(self, name: str, segment: int, low: int) -> Tensor:
        """Some of a vector, in float64."""
        piece = self._named[name][segment][low : low + CHUNK]
        if piece.dtype == torch.float64:
            return piece
        if name not in self._wide:
            self._wide[name] = torch.empty(CHUNK, dtype=torch.float64)
        return self._wide[name][: len(piece)].copy_(piece)

    def _largest(self, vector: Vector) -> float:
        found = [float(bound) for part in vector if len(part) for bound in torch.aminmax(part)]
        return math.nan if any(map(math.isnan, found)) else max(map(abs, found), default=0.0)

    # -- commands that change ------------------------------------------------------------------------------

    def _change(self, command: c.Command) -> None:
        v = self._named
        match command:
            case c.Swap(a, b):
                self._swap(a, b)
            case c.Combine(to, terms):
                self._combine(to, terms)
            case c.Copy(to, of):
                for target, source in zip(v[to], v[of], strict=True):
                    target.copy_(source)
            case c.Fill(to, value):
                for target in v[to]:
                    target.fill_(_fit(value, target))
            case c.Scale(to, by):
                for target in v[to]:
                    target.mul_(_fit(by, target))
            case c.Axpy(to, by, of):
                for target, source in zip(v[to], v[of], strict=True):
                    target.add_(source, alpha=_fit(by, target))
            case c.Multiply(to, of):
                for target, source in zip(v[to], v[of], strict=True):
                    target.mul_(source)
            case _:
                raise AssertionError(f"no command of a shard: {command}")

    def _swap(self, a: str, b: str) -> None:
        """By name; contents where x is one of them."""
        if "x" not in (a, b):
            self._named[a], self._named[b] = self._named[b], self._named[a]
            return
        for one, other in zip(self._named[a], self._named[b], strict=True):
            for low in range(0, len(one), CHUNK):
                kept = one[low : low + CHUNK].clone()
                one[low : low + CHUNK] = other[low : low + CHUNK]
                other[low : low + CHUNK] = kept

    def _combine(self, to: str, terms: tuple[tuple[float, str], ...]) -> None:
        for segment, target in enumerate(self._named[to]):
            for low in range(0, len(target), CHUNK):
                piece = target[low : low + CHUNK]
                total = torch.zeros_like(piece)  # of which `to` is no part yet
                for by, of in terms:
                    total.add_(self._named[of][segment][low : low + CHUNK], alpha=_fit(by, piece))
                piece.copy_(total)


def _fit(number: float, tensor: Tensor) -> float:
    """What the dtype can hold; torch refuses more."""
    return number if abs(number) <= torch.finfo(tensor.dtype).max else math.copysign(math.inf, number)


# -- files ---------------------------------------------------------------------------------------------------


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
    """Fill one shard's from the files of all that wrote them.

    Vectors that nobody wrote stay zero: those of a longer history are not in use yet.
    """
    checkpoint = Checkpoint(folder, 0, {})
    entries = [piece.entry for piece in layout.parts[shard].pieces]
    try:
        x, others = whole(layout, [(checkpoint.tensors(file), {}) for file in files], entries)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder} lacks parts of the vectors, or was made by another model: {error}"
        ) from error
    fill(vectors["x"], layout, shard, x)
    for name in {name for named in others.values() for name in named}.intersection(vectors.names):
        fill(vectors[name], layout, shard, {entry: named[name] for entry, named in others.items()})
