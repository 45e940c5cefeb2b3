"""The run folder of real (simulated) runs: what is in it, that it loads, and what a full disk does."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.errors import UsageError
from syncline.report import read_run
from syncline.report.event_lines import LineWriter, read_lines

INPUTS = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())


class Tied(nn.Module):
    """Tied, frozen and buffered: all that a state dict can be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(self.first(x)) + self.frozen(x)))


def trained(run_dir: Path, **changes: Any) -> sl.Result:
    arguments: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "engine": "sim",
        "learners": 2,
        "batch_size": 8,
        "epochs": 3,
        "evaluate": DATA,
        "run_dir": run_dir,
    }
    return sl.train(changes.pop("model", Tied), DATA, **{**arguments, **changes})


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = trained(run_dir)
    kinds = [line["kind"] for line in read_lines(run_dir / "events.jsonl")]
    assert kinds[0] == "start" and kinds[-1] == "end"
    assert kinds.count("epoch") == 3 and "best" in kinds and kinds.count("event") == 1  # the last checkpoint
    record = read_run(run_dir)
    assert record.state == "finished"
    assert record.last["version"] == result.version and record.last["gradients"] == result.gradients
    assert record.histogram == result.staleness.histogram
    assert [each["metrics"] for each in record.epochs] == [each.metrics for each in result.history]
    options = json.loads((run_dir / "run.json").read_text())
    assert options["sync"] == "softsync:1" and options["learners"] == 2 and options["examples"] == 64
    assert f"{result.version:,}" in (run_dir / "report.html").read_text()
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]


def test_a_simulated_run_says_so_with_its_cluster_and_who_was_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = "kill learner 1 at 0.01 s; add 1 at version 2; kill learner 2 at version 4"
    cluster = "p775:stragglers=0.5"
    result = trained(run_dir, learners=4, engine=sl.Sim(cluster, script=script), on_error="continue")
    record = read_run(run_dir)
    states = {each["rank"]: (each["state"], each["steps"]) for each in record.last["learners"]}
    assert states[1] == ("killed", 0), "before its first gradient"
    assert states[2][0] == "killed" and states[2][1] > 0
    assert [states[rank][0] for rank in (0, 3, 4)] == ["simulated"] * 3
    assert record.virtual and record.options["cluster"] == cluster
    first = record.took
    assert first is not None and 0 < first < 600
    before = next(line for line in read_lines(run_dir / "events.jsonl") if line["kind"] == "statistics")
    assert {each["state"] for each in before["learners"]} >= {"simulated"}
    said = (run_dir / "report.html").read_text()
    assert f"simulated, on {cluster}" in said and "virtual seconds" in said and "really taken" in said
    assert f"{os.cpu_count()} cores" not in said.split("<h2>Options</h2>")[0]
    assert "<td>machine that simulated it</td>" in said
    again = trained(run_dir, learners=4, epochs=4, engine=sl.Sim(cluster), resume=run_dir)
    took = read_run(run_dir).took
    assert again.version > result.version
    assert took is not None and took > first, "both sessions"


def test_models_load_into_the_plain_module_with_one_line(tmp_path: Path) -> None:
    result = trained(tmp_path / "run")
    model = Tied()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))  # strict
    assert result.model is not None
    for name, value in result.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    best = Tied()
    best.load_state_dict(load_file(tmp_path / "run" / "best.safetensors"))
    with safe_open(tmp_path / "run" / "best.safetensors", "pt") as file:
        notes = file.metadata()
    best.eval()
    accuracy = float((best(INPUTS).argmax(1) == DATA.tensors[1]).float().mean())
    assert notes["metric"] == "accuracy" and float(notes["value"]) == pytest.approx(accuracy)
    assert accuracy == pytest.approx(max(each.metrics["accuracy"] for each in result.history))


def test_a_folder_with_a_run_in_it_is_refused_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    trained(tmp_path, epochs=2)
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(UsageError, match="holds a run already"):
        trained(tmp_path)
    assert (tmp_path / "events.jsonl").read_bytes() == before
    trained(tmp_path, epochs=4, resume=tmp_path)
    assert (tmp_path / "events.jsonl").read_bytes().startswith(before), "append-only"
    record = read_run(tmp_path)
    assert [each["epoch"] for each in record.epochs] == [0, 1, 2, 3]
    assert len(record.starts) == 2 and record.starts[1]["resumed"]["epoch"] == 2


def test_events_alone_make_it_a_run(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="holds a run already"):
        trained(tmp_path)


def test_a_full_disk_is_said_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lines = LineWriter.write, []

    def full(writer: LineWriter, line: dict[str, Any]) -> None:
        lines.append(line)
        if len(lines) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(writer, line)

    monkeypatch.setattr(LineWriter, "write", full)
    with pytest.warns(RuntimeWarning, match="not complete: .*No space left") as caught:
        result = trained(tmp_path)
    assert len([each for each in caught if "not complete" in str(each.message)]) == 1
    assert len(result.history) == 3
    assert len(list(read_lines(tmp_path / "events.jsonl"))) == 2


def test_failures_are_in_the_folder(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("no such luck")

    with pytest.raises(sl.LearnerError):
        trained(tmp_path, loss=None, objective=broken, evaluate=None)
    record = read_run(tmp_path)
    assert record.state == "failed"
    assert record.end is not None and "no such luck" in record.end["error"]
    assert (tmp_path / "report.html").exists() and not (tmp_path / "model.safetensors").exists()


def test_a_stopped_run_says_so(tmp_path: Path) -> None:
    run = trained(tmp_path, epochs=500, wait=False)
    run.stop()
    run.wait()
    assert read_run(tmp_path).state == "stopped"


def test_a_run_that_nobody_waits_for_is_recorded_too(tmp_path: Path) -> None:
    run = trained(tmp_path, wait=False)
    run.recording._thread.join(30)
    assert read_run(tmp_path).state == "finished"


def test_own_loops_have_a_folder_too(tmp_path: Path) -> None:
    def learner(session: sl.Session) -> None:
        model = nn.Linear(6, 2)
        optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
        for x, y in session.loader(DATA, batch_size=8):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        session.log(rank=session.rank, bad=float("nan"))

    sl.launch(learner, learners=2, engine="sim", run_dir=tmp_path)
    nn.Linear(6, 2).load_state_dict(load_file(tmp_path / "model.safetensors"))
    logs = [line for line in read_lines(tmp_path / "events.jsonl") if line["kind"] == "log"]
    assert sorted(line["metrics"]["rank"] for line in logs) == [0, 1]
    assert logs[0]["metrics"]["bad"] == "nan"


def test_tensorboard_where_it_is_installed(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        trained(tmp_path)
        assert not (tmp_path / "tensorboard").exists()
        return
    trained(tmp_path)
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_the_throughput_of_a_run_that_was_over_at_the_first_look_is_not_zero(tmp_path: Path) -> None:
    trained(tmp_path / "run", epochs=1, batch_size=32, sync="hardsync")  # one update
    (end,) = [line for line in read_lines(tmp_path / "run" / "events.jsonl") if line["kind"] == "end"]
    assert end["version"] == 1 and end["throughput"] == pytest.approx(64 / end["seconds"])
