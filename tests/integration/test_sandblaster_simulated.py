"""Batch methods in virtual time (M18): the same iterates on any number of shards and learners, stragglers, scripts, options."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from typer.testing import CliRunner

import syncline as sl
from reproductions.distbelief.batch_times import time_batch
from syncline import errors
from syncline.cli.app import app
from syncline.engines import batch_method_record as batch
from syncline.jobs import Job
from tests.integration.batch_runs import METHOD, kinds, losses, network, points, same, train
from tests.unit.batch.test_own_method import barzilai_borwein

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def simulated(cluster: sl.Cluster | None = None, script: str | None = None, **changes: Any) -> sl.Result:
    return train(engine=sl.Sim(cluster, script=script), **changes)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_iterates_have_the_same_bits_for_any_number_of_learners(shards: int) -> None:
    runs = [simulated(learners=learners, topology=f"servers:{shards}") for learners in (1, 2, 3, 4)]
    assert all(same(run, runs[0]) for run in runs)
    assert losses(runs[0]) == pytest.approx(losses(simulated(topology="servers:2")), rel=1e-12)


def test_without_deterministic_they_are_the_same_to_rounding() -> None:
    free = dataclasses.replace(METHOD, deterministic=False)
    runs = [simulated(optimizer=free, learners=learners) for learners in (1, 2, 3, 4)]
    for run in runs:
        assert losses(run) == pytest.approx(losses(simulated()), rel=1e-9)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_learner_ten_times_slower_among_16_costs_next_to_nothing(deterministic: bool) -> None:
    """Time of a batch against that of 15 equal ones: at most 1.15×; with one share for each it would be 10×."""
    cluster = sl.Cluster.equal(compute=0.1, transfer=0.01, latency=0.001)
    slow = dataclasses.replace(cluster, speeds=(0.1,))
    sizes: dict[str, Any] = {"parameters": 10**6, "portion": 32, "deterministic": deterministic}
    for portions in (8, 20, 50):  # of a learner
        examples = 16 * portions * 32
        equal = time_batch(cluster, learners=15, examples=examples, **sizes)
        with_slow = time_batch(slow, learners=16, examples=examples, **sizes)
        alone = time_batch(slow, learners=16, examples=examples, copies=1, **sizes)
        assert with_slow.iteration <= 1.15 * equal.iteration
        assert alone.iteration > 1.5 * with_slow.iteration
        assert with_slow.sums.copied > 0


def test_a_straggler_costs_as_little_in_a_run_with_gradients_and_changes_no_bit() -> None:
    cluster = sl.Cluster.equal(compute=0.1, transfer=0.001, latency=0.0001)
    equal = simulated(cluster, learners=15, data=points(1000), steps=2)
    slow = simulated(dataclasses.replace(cluster, speeds=(0.1,)), learners=16, data=points(1000), steps=2)
    assert slow.seconds <= 1.15 * equal.seconds
    assert same(slow, equal)
    assert slow.simulated is not None and slow.simulated.learners[0].compute > 0


def test_more_learners_take_less_time_until_the_shards_are_busy() -> None:
    cluster = sl.Cluster.named("ethernet-1g")
    sizes: dict[str, Any] = {"parameters": 10**6, "examples": 200_000, "portion": 100, "shards": 4}
    seconds = [time_batch(cluster, learners=learners, **sizes).iteration for learners in (4, 16, 64)]
    assert seconds[0] > 3 * seconds[1] and seconds[1] > 2 * seconds[2]


def test_a_script_kills_adds_and_stops_and_no_bit_changes(tmp_path: Path) -> None:
    expected = simulated(steps=6)
    script = "kill learner 0 at version 1; add 2 at version 2; kill shard 1 at version 4; kill learner 2 at version 5"
    with pytest.warns(errors.LostWarning):
        result = simulated(script=script, steps=6, run_dir=tmp_path / "run", checkpoint_every=3)
    assert same(result, expected)
    assert set(kinds(result)) == {"lost", "joined", "shard lost", "recovered"}
    assert simulated(script="stop at version 2", steps=6).version == 2


def test_a_script_that_pauses_is_refused() -> None:
    with pytest.raises(errors.NotYetError, match="learners and shards can be killed"):
        simulated(script="pause learner 0 for 1 s at 1 s")


def test_one_example_is_a_batch_and_a_zero_gradient_an_end() -> None:
    assert simulated(data=points(1)).version == 4

    def flat(model: nn.Module, given: Any) -> Tensor:
        return 0.0 * model(given[0]).sum() + 3.0

    result = simulated(objective=flat)
    assert result.version == 0 and "the gradient is zero" in result.events[-1].what


def test_an_objective_that_is_not_finite_where_it_begins_is_an_error_with_the_weights() -> None:
    def broken(model: nn.Module, given: Any) -> Tensor:
        return model(given[0]).sum() * float("nan")

    with pytest.raises(sl.RunError, match="not finite where the run begins: loss nan") as raised:
        simulated(objective=broken)
    assert raised.value.result.state_dict().keys() == network().state_dict().keys()


def test_a_search_that_finds_nothing_lower_ends_with_the_best_weights_and_says_so() -> None:
    def jagged(model: nn.Module, given: Any) -> Tensor:  # its gradient points uphill
        total = sum(parameter.sum() for parameter in model.parameters())
        return 2 * total.detach() - total

    with pytest.warns(errors.SynclineWarning, match="no step lowers the loss"):
        result = simulated(objective=jagged)
    assert result.version == 0
    for name, value in network().state_dict().items():
        assert torch.equal(result.state_dict()[name], value)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(points())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": sl.LBFGS}, "got the class LBFGS; give an instance, sl.LBFGS"),
    ({"optimizer": torch.optim.SGD}, "needs a batch method as optimizer=, got the class SGD"),
    ({"sync": "hardsync"}, 'LBFGS is a batch method and folds no gradients: give sync="sandblaster"'),
    ({"sync": "sandblaster:history=3"}, "sandblaster itself has no options, they are the method's"),
    ({"sync": "hardsync until 1 then sandblaster", "optimizer": torch.optim.SGD}, "only train takes it"),
    ({"steps": None}, "needs steps=, the largest number of iterations"),
    ({"steps": 0}, "steps must be a whole number"),
    ({"steps": None, "epochs": 2}, "does not go with epochs=2: give steps="),
    ({"clip_norm": 1.0}, "does not go with clip_norm"),
    ({"warmstart": 5}, "does not go with warmstart"),
    ({"policy": "sample"}, "does not go with policy"),
    ({"topology": "allreduce"}, "keeps its vectors on servers"),
    ({"data": Stream()}, "give a data set with a length"),
    ({"global_batch_size": 10, "schedule": lambda iteration: 5}, "give either global_batch_size"),
    ({"schedule": 7}, "schedule= is a function"),
    ({"schedule": lambda iteration: 0}, "must be a whole number of examples >= 1, got 0"),
    ({"model": nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()}, "statistics of a portion"),
    ({"model": nn.Linear(5, 2).requires_grad_(False)}, "no parameter that is trained"),
    ({"model": nn.Linear(5, 2, dtype=torch.complex64)}, "moves real numbers only"),
]


@pytest.mark.parametrize(
    ("changes", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("engine", ["local", "sim"])
def test_bad_input_is_refused_in_one_line_before_anything_starts(
    changes: dict[str, Any], words: str, engine: str
) -> None:
    with pytest.raises(sl.UsageError, match=words) as raised:
        train(**{"engine": engine, **changes})
    assert "\n" not in str(raised.value)


def test_unknown_options_of_a_method_are_refused_where_it_is_made() -> None:
    with pytest.raises(TypeError, match="memory"):
        sl.LBFGS(memory=3)  # type: ignore[call-arg]
    with pytest.raises(sl.UsageError, match="history is a whole number >= 1"):
        sl.LBFGS(history=0)


def test_the_method_of_the_page_which_is_not_ours_trains() -> None:
    model = nn.Linear(5, 2).double()
    result = train(engine="sim", model=model, optimizer=barzilai_borwein(tolerance=1e-4), steps=200)
    assert result.version < 200 and result.history[-1]["gradient"] <= 1e-4


def test_a_learner_that_raises_once_is_left_out_with_on_error_continue() -> None:
    left = [True]

    def once(model: nn.Module, given: Any) -> Tensor:
        if left:
            left.clear()
            raise ZeroDivisionError("once")
        return nn.functional.cross_entropy(model(given[0]), given[1])

    with pytest.warns(errors.LostWarning, match="raised ZeroDivisionError: once"):
        result = train(engine="sim", objective=once, on_error="continue")
    assert same(result, train(engine="sim")) and "raised" in kinds(result)


def test_launch_has_no_batch_methods() -> None:
    with pytest.raises(sl.UsageError, match="only train takes it"):
        sl.launch(print, sync="sandblaster")


def test_memory_that_is_not_there_is_refused_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "available_memory", lambda: 100_000)
    words = r"LBFGS needs 12 vectors of 5\.1 kB on 2 shards \(.* each\), \d+ sums of gradients .*: .*, and 100\.0 kB are available"
    with pytest.raises(sl.UsageError, match=words):
        train(engine="sim")


def test_checkpoints_go_on_only_with_what_they_were_made_with(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(engine="sim", steps=6, run_dir=run)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": sl.ConjugateGradient()}, "holds the state of lbfgs, this run has conjugate gradient"),
        ({"optimizer": sl.LBFGS(history=2)}, "history=2.* cannot go on from a state with a history of 4"),
        ({"model": nn.Linear(5, 2).double()}, "made by another model"),
        ({"data": points(80)}, "made with 90 examples, this run has 80"),
        ({"seed": 5}, "was made with seed=0"),
        ({"sync": "hardsync", "optimizer": torch.optim.SGD}, "resume it with sync='sandblaster'"),
    ]
    for changes, words in wrong:
        with pytest.raises(sl.UsageError, match=words):
            train(engine="sim", resume=run, **{"steps": 7, **changes})
    assert train(engine="sim", resume=run, steps=7, optimizer=sl.LBFGS(history=9, decrease=0.0)).version == 7


def test_a_dial_s_checkpoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    other = {"sync": "hardsync", "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "run_dir": tmp_path / "r"}
    train(engine="sim", **other)
    with pytest.raises(sl.UsageError, match="was not written by a batch method but under hardsync"):
        train(engine="sim", resume=tmp_path / "r")


def test_the_dial_of_a_batch_method_cannot_change() -> None:
    run = sl.train(
        network,
        points(),
        loss=nn.CrossEntropyLoss(),
        sync="sandblaster",
        optimizer=METHOD,
        steps=3,
        wait=False,
    )
    with run:
        with pytest.raises(sl.UsageError, match="no dial to change"):
            run.change("hardsync")
        run.wait(60)


JOB = """
sync = "sandblaster"
engine = "sim"
steps = 3
batch_size = 64
[model]
name = "mlp"
sizes = [64, 16, 10]
[data]
name = "digits"
[evaluate]
split = "test"
[loss]
name = "cross_entropy"
[optimizer]
name = "lbfgs"
history = 5
"""


def test_a_job_file_names_a_method(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    assert Job.parse(Job.load(file).dumps()) == Job.load(file)
    done = CliRunner().invoke(app, ["train", str(file), "--run-dir", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "iteration 3/3" in done.output and "evaluations" in done.output
    again = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "run"), "--set", "steps=4"])
    assert again.exit_code == 0 and "iteration 4/4" in again.output, again.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["steps="], "steps: missing; sandblaster ends after so many iterations"),
        (["optimizer=sgd"], "'sgd' is no batch method; sandblaster takes lbfgs, conjugate_gradient"),
        (["sync=hardsync"], "'lbfgs' is a batch method: give sync = 'sandblaster' with it"),
        (["optimizer.memory=3"], "unknown argument; there are:"),
        (["optimizer.history=0"], "history is a whole number >= 1"),
    ],
)
def test_a_job_with_a_wrong_method_is_refused(changes: list[str], words: str) -> None:
    with pytest.raises(sl.UsageError, match=words):
        Job.parse(JOB, changes).build()
