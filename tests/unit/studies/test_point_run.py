"""One point as a run, in this process: what its row says, and that sizes alone give the same times."""

from __future__ import annotations

import pytest

from syncline.errors import LearnerError, RunError, UsageError
from syncline.jobs import Job
from syncline.studies.grid import Point
from syncline.studies.point_run import overrides, run_point, said, time_job

SMALL = [
    "epochs=2",
    "model={name='mlp',sizes=[64,10]}",
    "engine={name='sim',cluster='p775'}",
    "topology=servers:1",
]


def job(point: Point, *changes: str) -> Job:
    return Job.builtin([*SMALL, *changes, *overrides(point)])


def test_a_row_says_what_came_of_it() -> None:
    point = Point(sync="softsync:1", learners=4, batch_size=32, seed=3)
    heard: list[int] = []
    row = run_point(job(point), point, heard.append)
    assert row.point == point and row.n == 1 and row.mu_lambda == 128 and not row.failed
    assert heard == [1, 2] and row.epochs == 2.0 and row.gradients == 92
    assert row.test_error == pytest.approx(1 - (row.test_accuracy or 0)) and 0 < (row.test_error or 0) < 0.9
    assert 0 < (row.mean_staleness or 0) < 1 and 0.5 < (row.overlap or 0) < 1
    assert row.version and (row.throughput or 0) * (row.seconds or 0) == pytest.approx(2 * 1442, abs=1)


@pytest.mark.parametrize("sync", ["hardsync", "softsync:2", "async"])
def test_sizes_alone_give_the_same_times(sync: str) -> None:
    point = Point(sync=sync, learners=6, batch_size=32)
    trained, timed = run_point(job(point), point), run_point(job(point), point, timing=True)
    assert not timed.failed and timed.test_error is None
    for name in ("updates", "gradients", "mean_staleness", "max_staleness", "epochs"):
        assert getattr(timed, name) == getattr(trained, name), name
    for name in ("seconds", "throughput", "overlap"):
        assert getattr(timed, name) == pytest.approx(getattr(trained, name), rel=1e-4), name


def test_between_epochs_the_last_version_is_tested() -> None:
    point = Point(sync="hardsync", learners=2, batch_size=32)
    row = run_point(job(point, "epochs=", "steps=5"), point)
    assert row.updates == 5 and row.test_error is not None and row.loss is None
    assert row.epochs == pytest.approx(5 * 64 / 1442, rel=0.01)
    without = run_point(job(point, "epochs=", "steps=5", "evaluate="), point)
    assert without.test_error is None and without.test_loss is None and not without.failed


def test_what_goes_wrong_is_in_the_row() -> None:
    point = Point(sync="hardsync", learners=2, batch_size=32)
    row = run_point(job(point, "optimizer.lr=-1"), point)
    assert "Invalid learning rate" in row.error and row.seconds is None
    assert said(LearnerError(3, "Traceback\n  …\nValueError: no\n")) == "learner 3 raised ValueError: no"
    assert said(RunError("one")) == "RunError: one" and said(KeyError()) == "KeyError: "


def test_timing_is_the_simulator_s() -> None:
    point = Point(sync="hardsync", learners=2, batch_size=32)
    with pytest.raises(UsageError, match="timing is the simulator's"):
        time_job(job(point, "engine=local"))


@pytest.mark.parametrize("sync", ["hardsync", "delayed:1"])
@pytest.mark.parametrize("topology", ["allreduce", "allreduce:layerwise"])
@pytest.mark.parametrize("policy", ["ledger", "partition"])
def test_sizes_alone_over_all_reduce(sync: str, topology: str, policy: str) -> None:
    point = Point(sync=sync, learners=3, batch_size=32)
    changes = (f"topology='{topology}'", f"policy={policy}", "model={name='mlp',sizes=[64,32,10]}")
    trained, timed = (
        run_point(job(point, *changes), point),
        run_point(job(point, *changes), point, timing=True),
    )
    assert not trained.error and not timed.error
    for name in ("updates", "gradients", "mean_staleness", "max_staleness", "epochs"):
        assert getattr(timed, name) == getattr(trained, name), name
    for name in ("seconds", "throughput"):
        assert getattr(timed, name) == pytest.approx(getattr(trained, name), rel=0.02), name


def test_a_dial_that_all_reduce_does_not_have_is_said() -> None:
    point = Point(sync="async", learners=2, batch_size=32)
    row = run_point(job(point, "topology=allreduce"), point, timing=True)
    assert "async" in row.error and row.seconds is None
