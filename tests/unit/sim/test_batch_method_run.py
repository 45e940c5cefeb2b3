"""The arithmetic of a simulated batch method: sums of portions at the point of the evaluation, and when they are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from syncline.batch import messages as b
from syncline.batch.commands import Axpy, Dot
from syncline.batch.portions import Samples
from syncline.learn.portion_worker import BatchPlan, batch_layout
from syncline.sim.batch_method_run import Arithmetic

DATA = TensorDataset(torch.arange(20.0).view(10, 2))


def mean_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0]).mean()


class Run:
    def __init__(self, *, shards: int = 2, objective: Any = mean_of) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 400)
        method: Any = SimpleNamespace(vectors=("x", "g"))
        self.samples = Samples(10, 4)
        plan = BatchPlan(
            model=self.model, data=DATA, objective=objective, collate=None, samples=self.samples, seed=0,
            layout=batch_layout(self.model, shards), method=method, deterministic=False, fixed={},
        )  # fmt: skip
        self.evaluation, self.failed = 0, list[Any]()
        self.numbers = Arithmetic(
            plan, "cpu", current=lambda: self.evaluation, fail=lambda *what: self.failed.append(what)
        )
        self.numbers.start(None)

    def give(self, slot: int, start: int, stop: int, evaluation: int = 0) -> b.Give:
        return b.Give(1, evaluation, slot, start, stop, self.samples.at(0), slot)

    def gathered(self) -> list[Tensor]:
        """The vector g, of all shards."""
        return [torch.cat([shard["g"][0] for shard in self.numbers.shards])]

    def expected(self, examples: int) -> tuple[float, Tensor]:
        """The sum over the first examples, and its gradient in a segment."""
        self.model.zero_grad()
        loss = self.model(DATA.tensors[0][:examples]).mean(1).sum()
        loss.backward()
        flat = self.numbers._flat
        segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
        for view, parameter in zip(flat.views(segments), self.model.parameters(), strict=True):
            view.copy_(parameter.grad)
        return float(loss.detach()), segments[0]


def test_a_sum_is_of_all_portions_of_its_task_and_gone_when_the_last_shard_has_it() -> None:
    run = Run()
    loss, examples = run.numbers.sum(run.give(7, 0, 3))
    wanted, gradient = run.expected(10)
    assert examples == 10 and loss == pytest.approx(wanted, rel=1e-5)
    for shard in (1, 0):
        run.numbers.add(shard, b.Add(7, "g", first=True))
    torch.testing.assert_close(run.gathered()[0], gradient)
    with pytest.raises(KeyError):
        run.numbers.add(0, b.Add(7, "g", first=False))


def test_sums_are_added_up_and_commands_run_on_each_shards_part() -> None:
    run = Run()
    for slot, portions in ((1, (0, 1)), (2, (1, 3))):
        run.numbers.sum(run.give(slot, *portions))
        for shard in (0, 1):
            run.numbers.add(shard, b.Add(slot, "g", first=slot == 1))
    gradient = run.expected(10)[1]
    torch.testing.assert_close(run.gathered()[0], gradient)
    dots = [run.numbers.run(shard, (Dot("gg", "g", "g"),))[0] for shard in (0, 1)]
    assert sum(dots) == pytest.approx(float(gradient.square().sum()), rel=1e-5) and all(dots)


def test_a_point_that_was_moved_is_read_with_the_next_evaluation() -> None:
    run = Run()
    first, _ = run.numbers.sum(run.give(1, 0, 3))
    for shard in (0, 1):
        run.numbers.add(shard, b.Add(1, "g", first=True))
        run.numbers.run(shard, (Axpy("x", -1.0, "g"),))
    again, _ = run.numbers.sum(run.give(2, 0, 3))
    run.evaluation = 1
    moved, _ = run.numbers.sum(run.give(3, 0, 3, evaluation=1))
    assert first == again and moved < first


def test_nothing_is_computed_for_an_evaluation_that_is_over() -> None:
    run = Run()
    run.evaluation = 1
    assert run.numbers.sum(run.give(1, 0, 3)) == (0.0, 1)
    with pytest.raises(KeyError):
        run.numbers.add(0, b.Add(1, "g", first=True))


def test_an_error_of_the_users_is_its_learners() -> None:
    def wrong(model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError("of the user's")

    run = Run(objective=wrong)
    assert run.numbers.sum(run.give(1, 0, 3)) == (0.0, 1), "who asks goes on, until the run has heard of it"
    ((learner, error),) = run.failed
    assert learner == 1 and isinstance(error, ZeroDivisionError)


@pytest.mark.parametrize(("portion", "examples"), [(0, 4), (1, 4), (2, 2)])
def test_the_last_portion_is_what_is_left(portion: int, examples: int) -> None:
    run = Run()
    assert run.numbers.examples(run.give(1, 0, 3), portion) == examples
