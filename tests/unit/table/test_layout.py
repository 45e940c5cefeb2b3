"""The layout (M3, M5, M6): every element has one place and one owner, cuts fall on a grain, shards balance."""

import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncline.errors import LayoutError
from syncline.table.layout import GRAIN, LINE, Entry, Flat, Layout, as_state_dict, lay_out

shapes = st.one_of(
    st.just(()),
    st.sampled_from([(0,), (3, 0), (1,), (16,), (17,), (1, 1, 5)]),
    st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    st.tuples(st.integers(1, 3000)),
)
entries = st.lists(
    st.tuples(shapes, st.sampled_from(["float32", "bfloat16", "float64"])), min_size=1, max_size=12
)


def flat_of(made: Sequence[tuple[tuple[int, ...], str]]) -> Flat:
    return Flat(tuple(Entry(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(made)))


def layout_of(flat: Flat, *, shards: int = 1, cuttable: bool = True) -> Layout:
    everything = tuple(range(len(flat.entries)))
    return Layout(flat, Flat(()), Flat(()), (everything,), cuttable, shards)


@st.composite
def layouts(draw: st.DrawFn, cuttable: bool | None = None) -> Layout:
    chosen = draw(st.booleans()) if cuttable is None else cuttable
    return layout_of(flat_of(draw(entries)), shards=draw(st.integers(1, 5)), cuttable=chosen)


def part_bytes(layout: Layout) -> list[int]:
    sizes = layout.parameters.item_sizes
    return [sum((h - lo) * sizes[at] for at, lo, h in p.slices) for p in layout.parts]


many = settings(max_examples=100, deadline=None)


@many
@given(layouts())
def test_every_element_belongs_to_exactly_one_piece(layout: Layout) -> None:
    assert len(layout.parts) == layout.shards
    for index, entry in enumerate(layout.parameters.entries):
        pieces = [piece for part in layout.parts for piece in part.pieces if piece.entry == index]
        owned = [i for piece in pieces for i in range(piece.start, piece.stop)]
        assert owned == list(range(entry.numel))
        assert len(pieces) >= 1  # an empty parameter has an owner too: its state is part of the whole
        assert all(piece.whole == (len(pieces) == 1) for piece in pieces)


@many
@given(layouts())
def test_entries_and_cuts_lie_at_multiples_of_16_elements(layout: Layout) -> None:
    flat = layout.parameters
    assert GRAIN % 16 == 0
    assert all(start % GRAIN == 0 for _, start in flat.places)
    assert all(offset % LINE == 0 for offset in flat.offsets)
    for part in layout.parts:
        for piece in part.pieces:
            assert piece.position % GRAIN == 0 and piece.start % GRAIN == 0
            assert piece.stop % GRAIN == 0 or piece.stop == flat.entries[piece.entry].numel
        assert all(low % GRAIN == 0 and high % GRAIN == 0 for _, low, high in part.slices)


@many
@given(layouts())
def test_the_slices_of_the_shards_are_the_segments(layout: Layout) -> None:
    flat = layout.parameters
    for segment, length in enumerate(flat.lengths):
        slices = [part.slices[segment][1:] for part in layout.parts]
        bounds = [0, *(bound for pair in slices for bound in pair), length]
        assert bounds == sorted(bounds)
        assert sum(high - low for low, high in slices) == length


@many
@given(layouts(cuttable=True))
def test_cuttable_shards_balance_by_bytes(layout: Layout) -> None:
    sizes = part_bytes(layout)
    assert max(sizes) - min(sizes) <= LINE * (1 + len(layout.parameters.dtypes))


@many
@given(layouts(cuttable=False))
def test_what_cannot_be_cut_is_not_and_balances_to_one_entry(layout: Layout) -> None:
    flat = layout.parameters
    assert all(piece.whole for part in layout.parts for piece in part.pieces)
    largest = max(math.ceil(e.numel / GRAIN) * GRAIN * 8 for e in flat.entries)
    assert max(part_bytes(layout)) <= flat.nbytes / layout.shards + largest + LINE


@many
@given(layouts())
def test_views_are_one_memory_and_go_round(layout: Layout) -> None:
    flat = layout.parameters
    memory = torch.zeros(flat.nbytes, dtype=torch.uint8)
    views = flat.views(flat.segments(memory))
    for index, (view, entry) in enumerate(zip(views, flat.entries, strict=True)):
        assert tuple(view.shape) == entry.shape and str(view.dtype) == f"torch.{entry.dtype}"
        view.copy_((torch.arange(entry.numel) % 100 + index).view(entry.shape))
    for part in layout.parts:
        for piece, view in zip(
            part.pieces, part.views(part.segments(flat.segments(memory)), flat.entries), strict=True
        ):
            expected = (torch.arange(piece.start, piece.stop) % 100 + piece.entry).to(view.dtype)
            assert torch.equal(view.reshape(-1), expected)
            assert tuple(view.shape) == (flat.entries[piece.entry].shape if piece.whole else expected.shape)
            view.add_(1)
    for index, view in enumerate(flat.views(flat.segments(memory))):
        expected = (torch.arange(view.numel()) % 100 + index + 1).to(view.dtype).view(view.shape)
        assert torch.equal(view, expected)


@many
@given(layouts())
def test_a_layout_travels(layout: Layout) -> None:
    layout.parts  # noqa: B018 - cached values travel with it, or not at all
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout and copy.parts == layout.parts and copy.difference(layout) is None


def test_an_empty_model_of_empty_parameters_has_owners() -> None:
    layout = layout_of(flat_of([((0,), "float32"), ((2, 0), "float64")]), shards=3)
    assert layout.parameters.nbytes == 0
    assert sorted(piece.entry for part in layout.parts for piece in part.pieces) == [0, 1]


# -- differences (M6) --------------------------------------------------------------------------------------


def differ(
    mine: Sequence[tuple[tuple[int, ...], str]], theirs: Sequence[tuple[tuple[int, ...], str]]
) -> str | None:
    return layout_of(flat_of(mine)).difference(layout_of(flat_of(theirs)))


def test_a_difference_names_the_first_entry_on_both_sides() -> None:
    ours = [((2, 3), "float32"), ((4,), "float32")]
    assert differ(ours, ours) is None
    assert differ(ours, [ours[0], ((5,), "float32")]) == "parameters: p1 float32[4] against p1 float32[5]"
    assert (
        differ(ours, [((2, 3), "float64"), ours[1]])
        == "parameters: p0 float32[2, 3] against p0 float64[2, 3]"
    )
    one_less = "the first unmatched is p1 float32[4]"
    assert differ(ours, ours[:1]) == f"parameters: 2 against 1, {one_less}"
    assert differ(ours[:1], ours) == f"parameters: 1 against 2, {one_less}"


def test_a_difference_of_buffers_and_groups_is_named() -> None:
    model = nn.BatchNorm1d(3)
    one, _ = lay_out(model, [model.parameters()], cuttable=True, shards=1)
    two, _ = lay_out(model, [[p] for p in model.parameters()], cuttable=True, shards=1)
    assert one.difference(two) == "parameter groups of sizes [2] against [1, 1]"
    other = nn.BatchNorm1d(3, track_running_stats=False)
    three, _ = lay_out(other, [other.parameters()], cuttable=True, shards=1)
    found = one.difference(three)
    assert found == "buffers: 3 against 0, the first unmatched is running_mean float32[3]"


# -- from a model ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)


def test_tied_frozen_and_foreign_parameters_have_their_places() -> None:
    model, foreign = Tied(), nn.Parameter(torch.zeros(2))
    groups: list[list[nn.Parameter]] = [[model.first.weight], [model.second.bias, foreign]]
    layout, tensors = lay_out(model, groups, cuttable=True, shards=2)
    assert [e.name for e in layout.parameters.entries] == ["first.weight", "second.bias", "group1.1"]
    assert layout.groups == ((0,), (1, 2))
    assert dict(layout.keys) == {
        **{name: name for name in model.state_dict()},
        "second.weight": "first.weight",
        "group1.1": "group1.1",
    }
    assert [e.name for e in layout.others.entries] == ["norm.weight", "norm.bias"]
    assert [e.name for e in layout.buffers.entries] == [name for name, _ in model.named_buffers()]
    assert [p is q for p, q in zip(tensors.parameters, [*groups[0], *groups[1]], strict=True)] == [True] * 3
    shared: list[Tensor] = [*tensors.buffers, *tensors.others]
    assert shared[0] is model.norm.running_mean and shared[3].data_ptr() == model.norm.weight.data_ptr()


def test_an_optimizer_without_parameters_is_refused() -> None:
    with pytest.raises(LayoutError, match="no parameters"):
        lay_out(nn.Linear(1, 1), [[]], cuttable=True, shards=1)


class Hooked(nn.Module):
    """A model with a state_dict of other keys than its tensors have names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.renamed = nn.Parameter(torch.ones(3))
        self.computed = nn.Parameter(torch.ones(4))
        self.detached = nn.Parameter(torch.ones(5))
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("positions", torch.arange(3), persistent=False)
        self.register_state_dict_post_hook(self.change)

    @staticmethod
    def change(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["other name"] = state.pop("renamed")
        state["doubled"] = 2 * state.pop("computed")
        state["detached"] = state["detached"].detach()

    def get_extra_state(self) -> Any:
        return {"seen": 3}


def test_a_state_has_the_keys_of_the_model_s_own() -> None:
    model = Hooked()
    layout, tensors = lay_out(model, [model.parameters()], cuttable=True, shards=1)
    flats = (layout.parameters, tensors.parameters), (layout.buffers, tensors.buffers), (layout.others, None)
    state = as_state_dict(layout, *flats)
    assert state.keys() == (model.state_dict().keys() - {"doubled"}) | {"computed"}  # trained, so it stays
    assert state["other name"] is model.renamed and state["detached"] is model.detached
    assert state["_extra_state"] == {"seen": 3}


def test_a_model_without_a_state_dict_shows_all_its_tensors() -> None:
    class Strange(nn.Linear):
        def state_dict(self) -> Any:  # type: ignore[override]
            raise AttributeError

    model = Strange(2, 2)
    assert {key for key, _ in lay_out(model, [[model.weight]], cuttable=True, shards=1)[0].keys} == {
        "weight",
        "bias",
    }
