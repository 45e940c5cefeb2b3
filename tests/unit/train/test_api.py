"""`train` and `launch`: what of their arguments reaches the engine, and what they give back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.engines.run import RunSpec
from syncline.errors import NotYetError, UsageError
from syncline.learn.train_and_evaluate import Training
from syncline.sim.engine import Sim
from tests.unit.train.still_engine import DATA, StillEngine, good, squares


def trained(**changes: Any) -> tuple[RunSpec, Training]:
    """What an engine and its learners get."""
    engine = StillEngine()
    arguments = good(**{"engine": engine, "learners": 3, **changes})
    sl.train(arguments.pop("model"), arguments.pop("data"), **arguments)
    (training,) = engine.spec.task.arguments
    return engine.spec, training


def launched(*arguments: Any, **changes: Any) -> RunSpec:
    engine = StillEngine()
    sl.launch(print, *arguments, engine=engine, **changes)
    return engine.spec


def test_a_run_has_the_dial_the_learners_and_the_seed_it_was_given() -> None:
    spec, training = trained(
        sync="softsync:3",
        topology="servers:2",
        seed=5,
        steps=9,
        clip_norm=1.5,
        warmstart=4,
        threads=2,
        on_error="continue",
    )
    plan = spec.plan
    assert (str(plan.course), plan.learners, str(plan.topology)) == ("softsync:3", 3, "servers:2")
    assert (plan.seed, plan.limit, plan.epochs, plan.clip_norm, plan.warm) == (5, 9, None, 1.5, 4)
    assert (plan.batch_size, plan.joint_batch, training.batch_size) == (4, 12, 4)
    assert (spec.threads, spec.faults.on_error, spec.group, spec.cut) == (2, "continue", 1, None)


def test_without_a_number_of_steps_a_run_is_one_epoch() -> None:
    spec, training = trained()
    assert (spec.plan.epochs, spec.plan.limit, training.epochs) == (1, None, 1)
    spec, training = trained(epochs=4)
    assert (spec.plan.epochs, training.epochs) == (4, 4)


@pytest.mark.parametrize("topology, joint, expected", [
    ("servers", 9, (3, 9, None)), ("allreduce", 10, (4, 10, 10)), ("allreduce", None, (4, 12, None)),
])  # fmt: skip
def test_a_global_batch_is_dealt_to_the_learners(
    topology: str, joint: int | None, expected: tuple[int, int, int | None]
) -> None:
    spec, training = trained(sync="hardsync", topology=topology, global_batch_size=joint)
    assert (training.batch_size, spec.plan.joint_batch, training.global_batch_size) == expected


def test_tensors_are_data_and_a_function_that_makes_the_model_is_what_learners_get() -> None:
    _spec, training = trained(data=(torch.zeros(8, 3), torch.zeros(8, 1)), model=lambda: nn.Linear(3, 1))
    assert isinstance(training.data, TensorDataset) and len(training.data) == 8
    assert not isinstance(training.model, nn.Module) and isinstance(training.model(), nn.Linear)
    model = nn.Linear(3, 1)
    assert trained(model=model)[1].model is model


def test_a_regulariser_is_added_for_learners_and_not_to_what_is_evaluated() -> None:
    model = nn.Linear(3, 1)
    spec, training = trained(
        model=model, regulariser=lambda model: model.weight.sum() * 0 + 100.0, evaluate=DATA, loss=squares
    )
    batch = tuple(DATA.tensors)
    assert training.objective is not None and spec.evaluate is not None
    plain = float(squares(model(batch[0]), batch[1]).detach())
    assert float(training.objective(model, batch).detach()) == pytest.approx(plain + 100.0)
    assert spec.plan.snapshots and spec.evaluate(model.state_dict())["loss"] == pytest.approx(plain)
    assert not trained()[0].plan.snapshots


def test_a_way_of_ones_own_takes_the_place_of_the_objective() -> None:
    def way(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.zeros(())

    _, training = trained(gradient=way, loss=None)
    assert training.objective is None and training.gradient is not None
    with pytest.raises(UsageError, match="loss"):
        trained(gradient=way)


def test_a_rule_that_ends_the_run_hears_every_epoch_after_the_users_callbacks() -> None:
    spec, _ = trained(callbacks=print, stop={"loss": 0.5})
    assert spec.callbacks[0] is print and len(spec.callbacks) == 2
    assert trained(stop=None)[0].callbacks == ()


def test_a_schedule_travels_as_it_was_given() -> None:
    schedule = partial(StepLR, step_size=1)
    _, training = trained(schedule=schedule, policy="sample", check=True)
    assert (training.schedule, training.policy, training.check, training.on_device) == (
        schedule,
        "sample",
        True,
        False,
    )


@pytest.mark.parametrize("changes, local", [
    ({}, True), ({"local_update": False}, False), ({"clip_norm": 1.0}, False), ({"warmstart": 1}, False),
    ({"evaluate": DATA}, False), ({"learners": 2}, False),
])  # fmt: skip
def test_one_group_alone_updates_what_is_cut_over_its_seats(changes: dict[str, Any], local: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    spec, _ = trained(**{"model": model, "group": 2, "plan": {"0": "model"}, "learners": 1, **changes})
    assert spec.plan.local is local and spec.group == 2 and len(spec.devices) == 2 * spec.plan.learners
    assert spec.cut is not None and spec.cut.choices == {"0": "model"}


def test_to_the_simulator_a_group_is_one_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Sim, RunSpec]] = []
    given = Sim()

    def start(engine: Sim, spec: RunSpec) -> Any:
        started.append((engine, spec))
        return StillEngine().handle

    monkeypatch.setattr(Sim, "start", start)
    model = nn.Sequential(nn.Linear(3, 1))
    arguments = good(model=model, engine=given, group=2, plan="data", learners=3)
    sl.train(arguments.pop("model"), arguments.pop("data"), **arguments)
    ((engine, spec),) = started
    assert engine is not given and (spec.group, spec.plan.learners, spec.cut) == (1, 3, None)
    with pytest.raises(NotYetError, match="group=2 in launch: the simulator has no seats"):
        sl.launch(print, engine=given, group=2)


def test_launch_passes_its_function_everything_that_is_not_its_own() -> None:
    spec = launched(1, "two", learners=3, batch_size=6, sep=",", seed=3)
    assert (spec.task.function, spec.task.arguments, spec.task.keywords) == (print, (1, "two"), {"sep": ","})
    assert (spec.plan.learners, spec.plan.seed) == (3, 3)
    assert (spec.plan.batch_size, spec.plan.joint_batch, str(spec.plan.course)) == (6, 18, "hardsync")
    assert launched().plan.joint_batch is None


@pytest.mark.parametrize("changes, words", [
    ({"learners": 0}, "learners must be a whole number"),
    ({"batch_size": 0}, "batch_size must be a whole number"),
    ({"seed": None}, "seed must be a whole number"),
    ({"sync": "hardsync:reference_batch=8"}, "give batch_size"),
    ({"plan": "data"}, "give group= of at least 2"),
])  # fmt: skip
def test_launch_refuses_what_no_run_can_have(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launched(**changes)


def test_both_wait_unless_they_are_told_not_to() -> None:
    engine = StillEngine()
    for wait, kind in ((True, sl.Result), (False, sl.Run)):
        found = sl.launch(print, engine=engine, wait=wait)
        assert type(found) is kind
        if isinstance(found, sl.Run):
            found.wait()
