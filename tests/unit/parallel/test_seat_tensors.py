"""Where a table is cut for the seats of a group: every element in one shard, a seat's own windows in its own shards."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncline.models import AlexNet
from syncline.parallel import Box, Group, Part, partition
from syncline.parallel.seat_tensors import shard_cuts, shares_of, spans_of
from syncline.parallel.windows import cut, even
from syncline.table.layout import Layout, lay_out


@st.composite
def tables(draw: st.DrawFn) -> tuple[Layout, dict[str, Part], int]:
    """Tensors of one or two dtypes, whole in all seats or cut in some dimension, in several boxes or as it comes."""
    seats, shards = draw(st.integers(2, 4)), draw(st.integers(2, 6))
    count = draw(st.integers(1, 5))
    shapes = [tuple(draw(st.lists(st.integers(1, 90), max_size=3))) for _ in range(count)]
    dtypes = [draw(st.sampled_from([torch.float32, torch.float64])) for _ in range(count)]
    model = nn.ParameterList(
        [torch.zeros(shape, dtype=kind) for shape, kind in zip(shapes, dtypes, strict=True)]
    )
    layout, _ = lay_out(model, [list(model.parameters())], cuttable=True, shards=shards)
    parts = {}
    for number, shape in enumerate(shapes):
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        boxes = (
            [[Box.whole(shape)]] * seats
            if dim is None
            else [[box] for box in cut(shape, dim, even(shape[dim], seats))]
        )
        if dim == 0 and shape[0] % 2 == 0 and draw(st.booleans()):  # as gates lie
            half = shape[0] // 2
            ends = even(half, seats)
            boxes = [
                [Box.whole(shape).replaced(0, (low + at, high + at)) for at in (0, half)]
                for low, high in ends
            ]
        parts[str(number)] = Part(shape, tuple(tuple(each) for each in boxes))
    return layout, parts, seats


@settings(max_examples=300, deadline=None)
@given(tables())
def test_every_element_lies_in_one_shard(case: tuple[Layout, dict[str, Part], int]) -> None:
    layout, parts, seats = case
    layout = Layout(**{**vars(layout), "cuts": shard_cuts(layout, parts, seats)})
    whole = layout.parameters.new(torch.device("cpu"))
    for segment in whole:
        segment.zero_()
    for part in layout.parts:
        own = part.segments(whole)
        for view in part.views(own, layout.parameters.entries):
            view += 1
    for view in layout.parameters.views(whole):
        assert bool((view == 1).all())


@settings(max_examples=300, deadline=None)
@given(tables())
def test_a_seats_elements_are_those_of_its_boxes(case: tuple[Layout, dict[str, Part], int]) -> None:
    _, parts, seats = case
    for part in parts.values():
        for rank in range(seats):
            flat = torch.zeros(math.prod(part.shape))
            for low, high in spans_of(part, rank):
                flat[low:high] += 1
            expected = torch.zeros(part.shape)
            for box in part.boxes[rank]:
                expected[box.inside(Box.whole(part.shape))] += 1
            flat = flat.view(part.shape)
            if (
                len(spans_of(part, rank)) > 2 * len(part.boxes[rank])
                or part.boxes[rank][0].shape[1:] == part.shape[1:]
            ):
                assert torch.equal(flat, expected)
            else:  # of very many spans one around them
                assert bool((flat >= expected).all())
    shares = shares_of(list(parts.values()), seats)
    written = [sum(high - low for low, high in (spans[rank] for spans in shares)) for rank in range(seats)]
    assert max(written) - min(written) <= 1


def owners(layout: Layout, name: str, part: Part, rank: int) -> set[int]:
    """Shards that hold something of a seat's window."""
    index = [entry.name for entry in layout.parameters.entries].index(name)
    spans = spans_of(part, rank)
    return {
        shard
        for shard, held in enumerate(layout.parts)
        for piece in held.pieces
        if piece.entry == index and any(low < piece.stop and piece.start < high for low, high in spans)
    }


def test_a_seat_of_alexnet_finds_its_dense_layers_in_its_own_shards() -> None:
    with torch.device("meta"):
        model = AlexNet(dropout=0.0)
    group = Group()
    group.size = 4
    mine = partition(
        model, {"conv*": "data", "fc*": "model"}, torch.empty(8, 3, 224, 224, device="meta"), group
    )
    for shards in (2, 4, 8):
        layout, _ = lay_out(model, [list(model.parameters())], cuttable=True, shards=shards)
        layout = Layout(**{**vars(layout), "cuts": shard_cuts(layout, mine.parts, 4)})
        for rank in range(4):
            own = set(range(rank * shards // 4, max(rank * shards // 4 + 1, (rank + 1) * shards // 4)))
            for name in ("fc6.weight", "fc7.weight", "fc8.weight", "fc6.bias"):
                assert owners(layout, name, mine.parts[name], rank) <= own
        sizes = [sum(high - low for _, low, high in part.slices) for part in layout.parts]
        assert max(sizes) < 1.01 * min(sizes)
