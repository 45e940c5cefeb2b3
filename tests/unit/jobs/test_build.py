"""Objects from the names of a job: as `train` takes them, tried before anything starts, refused with the key that is wrong."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

import syncline as sl
from syncline.data import digits
from syncline.jobs import Job, JobError
from tests.unit.jobs.own_job import SMALL


def test_building() -> None:
    text = SMALL + '[evaluate]\nsplit = "test"\n[schedule]\nname = "step"\nstep_size = 2\n'
    made = Job.parse(text, ["seed=5"]).build()
    assert set(made) == set(inspect.signature(sl.train).parameters) - {"wait", "progress"}
    torch.manual_seed(5)
    assert torch.equal(made["model"][1].weight, torch.nn.Linear(64, 10).weight), "as a plain script makes it"
    assert len(made["data"]) == 1442 and len(made["evaluate"]) == len(digits("test"))
    assert made["loss"].func is F.cross_entropy and made["loss"].keywords == {"label_smoothing": 0.1}
    assert made["optimizer"].func is torch.optim.SGD
    assert made["schedule"].func is lr_scheduler.StepLR
    assert (made["engine"], made["sync"], made["steps"], made["epochs"]) == ("local", "softsync:1", 3, None)


def test_building_leaves_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    Job.parse(SMALL).build()
    assert torch.equal(torch.rand(3), expected)


def test_train_takes_what_is_built() -> None:
    result = sl.train(**Job.parse(SMALL, ["engine={name='sim', compute=3.0}"]).build())
    assert result.updates == 3 and result.seconds > 6


def test_a_record_of_the_dial() -> None:
    made = Job.parse(SMALL, ["sync={splits=2, rate='share'}"]).build()
    assert made["sync"] == sl.Sync.parse("softsync:2")


def test_own_callables(own: Path) -> None:
    changes = [
        "model={name='own_parts:Net', width=7}",
        "data={name='own_parts:data', count=8}",
        "loss=",
        "objective={name='own_parts:objective', weight=2.0}",
        "evaluate={name='own_parts:score'}",
        "callbacks=[{name='own_parts:stop', after=0}, 'own_parts:stop']",
    ]
    job = Job.load(own, changes)
    made = job.build()
    assert type(made["model"]).__name__ == "Net" and made["model"].layers[1].out_features == 7
    assert len(made["data"]) == 8 and isinstance(made["objective"], partial) and made["loss"] is None
    assert made["evaluate"](None) == {"score": 1.0}
    assert [getattr(call, "keywords", None) for call in made["callbacks"]] == [{"after": 0}, None]
    assert Job.parse(job.dumps(), folder=str(own.parent)) == job


def test_data_that_is_drawn_repeats(own: Path) -> None:
    one, two, other = (
        Job.load(own, ["data=own_parts:drawn", f"seed={seed}"]).build()["data"].tensors[0]
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_objects_instead_of_callables(own: Path) -> None:
    made = Job.load(own, ["model={name='own_parts:made'}", "data=own_parts:points"]).build()
    assert made["model"].out_features == 10 and len(made["data"]) == 9
    with pytest.raises(JobError, match=r"model: 'own_parts:made' is made already and takes no arguments"):
        Job.load(own, ["model={name='own_parts:made', width=3}"])


def test_the_built_in_job_learns() -> None:
    job = Job.builtin(["engine=sim"])
    assert job.sync == "softsync:1" and job.learners == 4
    result = sl.train(**job.build())
    assert result.history[-1]["accuracy"] >= 0.95


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["model.sizes=[63, 10]"], r"job:5: model: mlp\(sizes=\[63, 10\]\) failed on the first examples of data: RuntimeError: mat1"),
        (["model.sizes=[64]"], r"model: mlp\(sizes=\[64\]\) failed: sizes must be a list of at least two sizes"),
        (["data.split=valid"], r"^job:9: data: digits\(split='valid'\) failed: split must be one of"),
        (["data={name='mnist', folder='/no/such/place'}"], r"--set data=.*: data: mnist\(folder='/no/such/place'\) failed: no folder"),
        (["data={name='builtins:dict'}"], r"data: builtins:dict\(\) gave dict, expected a torch Dataset"),
        (["optimizer.lr=-1.0"], r"optimizer: sgd\(lr=-1.0\) failed: ValueError: Invalid learning rate: -1.0"),
        (["optimizer.lr=fast"], r"optimizer: sgd\(lr='fast'\) failed: TypeError"),
        (["schedule={name='step', step_size='x'}"], r"schedule: step\(step_size='x'\) failed: TypeError"),
        (["schedule={name='step', step_size=0}"], r"schedule: step\(step_size=0\) failed: ZeroDivisionError"),
        (["optimizer.momentum=[1]"], r"optimizer: sgd\(.*momentum=\[1\]\) failed: TypeError"),
        (["loss=", "objective=own_parts:constant"], r"objective: own_parts:constant\(\) has no gradient: RuntimeError"),
        (["loss.label_smoothing=7.0"], r"loss: .* failed on the first examples of data: RuntimeError: label_smoothing must be between"),
        (["loss={name='cross_entropy', reduction='none'}"], r"loss: expected a scalar tensor, got a tensor of shape \(2,\); reduce it"),
        (["batch_size=2000"], r"--set batch_size=2000: batch_size: batch_size 2000 is larger than the data set of 1442 examples"),
        (["data={name='own_parts:single'}"], r"loss: takes batches of \(input, target\), data gives a list; use an objective"),
        (["data=own_parts:Endless"], r"data: own_parts:Endless\(\) has no length: TypeError"),
        (["evaluate=own_parts:Endless"], r"evaluate: own_parts:Endless\(\) has no length: TypeError"),
        (["engine={name='sim', compute=-1.0}"], r"engine: sim\(compute=-1.0\) failed: Sim: compute must be a number >= 0, got -1"),
        (["model={name='own_parts:broken'}"], r"own_parts:broken\(\) failed: RuntimeError: two lines"),
        (["model={name='own_parts:data'}"], r"own_parts:data\(\) gave TensorDataset, expected a torch Module"),
        (["loss=", "objective=own_parts:vector"], r"objective: expected a scalar tensor, got a tensor of shape \(2,\)"),
        (["evaluate={name='own_parts:data', count=0}"], r"evaluate: the data set is empty"),
    ],
)  # fmt: skip
def test_what_building_refuses(overrides: list[str], message: str, own: Path) -> None:
    job = Job.parse(SMALL, overrides, folder=str(own.parent))
    with pytest.raises(JobError, match=message) as caught:
        job.build()
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


# -- files ---------------------------------------------------------------------------------------------------
