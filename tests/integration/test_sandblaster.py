"""Batch methods on real processes (M18): vectors on shards, portions to whoever is free, losses, joins, checkpoints."""

import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncline as sl
from syncline import errors
from tests.integration.batch_runs import METHOD, kinds, losses, network, points, same, start, train, unhurried
from tests.integration.small_runs import PacedFaults
from tests.unit.batch.plain import drive

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def undisturbed() -> sl.Result:
    """In the simulator: the bits are the same."""
    return train(engine="sim")


@pytest.fixture(autouse=True)
def _losses_are_no_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.LostWarning)
        yield


@pytest.mark.parametrize(("learners", "shards"), [(1, 2), (3, 2)])
def test_iterates_on_processes_have_the_bits_of_the_simulated_ones(
    undisturbed: sl.Result, learners: int, shards: int
) -> None:
    result = train(learners=learners, topology=f"servers:{shards}")
    assert same(result, undisturbed)
    assert result.version == len(result.history) == 4
    assert result.staleness.max == 0 and result.gradients >= 4 * 6


def test_iterates_are_those_of_the_method_on_the_whole_batch_in_plain_numpy() -> None:
    model, data = network(), points()

    def objective(x: Any) -> tuple[float, Any]:
        nn.utils.vector_to_parameters(torch.from_numpy(x), model.parameters())
        model.zero_grad()
        value = F.cross_entropy(model(data.tensors[0]), data.tensors[1])
        value.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return value.item(), nn.utils.parameters_to_vector(gradients).numpy().copy()

    first = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    expected = drive(METHOD, objective, first, most=4)
    result = train(optimizer=sl.LBFGS(history=4, tolerance=0.0, decrease=0.0), learners=2)
    assert losses(result) == pytest.approx([record.loss for record in expected.records], rel=1e-9)
    assert [record["step"] for record in result.history] == pytest.approx(
        [record.step for record in expected.records], rel=1e-9
    )


@pytest.mark.parametrize("operation", [1, 4, 7, 11, 18])
def test_a_learner_that_dies_in_any_operation_changes_no_bit(undisturbed: sl.Result, operation: int) -> None:
    both = {
        "learner 0": operation,
        "learner 1": operation,
    }  # one alone could be late, and the other do all the work
    result = train(engine=sl.Local(crashes=both), replace=True)
    assert same(result, undisturbed)
    assert "lost" in kinds(result) and set(kinds(result)) <= {"lost", "replaced"}


@pytest.mark.parametrize("operation", [1, 2, 9, 14, 23, 60])
def test_shards_go_back_to_the_last_checkpoint_with_their_history_from_any_command(
    undisturbed: sl.Result, tmp_path: Path, operation: int
) -> None:
    engine = sl.Local(crashes={"shard 1": operation})
    result = train(engine=engine, run_dir=tmp_path / "run", checkpoint_every=1)
    assert same(result, undisturbed)
    assert kinds(result) == ["shard lost", "recovered"]


@pytest.mark.long
@pytest.mark.parametrize("operation", range(1, 60))
@pytest.mark.parametrize("who", ["learner 1", "shard 0"])
def test_kills_at_every_operation_of_an_iteration_change_no_bit(
    undisturbed: sl.Result, tmp_path: Path, who: str, operation: int
) -> None:
    engine = sl.Local(crashes={who: operation})
    result = train(engine=engine, run_dir=tmp_path / "run", checkpoint_every=1)
    assert same(result, undisturbed)


def test_a_lost_shard_without_a_run_folder_ends_the_run_and_says_what_to_give() -> None:
    with pytest.raises(sl.RunError, match="no checkpoint to go back to: give run_dir="):
        train(engine=sl.Local(crashes={"shard 0": 20}))


def test_all_learners_lost_end_the_run_and_one_in_their_place_goes_on(undisturbed: sl.Result) -> None:
    with pytest.raises(sl.RunError, match="all learners are lost"):
        train(learners=1, engine=sl.Local(crashes={"learner 0": 5}))
    result = train(learners=1, replace=True, engine=sl.Local(crashes={"learner 0": 5}))
    assert same(result, undisturbed)
    assert kinds(result) == ["lost", "replaced"]


