"""What `train` refuses of its arguments, and what it makes of them: batches, data, models, optimizers, schedules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import IterableDataset, TensorDataset

from syncline.errors import LayoutError, UsageError
from syncline.train import checks
from tests.unit.train.still_engine import DATA, PLAIN


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize("joint, sync, topology, expected", [
    (None, "hardsync", "servers", (5, None)),
    (12, "hardsync", "servers", (3, None)),
    (12, "hardsync until 1 then delayed:2", "servers:2", (3, None)),
    (12, "hardsync", "allreduce", (3, 12)),
    (13, "hardsync", "allreduce", (4, 13)),
])  # fmt: skip
def test_a_joint_batch_is_shared_by_all_and_only_all_reduce_takes_a_rest(
    joint: int | None, sync: str, topology: str, expected: tuple[int, int | None]
) -> None:
    assert checks.batches_of(5, joint, 4, sync, topology) == expected


@pytest.mark.parametrize("joint, sync, topology", [
    (13, "hardsync", "servers"),
    (3, "hardsync", "allreduce"),
    (12, "async", "servers"),
    (12, "hardsync until 1 then softsync:2", "servers"),
])  # fmt: skip
def test_a_joint_batch_that_cannot_be_shared_is_refused(joint: int, sync: str, topology: str) -> None:
    with pytest.raises(UsageError, match=f"global_batch_size={joint}"):
        checks.batches_of(5, joint, 4, sync, topology)


def test_a_stream_has_no_length_but_needs_a_batch() -> None:
    stream = Stream()
    assert checks.check_data(stream, 1000) is stream
    with pytest.raises(UsageError, match="batch_size must be a whole number"):
        checks.check_data(stream, 0)
    with pytest.raises(UsageError, match="13 is larger than the data set of 12"):
        checks.check_data(DATA, 13)


def test_an_evaluation_is_a_function_or_a_data_set_with_examples() -> None:
    stream = Stream()
    assert checks.check_evaluate(None) is None and checks.check_evaluate(len) is len
    assert checks.check_evaluate(stream) is stream
    assert len(checks.check_evaluate((torch.zeros(2), torch.zeros(2)))) == 2
    with pytest.raises(UsageError, match="evaluate: the data set is empty"):
        checks.check_evaluate(TensorDataset(torch.zeros(0)))
    with pytest.raises(UsageError, match="evaluate must be a data set or a function of the model"):
        checks.check_evaluate(TensorDataset)


def test_callbacks_are_one_function_several_or_none() -> None:
    assert checks.check_callbacks(None) == checks.check_callbacks(()) == ()
    assert checks.check_callbacks(print) == (print,)
    assert checks.check_callbacks(iter([print, len])) == (print, len)


@pytest.mark.parametrize("seed", [True, 1.0, "1", 1 << 63, -(1 << 63) - 1])
def test_seeds_are_numbers_that_torch_takes(seed: Any) -> None:
    with pytest.raises(UsageError, match="at most 63 bits"):
        checks.check_seed(seed)
    for fits in (0, (1 << 63) - 1, -(1 << 63)):
        checks.check_seed(fits)


def test_a_function_makes_the_model_with_the_seed_and_is_itself_sent() -> None:
    model, sent = checks.built(lambda: nn.Linear(3, 1), 7)
    torch.manual_seed(7)
    assert torch.equal(model.weight, nn.Linear(3, 1).weight)
    assert not isinstance(sent, nn.Module) and torch.equal(sent().weight, model.weight)
    whole, same = checks.built(model, 7)
    assert whole is same is model


def raises() -> nn.Module:
    raise KeyError("lost")


def refuses() -> nn.Module:
    raise UsageError("my own words")


@pytest.mark.parametrize("model, words", [
    (raises, "^the function that makes the model failed: KeyError: 'lost'$"),
    (refuses, "^my own words$"),
    (dict, "model must be an nn.Module or a callable that makes one, got dict"),
    (nn.LazyLinear(1), "lazy|Lazy|uninitialized"),
    (nn.Embedding(3, 2, sparse=True), "sparse"),
])  # fmt: skip
def test_models_that_cannot_be_trained_are_refused(model: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checks.built(model, 0)


FROZEN = nn.Linear(3, 1).requires_grad_(False)


@pytest.mark.parametrize("model, optimizer, sync, words", [
    (nn.Linear(3, 1), lambda params: torch.optim.SGD([nn.Parameter(torch.zeros(1))]), "async", "that are not Linear's"),
    (FROZEN, PLAIN, "async", "all 2 parameters .* are frozen"),
    (nn.Linear(3, 1), lambda params: 1 / 0, "async", "the optimizer's factory failed: ZeroDivisionError"),
])  # fmt: skip
def test_optimizers_that_train_nothing_are_refused(model: Any, optimizer: Any, sync: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checks.check_optimizer(model, optimizer, sync)


def test_an_optimizer_may_have_frozen_and_foreign_parameters_beside_one_that_is_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 1).requires_grad_(False), nn.Linear(1, 1))
    assert isinstance(checks.check_optimizer(model, PLAIN, "async"), torch.optim.SGD)
    with pytest.raises(LayoutError, match="frozen"):
        checks.check_optimizer(model, lambda model: torch.optim.SGD(model[0].parameters()), "async")


class NoState:
    def step(self) -> None: ...


@pytest.mark.parametrize("schedule, words", [
    (StepLR, "the schedule's factory failed: TypeError"),
    (StepLR(PLAIN(nn.Linear(1, 1).parameters()), 1), "must not be a StepLR itself"),
    (ReduceLROnPlateau, "needs a metric"),
    (lambda optimizer: NoState(), "returned NoState, no LR scheduler"),
])  # fmt: skip
def test_a_schedule_is_made_of_an_optimizer(schedule: Any, words: str) -> None:
    made = PLAIN(nn.Linear(1, 1).parameters())
    checks.check_schedule(None, made)
    checks.check_schedule(partial(StepLR, step_size=1), made)
    with pytest.raises(UsageError, match=words):
        checks.check_schedule(schedule, made)


def test_a_function_that_cannot_take_what_launch_was_given_is_named() -> None:
    def loop(session: Any, rate: float) -> None: ...

    checks.check_call(loop, (0.1,), {}, ())
    checks.check_call(dict.fromkeys, (), {}, ())  # built in: nobody knows
    with pytest.raises(UsageError, match=r"loop\(session.*missing a required argument: 'rate'"):
        checks.check_call(loop, (), {}, ())
    with pytest.raises(UsageError, match=r"takes a function of \(session, \.\.\.\), got int"):
        checks.check_call(3, (), {}, ())


@pytest.mark.parametrize("given, device, data, collate, words", [
    ("cuda", None, DATA, None, "data_device='cuda' with device=None"),
    ("cuda", ["cuda:0", "cpu"], DATA, None, "with device=.*it is \"cuda\""),
    ("cpu", "cuda", DATA, None, "data_device='cpu'"),
    ("cuda", "cuda", Stream(), None, "got a Stream"),
    ("cuda", "cuda", DATA, list, "got an own collate="),
])  # fmt: skip
def test_data_lies_on_gpus_with_the_learners_and_as_tensors_only(
    given: Any, device: Any, data: Any, collate: Any, words: str
) -> None:
    checks.check_data_device(None, device, data, collate)
    checks.check_data_device("cuda", ["cuda:0", "cuda:1"], DATA, None)
    with pytest.raises(UsageError, match=words):
        checks.check_data_device(given, device, data, collate)
