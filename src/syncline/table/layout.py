"""How a model's parameters lie in flat memory, and which shard owns which part (M3, M5).

A `Layout` is plain data: it travels between processes, is compared across learners, and makes tensor views
over any block of bytes. One segment per dtype; every parameter starts at a multiple of 64 elements, and cuts
between shards fall on such multiples: fused optimizers are bit-equal to the plain loop only at 16, and 16-bit
dtypes round differently outside PyTorch's vector loops, which take up to 64 elements at a time.
Not responsible for the memory itself.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from syncline.errors import LayoutError

GRAIN = 64  # elements
LINE = 1024  # bytes: a segment starts at a multiple of GRAIN elements of any dtype
EXTRA = "_extra_state"  # how torch ends the keys of what `get_extra_state` returns

Spans = tuple[tuple[int, int], ...]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor by name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Entry:
        return cls(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


def _round_up(value: int, grain: int) -> int:
    return -(-value // grain) * grain


@dataclass(frozen=True)
class Flat:
    """A list of tensors packed into one block of bytes, one segment per dtype."""

    entries: tuple[Entry, ...]

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.dtype for entry in self.entries))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(segment, first element) of every entry."""
        fill = [0] * len(self.dtypes)
        places = []
        for entry in self.entries:
            segment = self.dtypes.index(entry.dtype)
            places.append((segment, fill[segment]))
            fill[segment] += _round_up(entry.numel, GRAIN)
        return tuple(places)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Elements of every segment, padding included."""
        fill = [0] * len(self.dtypes)
        for entry in self.entries:
            fill[self.dtypes.index(entry.dtype)] += _round_up(entry.numel, GRAIN)
        return tuple(fill)

    @cached_property
    def item_sizes(self) -> tuple[int, ...]:
        return tuple(DTYPES[dtype].itemsize for dtype in self.dtypes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of every segment."""
        offsets, position = [], 0
        for length, size in zip(self.lengths, self.item_sizes, strict=True):
            offsets.append(position)
            position += _round_up(length * size, LINE)
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        return sum(_round_up(n * size, LINE) for n, size in zip(self.lengths, self.item_sizes, strict=True))

    def segments(self, memory: Tensor) -> list[Tensor]:
        """The segments as flat tensors over `memory`, a uint8 tensor of at least `nbytes`."""
        return [
            memory[offset : offset + length * size].view(DTYPES[dtype])
            for dtype, offset, length, size in zip(
                self.dtypes, self.offsets, self.lengths, self.item_sizes, strict=True
            )
        ]

    def new(self, device: torch.device) -> list[Tensor]:
        """Segments in memory of their own, with whatever is there."""
        return [
            torch.empty(length, dtype=DTYPES[dtype], device=device)
            for dtype, length in zip(self.dtypes, self.lengths, strict=True)
        ]

    def views(self, segments: Sequence[Tensor]) -> list[Tensor]:
        """One tensor per entry, in its shape."""
        return [
            segments[segment][start : start + entry.numel].view(entry.shape)
            for entry, (segment, start) in zip(self.entries, self.places, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one entry that a shard owns: elements start..stop of it."""

    entry: int
    start: int
    stop: int
    segment: int  # which of the shard's slices
    position: int  # first element, in that slice
    whole: bool

    @property
    def end(self) -> int:
        """In that slice."""
        return self.position + self.stop - self.start

    def of(self, own: Sequence[Tensor]) -> Tensor:
        """Over the shard's slices, flat."""
        return own[self.segment][self.position : self.end]


@dataclass(frozen=True, slots=True)
class Part:
    """What one shard owns: slices of the segments, (segment, first element, end)."""

    slices: tuple[tuple[int, int, int], ...]
    pieces: tuple[Piece, ...]

    def segments(self, segments: Sequence[Tensor]) -> list[Tensor]:
        return [segments[segment][low:high] for segment, low, high in self.slices]

    def views(self, own: Sequence[Tensor], entries: Sequence[Entry]) -> list[Tensor]:
        """One tensor per piece over the shard's slices; whole entries in their shape, others flat."""
        views = []
        for piece in self.pieces:
            flat = piece.of(own)
            views.append(flat.view(entries[piece.entry].shape) if piece.whole else flat)
        return views


@dataclass(frozen=True)
class Layout:
    """All of one table: parameters (the optimizer's), buffers and the other tensors of the model."""

    parameters: Flat
    buffers: Flat
    others: Flat
    groups: tuple[tuple[int, ...], ...]  # entries of each parameter group, in the optimizer's order
    cuttable: bool
    shards: int
    # of the line of all bytes, each shard's spans, if they are not one of equal size for each
    cuts: tuple[Spans, ...] = ()
    # keys of the model's state_dict, each with the entry that it shows
    keys: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    # the model's extra state by key, pickled, as it was when the layout was made
    extra: bytes = field(default=b"", compare=False)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        if self.cuts:
            return tuple(_part(self.parameters, spans) for spans in self.cuts)
        bounds = _bounds(self.parameters, self.shards, self.cuttable)
        bounds[-1] += 1  # the last part also owns what is empty and lies at the very end
        return tuple(_part(self.parameters, (span,)) for span in pairwise(bounds))

    def difference(self, other: Layout) -> str | None:
        """The first thing in which two layouts differ, in words; None if they agree."""
        for kind in ("parameters", "buffers", "others"):
            mine, theirs = getattr(self, kind).entries, getattr(other, kind).entries
            for a, b in zip(mine, theirs, strict=False):
                if a != b:
                    return f"{kind}: {a} against {b}"
            if len(mine) != len(theirs):
                longer = (mine if len(mine) > len(theirs) else theirs)[min(len(mine), len(theirs))]
                return f"{kind}: {len(mine)} against {len(theirs)}, the first unmatched is {longer}"
        if self.groups != other.groups:
            sizes = [len(group) for group in self.groups], [len(group) for group in other.groups]
            return f"parameter groups of sizes {sizes[0]} against {sizes[1]}"
        return None


def _bounds(flat: Flat, shards: int, cuttable: bool) -> list[int]:
    """Where to cut the line of all bytes: shards + 1 positions, balanced."""
    starts = [flat.offsets[segment] + start * flat.item_sizes[segment] for segment, start in flat.places]
    edges = sorted({0, flat.nbytes, *starts})
    bounds = [0]
    for index in range(1, shards):
        ideal = flat.nbytes * index // shards
        if cuttable:
            ideal = (ideal + LINE // 2) // LINE * LINE
        else:
            at = bisect.bisect_left(edges, ideal)
            ideal = min(edges[max(0, at - 1) : at + 1], key=lambda edge: abs(edge - ideal))
        bounds.append(max(bounds[-1], ideal))
    return [*bounds, flat.nbytes]


def _part(flat: Flat, spans: Spans) -> Part:
    slices: list[tuple[int, int, int]] = []
    pieces: list[Piece] = []
    for low, high in spans:
        first = len(slices)
        for segment, (offset, length, size) in enumerate(
            zip(flat.offsets, flat.lengths, flat.item_sizes, strict=True)
        ):
            begin, end = (min(length, max(0, (at - offset) // size)) for at in (low, high))
            slices.append((segment, begin, end))
        for index, (entry, (segment, start)) in enumerate(zip(flat.entries, flat.places, strict=True)):
            _, left, right = slices[first + segment]
            begin, end = max(start, left), min(start + entry.numel, right)
            here = low <= flat.offsets[segment] + start * flat.item_sizes[segment] < high
            if begin < end or (entry.numel == 0 and here):
                end = max(begin, end)
                entire = end - begin == entry.numel
                own = (begin - start, end - start, first + segment, begin - left)
                pieces.append(Piece(index, *own, entire))
    return Part(tuple(slices), tuple(sorted(pieces, key=lambda piece: (piece.entry, piece.start))))


@dataclass(frozen=True)
class Tensors:
    """The live tensors that a layout describes, in its order."""

    parameters: list[nn.Parameter]
    buffers: list[Tensor]
    others: list[Tensor]


def lay_out(
    model: nn.Module, groups: Sequence[Iterable[nn.Parameter]], *, cuttable: bool, shards: int
) -> tuple[Layout, Tensors]:
    """Layout of `model` whose optimizer holds `groups` of parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen: list[nn.Parameter] = []
    indices: list[tuple[int, ...]] = []  # of each group
    for number, group in enumerate(groups):
        first = len(chosen)
        for parameter in group:
            names.setdefault(id(parameter), f"group{number}.{len(chosen) - first}")
            chosen.append(parameter)
        indices.append(tuple(range(first, len(chosen))))
    if not chosen:
        raise LayoutError("the optimizer holds no parameters: give it a model with at least one nn.Parameter")
    own = {id(parameter) for parameter in chosen}
    rest = [(name, p) for name, p in model.named_parameters() if id(p) not in own]
    buffers = list(model.named_buffers())
    named: dict[str, Tensor] = dict([*((names[id(p)], p) for p in chosen), *rest, *buffers])
    keys, extra = _state_keys(model, named)
    shown = {name for _, name in keys}
    unseen = [names[id(p)] for p in chosen if names[id(p)] not in shown]  # trained all the same
    layout = Layout(
        parameters=Flat(tuple(Entry.of(names[id(p)], p) for p in chosen)),
        buffers=Flat(tuple(Entry.of(name, buffer) for name, buffer in buffers)),
        others=Flat(tuple(Entry.of(name, p) for name, p in rest)),
        groups=tuple(indices),
        keys=(*keys, *((name, name) for name in unseen)),
        cuttable=cuttable,
        shards=shards,
        extra=cloudpickle.dumps(extra) if extra else b"",
    )
    return layout, Tensors(chosen, [buffer for _, buffer in buffers], [p.data for _, p in rest])


def _state_keys(
    model: nn.Module, named: Mapping[str, Tensor]
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return the keys of the model's state_dict with the named tensor that each shows, and its extra state by key.

    Tensors that a hook of the model computes for its state_dict have no key here: nothing can compute them without the model.
    """
    try:
        state: dict[str, Any] = model.state_dict(keep_vars=True)
    except Exception:  # whatever an override of the user's raises: show everything
        state = dict(named)
    held = {id(tensor): name for name, tensor in named.items()}
    keys: list[tuple[str, str]] = []
    extra: dict[str, Any] = {}
    views: dict[Any, str] = {}
    for key, value in state.items():
        name = held.get(id(value))
        if name is None and isinstance(value, Tensor):  # detached, where a module does not heed keep_vars
            views = views or {_place(tensor): name for name, tensor in named.items()}
            name = views.get(_place(value))
        if name is not None:
            keys.append((key, name))
        elif key.endswith(EXTRA):
            extra[key] = value
    return keys, extra


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors of the same values in the same memory have in common."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def as_state_dict(layout: Layout, *flats: tuple[Flat, Sequence[Tensor] | None]) -> dict[str, Any]:
    """Return a model's state_dict, as far as these tensors of the layout's flats hold it."""
    held = {
        e.name: t
        for flat, given in flats
        for e, t in zip(flat.entries, given or (), strict=given is not None)
    }
    extra: dict[str, Any] = cloudpickle.loads(layout.extra) if layout.extra else {}
    return {key: held[name] for key, name in layout.keys if name in held} | extra
