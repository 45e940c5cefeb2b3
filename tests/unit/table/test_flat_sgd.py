"""SGD over whole segments against the plain optimizer: every option, groups, schedules, states that are replaced."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.dial import as_sync
from syncline.table.accumulator import Made, Maker, PromisedPart
from syncline.table.flat_sgd import FlatSGD
from syncline.table.layout import Layout, lay_out
from syncline.table.optimizer_template import OptimizerTemplate
from syncline.table.shard import Shard
from syncline.table.store import OwnMemory


class Given(Maker):
    """Gradients that a test chose."""

    def __init__(self, flat: bool) -> None:
        self.flat, self.gradient = flat, []  # type: bool, list[Tensor]
        self.missing: set[int] = set()

    def fold(self, part: Any, taken: Any) -> Made:
        views = part.views(self.gradient, self.entries)
        present = tuple(index not in self.missing for index in range(len(views)))
        return Made(views, present, self.gradient if self.flat else None)

    entries: Any = ()


class Both:
    """The same table twice: one stepped over segments, one plainly."""

    def __init__(self, options: list[dict[str, Any]], dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2), nn.Linear(2, 7)).to(dtype)
        parameters = list(model.parameters())
        cut = len(parameters) // len(options)
        groups = [
            {"params": parameters[i * cut : (i + 1) * cut], **option} for i, option in enumerate(options)
        ]
        inner = torch.optim.SGD(groups, lr=0.1)
        self.layout, _ = lay_out(model, [g["params"] for g in inner.param_groups], cuttable=True, shards=1)
        self.template = OptimizerTemplate.of(inner)
        values = [parameter.detach() for parameter in parameters]
        self.makers = [Given(True), Given(False)]
        self.shards = [shard_of(self.layout, self.template, values) for _ in self.makers]
        self.options = copy.deepcopy(self.template.options)

    def step(self, factor: float = 1.0) -> None:
        self.options = copy.deepcopy(self.options)
        gradient = [torch.randn_like(segment) for segment in self.shards[0].weights]
        for shard, maker in zip(self.shards, self.makers, strict=True):
            maker.entries, maker.gradient = (
                self.layout.parameters.entries,
                [segment.clone() for segment in gradient],
            )
            part = PromisedPart(_Slot(), maker)
            shard.take(part, full=True, count=1, rank=0, iteration=0, alone=True)
            shard.gather(0)
            shard.apply(self.options, factor)

    def compare(self) -> None:
        mine, plain = ([p.detach() for p in shard.parameters] for shard in self.shards)
        torch.testing.assert_close(mine, plain)
        states = [shard.state()[1] for shard in self.shards]
        assert states[0].keys() == states[1].keys()
        for key, state in states[1].items():
            torch.testing.assert_close(states[0][key], state)


class _Slot:
    promise = None


def shard_of(layout: Layout, template: OptimizerTemplate, values: list[Tensor]) -> Shard:
    memory = OwnMemory(layout, 0, 1)
    for view, value in zip(layout.parameters.views(memory.places[0]), values, strict=True):
        view.copy_(value)
    return Shard(layout, 0, template, memory, sync=as_sync("async"))


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "momentum": [{"momentum": 0.9}],
    "nesterov": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "dampening": [{"momentum": 0.8, "dampening": 0.3}],
    "maximize": [{"maximize": True, "momentum": 0.5, "weight_decay": 0.02}],
    "groups": [
        {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9},
        {"lr": 0.2, "weight_decay": 0.0, "momentum": 0.9},
        {"lr": 0.0, "weight_decay": 1.0, "momentum": 0.9},
    ],
    "rates": [{"lr": 0.3}, {"lr": 0.001}],
    "unlike": [{"momentum": 0.9}, {"momentum": 0.5}],  # stepped plainly
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_over_segments_is_the_plain_one(name: str) -> None:
    both = Both(OPTIONS[name])
    for step in range(8):
        if step == 3:
            both.options = [{**option, "lr": option["lr"] * 0.5} for option in both.options]
        if step == 5:
            both.options = [{**option, "weight_decay": 0.125} for option in both.options]
        both.step(factor=1.0 if step < 6 else 1 / (step - 2))
    both.compare()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    both = Both(OPTIONS["groups"], dtype)
    for _ in range(6):
        both.step()
    both.compare()


def test_a_missing_gradient_is_stepped_plainly() -> None:
    both = Both(OPTIONS["groups"])
    for step in range(6):
        for maker in both.makers:
            maker.missing = {1} if step in (0, 3) else set()
        both.step()
    both.compare()


def test_a_state_that_is_replaced_counts() -> None:
    both = Both(OPTIONS["momentum"])
    both.step()
    both.step()
    options, state = both.shards[1].state()
    both.step()
    for shard in both.shards:
        shard.load(options, {entry: dict(values) for (entry, _, _), values in state.items()})
    both.step()
    both.step()
    both.compare()


def test_only_sgd_fits() -> None:
    weights = [torch.zeros(4)]
    parameter = nn.Parameter(torch.zeros(4))
    assert FlatSGD.fits(torch.optim.SGD([parameter], lr=0.1), weights)
    assert not FlatSGD.fits(torch.optim.Adam([parameter]), weights)
    assert not FlatSGD.fits(torch.optim.SGD([parameter], lr=0.1), [torch.zeros(4, dtype=torch.bfloat16)])

    class Own(torch.optim.SGD):
        """Whatever it does."""

    assert not FlatSGD.fits(Own([parameter], lr=0.1), weights)
