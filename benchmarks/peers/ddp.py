"""DistributedDataParallel over Gloo on the loopback interface: lockstep, all-reduce, an optimizer per worker."""

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.team import START_S, WARM_UP_STEPS, Team, command_line
from benchmarks.workload import backward, make_batch, make_model, make_optimizer

HOST = "127.0.0.1"


def run(dims: tuple[int, ...], batch_size: int, workers: int, seconds: float) -> float:
    # The store lives here, on a port that the system picks, so that runs never collide.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with Team(seconds) as team:
        arguments = (workers, store.port, dims, batch_size, seconds)
        members = [team.start(work, rank, *arguments) for rank in range(workers)]
        return sum(team.receive(member) for member in members)


def work(
    _: Connection,
    rank: int,
    workers: int,
    port: int,
    dims: tuple[int, ...],
    batch_size: int,
    seconds: float,
) -> float:
    join(rank, workers, port, START_S)
    try:
        return lockstep_rate(dims, batch_size, rank, seconds)
    finally:
        dist.destroy_process_group()


def join(rank: int, workers: int, port: int, timeout_s: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timeout)


def lockstep_rate(dims: tuple[int, ...], batch_size: int, rank: int, seconds: float) -> float:
    """Steps per second of this worker; all workers take the same number of steps."""
    # Bucket views gained about a tenth at 14 M parameters; static_graph and other bucket sizes gained nothing
    # beyond the noise.
    model = DistributedDataParallel(make_model(dims), gradient_as_bucket_view=True)
    batch = make_batch(dims, batch_size, seed=rank)
    optimizer = make_optimizer(model.parameters())

    def timed(steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
        return time.perf_counter() - start

    timed(WARM_UP_STEPS)
    for portion in (0.25, 1.0):
        steps = agreed(WARM_UP_STEPS * portion * seconds / timed(WARM_UP_STEPS))
        elapsed = timed(steps)
    return steps / elapsed


def agreed(steps: float) -> int:
    """Rank 0's number of steps, at least a few."""
    number = torch.tensor([max(WARM_UP_STEPS, round(steps))])
    dist.broadcast(number, src=0)
    return int(number.item())


if __name__ == "__main__":
    command_line(run)
