"""Checkpoints and resume over all-reduce: the same bits, with averages in flight too; other numbers of learners; what is refused."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset, TensorDataset

import syncline as sl
from syncline.errors import LearnerError, UsageError
from syncline.report.run_record import read_run

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE = 204  # of the last round some have a short batch, some none
SMALL = "allreduce:layerwise,bucket=200b"


def points() -> TensorDataset:
    x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    """Everything that has a state of its own: batch statistics, dropout."""
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.4), nn.Linear(40, 2))


def train(**options: Any) -> Any:
    settings = {
        "loss": F.cross_entropy,
        "optimizer": partial(Adam, lr=0.01),
        "schedule": partial(StepLR, step_size=1, gamma=0.6),
        "sync": "hardsync",
        "topology": "allreduce",
        "engine": "sim",
        "learners": 3,
        "batch_size": 16,
        "epochs": 3,
        "seed": 5,
        "threads": 1,
    }
    model, data = options.pop("model", net), options.pop("data", points())
    return sl.train(model, data, **{**settings, **options})


def unhurried(model: nn.Module, batch: Any) -> Tensor:
    """The same loss, slowly: a stop comes before the end."""
    time.sleep(0.04)
    return F.cross_entropy(model(batch[0]), batch[1])


def same(one: sl.Result, other: sl.Result, table: int = 0) -> bool:
    a, b = one.state_dict(table), other.state_dict(table)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").iterdir())


def check(result: sl.Result, whole: sl.Result) -> None:
    """As if nothing had happened."""
    assert same(result, whole)
    assert (result.version, result.gradients) == (whole.version, whole.gradients)
    assert result.staleness == whole.staleness
    assert result.statistics.tables[0].examples == whole.statistics.tables[0].examples
    assert [(r.epoch, r.version, r.loss) for r in result.history] == [
        (r.epoch, r.version, r.loss) for r in whole.history
    ]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "topology, sync",
    [
        ("allreduce", "hardsync"),
        (SMALL, "hardsync"),
        (SMALL + ",apply=reverse", "hardsync"),
        ("allreduce", "delayed:2"),
        (SMALL, "delayed:3"),
        (SMALL, "delayed:2 until 1 then hardsync"),
    ],
)
def test_from_any_checkpoint_to_the_same_bits(topology: str, sync: str, tmp_path: Path) -> None:
    way = {"topology": topology, "sync": sync}
    whole = train(**way)
    check(train(**way, run_dir=tmp_path / "a", checkpoint_every=2, keep_checkpoints=99), whole)
    folders = kept(tmp_path / "a")
    assert len(folders) >= 6
    for folder in folders:
        check(train(**way, resume=folder, run_dir=tmp_path / f"b{folder.name}"), whole)


@pytest.mark.parametrize("topology, sync", [("allreduce", "hardsync"), (SMALL, "delayed:2")])
def test_real_processes_go_on_to_the_same_bits_from_a_stop_and_from_the_middle(
    topology: str, sync: str, tmp_path: Path
) -> None:
    way = {"topology": topology, "sync": sync, "engine": "local", "learners": 2}
    whole = train(**way)
    slow = {"loss": None, "objective": unhurried}
    part = train(**way, **slow, run_dir=tmp_path / "a", checkpoint_every=4, keep_checkpoints=9, wait=False)
    while not part.statistics().tables or part.statistics().tables[0].version < 9:
        time.sleep(0.005)
    part.stop()
    assert part.wait().version < whole.version
    middle, last = kept(tmp_path / "a")[0], kept(tmp_path / "a")[-1]
    assert int(middle.name) == 4 and int(last.name) >= 9
    check(train(**way, resume=middle, run_dir=tmp_path / "b"), whole)
    check(train(**way, resume=tmp_path / "a"), whole)
    record = read_run(tmp_path / "a")
    assert record.state == "finished" and [each["epoch"] for each in record.epochs] == [0, 1, 2]


def test_the_twin_goes_on_with_a_real_run_and_with_its_own_clock(tmp_path: Path) -> None:
    whole = train(learners=2)
    train(learners=2, engine="local", run_dir=tmp_path / "a", checkpoint_every=5)
    check(train(learners=2, resume=kept(tmp_path / "a")[0], run_dir=tmp_path / "b"), whole)
    train(learners=2, run_dir=tmp_path / "c", checkpoint_every=5, keep_checkpoints=9)
    resumed = train(learners=2, resume=kept(tmp_path / "c")[1], run_dir=tmp_path / "d")
    assert resumed.history[0].seconds == whole.history[0].seconds  # the opening takes its time once more
    assert whole.history[1].seconds <= resumed.history[1].seconds < whole.history[1].seconds + 1


def test_a_finished_run_goes_on_for_more_epochs_as_a_longer_one_would_have(tmp_path: Path) -> None:
    """Averages in flight at the end are in the last checkpoint, not applied."""
    way = {"sync": "delayed:2", "topology": SMALL}
    done = train(**way, epochs=2, run_dir=tmp_path)
    assert int(kept(tmp_path)[-1].name) == done.version - 2
    check(train(**way, epochs=2, resume=tmp_path, run_dir=tmp_path / "again"), done)
    check(train(**way, epochs=4, resume=tmp_path), train(**way, epochs=4))


def test_a_stop_by_a_script_and_the_rest(tmp_path: Path) -> None:
    script = "stop at version 7"
    part = train(engine=sl.Sim(script=script), run_dir=tmp_path)
    assert part.version < 10 and part.interrupted is False
    check(train(engine=sl.Sim(script=script), resume=tmp_path), train())


@pytest.mark.parametrize("sync", ["hardsync", "delayed:2"])
@pytest.mark.parametrize("learners", [2, 4])
def test_with_another_number_of_learners(sync: str, learners: int, tmp_path: Path) -> None:
    part = train(sync=sync, engine=sl.Sim(script="stop at version 6"), run_dir=tmp_path)
    result = train(sync=sync, resume=tmp_path, learners=learners)
    assert result.statistics.tables[0].examples == 3 * SIZE
    assert result.version > part.version and [each.epoch for each in result.history] == [0, 1, 2]


@pytest.mark.parametrize(
    "topology, sync", [("allreduce", "hardsync"), ("allreduce", "delayed:1"), (SMALL, "hardsync")]
)
def test_averages_in_flight_are_applied_under_another_dial_and_way(
    topology: str, sync: str, tmp_path: Path
) -> None:
    whole = train(sync="delayed:3", topology=SMALL)
    train(sync="delayed:3", topology=SMALL, engine=sl.Sim(script="stop at version 6"), run_dir=tmp_path)
    result = train(sync=sync, topology=topology, resume=tmp_path)
    assert (result.version, result.gradients) == (whole.version, whole.gradients)
    assert result.statistics.tables[0].examples == 3 * SIZE and result.staleness.max == 3


def test_partitions_go_on_with_the_same_learners_only(tmp_path: Path) -> None:
    whole = train(policy="partition")
    train(policy="partition", run_dir=tmp_path / "a", checkpoint_every=4, keep_checkpoints=99)
    for folder in kept(tmp_path / "a"):
        check(train(policy="partition", resume=folder, run_dir=tmp_path / f"b{folder.name}"), whole)
    with pytest.raises(LearnerError, match=r"partition' of 3 learners .* with 2, .* resume with learners=3"):
        train(policy="partition", learners=2, resume=tmp_path / "a")


def test_servers_and_all_reduce_go_on_with_each_other(tmp_path: Path) -> None:
    flat = {"model": partial(nn.Linear, 6, 2), "keep_checkpoints": 99}  # nothing that is drawn
    train(**flat, topology="servers:2", run_dir=tmp_path / "s", checkpoint_every=7)
    train(**flat, run_dir=tmp_path / "a", checkpoint_every=7)
    onward = train(**flat, resume=kept(tmp_path / "s")[0], run_dir=tmp_path / "sa")
    back = train(**flat, topology="servers:2", resume=kept(tmp_path / "a")[0], run_dir=tmp_path / "as")
    whole = train(**flat)
    for result in (onward, back):
        assert result.version == whole.version
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(result.state_dict()[name], value)
    train(**flat, sync="delayed:2", run_dir=tmp_path / "d", checkpoint_every=4)
    with pytest.raises(UsageError, match=r"holds 2 averages .*delayed:2.* resume with topology='allreduce'"):
        train(topology="servers", sync="delayed:2", resume=tmp_path / "d")


def test_by_seconds_and_how_many_are_kept(tmp_path: Path) -> None:
    """In virtual time a step takes a second."""
    result = train(run_dir=tmp_path, checkpoint_every="4s", keep_checkpoints=2)
    versions = [event.details["version"] for event in result.events if event.kind == "checkpoint"]
    assert len(versions) >= 3 and versions == sorted(versions) and versions[-1] == result.version
    assert [int(folder.name) for folder in kept(tmp_path)] == versions[-2:]
    names = sorted(path.name for path in kept(tmp_path)[-1].iterdir())
    assert names == ["checkpoint.json", "learners.safetensors", "table0-shard0.safetensors"]
    for name in names[1:]:
        assert safetensors.torch.load_file(kept(tmp_path)[-1] / name)
    content = json.loads((kept(tmp_path)[-1] / "checkpoint.json").read_text())["content"]
    assert [each["version"] for each in content["manifest"]["history"]] == [r.version for r in result.history]


# -- own loops ---------------------------------------------------------------------------------------------------


def two_tables(session: sl.Session, epochs: int) -> int:
    one, two = nn.Linear(6, 4), nn.Linear(4, 2)
    first = session.optimizer(one, partial(SGD, lr=0.1, momentum=0.9))
    second = session.optimizer(two, partial(Adagrad, lr=0.1))
    loader = session.loader(points(), batch_size=12)
    with contextlib.suppress(KeyboardInterrupt):  # of a stop
        while loader.epoch < epochs:
            for x, y in loader:
                first.zero_grad()
                second.zero_grad()
                F.cross_entropy(two(F.dropout(one(x))), y).backward()
                first.step()
                second.step()
    return first.version - second.version


@pytest.mark.parametrize("topology", ["allreduce", SMALL])
def test_several_tables_stop_and_go_on_together(topology: str, tmp_path: Path) -> None:
    launch = partial(sl.launch, two_tables, 2, learners=2, topology=topology)
    whole = launch(engine="sim")
    for version in (3, 9):
        folder = tmp_path / str(version)
        part = launch(engine=sl.Sim(script=f"stop at version {version}"), run_dir=folder)
        assert part.returned == [0, 0] and part.version < whole.version
        result = launch(engine="sim", resume=folder)
        assert same(result, whole) and same(result, whole, table=1)


def accumulating(session: sl.Session, epochs: int) -> None:
    """A step every three batches."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    opt = session.optimizer(model, partial(SGD, lr=0.1, momentum=0.9))
    loader = session.loader(points(), batch_size=7)
    while loader.epoch < epochs:
        opt.zero_grad()
        for number, (x, y) in enumerate(loader):
            with session.accumulate():
                F.cross_entropy(model(x), y).backward()
            if number % 3 == 2:
                opt.step()
                opt.zero_grad()


