"""Steps over neighbouring parameters against the plain optimizer: all kinds, odd shapes, groups, states, to the bit."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncline.table import joined_parameters_step as joined_step
from syncline.table.joined_parameters_step import JoinedStep
from syncline.table.layout import lay_out
from syncline.table.optimizer_template import ELEMENTWISE, OptimizerTemplate, bare_step, piece_states

SHAPES = [(7, 13), (10,), (33,), (128, 5), (1,), (17,), (), (0,), (3, 3, 3, 3), (65,)]
OPTIONS: dict[type, list[dict[str, Any]]] = {
    torch.optim.SGD: [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        {"momentum": 0.8, "dampening": 0.1, "maximize": True},
        {"momentum": 0.9, "foreach": True},
    ],
    torch.optim.Adam: [{}, {"amsgrad": True, "weight_decay": 1e-2}, {"foreach": True}],
    torch.optim.RMSprop: [{"centered": True, "momentum": 0.5}],
    torch.optim.Adagrad: [{"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
}
CASES = [(kind, options) for kind in ELEMENTWISE for options in OPTIONS.get(kind, [{}])]


class Pair:
    """The same shard twice, one of them stepped over runs."""

    def __init__(
        self,
        kind: type,
        options: dict[str, Any],
        shapes: list[tuple[int, ...]],
        *,
        groups: int = 1,
        shards: int = 1,
        index: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(1)
        model = nn.ParameterList([nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes])
        own = list(model)
        lists = [own[number::groups] for number in range(groups)]
        inner = kind([{"params": each, "lr": 0.01 * (1 + n)} for n, each in enumerate(lists)], **options)
        layout, tensors = lay_out(
            model, [g["params"] for g in inner.param_groups], cuttable=True, shards=shards
        )
        self.part = layout.parts[index]
        template = OptimizerTemplate.of(inner)
        self.layout = layout
        self.sides = []
        for _ in range(2):
            segments = [
                torch.zeros(length, dtype=dtype) for length in layout.parameters.lengths
            ]  # one dtype: one segment
            for view, value in zip(layout.parameters.views(segments), tensors.parameters, strict=True):
                view.copy_(value.detach())
            weights = self.part.segments(segments)
            views = self.part.views(weights, layout.parameters.entries)
            optimizer, parameters = template.build(self.part, layout, views)
            self.sides.append((weights, optimizer, parameters))
        weights, optimizer, parameters = self.sides[0]
        self.joined = JoinedStep(optimizer, self.part, parameters, weights)
        self.plain = [bare_step(side[1]) for side in self.sides]
        self.taken = 0

    def step(self, missing: frozenset[int] = frozenset()) -> None:
        whole = [torch.zeros_like(segment) for segment in self.sides[0][0]]
        for view in self.part.views(whole, self.layout.parameters.entries):
            view.copy_(torch.randn(view.shape))
        for number, (_, _, parameters) in enumerate(self.sides):
            own = [segment.clone() for segment in whole]
            views = self.part.views(own, self.layout.parameters.entries)
            for position, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
                parameter.grad = None if position in missing else view
            if number == 0 and not missing and self.joined.step(own):
                self.taken += 1
                continue
            if number == 0:
                self.joined.give_back(whole=True)
            self.plain[number]()

    def agree(self) -> None:
        self.joined.give_back()
        (mine, my_optimizer, my_parameters), (theirs, their_optimizer, their_parameters) = self.sides
        views = [self.part.views(side, self.layout.parameters.entries) for side in (mine, theirs)]
        assert all(torch.equal(a, b) for a, b in zip(*views, strict=True))
        states = [
            piece_states(my_optimizer, self.part, my_parameters),
            piece_states(their_optimizer, self.part, their_parameters),
        ]
        assert states[0].keys() == states[1].keys()
        for key, state in states[0].items():
            assert state.keys() == states[1][key].keys()
            for name, value in state.items():
                other = states[1][key][name]
                same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
                assert same and type(value) is type(other), (key, name)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
def test_same_bits_as_parameter_by_parameter(kind: type, options: dict[str, Any], dtype: torch.dtype) -> None:
    pair = Pair(kind, options, SHAPES, dtype=dtype)
    for _ in range(6):
        pair.step()
    pair.agree()
    assert pair.taken == 6


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(ELEMENTWISE),
    sizes=st.lists(st.none() | st.integers(0, 200), min_size=1, max_size=12),
    groups=st.integers(1, 3),
    shards=st.integers(1, 3),
    most=st.sampled_from([64, 256, 1 << 16]),
    events=st.lists(st.sampled_from(["step", "missing", "look", "option", "load"]), max_size=12),
)
def test_any_order_of_steps_and_looks(
    kind: type, sizes: list[int | None], groups: int, shards: int, most: int, events: list[str]
) -> None:
    """`None` is a parameter without dimensions, such as a temperature."""
    groups = min(groups, len(sizes))
    shapes = [() if size is None else (size,) for size in sizes]
    before, joined_step.MOST = joined_step.MOST, most
    try:
        for index in range(shards):
            pair = Pair(kind, {}, shapes, groups=groups, shards=shards, index=index)
            for event in [*events, "step"]:
                _happen(pair, event)
            pair.agree()
    finally:
        joined_step.MOST = before


def _happen(pair: Pair, event: str) -> None:
    if event == "look":
        pair.agree()
    elif event == "option":
        for _, optimizer, _ in pair.sides:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        pair.joined.changed()
    elif event == "load":  # both go on with what the second has
        pair.joined.give_back(whole=True)
        kept = pair.sides[1]
        for parameter, other in zip(pair.sides[0][2], kept[2], strict=True):
            if other in kept[1].state:
                pair.sides[0][1].state[parameter] = copy.deepcopy(kept[1].state[other])
    else:
        pair.step(frozenset({0}) if event == "missing" else frozenset())


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("shapes", [[(), (5,), (3,)], [(), (), ()], [(5,), ()]], ids=str)
def test_parameters_without_dimensions(kind: type, shapes: list[tuple[int, ...]]) -> None:
    """Their states are taken over like the others', wherever they lie among them."""
    pair = Pair(kind, {"momentum": 0.9} if kind is torch.optim.SGD else {}, shapes)
    for event in ("step", "load", "step", "look", "load", "step"):
        _happen(pair, event)
    pair.agree()
    assert pair.taken == 3


