"""What a worker of `bench_cluster` does, ours and DDP's alike: gradients per second, and what goes over the link meanwhile."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import syncline as sl
from benchmarks import link
from benchmarks.peers.team import START_S
from benchmarks.workload import backward, make_batch, make_model, make_optimizer

WARM_UP_STEPS = 3
LEAST_STEPS = 3


@dataclass(frozen=True)
class Pace:
    """Of one worker, and of the link of its node; a second."""

    rate: float  # gradients
    sent: float  # bytes
    received: float
    computing: float = (
        0.0  # seconds of forward and backward: with those seen to communicate a second (Rudra's overlap, R8)
    )


def pace(step: Callable[[], float], seconds: float, mean: Callable[[float], float], *, free: bool) -> Pace:
    """Over a window that all begin together: so many seconds, or, where all wait for each other, as many steps for all.

    A step says how long it computed.
    """
    began = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        step()
    usual = mean((time.perf_counter() - began) / WARM_UP_STEPS)
    steps = None if free else max(LEAST_STEPS, round(seconds / usual))
    window, count, computing = Window(), 0, 0.0
    while count < LEAST_STEPS or (window.seconds < seconds if steps is None else count < steps):
        computing += step()
        count += 1
    return window.pace(count, computing)


class Window:
    """From its making on."""

    def __init__(self) -> None:
        self._traffic, self._began = link.traffic(), time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def pace(self, gradients: int, computing: float = 0.0) -> Pace:
        seconds, traffic = self.seconds, link.traffic()
        sent, received = (now - then for now, then in zip(traffic, self._traffic, strict=True))
        return Pace(gradients / seconds, sent / seconds, received / seconds, computing / seconds)


def ours(session: sl.Session, dims: tuple[int, ...], batch_size: int, seconds: float, free: bool) -> Pace:
    model = make_model(dims)
    batch = make_batch(dims, batch_size, seed=session.rank)
    optimizer = session.optimizer(model, make_optimizer)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        backward(model, batch)
        computed = time.perf_counter() - began
        optimizer.step()
        return computed

    return pace(step, seconds, session.mean, free=free)


def ddp(
    _: Connection,
    rank: int,
    workers: int,
    namespace: str,
    cores: list[int],
    meeting: str,
    dims: tuple[int, ...],
    batch_size: int,
    seconds: float,
) -> Pace:
    link.enter(namespace)
    os.sched_setaffinity(0, cores)
    os.environ["GLOO_SOCKET_IFNAME"] = link.INTERFACE
    timeout = timedelta(seconds=START_S)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers, timeout=timeout)
    try:
        return _ddp(rank, dims, batch_size, seconds)
    finally:
        dist.destroy_process_group()


def _ddp(rank: int, dims: tuple[int, ...], batch_size: int, seconds: float) -> Pace:
    model = DistributedDataParallel(make_model(dims), gradient_as_bucket_view=True)
    batch = make_batch(dims, batch_size, seed=rank)
    optimizer = make_optimizer(model.parameters())

    def step() -> float:  # what it communicates is inside of backward
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        return 0.0

    return pace(step, seconds, _mean, free=False)


def _mean(value: float) -> float:
    number = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(number)
    return float(number.item()) / dist.get_world_size()