def test_accumulated_gradients_are_computed_again(tmp_path: Path) -> None:
    launch = partial(sl.launch, accumulating, 2, learners=2, topology="allreduce", engine="sim")
    whole = launch()
    launch(run_dir=tmp_path / "a", checkpoint_every=1, keep_checkpoints=99)
    for folder in kept(tmp_path / "a")[1:3]:
        manifest = json.loads((folder / "checkpoint.json").read_text())["content"]["manifest"]
        (left,) = manifest["loaders"][0]["standing"]["fresh"]["0"].values()
        assert left == [int(folder.name) * 3 * 14, SIZE]
        assert same(launch(resume=folder, run_dir=tmp_path / f"b{folder.name}"), whole)


def without_loader(session: sl.Session, steps: int) -> int:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    opt = session.optimizer(model, partial(SGD, lr=0.1, momentum=0.9))
    while opt.version < steps:
        opt.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        opt.step()
    return opt.version


@pytest.mark.parametrize("topology", ["allreduce", SMALL])
def test_loops_without_loaders_go_on_by_their_version(topology: str, tmp_path: Path) -> None:
    launch = partial(sl.launch, without_loader, 12, learners=2, topology=topology, engine="sim")
    whole = launch()
    launch(run_dir=tmp_path / "a", checkpoint_every=5, keep_checkpoints=99)
    assert [folder.name for folder in kept(tmp_path / "a")] == ["000000005", "000000010", "000000012"]
    for folder in kept(tmp_path / "a"):
        result = launch(resume=folder, run_dir=tmp_path / f"b{folder.name}")
        assert result.returned == [12, 12] and same(result, whole), folder.name


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*points().tensors, strict=True))