def test_learners_join_and_are_killed_in_the_middle_and_no_bit_changes() -> None:
    def slow(model: nn.Module, batch: Any) -> Tensor:
        """Leave the added learners some seconds to begin."""
        time.sleep(0.04)
        return F.cross_entropy(model(batch[0]), batch[1])

    options = {"steps": 12, "learners": 2}
    expected = train(engine="sim", **options)
    result = start("add 2 at version 1; kill learner 0 at version 2", objective=slow, **options).wait(60)
    assert same(result, expected)
    assert sorted(kinds(result)) == ["joined", "joined", "lost"]
    assert result.statistics.steps.get(2, 0) + result.statistics.steps.get(3, 0) > 0


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_interrupted(engine: str, tmp_path: Path) -> None:
    whole = train(engine=engine, steps=7)
    train(engine=engine, steps=3, run_dir=tmp_path / "run")
    resumed = train(engine=engine, steps=7, resume=tmp_path / "run", learners=3)
    assert same(resumed, whole)
    assert resumed.gradients == whole.gradients
    again = train(engine=engine, steps=8, resume=tmp_path / "run", topology="servers:3")
    assert losses(again)[:7] == losses(whole) and losses(again)[7] < losses(again)[6]


def test_a_stop_ends_after_an_iteration_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    def enough(record: sl.EpochRecord) -> bool:
        return record.version == 3

    stopped = train(callbacks=enough, steps=50, run_dir=tmp_path / "run")
    assert stopped.version == 3
    assert same(train(resume=tmp_path / "run", steps=5), train(engine="sim", steps=5))


def test_it_ends_by_itself_where_the_gradient_is_small_or_nothing_more_is_gained() -> None:
    result = train(engine="sim", optimizer=sl.LBFGS(tolerance=1e-2), steps=200)
    assert result.history[-1]["gradient"] <= 1e-2 < result.history[-2]["gradient"]
    assert result.events[-1].kind == "converged" and "within 0.01" in result.events[-1].what
    result = train(engine="sim", optimizer=sl.ConjugateGradient(tolerance=0.0, decrease=1e-3), steps=200)
    assert result.version < 200 and result.events[-1].kind == "converged"


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_a_run_that_has_converged_ends_at_once_when_it_is_resumed(engine: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": engine, "optimizer": sl.LBFGS(tolerance=1e-2)}
    whole = train(steps=100, run_dir=tmp_path / "run", **options)
    assert kinds(whole) == ["converged"]
    resumed = train(steps=200, resume=tmp_path / "run", **options)
    assert kinds(resumed) == ["converged"] and same(resumed, whole)


def test_evaluation_history_and_report_are_there(tmp_path: Path) -> None:
    seen: list[int] = []
    result = train(
        evaluate=points(),
        run_dir=tmp_path / "run",
        callbacks=lambda record: seen.append(record.version),
        optimizer=sl.GradientDescent(lr=0.1),
    )
    assert seen == [1, 2, 3, 4]
    for record in result.history:
        assert record.metrics["loss"] == pytest.approx(record.loss, rel=1e-9)
        assert record["step"] == 0.1 and record["evaluations"] == record.version + 1
    assert result.model is not None
    with torch.no_grad():
        left = F.cross_entropy(result.model(points().tensors[0]), points().tensors[1]).item()
    assert left == pytest.approx(result.history[-1].loss, rel=1e-9)
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(words in page for words in ("Loss over iterations", "Step lengths", "Function evaluations"))


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_what_a_learner_raises_ends_the_run_with_its_words(engine: str) -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(sl.LearnerError, match="on purpose"):
        train(objective=broken, engine=engine)


def test_what_is_frozen_tied_or_unused_stays_and_buffers_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    model(points().tensors[0])  # it has statistics now
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(errors.SynclineWarning, match=r"eval mode.*dropout is off in '2' \(Dropout\)"):
        result = train(model=model)
    after = result.model.state_dict()
    for name in ("0.weight", "unused", "1.running_mean", "1.num_batches_tracked"):
        assert torch.equal(after[name], before[name]), name
    assert not torch.equal(after["3.weight"], before["3.weight"])
    assert losses(result) == sorted(losses(result), reverse=True)


def test_a_sample_for_each_iteration_is_drawn_alike_everywhere(tmp_path: Path) -> None:
    options = {"schedule": lambda iteration: 30 + 20 * iteration, "optimizer": METHOD, "steps": 4}
    local, simulated = train(**options), train(engine="sim", **options)
    assert [record.examples for record in local.history] == [30, 50, 70, 90]
    assert same(local, simulated)
    fixed = train(engine="sim", global_batch_size=40)
    assert [record.examples for record in fixed.history] == [40] * 4
    train(engine="sim", **{**options, "steps": 2}, run_dir=tmp_path / "run")
    assert same(train(engine="sim", **options, resume=tmp_path / "run"), simulated)


def test_a_learner_that_stands_still_holds_nobody_up(undisturbed: sl.Result) -> None:
    faults = PacedFaults("pause learner 1 for 600 s at version 1")
    run = start(steps=4, objective=partial(faults.pace.loss, unhurried), learners=2)
    faults.play(run)
    result = run.wait(60)
    faults.join()
    assert not faults.missed and same(result, undisturbed)
