"""Simulated learners whose gradients are computed together on a GPU, against one at a time on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.models import Cifar10Full, cifar10_full_sgd
from syncline.sim.batched import deferred_steps as later
from syncline.sim.batched.batched_gradients import BatchedGradients
from syncline.sim.batched.shared_model import Ways

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DIALS = ("hardsync", "softsync:1", "softsync:2", "async", "ssp:1", "delayed:1")


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = 60 * torch.randn(102, 3, 32, 32, generator=generator).double()  # 26 batches of 4, the last of 2
    return TensorDataset(images, torch.randint(0, 10, (102,), generator=generator))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured in runs as short as these."""
    monkeypatch.setattr(later, "OFTEN", 8)


def network() -> Cifar10Full:
    """In float64: where two values are all but equal, float32's rounding lets pooling choose the other."""
    return Cifar10Full().double()


def train(data: TensorDataset, sync: str, **options: object) -> sl.Result:
    return sl.train(
        network,
        data,
        loss=F.cross_entropy,
        optimizer=cifar10_full_sgd,
        sync=sync,
        learners=6,
        batch_size=4,
        epochs=2,
        **options,
    )


def apart(one: sl.Result, other: sl.Result) -> float:
    """The largest difference of any parameter, relative to how far it moved from the start."""
    torch.manual_seed(0)
    start = network().state_dict()
    return max(
        float((one.state_dict()[name] - other.state_dict()[name]).norm())
        / max(1e-12, float((other.state_dict()[name] - value).norm()))
        for name, value in start.items()
    )


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launched"])
@pytest.mark.parametrize("sync", DIALS)
def test_the_gpu_trains_as_the_cpu_does(data: TensorDataset, sync: str, graphs: bool) -> None:
    alone = train(data, sync, engine=sl.Sim("p775"))
    together = train(data, sync, engine=sl.Sim("p775", batched=Ways(graphs=graphs)), device="cuda")
    assert not [event for event in together.events if "one at a time" in event.what], together.events
    assert (together.updates, together.seconds) == (alone.updates, alone.seconds)
    assert together.staleness == alone.staleness
    assert apart(together, alone) < 1e-6


def test_the_same_bits_every_time(data: TensorDataset) -> None:
    first, again = (train(data, "async", engine=sl.Sim("p775"), device="cuda") for _ in range(2))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_steps_that_wait_have_the_bits_of_steps_at_once(
    data: TensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = train(data, "async", engine=sl.Sim("p775"), device="cuda")
    monkeypatch.setattr(BatchedGradients, "waits", False)
    at_once = train(data, "async", engine=sl.Sim("p775"), device="cuda")
    for name, value in waiting.state_dict().items():
        assert torch.equal(value, at_once.state_dict()[name]), name
