"""The commands in this process: exit codes, messages, what they print."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from typer.testing import CliRunner, Result

import syncline as sl
from syncline.cli.app import app
from syncline.dial import PRESETS
from syncline.errors import NothingLeft
from syncline.report.event_lines import plain
from syncline.report.html_page import page
from syncline.report.run_record import read_run
from syncline.report.run_text import epoch_line
from tests.unit.report.lines_of_a_run import OPTIONS, end, epoch, start, statistics, whole

JOB = """
learners = 2
batch_size = 8
epochs = 1
model = {name = "mlp", sizes = [64, 10]}
data = "digits"
loss = "cross_entropy"
optimizer = {name = "sgd", lr = 0.1}
engine = "sim"
"""


def syncline(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def written(folder: Path, lines: list[dict[str, Any]]) -> str:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_help_is_good_reading() -> None:
    top = syncline("--help").output
    assert all(command in top for command in ("train", "presets", "show", "compare"))
    options = syncline("train", "--help").output
    for name in (
        "sync",
        "topology",
        "engine",
        "learners",
        "batch-size",
        "epochs",
        "device",
        "seed",
        "run-dir",
    ):
        assert f"--{name}" in options
    assert all(f"--{name}" in options for name in ("resume", "set", "debug"))
    assert syncline("--version").output.startswith("syncline ")


@pytest.mark.parametrize("file", [[], ["job.toml"]], ids=["built-in", "file"])
def test_steps_alone_replace_the_job_s_epochs(file: list[str]) -> None:
    Path("job.toml").write_text(JOB)
    options = ["--steps", "7", "--learners", "2", "--set", "engine.name=sim", "--run-dir", "out"]
    result = syncline("train", *file, *options)
    assert result.exit_code == 0, result.output
    assert "finished: 7 updates in" in result.output and "epoch 1/" not in result.output
    job = Path("out/job.toml").read_text()
    assert "steps = 7" in job and "epochs" not in job
    both = syncline("train", *file, *options, "--epochs", "2")
    assert both.exit_code == 2 and "give either epochs or steps, got epochs = 2 and steps = 7" in both.output


def test_presets_come_from_the_dial() -> None:
    output = syncline("presets").output
    for preset in PRESETS:
        assert preset.syntax in output and preset.paper in output


def test_a_job_runs_to_its_end(tmp_path: Path) -> None:
    Path("job.toml").write_text(JOB)
    result = syncline("train", "job.toml", "--set", "evaluate.split=test", "--seed", "3", "--run-dir", "out")
    assert result.exit_code == 0, result.output
    assert "epoch 1/1" in result.output and "test accuracy" in result.output and "try next" in result.output
    job = (tmp_path / "out" / "job.toml").read_text()
    assert "seed = 3" in job and 'run_dir = "out"' in job
    assert syncline("show", "out").exit_code == 0


def test_without_a_name_a_run_gets_a_folder_under_runs() -> None:
    Path("my job.toml").write_text(JOB)
    result = syncline("train", "my job.toml")
    assert result.exit_code == 0, result.output
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-my-job") and (folder / "report.html").exists()
    assert folder.name in syncline("show").output, "the newest one"


def test_a_finished_run_goes_on_with_its_own_job() -> None:
    Path("job.toml").write_text(JOB)
    assert syncline("train", "job.toml", "--run-dir", "out").exit_code == 0
    result = syncline("train", "--resume", "out", "--epochs", "2")
    assert result.exit_code == 0, result.output
    assert "epoch 2/2" in result.output and "epoch 1/2" not in result.output
    assert "resume" not in Path("out/job.toml").read_text()
    assert [each["epoch"] for each in read_run("out").epochs] == [0, 1], "files count from 0"


@pytest.mark.parametrize(
    "options, made, total",
    [
        ([], "3 epochs", "--epochs 3 "),
        (["--epochs", "2"], "3 epochs", "--epochs 2 "),
        (["--steps", "5"], "updates", "--steps 5 "),
        (["job.toml", "--epochs", "1"], "3 epochs", "--epochs 1 "),
    ],
)
def test_a_run_with_nothing_left_to_do_says_so(options: list[str], made: str, total: str) -> None:
    Path("job.toml").write_text(JOB)
    assert syncline("train", "job.toml", "--epochs", "3", "--run-dir", "out").exit_code == 0
    before = {path: path.read_bytes() for path in sorted(Path("out").rglob("*")) if path.is_file()}
    result = syncline("train", "--resume", "out", *options)
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: nothing is left to do: ") and f"{made}, and {total}is the total" in line
    more = re.search(r"give (--\w+) (\d+) to make \d+ more$", line)
    assert more is not None
    assert before == {path: path.read_bytes() for path in sorted(Path("out").rglob("*")) if path.is_file()}
    assert syncline("train", "--resume", "out", more[1], more[2]).exit_code == 0


def test_in_python_it_is_a_warning_and_the_weights_come_back() -> None:
    options: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": SGD, "engine": "sim"}
    data = (torch.randn(32, 4), torch.randint(2, (32,)))
    first = sl.train(nn.Linear(4, 2), data, epochs=2, run_dir="out", **options)
    for total, words in (
        ({"epochs": 1}, "has made 2 epochs, and epochs=1 is the total, not how many more; give epochs=3"),
        ({"steps": 1}, f"has made {first.updates} updates, and steps=1 is the total"),
    ):
        with pytest.warns(NothingLeft, match=words):
            again = sl.train(
                nn.Linear(4, 2), data, resume="out", run_dir=f"other-{total}", **total, **options
            )
        assert all(torch.equal(again.state_dict()[key], value) for key, value in first.state_dict().items())


def test_a_run_over_all_reduce_goes_on_the_same_way() -> None:
    Path("job.toml").write_text(JOB)
    way = ("--topology", "allreduce", "--sync", "hardsync")
    assert syncline("train", "job.toml", *way, "--run-dir", "out").exit_code == 0
    result = syncline("train", "--resume", "out", "--epochs", "2")
    assert result.exit_code == 0, result.output
    assert "epoch 2/2" in result.output and "epoch 1/2" not in result.output
    assert syncline("show", "out").exit_code == 0
    assert json.loads(Path("out/run.json").read_text())["topology"].startswith("allreduce")


BAD: dict[str, tuple[list[str], str]] = {
    "no file": (["missing.toml"], "missing.toml: cannot be read: No such file"),
    "unknown key": (
        ["job.toml", "--set", "lerners=3"],
        "--set lerners=3: lerners: unknown key, did you mean 'learners'",
    ),
    "bad dial": (["job.toml", "--sync", "softsnyc:1"], "--sync softsnyc:1: no preset is called 'softsnyc'"),
    "bad number": (["job.toml", "--learners", "0"], "--learners 0: expected a whole number of at least 1"),
    "bad engine": (["job.toml", "--engine", "slim"], "--engine slim: "),
    "bad device": (["job.toml", "--device", "gpu7"], "--device gpu7: "),
    "bad topology": (["job.toml", "--topology", "ring"], "--topology ring: "),
    "no callable": (["job.toml", "--set", "model=nowhere:Net"], "nowhere"),
    "no pair": (["job.toml", "--set", "learners"], "is no key=value"),
    "not TOML": (["broken.toml"], "broken.toml:1: not TOML"),
    "no run": (["--resume", "nowhere"], "--resume nowhere: no such folder; name the folder of a run"),
    "a job, no run": (["job.toml", "--resume", "nowhere"], "--resume nowhere: no such folder"),
    "an empty folder": (
        ["--resume", "empty"],
        "--resume empty: no run is in this folder, it has no checkpoints",
    ),
    "a run of Python": (
        ["--resume", "old"],
        "old: there is no job.toml in it, as of a run that Python started; continue there with resume='old', or name a job "
        "file: syncline train JOB.toml --resume old",
    ),
    "no checkpoint": (["job.toml", "--resume", "old"], "no checkpoint at"),
    "a file as folder": (["job.toml", "--run-dir", "job.toml/x"], "cannot use job.toml/x"),
    "a run as folder": (["job.toml", "--run-dir", "old"], "old holds a run already"),
}


ONCE_BEGUN = ("no checkpoint at", "cannot use job.toml/x")  # failures of the disk, not of the command


@pytest.mark.parametrize("arguments, words", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_message(arguments: list[str], words: str) -> None:
    Path("job.toml").write_text(JOB)
    Path("broken.toml").write_text("= 3")
    written(Path("old"), whole())
    Path("empty").mkdir()
    result = syncline("train", *arguments)
    expected = 1 if words in ONCE_BEGUN else 2
    assert result.exit_code == expected, result.output
    assert words in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert not Path("runs").exists(), "nothing was begun"


def test_a_learner_that_raises_is_a_failure_in_one_line() -> None:
    Path("wrong.py").write_text(
        "def objective(model, batch):\n    if model.training and batch[0].shape[0] > 2:\n        raise ValueError('no luck')\n    return model(batch[0]).sum()\n"
    )
    Path("job.toml").write_text(JOB.replace('loss = "cross_entropy"', 'objective = "wrong:objective"'))
    result = syncline("train", "job.toml", "--run-dir", "out")
    assert result.exit_code == 1
    assert result.stderr.strip().endswith("raised ValueError: no luck; --debug shows where")
    assert "Traceback" not in result.output
    assert "failed" in syncline("show", "out").output
    debugged = syncline("train", "job.toml", "--run-dir", "other", "--debug")
    assert debugged.exit_code == 1 and "no luck" in str(debugged.exception)


def test_show_of_running_finished_and_damaged_runs(tmp_path: Path) -> None:
    running = written(tmp_path / "running", [start(), epoch(0, accuracy=0.5), statistics(1.0, version=10)])
    output = syncline("show", running).output
    assert "running" in output and "50.00 %" in output and "computing" in output
    output = syncline("show", written(tmp_path / "done", whole())).output
    assert "finished" in output and "81.25 % (best 87.50 % after epoch 3)" in output
    assert "learner 1: lost: its process (pid 7) ended with SIGKILL" in output
    gone = written(tmp_path / "gone", [start(pid=2**22 - 1), statistics(1.0, version=10)])
    assert "ended without a word" in syncline("show", gone).output
    with (Path(gone) / "events.jsonl").open("ab") as file:
        file.write(b'\x00\xff garbage\n{"kind":"end","learners":3,"staleness":[]}\n{"kind":"ep')
    result = syncline("show", gone)
    assert result.exit_code == 0 and "ended without a word" in result.output
    damage = "events.jsonl: left out is line 4 (end): Expected `array`, got `int` - at `$.learners`; what is shown lacks"
    assert damage in result.stderr.replace("\n", "")
    for bad in ("nowhere", str(tmp_path)):
        result = syncline("show", bad)
        assert result.exit_code == 2 and "no run folder" in result.stderr


def test_compare_side_by_side_with_a_plot(tmp_path: Path) -> None:
    one, two = (
        written(tmp_path / "one", whole()),
        written(tmp_path / "two", [start(), epoch(0, accuracy=0.9), end()]),
    )
    result = syncline("compare", one, two, "--plot", "plot.svg")
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if line.strip().startswith("test accuracy"))
    assert "81.25 % (best 87.50 % after epoch 3)" in row and "90.00 %" in row
    plot = ElementTree.parse("plot.svg").getroot()
    titles = [each.text for each in plot.iter("{http://www.w3.org/2000/svg}title")]
    assert "Training loss over epochs" in titles and "Test accuracy over time" in titles
    assert syncline("compare", one, two, "--plot", "plot.png").exit_code == 2
    assert syncline("compare", one, two, "--plot", "missing/plot.svg").exit_code == 1
    assert syncline("compare", one, "nowhere").exit_code == 2


def test_simulated_and_real_runs_are_told_apart(tmp_path: Path) -> None:
    virtual = {**OPTIONS, "engine": "sim", "cluster": "p775"}
    real = written(tmp_path / "real", whole())
    simulated = written(tmp_path / "simulated", [start(run=virtual), *whole()[1:]])
    (tmp_path / "simulated" / "run.json").write_text('{"took": 90.0}')
    shown = [" ".join(syncline("show", run).output.split()) for run in (real, simulated)]
    assert "finished: 4 epochs in 5.0 s test" in shown[0] and "virtual" not in shown[0]
    assert "4 epochs in 5.0 s virtual" in shown[1] and "simulating took 1:30" in shown[1]
    assert "simulated on p775" in shown[1]
    compared = " ".join(syncline("compare", real, simulated, "--plot", "plot.svg").output.split())
    assert "local │ sim, p775" in compared and "5.0 s │ 5.0 s virtual" in compared
    assert "simulating took │ – │ 1:30" in compared
    assert "of simulated runs virtual" in Path("plot.svg").read_text()
    assert "simulating" not in syncline("compare", real, real).output


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "syncline", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("syncline ")


# -- numbers that are not finite -----------------------------------------------------------------------------------

NUMBERS = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 10**400, 0])


def run_with(values: list[float], sync: str) -> list[dict[str, Any]]:
    """Return a run of epochs or of iterations with these numbers, in turn."""
    draw = cycle(values).__next__
    lines = []
    for line in [start(run={**OPTIONS, "sync": sync, "epochs": None, "steps": 30}), *whole()[1:]]:
        if line["kind"] == "epoch":
            names = ("loss", "accuracy", "rate")
            line |= {"loss": draw(), "losses": {"0": draw()}, "metrics": {name: draw() for name in names}}
            line["notes"] = {"step": draw(), "gradient": draw()}
        elif line["kind"] in ("statistics", "end"):
            staleness = {**line["staleness"], "mean": draw()}
            line |= {
                "staleness": staleness,
                "learners": [{**each, "loss": draw()} for each in line["learners"]],
            }
        if line["kind"] == "end":
            line["throughput"] = draw()
        lines.append(plain(line))
    return lines


@given(st.lists(NUMBERS, min_size=1, max_size=7), st.sampled_from(["softsync:1", "sandblaster"]))
@settings(max_examples=60, deadline=None)
def test_numbers_that_are_not_finite_are_shown(values: list[float], sync: str) -> None:
    with TemporaryDirectory() as root:
        folder = written(Path(root) / "run", run_with(values, sync))
        plot = Path(root) / "plot.svg"
        for command in (["show", folder], ["compare", folder, folder, "--plot", str(plot)]):
            result = syncline(*command)
            assert result.exit_code == 0, result.output
        assert "nan" not in "".join(re.findall(r"points='[^']*'", plot.read_text()))
        record = read_run(folder)
    ElementTree.fromstring(page(record).removeprefix("<!DOCTYPE html>\n"))
    for each in record.epochs:
        assert re.search(r"loss (-?[\d.]+|nan|-?inf)  ", epoch_line(record, each))


NAN = """
import torch
def evaluate(model):
    return {"loss": float("nan"), "accuracy": float("inf")}
def objective(model, batch):
    return model(batch[0]).sum() * 0 + float("nan")
"""


@pytest.mark.filterwarnings("ignore::syncline.errors.SynclineWarning")
def test_a_run_with_a_loss_that_is_not_finite() -> None:
    Path("broken_loss.py").write_text(NAN)
    job = JOB.replace('loss = "cross_entropy"', 'objective = "broken_loss:objective"')
    Path("job.toml").write_text(f'{job}evaluate = "broken_loss:evaluate"\n')
    result = syncline("train", "job.toml", "--run-dir", "out")
    assert result.exit_code == 0, result.output
    assert "epoch 1/1" in result.output and "loss nan  test loss nan  test accuracy inf %" in result.output
    shown = " ".join(syncline("show", "out").output.replace("│", " ").split())
    assert "in epoch 1 is nan" in shown and "epoch 0" not in shown
    page = Path("out/report.html").read_text()
    assert "in epoch 1 is nan" in page and "epoch 0" not in page