def test_streams_go_on_where_they_stood(tmp_path: Path) -> None:
    options = {"data": Stream(), "batch_size": 9}
    whole = train(**options)
    train(**options, run_dir=tmp_path / "a", checkpoint_every=3, keep_checkpoints=99)
    for folder in kept(tmp_path / "a"):
        check(train(**options, resume=folder, run_dir=tmp_path / f"b{folder.name}"), whole)
    with pytest.raises(
        LearnerError, match=r"in the middle of epoch 1 by 3 learners .* resume with learners=3"
    ):
        train(**options, learners=2, resume=kept(tmp_path / "a")[0], run_dir=tmp_path / "c")


# -- optimizers --------------------------------------------------------------------------------------------------


class Counting(SGD):
    """Its state lies in its groups, as that of schedule-free methods does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["k"])


def plain(count: int) -> list[Tensor]:
    """What Counting makes of gradients that are all one, at its k-th step."""
    return [torch.tensor(-sum(0.5 / k for k in range(1, count + 1)))]


def falling(session: sl.Session, steps: int) -> float:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = session.optimizer(model, partial(Counting, lr=0.5))
    while opt.version < steps:
        opt.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        opt.step()
        if steps - opt.version <= opt.delay:
            opt.flush()
    return float(model.weight.detach())


@pytest.mark.parametrize("sync", ["hardsync", "delayed:2"])
def test_state_in_param_groups_is_the_optimizer_s_and_is_kept(sync: str, tmp_path: Path) -> None:
    launch = partial(sl.launch, falling, learners=2, sync=sync, topology="allreduce", engine="sim")
    launch(4, run_dir=tmp_path)
    for result in (launch(9), launch(9, resume=tmp_path)):
        assert result.returned[0] == pytest.approx(float(plain(9)[0]))


class Lookahead(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        params = list(params)
        self.base = SGD(params, lr=0.1)
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def test_an_optimizer_that_hides_state_has_no_checkpoints_and_says_so(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = train(optimizer=Lookahead, schedule=None, run_dir=tmp_path, checkpoint_every=5)
    assert result.version == train(optimizer=Lookahead, schedule=None).version
    (first, *_) = [str(each.message) for each in said]
    assert "Lookahead keeps a SGD in .base, which no checkpoint holds" in first and "The run goes on" in first
    assert kept(tmp_path) == []


def test_another_model_optimizer_or_data_set_is_refused(tmp_path: Path) -> None:
    train(run_dir=tmp_path, checkpoint_every=9, epochs=1)
    with pytest.raises(LearnerError, match=r"was made by another model.*0\.weight.*\[40, 6\].*\[41, 6\]"):
        train(model=lambda: nn.Sequential(nn.Linear(6, 41), nn.Linear(41, 2)), resume=tmp_path)
    with pytest.raises(LearnerError, match=r"holds the state of .*Adam, this run has .*SGD"):
        train(optimizer=partial(SGD, lr=0.1), resume=tmp_path)
    with pytest.raises(LearnerError, match="204 examples in loader 0"):
        train(data=TensorDataset(torch.zeros(50, 6), torch.zeros(50, dtype=torch.long)), resume=tmp_path)
