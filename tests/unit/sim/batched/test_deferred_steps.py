"""Steps that wait: the same bits as when each is made at once, however many are made together, whatever changes between."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.learn.gradient_ways import Supervised
from syncline.sim.batched import deferred_steps as later
from syncline.sim.batched.deferred_steps import DeferredSteps
from syncline.sim.batched.objective import Rows, SimTask
from syncline.table import flat_sgd
from syncline.table.flat_sgd import FlatSGD
from syncline.table.layout import lay_out
from syncline.table.optimizer_template import OptimizerTemplate

OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    {"momentum": 0.5, "dampening": 0.25, "maximize": True},
]


class Table:
    """A shard's weights with a flat optimizer, twice: stepped at once, and later."""

    def __init__(self, options: dict[str, Any], together: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
        groups = [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()], "lr": 0.3}]
        inner = torch.optim.SGD(groups, lr=0.1, **options)
        layout, _ = lay_out(model, [group["params"] for group in inner.param_groups], cuttable=True, shards=1)
        data = torch.utils.data.TensorDataset(torch.zeros(4, 5), torch.zeros(4, 2))
        self.task = SimTask(model, Supervised(nn.functional.mse_loss), layout, data)
        self.part, self.layout, self.template = layout.parts[0], layout, OptimizerTemplate.of(inner)
        self.now, self.later = self._flat(model), self._flat(model)
        self.gradients, self.versions = Rows(self.task, 4), Rows(self.task, 4)
        self.wanted: dict[int, int] = {}
        self.steps = DeferredSteps(self.gradients, self.versions, self._row_of, together=together)
        self.number = 0
        self.expected: dict[int, list[Tensor]] = {}

    def _row_of(self, version: int) -> int:
        return self.wanted.get(version, self.versions.nobodys)

    def _flat(self, model: nn.Module) -> tuple[FlatSGD, Any, list[Tensor]]:
        weights = self.task.segments()
        for view, parameter in zip(self.task.views(weights), model.parameters(), strict=True):
            view.copy_(parameter.detach())
        views = self.part.views(weights, self.layout.parameters.entries)
        optimizer, parameters = self.template.build(self.part, self.layout, views)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # from here on there is momentum
        return FlatSGD(optimizer, self.part, weights), optimizer, parameters

    def rate(self, rate: float) -> None:
        for flat, optimizer, _ in (self.now, self.later):
            optimizer.param_groups[0]["lr"] = rate
            flat.changed()

    def step(self, row: int, *, wanted: int | None = None) -> None:
        for stack in self.gradients.stacks:
            stack[row] = torch.randn(stack.shape[1:])
        flat, _, parameters = self.now
        assert flat.step(parameters, self.gradients.segments(row))
        self.number += 1
        if wanted is not None:
            self.wanted[self.number] = wanted
            self.expected[wanted] = [segment.clone() for segment in flat.weights]
        flat, _, parameters = self.later
        plan = flat.plan(parameters)
        assert plan is not None
        self.steps.add(flat, plan, row, self.number)

    def compare(self) -> None:
        self.steps.settle()
        for mine, theirs in zip(self.later[0].weights, self.now[0].weights, strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(self.later[0].momentum, self.now[0].momentum, strict=True):
            assert torch.equal(mine, theirs)
        for row, values in self.expected.items():
            assert all(map(torch.equal, self.versions.segments(row), values))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_bits(options: dict[str, Any], together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "OFTEN", 2)
    table = Table(options, together)
    for count in (1, 3, 4):
        for row in range(count):
            table.step(row, wanted=row if row % 2 else None)
        assert len(table.steps) == count and table.steps.newest == table.number
        table.compare()
        assert len(table.steps) == 0


@pytest.mark.parametrize("together", [False, True])
def test_rates_that_change_between_steps(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "OFTEN", 0)
    table = Table({"momentum": 0.9}, together)
    for row, rate in enumerate((0.1, 0.1, 0.01, 0.1)):
        table.rate(rate)
        table.step(row, wanted=row)
    table.compare()


def test_large_tables_make_fewer_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "OFTEN", 0)
    monkeypatch.setattr(later, "MOST_BYTES", 0)
    table = Table({"momentum": 0.9}, True)
    for row in range(3):
        table.step(row, wanted=row)
    table.compare()
    assert [list(known.programs) for known in table.steps._known.values()] == [[1]]


def test_rates_of_the_past_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "OFTEN", 0)
    monkeypatch.setattr(flat_sgd, "PLANS_KEPT", 2)
    table = Table({"momentum": 0.9}, True)
    for rate in (0.1, 0.2, 0.3, 0.4, 0.5):
        table.rate(rate)
        table.step(0, wanted=0)
        table.compare()
    assert len(table.steps._known) <= 2


def test_memory_that_grew_and_momentum_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "OFTEN", 0)
    table = Table({"momentum": 0.9}, True)
    table.step(0, wanted=0)
    table.compare()
    held = [rows.take() for rows in (table.gradients, table.versions) for _ in range(5)]
    assert len(held) == 10 and table.versions.nobodys == 8
    table.step(6, wanted=7)
    table.compare()
    for _, optimizer, parameters in (table.now, table.later):
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.5)
    table.step(1, wanted=2)
    table.compare()
