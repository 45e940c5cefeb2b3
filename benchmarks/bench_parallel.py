"""A model cut over two processes: ours against DDP and against DTensor's hybrid. Time of one update.

    python -m benchmarks.bench_parallel [--models alexnet,dense] [--batches 64,8] [--rates loopback,1000]
        [--methods ddp,dtensor,ours] [--repeats 3] [--steps 5] [--json FILE] [--quick]

`alexnet` is AlexNet in one tower (62 M), `dense` its fully connected part. `ddp` gives each process half of the batch; `ours`
is `sl.partition` by the plan that counts floats, with local updates; `dtensor` has replicated convolutions on half of the
batch and columnwise and rowwise dense layers. Processes are joined by the loopback interface, or by a link of so many Mbit/s
between two network namespaces (root and iproute2). All methods run in turn, repeated; the table shows medians, and what
the plan predicts from measured layers. Leave the machine alone meanwhile.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncline as sl
from benchmarks import link, machine
from benchmarks.bench_overlap import Network, network_of
from benchmarks.overlap_learner import Place
from benchmarks.peers.team import Team
from benchmarks.workload import make_optimizer
from syncline.cluster.record import Compute, Link
from syncline.models import AlexNet
from syncline.plan import Plan, measure, plan

START_S, WARM_UP = 120.0, 2
QUICK = {"models": "small", "batches": "8", "rates": "loopback", "repeats": 1, "steps": 2}
GBIT = 125e6


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 1000


def dense() -> nn.Module:
    names = ((9216, 4096), (4096, 4096), (4096, 1000))
    layers = [part for a, b in names for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


MODELS = {
    "alexnet": Model(lambda: AlexNet(groups=1, norm=False, dropout=0.0), (3, 224, 224)),
    "dense": Model(dense, (9216,)),
    "small": Model(
        lambda: AlexNet(10, image=32, width=0.125, hidden=64, norm=False, dropout=0.0), (3, 32, 32), 10
    ),
}


@dataclass(frozen=True)
class Task:
    model: str
    batch: int
    method: str
    steps: int


@dataclass
class Row:
    """One model and batch on one link: seconds of an update by method and repeat."""

    model: str
    batch: int
    rate: str
    predicted: float | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)


def prepared(task: Task) -> tuple[nn.Module, Tensor, Tensor]:
    model = MODELS[task.model]
    torch.manual_seed(0)
    inputs = torch.randn(task.batch, *model.shape)
    return model.make(), inputs, torch.randint(model.classes, (task.batch,))


def work(_: Connection, rank: int, place: Place, task: Task) -> float:
    """One process: seconds of an update."""
    if place.namespace is not None:
        link.enter(place.namespace)
    if place.core is not None:
        os.sched_setaffinity(0, {place.core})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    timeout = timedelta(seconds=START_S)
    store = dist.TCPStore(place.address, place.port, 2, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    step = METHODS[task.method](task, rank)
    for _step in range(WARM_UP):
        step()
    dist.barrier()
    start = time.perf_counter()
    for _step in range(task.steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / task.steps


def _ddp(task: Task, rank: int) -> Callable[[], None]:
    model, inputs, labels = prepared(task)
    shared = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x, y = inputs.chunk(2)[rank], labels.chunk(2)[rank]
    return _stepping(shared, make_optimizer(shared.parameters()), x, y)


def _ours(task: Task, rank: int) -> Callable[[], None]:
    model, inputs, labels = prepared(task)
    mine = sl.partition(model, plan(model, inputs, group=2))
    optimizer = make_optimizer(mine.parameters())
    return _stepping(mine, optimizer, inputs, labels, mine.reduce_gradients)


def _dtensor(task: Task, rank: int) -> Callable[[], None]:
    """Data-parallel up to the first dense layer, then columns and rows in turn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, inputs, labels = prepared(task)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    whole = task.model == "dense"
    first = ColwiseParallel(input_layouts=Replicate() if whole else Shard(0))
    last = ColwiseParallel(output_layouts=Replicate())
    styles = dict(zip(names, (first, RowwiseParallel(), last), strict=True))
    parallelize_module(model, init_device_mesh("cpu", (2,)), styles)
    for parameter in model.parameters():
        if not hasattr(parameter, "device_mesh"):
            parameter.register_post_accumulate_grad_hook(_add_up)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return _stepping(model, optimizer, inputs if whole else inputs.chunk(2)[rank], labels)


def _add_up(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)


def _stepping(
    model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, reduce: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        reduce()
        optimizer.step()

    return step


METHODS: dict[str, Callable[[Task, int], Callable[[], None]]] = {
    "ddp": _ddp,
    "dtensor": _dtensor,
    "ours": _ours,
}


def predicted(name: str, batch: int, rate: str) -> float | None:
    """Seconds of an update by the plan, from layers measured here with one thread; over a link only."""
    if rate == "loopback":
        return None
    torch.set_num_threads(1)
    model, inputs, _ = prepared(Task(name, batch, "ours", 0))
    wire = Link(latency=2e-4, bandwidth=float(rate) / 1000 * GBIT)
    cluster = sl.Cluster(compute=Compute(base=1.0), card=wire)
    choices: Plan = plan(model, inputs, group=2)
    return plan(model, inputs, cluster, 2, compute=measure(model, inputs), given=choices.choices).seconds


def run(network: Network, task: Task) -> float:
    with Team(START_S + 60 * task.steps, method="fork") as team:
        members = [team.start(work, rank, place, task) for rank, place in enumerate(network.places())]
        return max(team.receive(member) for member in members)


def measured(name: str, batch: int, rate: str, methods: list[str], repeats: int, steps: int) -> Row:
    row = Row(name, batch, rate, predicted(name, batch, rate))
    with network_of(rate, 0.0) as network:
        for _ in range(repeats):
            for method in methods:
                row.seconds.setdefault(method, []).append(run(network, Task(name, batch, method, steps)))
    return row


def show(row: Row) -> None:
    print(f"\n{row.model}, batch {row.batch} of both, {row.rate}: seconds of an update")
    median = {method: statistics.median(values) for method, values in row.seconds.items()}
    for method, value in median.items():
        spread = f"{min(row.seconds[method]):.3f}..{max(row.seconds[method]):.3f}"
        ratio = f"{median['ddp'] / value:.2f} x ddp" if "ddp" in median else ""
        print(f"  {method:<10}{value:>9.3f}{spread:>18}  {ratio}")
    if row.predicted is not None:
        print(f"  predicted{row.predicted:>10.3f}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="alexnet,dense")
    parser.add_argument("--batches", default="64,8")
    parser.add_argument("--rates", default="loopback,1000")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    rows = []
    for rate in options.rates.split(","):
        for name in options.models.split(","):
            for batch in map(int, options.batches.split(",")):
                row = measured(name, batch, rate, options.methods.split(","), options.repeats, options.steps)
                show(row)
                rows.append(row)
    if options.json:
        found = {"machine": machine.describe(), "rows": [vars(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
