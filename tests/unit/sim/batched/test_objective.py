"""What gradients are computed of: batches on the device, losses and gradients of flat weights, and rows of these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from syncline.errors import UsageError
from syncline.learn.gradient_ways import Supervised
from syncline.sim.batched.objective import Collated, Resident, Rows, SimTask, rows_of
from syncline.table.layout import lay_out

DATA = TensorDataset(torch.arange(24.0).view(8, 3), torch.arange(8))


class Records(Dataset[Any]):
    """The same as dicts, one by one, with whatever else is given."""

    def __init__(self, **more: Any) -> None:
        self.more = more

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": DATA.tensors[0][index], "y": DATA.tensors[1][index], **self.more}


def task_of(data: Any = DATA, objective: Any = None, **options: Any) -> SimTask:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "other": nn.Linear(2, 2)})
    model["used"].bias.requires_grad_(False)
    layout, _ = lay_out(model, [model.parameters()], cuttable=True, shards=1)
    return SimTask(
        model,
        objective or (lambda model, batch: model["used"](batch[0]).square().mean()),
        layout,
        data,
        **options,
    )


INDICES = torch.tensor([[1, 4], [0, 7]])


def test_data_of_tensors_lies_on_the_device_and_any_other_is_collated() -> None:
    resident, collated = task_of().examples, task_of(Records()).examples
    assert isinstance(resident, Resident) and isinstance(collated, Collated)
    assert isinstance(task_of(collate=lambda items: items[0]).examples, Collated), (
        "who collates sees examples"
    )
    x, y = resident.stack(INDICES, resident.leaves(list(INDICES)))
    assert torch.equal(y, INDICES) and torch.equal(x[1], DATA.tensors[0][INDICES[1]])
    batch = collated.stack(INDICES, collated.leaves(list(INDICES)))
    assert torch.equal(batch["y"], INDICES) and torch.equal(batch["x"], x)
    words = task_of(Records(word="no tensor")).examples
    with pytest.raises(UsageError, match="holds something that is no tensor"):
        words.leaves(list(INDICES))


def test_gradients_are_those_of_the_parameters_that_the_loss_depends_on() -> None:
    task = task_of()
    weights = task.segments()
    for view in task.views(weights):
        view.fill_(0.5)
    leaves = task.leaves(weights)
    loss = task.loss(leaves, DATA[:2])
    names = [entry.name for entry in task.layout.parameters.entries]
    found = dict(zip(names, task.gradients(loss, leaves), strict=True))
    assert {name for name, each in found.items() if each is not None} == {"used.weight"}, "the bias is frozen"
    x = DATA.tensors[0][:2]
    output = 0.5 * x.sum(1, keepdim=True) + 0.5  # of both rows alike
    torch.testing.assert_close(loss, output.square().mean())
    torch.testing.assert_close(found["used.weight"], (output * x).mean(0).expand(2, 3))
    assert all(parameter.grad is None for parameter in task.model.parameters())


def test_rows_of_weights_are_viewed_with_their_leading_dimension() -> None:
    task = task_of()
    assert [view.shape for view in task.views(task.segments(5))] == [
        (5, *entry.shape) for entry in task.layout.parameters.entries
    ]


def test_a_loss_is_one_number() -> None:
    task = task_of(objective=lambda model, batch: model["used"](batch[0]))
    with pytest.raises(UsageError, match="the loss must be a scalar tensor"):
        task.loss(task.leaves(task.segments()), DATA[:2])


def test_only_the_models_own_parameters() -> None:
    model, other = nn.Linear(2, 1), nn.Parameter(torch.ones(2))
    layout, _ = lay_out(model, [[*model.parameters(), other]], cuttable=True, shards=1)
    with pytest.raises(UsageError, match="no parameter of the model"):
        SimTask(model, Supervised(F.mse_loss), layout, DATA)


# -- rows ----------------------------------------------------------------------------------------------------


def test_rows_are_free_again_when_nobody_holds_them() -> None:
    rows = Rows(task_of(), 4)
    first, second = rows.take(), rows.take()
    assert (first.number, second.number) == (0, 1)
    del first
    assert rows.take().number == 0
    assert [segment.shape for segment in second.segments] == [stack.shape[1:] for stack in rows.stacks]


def test_rows_that_grow_keep_what_is_in_them_and_one_that_is_nobodys() -> None:
    def filled(row: int) -> list[Tensor]:
        return [torch.full_like(segment, float(row)) for segment in task.segments()]

    task = task_of()
    rows = rows_of(task, [filled(row) for row in range(2)])
    held = [rows.take() for _ in range(2)]
    assert rows.nobodys == 2 and rows.growths == 0
    more = [rows.take() for _ in range(2)]
    assert [each.number for each in (*held, *more)] == [0, 1, 2, 3]
    assert rows.nobodys == 4 and rows.growths == 1 and all(len(stack) == 5 for stack in rows.stacks)
    for row in held:
        assert all((segment == row.number).all() for segment in row.segments)
