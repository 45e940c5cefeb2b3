"""A learner of a batch method: sums of portions make the gradient of the batch, whatever was read ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from syncline.batch.portions import Batch, Samples
from syncline.errors import UsageError
from syncline.learn.loader import epoch_order
from syncline.learn.portion_worker import BatchPlan, PortionWorker, batch_layout, trained

SIZE, PORTION, SEED = 11, 4, 5
X = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1))


class Rows(Dataset[Tensor]):
    """Not tensors: read by a thread ahead of their use."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return X[index]


def objective(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0] if isinstance(batch, list) else batch).square().sum(1).mean()


def net() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    return model


def plan(data: Any, objective: Any = objective) -> BatchPlan:
    samples, model = Samples(SIZE, PORTION, lambda iteration: SIZE), net()
    given: dict[str, Any] = {"collate": None, "seed": SEED, "method": None, "deterministic": True}
    layout = batch_layout(model, 2)
    return BatchPlan(
        model=model, data=data, objective=objective, samples=samples, layout=layout, fixed={}, **given
    )


def moved(plan: BatchPlan, **options: Any) -> tuple[PortionWorker, list[Tensor]]:
    """A worker at some point, and that point."""
    generator = torch.Generator().manual_seed(9)
    point = [torch.randn(entry.shape, generator=generator) for entry in plan.layout.parameters.entries]
    flat = plan.layout.parameters.new(torch.device("cpu"))
    for view, value in zip(plan.layout.parameters.views(flat), point, strict=True):
        view.copy_(value)
    worker = PortionWorker(plan, **options)
    worker.move(flat)
    return worker, point


def total_of(
    worker: PortionWorker, plan: BatchPlan, batch: Batch, ahead: bool = False
) -> tuple[Any, float, int]:
    """Gradient sums by parameter, their losses, and how many examples."""
    total = [segment.fill_(float("nan")) for segment in plan.layout.parameters.new(torch.device("cpu"))]
    worker.begin(total)
    losses, count = 0.0, 0
    for portion in range(batch.portions):
        then = (batch, portion + 1) if ahead and portion + 1 < batch.portions else None
        loss, examples = worker.add(batch, portion, then)
        losses, count = losses + loss, count + examples
    worker.end(total)
    return plan.layout.parameters.views(total), losses, count


def plain(rows: Tensor, point: list[Tensor]) -> tuple[list[Tensor], float]:
    model = net().eval()
    for parameter, value in zip(trained(model), point, strict=True):
        parameter.data = value
    loss = objective(model, rows) * len(rows)
    loss.backward()
    return [parameter.grad for parameter in trained(model)], loss.item()


@pytest.mark.parametrize("data", [TensorDataset(X), Rows()], ids=["tensors", "rows"])
@pytest.mark.parametrize("ahead", [False, True])
def test_portions_add_up_to_the_batch(data: Any, ahead: bool) -> None:
    given = plan(data)
    worker, point = moved(given)
    for drawn, examples in ((None, SIZE), (3, 6), (4, 6), (None, SIZE)):
        batch = Batch(examples, -(-examples // PORTION), drawn)
        sample = epoch_order(SIZE, seed=SEED, epoch=drawn or 0)[:examples]
        rows = X if drawn is None else X[sample]
        found, losses, count = total_of(worker, given, batch, ahead)
        wanted, loss = plain(rows, point)
        assert count == examples and losses == pytest.approx(loss, rel=1e-5)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_a_sample_is_read_in_the_order_of_the_data_set() -> None:
    data = Rows()
    given = plan(data)
    worker, _ = moved(given, ahead=False)
    total_of(worker, given, Batch(6, 2, 3))
    assert data.read == sorted(epoch_order(SIZE, seed=SEED, epoch=3)[:6].tolist())


def test_what_was_read_ahead_is_used_only_where_it_is_wanted() -> None:
    data = Rows()
    given, whole = plan(data), Batch(SIZE, 3, None)
    worker, point = moved(given)
    worker.begin(given.layout.parameters.new(torch.device("cpu")))
    worker.add(whole, 0, (whole, 1))
    loss, examples = worker.add(whole, 2)  # another than what was read
    assert examples == 3 and loss == pytest.approx(plain(X[8:], point)[1], rel=1e-5)
    worker.add(whole, 0, (whole, 2))
    assert worker.add(whole, 2) == (loss, 3) and data.read.count(8) == 2, "what the thread has read is used"


def test_a_model_keeps_its_statistics_and_another_may_be_worked_on() -> None:
    given = plan(TensorDataset(X))
    before = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}  # type: ignore[union-attr]
    worker, _ = moved(given, own=False)
    total_of(worker, given, Batch(SIZE, 3, None))
    after = given.model.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_frozen_parameters_do_not_move_and_a_loss_must_depend_on_the_others() -> None:
    names = [entry.name for entry in plan(TensorDataset(X)).layout.parameters.entries]
    assert "0.weight" in names and "0.bias" not in names
    worker, _ = moved(plan(TensorDataset(X), lambda model, batch: batch[0].sum()))
    with pytest.raises(UsageError, match="does not depend on a parameter that is trained"):
        worker.add(Batch(SIZE, 3, None), 0)


def test_what_learners_do_not_need_does_not_travel() -> None:
    given = plan(TensorDataset(X))
    sent = given.sent()
    assert sent.samples == Samples(SIZE, PORTION) and sent.method is None and sent.fixed == {}
    assert sent.layout is given.layout and sent.data is given.data and sent.seed == SEED
