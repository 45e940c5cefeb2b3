"""Layers in job files: lines of problems, overrides, builds, `syncline show`, runs whose model loads alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import syncline as sl
from syncline.cli.app import app
from syncline.jobs import Job, JobError
from syncline.nn import Net, load_net
from syncline.nn.registry import TYPES

NET = """\
learners = 2
batch_size = 8
steps = 3

[data]
name = "digits"

[optimizer]
name = "sgd"
lr = 0.1

[[layers]]
name = "data"
type = "input"

[[layers]]
name = "label"
type = "label"

[[layers]]
name = "conv"
type = "convolution"
channels = 4
kernel = 3
sources = "data"

[[layers]]
name = "pool"
type = "pooling"
kernel = 2

[[layers]]
name = "fc"
type = "dense"
units = 10

[[layers]]
name = "loss"
type = "cross_entropy"
sources = ["fc", "label"]
"""


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        Job.parse(text).build()
    return caught.value.problems


def test_a_job_of_layers_is_read_written_and_built() -> None:
    job = Job.parse(NET)
    assert Job.parse(job.dumps()) == job
    made = job.build()
    assert isinstance(made["model"], Net) and "layers" not in made
    assert made["model"](torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert made["model"].records[0]["shape"] == [1, 8, 8]  # as the data has it


@pytest.mark.parametrize(
    "old, new, line",
    [
        ('"pooling"', '"poling"', "job:29: layer 'pool': type: no layer type is called 'poling', did you mean 'pooling'?"),
        ("units = 10", "unit = 10", "job:35: layer 'fc': unit: unknown argument, did you mean 'units'?; there are: units, bias, flatten"),
        ("units = 10", "units = 0", "job:35: layer 'fc': units: expected a whole number of at least 1, got 0"),
        ("units = 10\n", "", "job:32: layer 'fc': dense lacks its argument 'units'"),
        ('sources = "data"', 'sources = "dat"', "job:25: layer 'conv': sources: there is no layer 'dat', did you mean 'data'?; there are: data, label, conv, pool, fc, loss"),
        ('sources = "data"', 'sources = "pool"', "job:25: layer 'conv': sources: a cycle: 'conv' takes 'pool' takes 'conv'"),
        ('sources = "data"', 'sources = ["data", "label"]', "job:25: layer 'conv': sources: convolution takes one, got data, label"),
        ('sources = "data"', 'source = "data"', "job:25: layer 'conv': source: unknown argument, did you mean 'sources'?; there are: channels, kernel, stride, padding, dilation, groups, bias"),
        ("kernel = 3", "kernel = 9", "job:20: layer 'conv': convolution failed: RuntimeError: Calculated padded input size per channel: (8 x 8). Kernel size: (9 x 9). Kernel size can't be greater than actual input size; 'data' gives (1, 8, 8)"),
        ("kernel = 2", "kernel = 7", "job:27: layer 'pool': pooling by [7, 7] does not fit into maps of (6, 6); 'conv' gives (4, 6, 6)"),
        ("kernel = 2", "kernel = [2, 2, 2]", "job:27: layer 'pool': kernel = [2, 2, 2] has 3 numbers, there are 2 dimensions; 'conv' gives (4, 6, 6)"),
        ('["fc", "label"]', '["conv", "label"]', "job:33: layer 'fc': name: unused: it leads to no loss or output; take it away, connect it, or write output = true"),
        ('["fc", "label"]', '["label", "fc"]', "job:37: layer 'loss': cross_entropy: the output's shape () does not fit the target's (10,); 'label' gives (), 'fc' gives (10,)"),
        ('name = "fc"', 'name = "conv"', "job:33: layer 'conv': name: layer 3 is called so already"),
        ('name = "fc"', 'name = "a.b"', "job:33: layer 'a.b': name: expected letters, digits, _ and -, got 'a.b'"),
        ("units = 10", 'units = 10\nshare = "conv"', "job:36: layer 'fc': share: 'fc.weight' has shape (10, 36), 'conv.weight' has (4, 1, 3, 3)"),
        ("units = 10", 'units = 10\nshare = {weight = "pool.weight"}', "job:36: layer 'fc': share: there is no parameter 'pool.weight'"),
        ("units = 10", 'units = 10\ninit = "gausian"', "job:36: layer 'fc': init: no initialiser is called 'gausian', did you mean 'gaussian'?"),
        ("units = 10", "units = 10\nrate = {weigth = 2.0}", "job:36: layer 'fc': rate: dense has no parameter 'weigth', did you mean 'weight'?"),
        ("units = 10", "units = 10\ndecay = -1", "job:36: layer 'fc': decay: expected a finite number of at least 0, got -1"),
        ("steps = 3", 'steps = 3\nloss = "mse"', "job:4: loss: the layers have their own losses; take those away, or this"),
        ("steps = 3", 'steps = 3\nmodel = "mlp"', "layers: give either model or layers, not both"),
    ],
)  # fmt: skip
def test_problems_name_the_layer_and_the_line(old: str, new: str, line: str) -> None:
    assert old in NET
    problems = problems_of(NET.replace(old, new, 1))
    assert any(line in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_a_layer_is_changed_by_its_name() -> None:
    job = Job.parse(NET, ["layers.conv.channels=7", "layers.pool.kind=average"])
    assert job.build()["model"].conv.out_channels == 7
    with pytest.raises(JobError, match=r"--set: layers has none called 'cov'; there are: data, label, conv"):
        Job.parse(NET, ["layers.cov.channels=7"])
    with pytest.raises(
        JobError, match=r"--set layers.conv.channels=x: layer 'conv': channels: expected a whole"
    ):
        Job.parse(NET, ["layers.conv.channels=x"])


def test_own_types_come_from_modules_beside_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_layer.py").write_text(
        "from torch import nn\n\nclass Twice(nn.Module):\n    def forward(self, x):\n        return 2 * x\n"
    )
    own = '[[layers]]\nname = "twice"\ntype = "own_layer:Twice"\n\n[[layers]]\nname = "fc"'
    (tmp_path / "job.toml").write_text(NET.replace('[[layers]]\nname = "fc"', own))
    try:
        net = Job.load(tmp_path / "job.toml").build()["model"]
        assert net.twice(torch.ones(1)).item() == 2
        missing = NET.replace('[[layers]]\nname = "fc"', own.replace("Twice", "Thrice"))
        (line,) = problems_of(missing)
        assert re.match(r"job:34: layer 'twice': type: .*Thrice", line)
    finally:
        TYPES.pop("own_layer:Twice", None)


def test_layers_without_losses_take_the_jobs() -> None:
    text = NET[: NET.index('[[layers]]\nname = "loss"')].replace(
        '[[layers]]\nname = "label"\ntype = "label"\n', ""
    )
    (problem,) = problems_of(text)
    assert problem.startswith("job: loss: missing; give a loss")
    made = Job.parse('loss = "cross_entropy"\n' + text).build()
    assert made["loss"] is not None


def test_an_evaluation_of_own_losses_tells_the_accuracy() -> None:
    made = Job.parse(
        NET, ["engine=sim", "sync=hardsync", "evaluate.split=test", "steps=", "epochs=1"]
    ).build()
    assert set(sl.train(**made).history[-1].metrics) == {"loss", "accuracy"}


def test_a_function_beside_the_job_may_be_the_way_to_a_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_way.py").write_text(
        "def way(model, batch, *, scale=1.0):\n"
        "    value = scale * model.objective(batch)\n    value.backward()\n    return value\n"
    )
    own = 'gradient = {name = "own_way:way", scale = 2.0}\n' + NET.replace("lr = 0.1", "lr = 0.05")
    (tmp_path / "job.toml").write_text(own)
    settings = ["engine=sim", "sync=hardsync"]
    one = sl.train(**Job.load(tmp_path / "job.toml", settings).build()).state_dict()
    other = sl.train(**Job.parse(NET, settings).build()).state_dict()
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_multipliers_of_a_job_reach_the_optimizer() -> None:
    job = Job.parse(NET.replace("units = 10", "units = 10\nrate = 0.5"))
    made = job.build()
    assert sorted(group["lr"] for group in made["optimizer"](made["model"]).param_groups) == [0.05, 0.1]


def test_show_prints_and_draws_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(NET)
    done = CliRunner().invoke(app, ["show", "small.toml", "--graph"])
    assert done.exit_code == 0, done.output
    assert "conv   convolution" in done.stdout and "graph: small.svg" in done.stdout
    assert (tmp_path / "small.svg").read_text().startswith("<svg")
    (tmp_path / "named.toml").write_text(
        'model = {name = "mlp", sizes = [64, 10]}\nloss = "cross_entropy"\ndata = "digits"\noptimizer = {name = "sgd", lr = 0.1}\n'
    )
    assert "650 parameters" in CliRunner().invoke(app, ["show", "named.toml"]).stdout
    refused = CliRunner().invoke(app, ["show", "named.toml", "--graph"])
    assert refused.exit_code == 2 and "--graph draws nets that are written as layers" in refused.stderr


def test_a_run_leaves_a_model_that_loads_without_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Job.parse(NET, [f"run_dir={tmp_path / 'run'}", "engine=sim", "sync=hardsync"]).build()
    result = sl.train(**made)
    net = load_net(tmp_path / "run" / "model.safetensors")
    assert result.model is not None
    for (name, mine), (_, theirs) in zip(
        net.state_dict().items(), result.model.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["show", "run/model.safetensors", "--graph"])
    assert "graph: model.svg" in done.stdout and (tmp_path / "model.svg").exists()
