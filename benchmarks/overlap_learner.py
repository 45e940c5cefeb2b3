"""What one learner of `bench_overlap` does, in a process of its own: the time per batch by one way to communicate.

All ways run the same model, batch and optimizer. `none` does not communicate, `communication` does nothing else,
`ddp` and `ddp:MB` are DistributedDataParallel (buckets of 25 MB as it comes, or of so many MB); the rest is ours.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncline as sl
from benchmarks import link
from benchmarks.workload import Batch, make_optimizer, stepping
from syncline.models import AlexNet, GoogLeNet

WARM_UP_STEPS = 4  # times k + 1: gradients in flight must have met the link's limit before the clock starts
START_S = 60.0
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A network of a kind that two cores can train, with its batch."""

    make: Callable[[], nn.Module]
    batch_size: int
    shape: tuple[int, int, int] = (3, 32, 32)

    def model(self) -> nn.Module:
        """The same weights every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    def batch(self, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(self.batch_size, *self.shape, generator=generator)
        return images, torch.randint(CLASSES, (self.batch_size,), generator=generator)

    @property
    def parameters(self) -> int:
        return sum(value.numel() for value in self.model().parameters())


def _alexnet(width: float, hidden: int) -> nn.Module:
    return AlexNet(CLASSES, image=32, width=width, hidden=hidden, norm=False)


def _googlenet(width: float) -> nn.Module:
    return GoogLeNet(CLASSES, image=32, width=width, norm=False)


WORKLOADS: Mapping[str, Workload] = {
    "alexnet": Workload(lambda: _alexnet(0.25, 2048), 64),
    "googlenet": Workload(lambda: _googlenet(0.5), 32),
    "alexnet-small": Workload(lambda: _alexnet(0.125, 64), 4),
    "googlenet-small": Workload(lambda: _googlenet(0.0625), 2),
}
# ours: topology and dial
OURS: Mapping[str, tuple[str, str]] = {
    "blocking": ("allreduce:blocking", "hardsync"),
    "layerwise": ("allreduce:layerwise", "hardsync"),
    "layerwise,bucket=4MiB": ("allreduce:layerwise,bucket=4MiB", "hardsync"),
    "layerwise,apply=reverse": ("allreduce:layerwise,apply=reverse", "hardsync"),
    "layerwise,apply=arrival": ("allreduce:layerwise,apply=arrival", "hardsync"),
    "delayed:1": ("allreduce", "delayed:1"),
    "delayed:2": ("allreduce", "delayed:2"),
    "delayed:3": ("allreduce", "delayed:3"),
}
METHODS = ("none", "communication", "ddp", "ddp:5", "ddp:1", *OURS)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a learner runs and how it finds the other; without a namespace on the loopback interface."""

    namespace: str | None
    address: str
    port: int
    interface: str
    core: int | None

    def enter(self) -> None:
        """With this process."""
        if self.namespace is not None:
            link.enter(self.namespace)
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})


@dataclass(frozen=True, kw_only=True)
class Task:
    workload: str
    method: str
    steps: int


@dataclass(frozen=True)
class Times:
    """Of one learner, per batch: on the clock, and of its core (all threads)."""

    wall: float
    core: float


def prepare() -> None:
    """In the process that forks: what torch imports late is imported once. No backward, which forbids forking."""
    torch.set_num_threads(1)
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    make_optimizer([weight]).step()


def work(_: Connection, rank: int, place: Place, task: Task, barrier: Barrier) -> Times:
    """Called in a fresh process, before it has started threads that compute or communicate."""
    place.enter()
    os.environ.update(environment(rank, place))
    workload = WORKLOADS[task.workload]
    if task.method in OURS:
        return ours(workload, task)
    if task.method == "none":
        return alone(workload, task, rank, barrier)
    timeout = timedelta(seconds=START_S)
    dist.init_process_group("gloo", timeout=timeout)
    try:
        if task.method == "communication":
            return communication(workload, task)
        return ddp(workload, task, rank)
    finally:
        dist.destroy_process_group()


def environment(rank: int, place: Place) -> dict[str, str]:
    """As torchrun sets it, one learner on each of two machines."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "GLOO_SOCKET_IFNAME": place.interface,
        "OMP_NUM_THREADS": "1",
    }


def alone(workload: Workload, task: Task, rank: int, barrier: Barrier) -> Times:
    model = workload.model()
    step = stepping(model, workload.batch(rank), make_optimizer(model.parameters()))
    return timed(step, task.steps, lambda: barrier.wait())


def ddp(workload: Workload, task: Task, rank: int) -> Times:
    megabytes = float(task.method.partition(":")[2] or 25)
    model = DistributedDataParallel(workload.model(), gradient_as_bucket_view=True, bucket_cap_mb=megabytes)
    step = stepping(model, workload.batch(rank), make_optimizer(model.parameters()))
    return timed(step, task.steps, dist.barrier)


def communication(workload: Workload, task: Task) -> Times:
    """All gradients as one buffer, reduced in place, one after the other."""
    buffer = torch.zeros(workload.parameters)
    return timed(lambda: dist.all_reduce(buffer), task.steps, dist.barrier)


def ours(workload: Workload, task: Task) -> Times:
    topology, sync = OURS[task.method]
    delay = sl.Sync.parse(sync).delay
    result = sl.launch(
        learner, workload, task.steps, delay, learners=2, sync=sync, topology=topology, threads=1
    )
    returned: list[Times] = [times for times in result.returned if times is not None]
    return returned[0]


def learner(session: sl.Session, workload: Workload, steps: int, delay: int) -> Times:
    model = workload.model()
    optimizer = session.optimizer(model, make_optimizer)
    step = stepping(model, workload.batch(session.rank), optimizer)
    return timed(step, steps, lambda: session.mean(0.0), WARM_UP_STEPS * (1 + delay))


def timed(
    step: Callable[[], None], steps: int, meet: Callable[[], Any], warm_up: int = WARM_UP_STEPS
) -> Times:
    """After a warm-up that all learners end together."""
    for _ in range(warm_up):
        step()
    meet()
    wall, core = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return Times((time.perf_counter() - wall) / steps, (time.process_time() - core) / steps)
