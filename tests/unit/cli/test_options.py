"""The job that a command line asks for: what goes before what, where its run folder is, and what is refused by its option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syncline.cli.options import Wish, load, on_simulator, refuse_other_engine
from syncline.errors import UsageError
from syncline.jobs import Job, JobError, Named

JOB = """
learners = 3
epochs = 2
model = {name = "mlp", sizes = [64, 10]}
data = "digits"
loss = "cross_entropy"
optimizer = {name = "sgd", lr = 0.1}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)


def wished(*, job: str | None = "job.toml", **options: Any) -> Wish:
    sets, run_dir, resume = (
        options.pop(key, default) for key, default in (("sets", ()), ("run_dir", None), ("resume", None))
    )
    return Wish(job=Path(job) if job else None, flags=options, sets=sets, run_dir=run_dir, resume=resume)


# -- what goes before what -----------------------------------------------------------------------------------


def test_options_go_before_the_file_and_settings_before_options() -> None:
    job = load(wished(learners=4, seed=None, sets=["optimizer.lr=0.5"]))
    assert (job.learners, job.seed, job.epochs) == (4, 0, 2)
    assert job.optimizer is not None and job.optimizer.arguments["lr"] == 0.5
    assert load(wished(learners=4, sets=["learners=5"])).learners == 5
    assert load(wished(job=None)).data == Job.builtin([]).data


@pytest.mark.parametrize(
    "options, epochs, steps",
    [
        ({}, 2, None),
        ({"steps": 7}, None, 7),
        ({"epochs": 3}, 3, None),
        ({"steps": None, "epochs": None}, 2, None),
        ({"steps": 7, "sets": ["epochs=1", "steps="]}, 1, None),
    ],
)
def test_steps_stand_for_epochs_and_epochs_for_steps(
    options: dict[str, Any], epochs: int | None, steps: int | None
) -> None:
    job = load(wished(**options))
    assert (job.epochs, job.steps) == (epochs, steps)


def test_both_together_are_refused() -> None:
    with pytest.raises(JobError, match="either epochs or steps"):
        load(wished(steps=7, epochs=3))


@pytest.mark.parametrize("text", ["true", "3", "a b", 'with "quotes"', "back\\slash"])
def test_a_text_stays_a_text(text: str) -> None:
    assert load(wished(run_dir=text)).run_dir == text


def test_problems_name_the_option_that_was_written() -> None:
    with pytest.raises(JobError) as refused:
        load(wished(learners=0, batch_size=-1, sets=["seed=x"]))
    problems = sorted(refused.value.problems)
    assert [problem.partition(":")[0] for problem in problems] == [
        "--batch-size -1",
        "--learners 0",
        "--set seed=x",
    ]
    assert "learners:" not in problems[1]


# -- the run folder ------------------------------------------------------------------------------------------


def test_a_run_without_a_folder_gets_a_new_one_of_the_job_s_name() -> None:
    Path("my job+.toml").write_text(JOB)
    first = load(wished(job="my job+.toml")).run_dir
    assert first is not None and first.startswith("runs/") and first.endswith("-my-job-")
    for name in (None, "job.toml"):
        found = load(wished(job=name)).run_dir
        assert found is not None and found.endswith("-job" if name else "-digits")


def test_two_runs_of_one_second_have_two_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"": 2}

    def exists(path: Path) -> bool:
        taken[""] -= 1
        return taken[""] >= 0

    monkeypatch.setattr(Path, "exists", exists)
    found = load(wished()).run_dir
    assert found is not None and found.endswith("-job-3")


@pytest.mark.parametrize(
    "options, run_dir, resume",
    [
        ({"run_dir": "out"}, "out", None),
        ({"sets": ["run_dir=mine"]}, "mine", None),
        ({"run_dir": "out", "sets": ["run_dir=mine"]}, "out", None),
        ({"resume": "runs/a"}, None, "runs/a"),
        ({"resume": "runs/a", "run_dir": "out"}, "out", "runs/a"),
        ({"sets": ["resume=runs/a"]}, None, "runs/a"),
    ],
)
def test_a_folder_that_is_named_or_goes_on_is_that_one(
    options: dict[str, Any], run_dir: str | None, resume: str | None
) -> None:
    Path("runs/a/checkpoints").mkdir(parents=True)
    job = load(wished(**options))
    assert (job.run_dir, job.resume) == (run_dir, resume)


def test_the_job_s_own_folder_stays() -> None:
    Path("own.toml").write_text(f'run_dir = "mine"\n{JOB}')
    Path("runs/a/checkpoints").mkdir(parents=True)
    assert load(wished(job="own.toml")).run_dir == "mine"
    assert load(wished(job="own.toml", resume="runs/a")).run_dir is None, "it goes on where it was"


def test_a_run_goes_on_with_its_own_job_unless_another_is_named() -> None:
    Path("runs/a/checkpoints/000000007").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"there is no job\.toml in it, as of a run that Python started"):
        load(wished(job=None, resume="runs/a"))
    Path("runs/a/job.toml").write_text(JOB.replace("learners = 3", "learners = 8"))
    for where in ("runs/a", "runs/a/checkpoints", "runs/a/checkpoints/000000007"):
        assert load(wished(job=None, resume=where)).learners == 8
    assert load(wished(resume="runs/a")).learners == 3


# -- on the simulator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine, cluster, script, expected",
    [
        ({"name": "local"}, None, None, {"cluster": "p775"}),
        ({"name": "sim"}, None, None, {"cluster": "p775"}),
        ({"name": "sim", "cluster": "dgx-1", "seed": 5}, None, None, {"cluster": "dgx-1", "seed": 5}),
        ({"name": "sim", "cluster": "dgx-1", "seed": 5}, "p775", None, {"cluster": "p775", "seed": 5}),
        ({"name": "sim", "compute": 0.1}, None, "stop at 2 s", {"compute": 0.1, "script": "stop at 2 s"}),
    ],
)
def test_the_job_s_own_cluster_stays_where_the_command_names_none(
    engine: dict[str, Any], cluster: str | None, script: str | None, expected: dict[str, Any]
) -> None:
    job = load(wished(sets=[f"engine.{key}={value}" for key, value in engine.items()]))
    assert on_simulator(job, cluster, script).engine == Named(name="sim", arguments=expected)


@pytest.mark.parametrize(
    "own, topology", [("servers", "servers:1"), ("servers:3", "servers:3"), ("allreduce", "allreduce")]
)
def test_shards_that_are_not_counted_are_one(own: str, topology: str) -> None:
    assert on_simulator(load(wished(topology=own, sync="hardsync"))).topology == topology


def test_a_wrong_cluster_or_script_is_refused_by_its_option() -> None:
    with pytest.raises(UsageError, match="--cluster p777: unknown cluster"):
        on_simulator(load(wished()), "p777")
    with pytest.raises(UsageError, match="--script kill all: no fault"):
        on_simulator(load(wished()), None, "kill all")


@pytest.mark.parametrize("text", ["engine=local", "engine.name=ray", 'engine={name="local"}'])
def test_another_engine_on_the_same_line_is_refused(text: str) -> None:
    refuse_other_engine(["engine.name=sim", "engine.seed=3", "engine=sim", "learners", "optimizer.lr=2"])
    with pytest.raises(UsageError, match="this command simulates; real processes are with syncline train"):
        refuse_other_engine(["learners=2", text])
