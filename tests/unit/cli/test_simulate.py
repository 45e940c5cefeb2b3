"""`syncline simulate JOB`: a job on a simulated cluster."""

from __future__ import annotations

import io
import re
import tomllib
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from syncline.cli.app import app
from syncline.cli.simulate import timing_progress
from syncline.report import read_run
from syncline.sim.timing.run_times import SoFar

JOB = """
learners = 2
batch_size = 16
epochs = 1
model = {name = "mlp", sizes = [64, 10]}
data = "digits"
evaluate = {name = "digits", split = "test"}
loss = "cross_entropy"
optimizer = {name = "sgd", lr = 0.1}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "200"})


def test_a_job_on_a_cluster_of_the_papers() -> None:
    result = simulate(
        "job.toml", "--learners", "30", "--cluster", "p775", "--sync", "async", "--run-dir", "out"
    )
    assert result.exit_code == 0, result.output
    assert "times are virtual, on p775" in result.output and "examples per virtual second" in result.output
    assert re.search(
        r"learners' time +[\d.]+ % computing, [\d.]+ % communication, [\d.]+ % waiting", result.output
    )
    assert re.search(r"overlap +9\d\.\d %", result.output) and "syncline simulate job.toml" in result.output
    record = read_run(Path("out"))
    assert record.state == "finished" and record.options["learners"] == 30
    assert record.staleness["mean"] > 10 and record.seconds < 10, (
        "virtual: 90 gradients of 0.06 s by 30 learners"
    )
    kept = tomllib.loads(Path("out/job.toml").read_text())
    assert kept["engine"] == {"name": "sim", "cluster": "p775"} and kept["topology"] == "servers:1"


def test_a_script_and_another_cluster_change_what_happens() -> None:
    script = "kill learner 1 at 0.1 s; add 1 at 0.2 s"
    result = simulate("job.toml", "--cluster", "p775:stragglers=0.5", "--script", script, "--run-dir", "out")
    assert result.exit_code == 0, result.output
    assert "learner 1: lost: killed by the script" in result.output and "learner 2: joined" in result.output
    again = simulate("job.toml", "--cluster", "p775:stragglers=0.5", "--script", script, "--run-dir", "twice")
    assert again.exit_code == 0
    lines = [(Path(name) / "model.safetensors").read_bytes() for name in ("out", "twice")]
    assert lines[0] == lines[1], "the same every time"


def test_the_job_s_own_cluster_stays_and_steps_stand_for_epochs() -> None:
    Path("own.toml").write_text(JOB + 'engine = {name = "sim", cluster = "dgx-1", seed = 5}\n')
    result = simulate("own.toml", "--steps", "4", "--seed", "3", "--run-dir", "out")
    assert result.exit_code == 0 and "on dgx-1" in result.output, result.output
    kept = tomllib.loads(Path("out/job.toml").read_text())
    assert kept["engine"] == {"name": "sim", "cluster": "dgx-1", "seed": 5}
    assert kept["steps"] == 4 and kept["seed"] == 3 and "epochs" not in kept
    assert read_run(Path("out")).last["version"] == 4


def test_options_of_the_simulator_can_be_set() -> None:
    result = simulate("job.toml", "--set", "engine.check=true", "--set", "engine.seed=4", "--run-dir", "out")
    assert result.exit_code == 0, result.output
    kept = tomllib.loads(Path("out/job.toml").read_text())
    assert kept["engine"] == {"name": "sim", "cluster": "p775", "check": True, "seed": 4}


def test_sizes_only() -> None:
    result = simulate("job.toml", "--learners", "100", "--sync", "async", "--steps", "300", "--timing")
    assert result.exit_code == 0, result.output
    assert "for 300 updates of 300 gradients" in result.output and "overlap" in result.output
    assert not Path("runs").exists(), "nothing was trained"
    assert result.stderr == "", "progress is for terminals"


def test_groups_are_timed_by_their_plan() -> None:
    steps = ("job.toml", "--cluster", "p775", "--steps", "20", "--timing")
    alone, group = (simulate(*steps, *more) for more in ((), ("--set", "group=4", "--set", "plan=data")))
    assert group.exit_code == 0, group.output
    rates = [
        float(found.output.split("throughput")[1].split()[0].replace(",", "")) for found in (alone, group)
    ]
    assert rates[1] > 2 * rates[0]
    refused = simulate(*steps, "--set", "group=4", "--topology", "allreduce")
    assert refused.exit_code != 0 and "groups publish to servers" in refused.stderr


def test_a_timing_s_progress_is_a_line_on_a_terminal_and_nothing_elsewhere() -> None:
    looked: list[SoFar] = []

    def look() -> SoFar:
        looked.append(SoFar(share=0.25, seconds=90.0, updates=1_500))
        return looked[-1]

    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        with timing_progress(console) as follow:
            follow(look)
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("25 %  1,500 updates  1:30 virtual" in said) is terminal
        assert bool(said) is terminal
        assert bool(looked) is terminal
        looked.clear()


def test_help_is_good_reading() -> None:
    for command in ("simulate", "tradeoff"):
        text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert all(
            f"--{name}" in text for name in ("learners", "batch-size", "sync", "cluster", "timing", "set")
        )


BAD = {
    "no such cluster": (
        ["--cluster", "p777"],
        "--cluster p777: unknown cluster 'p777', did you mean 'p775'?; use one of",
    ),
    "no such key": (["--cluster", "p775:stragler=1"], "--cluster p775:stragler=1: "),
    "no script": (["--script", "kill everybody"], "--script kill everybody: no fault"),
    "bad dial": (["--sync", "softsync:4"], "--sync softsync:4: softsync:4 needs n <= learners"),
    "both": (["--epochs", "1", "--steps", "2"], "either epochs or steps"),
    "a hunt's option": (["--shards", "2"], "of a job write --topology servers:2"),
    "no option of the simulator": (["--set", "engine.speed=3"], "unknown argument"),
    "processes of a hunt": (["--jobs", "2"], "--jobs 2 is of a hunt"),
    "a folder of a timing": (["--timing", "--run-dir", "out"], "--timing leaves no run folder"),
    "real processes": (["--set", "engine=local"], "--set engine=local: this command simulates"),
    "a hunt of a job": (["--faults", "random", "--seeds", "2"], "a job file would be ignored"),
    "half a number": (["--script", "stop at 1.2.3 s"], "no fault: 'stop at 1.2.3 s'"),
    "no file": (["missing.toml"], "missing.toml: cannot be read"),
}


@pytest.mark.parametrize("arguments, words", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    given = arguments if arguments[0].endswith(".toml") else ["job.toml", *arguments]
    result = simulate(*given)
    assert result.exit_code == 2, result.output
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not Path("runs").exists()


def test_next_steps_are_the_same_command_with_another_dial() -> None:
    given = ("--cluster", "dgx-1:stragglers=0.1", "--learners", "3", "--set", "optimizer.lr=0.2")
    result = simulate("job.toml", *given, "--epochs", "1", "--run-dir", "out")
    assert result.exit_code == 0, result.output
    rest = "--epochs 1 --cluster dgx-1:stragglers=0.1 --set optimizer.lr=0.2"
    assert f"  syncline simulate job.toml --sync hardsync --learners 3 {rest}\n" in result.output
    assert f"  syncline simulate job.toml --sync async --learners 6 {rest}\n" in result.output


def test_a_script_of_a_timing_is_told() -> None:
    result = simulate("job.toml", "--timing", "--script", "kill learner 1 at 0.1 s; add 1 at 1000 s")
    assert "0.1 s  learner 1: lost: killed by the script" in result.output, result.output
    assert "not played, the run was over before: add 1 at 1000 s" in result.output
