"""Programs: what a plan chooses by name, who reads which window, and what moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.parallel.module import is_layer
from syncline.parallel.move import Group
from syncline.parallel.program import Program, Slot, chosen, layer_names
from syncline.parallel.rules import Want
from syncline.parallel.trace import Array, Inputs, skeleton, trace
from syncline.parallel.windows import Box
from tests.unit.parallel.calls import lying

NAMES = ["conv", "fc1", "fc1#2", "fc2", "relu"]
LAYERS = NAMES[:-1]


@pytest.mark.parametrize(
    "plan, found",
    [
        ({}, {}),
        ({"conv": "data"}, {"conv": "data"}),
        ({"fc1": "model"}, {"fc1": "model", "fc1#2": "model"}),
        ({"fc1": "model", "fc1#2": "data"}, {"fc1": "model", "fc1#2": "data"}),
        ({"fc*": "model", "*2": "rows"}, {"fc1": "model", "fc1#2": "rows", "fc2": "rows"}),
        ({"fc2": "data", "*": "model"}, {"conv": "model", "fc1": "model", "fc1#2": "model", "fc2": "data"}),
        ({"relu": "data"}, {"relu": "data"}),
    ],
)
def test_a_plan_says_it_by_name_else_by_the_last_pattern_and_patterns_are_of_layers(
    plan: dict[str, str], found: dict[str, str]
) -> None:
    assert chosen(plan, NAMES, LAYERS) == found


@pytest.mark.parametrize(
    "plan, words",
    [
        ({"conv": "modal"}, "plan: 'conv' is to be cut as 'modal', did you mean 'model'"),
        ({"fc3": "model"}, "plan: no layer is called 'fc3', did you mean 'fc"),
        ({"rel*": "model"}, r"plan: no layer is called 'rel\*'.*the model has conv, fc1, fc1#2, fc2"),
    ],
)
def test_a_plan_for_what_is_not_there_is_refused(plan: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        chosen(plan, NAMES, LAYERS)


def test_readers_of_the_same_windows_share_a_move_and_own_windows_need_none() -> None:
    array = Array((6, 4), 0)
    slot = Slot(array, lying(array, 0, "data"))
    own = tuple(Want(box) for box in slot.spread.boxes)
    everything = (Want(Box.whole(array.shape)),) * 3
    assert [slot.port(each) for each in (own, everything, own, everything)] == [-1, 0, -1, 0]
    summed = Slot(array, type(slot.spread)(slot.spread.boxes, "whole", sums=True))
    assert summed.port(own) == 0, "parts of sums have to be added first"


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.again(torch.relu(self.first(x))))


def program(plan: dict[str, str], batch: int = 6, size: int = 3, **options: Any) -> Program:
    group = Group()
    group.size = size
    model = skeleton(Twice())
    return Program(
        trace(model, Inputs(model, (torch.empty(batch, 6),), {}), leaf=is_layer),
        model,
        plan,
        group,
        **options,
    )


def test_layers_are_named_by_path_and_call_and_functions_by_the_graph() -> None:
    model = skeleton(Twice())
    graph = trace(model, Inputs(model, (torch.empty(2, 6),), {}), leaf=is_layer).graph
    assert list(layer_names(graph).values()) == ["first", "relu", "again", "again#2"]


@pytest.mark.parametrize(
    "plan, moved",
    [
        ({}, 0),
        ({"again": "model"}, 2 * 36 * 2),  # everybody reads all of it, a third is here; twice
        ({"first": "model"}, 36 - 12),  # features to examples: two thirds of it
    ],
)
def test_what_moves_is_what_a_process_reads_and_does_not_have(plan: dict[str, str], moved: int) -> None:
    assert program(plan).moved == moved


def test_slices_are_of_the_layers_whose_parameters_are_cut() -> None:
    found = program({"first": "model"}).slices(1)
    assert found["again"] == {}
    assert found["first"] == {"weight": (Box(((2, 4), (0, 6))),), "bias": (Box(((2, 4),)),)}
    with pytest.raises(UsageError, match="layer 'again' is called several times with other slices"):
        program({"again": "model", "again#2": "data"}).slices(0)


def test_what_backward_keeps_is_what_layers_with_parameters_have_read() -> None:
    assert program({}).kept(0) == 3 * (2 * 6) * 4
    assert program({"again": "model"}).kept(0) == (2 * 6 + 2 * 6 * 6) * 4


def test_fewer_examples_than_processes_are_refused_where_a_layer_would_be_idle() -> None:
    program({}, batch=3).check_examples()
    with pytest.raises(
        UsageError, match="layer 'first' is cut by examples, and 2 of them are less than a group of 3"
    ):
        program({}, batch=2).check_examples()


def test_a_grid_has_a_place_for_every_process() -> None:
    with pytest.raises(UsageError, match="a grid of 2 × 2 needs 4 processes, the group has 3"):
        program({}, grid=(2, 2))
