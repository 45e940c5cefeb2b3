"""Built-in learners as handlers against their plain reference, `train`'s loop on fibers: to the bit, to the second."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import syncline as sl

PRESETS = [
    "hardsync",
    "softsync:1",
    "softsync:2",
    "softsync:2,rate=staleness",
    "async",
    "async:rate=staleness",
    "downpour:push=1,fetch=1",
    "downpour:push=2,fetch=3,local_lr=0.05",
    "downpour:push=3,fetch=1,local_lr=0.05",
    "ssp:1",
    "backup:1",
    "delayed:1",
    "delayed:3",
    "hardsync until 1 then softsync:1 until 2 then downpour:push=2,fetch=2,local_lr=0.1",
]


def points(examples: int = 66) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(examples, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Dropout(0.2), nn.ReLU(), nn.Linear(20, 2))


class Pairs(Dataset[Any]):
    """Data that a thread would read ahead."""

    def __init__(self, examples: int = 66) -> None:
        self._points = points(examples)

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        return self._points[index]


def run(engine: bool | sl.Sim, **options: Any) -> sl.Result:
    given: dict[str, Any] = {
        "learners": 4,
        "batch_size": 4,
        "epochs": 3,
        "seed": 5,
        "evaluate": points(40),
        "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        "clip_norm": 1.0,
        "data": points(),
        **options,
    }
    data = given.pop("data")
    engine = sl.Sim(handlers=engine) if isinstance(engine, bool) else engine
    engine = sl.Sim(handlers=engine) if isinstance(engine, bool) else engine
    return sl.train(given.pop("model", network)(), data, engine=engine, threads=1, **given)


def assert_same(a: sl.Result, b: sl.Result) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    for what in ("version", "updates", "gradients", "dropped", "staleness", "seconds", "statistics"):
        assert getattr(a, what) == getattr(b, what), what
    assert a.history == b.history
    assert len(a.history) > 0 or a.version > 0


@pytest.mark.parametrize("topology", ["servers", "servers:2"])
@pytest.mark.parametrize("sync", PRESETS)
def test_every_preset(sync: str, topology: str) -> None:
    assert_same(*(run(handlers, sync=sync, topology=topology) for handlers in (True, False)))


@pytest.mark.parametrize(
    "sync", ["hardsync", "softsync:1", "delayed:2", "downpour:push=2,fetch=3,local_lr=0.05"]
)
def test_data_read_ahead(sync: str) -> None:
    assert_same(*(run(handlers, sync=sync, data=Pairs()) for handlers in (True, False)))


@pytest.mark.parametrize("sync", ["hardsync", "async", "ssp:0", "downpour:push=2,fetch=2,local_lr=0.05"])
@pytest.mark.parametrize("policy", ["partition", "sample"])
def test_policies(sync: str, policy: str) -> None:
    assert_same(*(run(handlers, sync=sync, policy=policy, learners=3) for handlers in (True, False)))


@pytest.mark.parametrize(
    "sync", ["hardsync", "softsync:2", "backup:1", "delayed:2", "downpour:push=2,fetch=2,local_lr=0.05"]
)
def test_a_set_number_of_updates(sync: str) -> None:
    assert_same(*(run(handlers, sync=sync, epochs=None, steps=13) for handlers in (True, False)))


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
def test_warm_start_and_an_early_stop(sync: str) -> None:
    options = {"sync": sync, "warmstart": 5, "callbacks": [lambda record: record.epoch == 1]}
    assert_same(*(run(handlers, **options) for handlers in (True, False)))


SCRIPT = (
    "kill learner 1 at version 6; add 2 at version 9; pause shard 0 for 0.3 s at 0.2 s; pause learner 0 for 0.1 s at 0.1 s; "
    "kill learner 0 at version 14"
)


@pytest.mark.parametrize("topology", ["servers", "servers:2"])
@pytest.mark.parametrize("sync", PRESETS)
def test_deaths_joins_and_pauses_on_an_uneven_cluster(sync: str, topology: str) -> None:
    cluster = "ethernet-1g:stragglers=0.3,bandwidth=1e4,base=0.02,per_example=0.01,jitter=exponential:0.5"
    results = [
        run(
            sl.Sim(cluster, script=SCRIPT, handlers=handlers),
            sync=sync,
            topology=topology,
            replace=True,
            epochs=2,
        )
        for handlers in (True, False)
    ]
    assert_same(*results)
    kinds = [[(event.kind, event.seconds) for event in result.events] for result in results]
    assert kinds[0] == kinds[1]
    assert {"lost", "replaced", "joined"} <= {kind for kind, _ in kinds[0]}
    first, second = (result.simulated for result in results)
    assert (first.learners, first.moved, first.copied) == (second.learners, second.moved, second.copied)


@pytest.mark.parametrize("sync", PRESETS[:-1])
def test_what_always_holds_is_checked_with_handlers_too(sync: str) -> None:
    result = run(sl.Sim("p775", script=SCRIPT, check=True), sync=sync, topology="servers:2", epochs=2)
    assert result.version > 6


class Drawing(nn.Module):
    """Draws from every generator, leaves one parameter unused at times, and has a frozen and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)
        self.tied = self.first
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        out = self.first(inputs) * noise * self.frozen
        return out + self.second(inputs) if random.random() < 0.5 else out


def drawing() -> nn.Module:
    torch.manual_seed(2)
    return Drawing()


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async", "downpour:push=2,fetch=2,local_lr=0.05"])
@pytest.mark.parametrize("topology", ["servers", "servers:2"])
def test_random_states_belong_to_the_learner(sync: str, topology: str) -> None:
    options = {"sync": sync, "topology": topology, "model": drawing, "learners": 3}
    assert_same(*(run(handlers, **options) for handlers in (True, False)))


def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    sync = "hardsync"
    whole = run(True, sync=sync, run_dir=tmp_path / "whole", epochs=4)
    run(True, sync=sync, run_dir=tmp_path / "parts", epochs=4, callbacks=[lambda record: record.epoch == 1])
    rest = run(True, sync=sync, resume=tmp_path / "parts", epochs=4)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name
    assert whole.version == rest.version


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async"])
def test_checkpoints(sync: str, tmp_path: Path) -> None:
    results = [
        run(handlers, sync=sync, run_dir=tmp_path / str(handlers), checkpoint_every=7, model=drawing)
        for handlers in (True, False)
    ]
    assert_same(*results)
    resumed = [
        run(handlers, sync=sync, resume=tmp_path / str(handlers), epochs=5, model=drawing)
        for handlers in (True, False)
    ]
    assert_same(*resumed)


def test_an_error_in_the_loss_names_the_learner() -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("lost shoe")

    with pytest.raises(sl.LearnerError, match="lost shoe") as caught:
        run(True, loss=broken, evaluate=None)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(sl.LearnerError, match="must be a scalar"):
        run(True, loss=lambda output, target: output, evaluate=None)
