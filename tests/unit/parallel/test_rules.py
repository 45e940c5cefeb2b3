"""What a way to cut means: where results lie, who mixes examples, what is refused, and rules of types of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.parallel.rules import (
    RULES,
    Rule,
    Want,
    Windowed,
    by_examples,
    check_names,
    cut_by,
    layer,
    own_code,
    rule_of,
    tiles,
)
from syncline.parallel.trace import Array
from syncline.parallel.windows import Box
from tests.unit.parallel.calls import PARTS, call_of, local_of, lying


@given(batch=st.integers(1, 9), unit=st.integers(1, 4), parts=st.integers(1, 5), dim=st.integers(0, 1))
def test_examples_are_dealt_alike_however_many_places_they_have(
    batch: int, unit: int, parts: int, dim: int
) -> None:
    def starts(places: int) -> list[int]:
        shape = [7, 7]
        shape[dim] = batch * places
        spread = by_examples(Array(tuple(shape), dim, places), batch, parts)
        assert sum(box.spans[dim][1] - box.spans[dim][0] for box in spread.boxes) == batch * places
        return [box.spans[dim][0] for box in spread.boxes]

    assert starts(unit) == [start * unit for start in starts(1)]


def test_what_has_no_examples_is_everywhere() -> None:
    spread = by_examples(Array((4, 5)), 4, PARTS)
    assert spread.way == "whole" and spread.boxes == (Box.whole((4, 5)),) * PARTS


@pytest.mark.parametrize(
    "way, shape, spans",
    [
        ("data", (4, 6), [((0, 1), (0, 6)), ((1, 2), (0, 6)), ((2, 4), (0, 6))]),
        ("model", (4, 6), [((0, 4), (0, 2)), ((0, 4), (2, 4)), ((0, 4), (4, 6))]),
        ("model", (4, 5, 6), [((0, 4), (0, 5), (0, 2)), ((0, 4), (0, 5), (2, 4)), ((0, 4), (0, 5), (4, 6))]),
        ("model", (4, 3, 2, 2), [((0, 4), (c, c + 1), (0, 2), (0, 2)) for c in range(3)]),
        ("spatial", (4, 2, 6), [((0, 4), (0, 2), (r, r + 2)) for r in (0, 2, 4)]),
        ("spatial", (4, 2, 6, 5), [((0, 4), (0, 2), (r, r + 2), (0, 5)) for r in (0, 2, 4)]),
    ],
)
def test_the_usual_windows_of_a_way(way: str, shape: tuple[int, ...], spans: list[Any]) -> None:
    array = Array(shape, 0)
    found = cut_by(call_of("f", [array], [array]), way, array)
    assert found.way == way and [box.spans for box in found.boxes] == spans


@pytest.mark.parametrize(
    "way, shape, words",
    [
        ("model", (4, 2), r"'it' \(function\) has 2 places in dimension 1, fewer than the 3 processes"),
        ("spatial", (4, 6), r"has results of shape \[4, 6\]: 'spatial' needs images"),
        ("spatial", (4, 6, 2, 9), r"has 2 × 9 places for a grid of 3 × 1 processes"),
    ],
)
def test_what_is_too_small_to_be_cut_is_refused(way: str, shape: tuple[int, ...], words: str) -> None:
    array = Array(shape, 0)
    with pytest.raises(UsageError, match=words):
        cut_by(call_of("f", [array], [array]), way, array)


def test_tiles_keep_units_whole() -> None:
    array = Array((1, 1, 10, 8), 0)
    found = tiles(call_of("f", [array], [array], grid=(3, 1)), array, (4, 1))
    assert [box.spans[2] for box in found.boxes] == [(0, 4), (4, 8), (8, 10)]


@pytest.mark.parametrize(
    "module, ins, outs, mixed",
    [
        (nn.ReLU(), Array((4, 5), 0), Array((4, 5), 0), False),
        (nn.ReLU(), Array((5, 4), 1), Array((5, 4), 1), True),  # examples where nobody expects them
        (nn.GRU(2, 2), Array((5, 4, 2), 1), Array((5, 4, 2), 1), False),
        (nn.GRU(2, 2, batch_first=True), Array((5, 4, 2), 1), Array((5, 4, 2), 1), True),
        (nn.MSELoss(), Array((4, 5), 0), Array(()), True),
        (nn.ReLU(), Array((4, 5)), Array((4, 5)), False),
    ],
)
def test_who_mixes_examples_is_computed_whole(
    module: nn.Module, ins: Array, outs: Array, mixed: bool
) -> None:
    call = call_of(type(module), [ins], [outs], module=module, batch=4)
    rule = Rule()
    assert rule.mixes(call) == mixed
    (spread,) = rule.place(call)
    wants = rule.wants(call, [spread], 0)
    assert (wants == [Want(Box.whole(ins.shape))]) == (mixed or ins.batch is None)


def test_the_largest_input_that_is_cut_leads() -> None:
    arrays = [Array((6, 9), 0), Array((6, 3), 0), Array((6, 99), 0)]
    spreads = [lying(arrays[0], 1), lying(arrays[1], 1), lying(arrays[2], None)]
    assert call_of("f", arrays, arrays[:1], spreads=spreads).leader() == 0
    assert call_of("f", arrays, arrays[:1]).leader() is None


def test_what_holds_nothing_goes_on_as_its_input_is_cut() -> None:
    rule, array = Windowed(lambda module, window, shapes: window), Array((6, 6), 0)
    spreads = [lying(array, 1)]
    for module, way in ((nn.ReLU(), "model"), (nn.Linear(6, 6), "data")):
        call = call_of(type(module), [array], [array], spreads=spreads, module=module)
        assert rule.place(call)[0].way == way


def test_what_is_dropped_is_drawn_for_the_window_and_leaves_the_state_of_others() -> None:
    module, array, x = nn.Dropout(0.5), Array((64, 3), 0), torch.ones(64, 3)
    call = call_of(nn.Dropout, [array], [array], module=module)
    spread = lying(array, 0, "data")
    before = torch.get_rng_state()
    found = [own_code(local_of(call, spread, rank, [], module), x) for rank in (0, 0, 1)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), before)


class Own(nn.Linear):
    """With the code of a Linear."""


class Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.fixture
def _own_layers() -> Iterator[None]:
    yield
    RULES.pop(Other, None)


def test_a_rule_is_that_of_the_nearest_type_with_the_same_code() -> None:
    assert rule_of(Own(2, 2)) is RULES[nn.Linear] and rule_of(Other(2, 2)) is None


@pytest.mark.usefixtures("_own_layers")
def test_a_type_of_ones_own_is_registered_with_data_among_its_ways() -> None:
    assert layer(Other, lambda module, window, shapes: window, ways=("model",)) is Other
    found: Any = rule_of(Other(2, 2))
    assert found.ways == ("data", "model")
    array = Array((6, 6), 0)
    call = call_of(Other, [array], [array], module=Other(6, 6), way="spatial")
    with pytest.raises(
        UsageError, match=r"'it' \(Other\) cannot be cut as 'spatial': it can be 'data', 'model'"
    ):
        found.place(call)
    call.way = "model"
    with pytest.raises(UsageError, match="cannot be cut as 'model': 'wait' is no parameter of it"):
        check_names(call, {"wait": (), "weight": ()})
    with pytest.raises(UsageError, match=r"layer Other: no way \['modal'\]; there are data, model"):
        layer(Other, ways=("modal",))
    with pytest.raises(UsageError, match=r"layer\(...\) takes a type of nn.Module"):
        layer(nn.ReLU())  # type: ignore[arg-type]