def test_states_that_differ_are_stepped_plainly() -> None:
    """Adam's count of steps is one behind where a gradient was missing."""
    pair = Pair(torch.optim.Adam, {}, SHAPES)
    pair.step(frozenset({2}))
    pair.step()
    assert pair.taken == 0
    pair.agree()


@pytest.mark.parametrize(
    ("kind", "options", "shapes", "dtype", "fits"),
    [
        (torch.optim.Adam, {}, SHAPES, torch.float32, True),
        (torch.optim.Adam, {}, SHAPES, torch.bfloat16, False),
        (torch.optim.Adam, {}, [(300, 300)], torch.float32, False),
        (torch.optim.Adam, {}, [(300, 300), (300, 300)], torch.float32, False),
        (torch.optim.ASGD, {}, SHAPES, torch.float32, False),
        (torch.optim.Adam, {"fused": True}, SHAPES, torch.float32, False),
    ],
)
def test_where_it_fits(
    kind: type, options: dict[str, Any], shapes: list[tuple[int, ...]], dtype: torch.dtype, fits: bool
) -> None:
    pair = Pair(kind, options, shapes, dtype=dtype)
    weights, optimizer, parameters = pair.sides[0]
    assert (JoinedStep.where_it_fits(optimizer, pair.part, parameters, weights) is not None) is fits


def test_its_runs_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, laid_out = Pair(torch.optim.SGD, {}, SHAPES), []
    plain = joined_step._runs
    monkeypatch.setattr(joined_step, "_runs", lambda *these: laid_out.append(these) or plain(*these))
    weights, optimizer, parameters = pair.sides[0]
    assert JoinedStep.where_it_fits(optimizer, pair.part, parameters, weights) is not None
    assert len(laid_out) == 1


def test_fused_steps_stay_as_they_are() -> None:
    pair = Pair(torch.optim.SGD, {"momentum": 0.9, "fused": True}, SHAPES[:5])
    pair.step()
    assert pair.taken == 0
    pair.agree()
