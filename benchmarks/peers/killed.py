"""Peers whose workers step until somebody stops or kills them: torchft and plain DDP, both over Gloo.

torchft comes twice: with its DDP, and with its manager's all-reduce called by hand, since a failed all-reduce raises an
AssertionError within the hook of its DDP (0.2.0). Not contenders of the throughput benchmark; `bench_faults --stall` kills one of them.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.ddp import HOST, join
from benchmarks.peers.team import Member, Team, wait_for_end
from benchmarks.ticks import Ticker
from benchmarks.workload import backward, make_batch, make_model, make_optimizer

Size = tuple[tuple[int, ...], int]  # widths, batch size


@contextmanager
def ddp(folder: Path, size: Size, workers: int, timeout_s: float) -> Iterator[list[Member]]:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with Team(timeout_s) as team:
        arguments = (workers, store.port, folder, size, timeout_s)
        yield [team.start(work_ddp, rank, *arguments) for rank in range(workers)]


def work_ddp(
    _: Connection, rank: int, workers: int, port: int, folder: Path, size: Size, timeout_s: float
) -> None:
    join(rank, workers, port, timeout_s)
    dims, batch_size = size
    model = DistributedDataParallel(make_model(dims), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model.parameters())
    batch, tick = make_batch(dims, batch_size, seed=rank), Ticker(folder, rank)
    while True:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        tick()


@contextmanager
def torchft(
    folder: Path, size: Size, workers: int, timeout_s: float, by_hand: bool = False
) -> Iterator[list[Member]]:
    """`timeout_s` is the manager's and the process group's; the lighthouse has the defaults of its Python class."""
    with Team(timeout_s) as team:
        address = team.receive(team.start(serve_lighthouse, workers - 1))
        arguments = (address, folder, size, timeout_s, by_hand)
        yield [team.start(work_torchft, rank, *arguments) for rank in range(workers)]


def serve_lighthouse(connection: Connection, least: int) -> None:
    from torchft.coordination import LighthouseServer

    be_silent()
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=least)
    connection.send(lighthouse.address())
    wait_for_end(connection)


def be_silent() -> None:
    """torchft logs every step, its Rust part straight to the descriptors."""
    logging.disable(logging.CRITICAL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def work_torchft(
    _: Connection, rank: int, lighthouse: str, folder: Path, size: Size, timeout_s: float, by_hand: bool
) -> None:
    """One replica group of one worker; only steps that were committed count."""
    from torchft.ddp import DistributedDataParallel as FaultTolerant
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    be_silent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["no_proxy"] = "*"
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    dims, batch_size = size
    plain: nn.Module = make_model(dims)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=plain.load_state_dict,
        state_dict=plain.state_dict,
        min_replica_size=1,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{rank}",
        hostname=HOST,
        init_sync=False,
    )
    model = plain if by_hand else FaultTolerant(manager, plain)
    optimizer = OptimizerWrapper(manager, make_optimizer(model.parameters()))
    batch, tick = make_batch(dims, batch_size, seed=rank), Ticker(folder, rank)
    done = 0
    while True:
        optimizer.zero_grad()
        backward(model, batch)
        if by_hand:
            for work in [manager.allreduce(each.grad) for each in model.parameters()]:
                work.wait()
        optimizer.step()
        if manager.current_step() > done:
            tick()
        done = manager.current_step()
