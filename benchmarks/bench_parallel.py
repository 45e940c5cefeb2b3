"""A model cut over two processes: ours against DDP and against DTensor's hybrid. Time of one update.

    python -m benchmarks.bench_parallel [--models alexnet,dense] [--batches 64,8] [--rates loopback,1000]
        [--methods ddp,dtensor,ours,group] [--repeats 3] [--steps 5] [--json FILE] [--quick]

`alexnet` is AlexNet in one tower (62 M), `dense` its fully connected part. `ddp` gives each process half of the batch;
`dtensor` has replicated convolutions on half of the batch and columnwise and rowwise dense layers; `ours` is `sl.partition` in
a plain loop, by the plan that counts floats; `group` is the same as `sl.launch(..., learners=1, group=2)` under torchrun, which
adds up gradients while backward runs. Processes are joined by the loopback interface, or by a link of so many Mbit/s between
two network namespaces (root and iproute2). All methods run in turn, repeated; the table shows medians, beside what the plan
predicts for `ours` from what was measured just before, in both processes at once: layers, the optimizer, the link.
Leave the machine alone meanwhile.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
from benchmarks import machine
from benchmarks.bench_overlap import Network, network_of
from benchmarks.overlap_learner import Place
from benchmarks.peers.team import Team
from benchmarks.workload import make_optimizer
from syncline.cluster import Compute, Link
from syncline.models import AlexNet
from syncline.parallel import Group
from syncline.plan import measure, plan, step_seconds

START_S, WARM_UP = 120.0, 2
QUICK = {"models": "small", "batches": "8", "rates": "loopback", "repeats": 1, "steps": 2}
WIRE = (256, 2 << 20)  # numbers that are exchanged to measure the link


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
    """Seconds of an update, or with the method "parts" what a prediction is made of; `choices` of ours, by hand."""

    model: str
    batch: int
    method: str
    steps: int
    processes: int = 2
    choices: Mapping[str, str] | None = None


@dataclass
class Row:
    """One model and batch on one link: seconds of an update by method and repeat."""

    model: str
    batch: int
    rate: str
    predicted: float
    seconds: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """Of one process: seconds of each layer for the whole batch and of its optimizer, and the link as it finds it."""

    layers: dict[str, float]
    optimizer: float
    wire: Link


def prepared(task: Task) -> tuple[nn.Module, Tensor, Tensor]:
    model = MODELS[task.model]
    torch.manual_seed(0)
    inputs = torch.randn(task.batch, *model.shape)
    return model.make(), inputs, torch.randint(model.classes, (task.batch,))


def work(_: Connection, rank: int, place: Place, task: Task) -> Any:
    """One process: seconds of an update."""
    place.enter()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    if task.method == "group":
        return _in_group(task, rank, place)
    timeout = timedelta(seconds=START_S)
    store = dist.TCPStore(place.address, place.port, task.processes, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.processes, timeout=timeout)
    if task.method == "parts":
        return _parts(task)
    return _timed(METHODS[task.method](task, rank), task.steps, dist.barrier)


def _timed(step: Callable[[], Any], steps: int, meet: Callable[[], Any]) -> float:
    for _ in range(WARM_UP):
        step()
    meet()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    meet()
    return (time.perf_counter() - start) / steps


def _parts(task: Task) -> Parts:
    model, inputs, _ = prepared(task)
    layers = measure(model, inputs)
    mine = sl.partition(model, _choices(task, model, inputs), inputs)
    optimizer = make_optimizer(mine.parameters())
    for parameter in mine.parameters():
        parameter.grad = torch.zeros_like(parameter)
    seconds = _timed(optimizer.step, 3, dist.barrier)
    small, large = (_timed(_exchange(count), 10, dist.barrier) for count in WIRE)
    return Parts(layers, seconds, Link(latency=small, bandwidth=4 * WIRE[1] / max(large - small, 1e-9)))


def _exchange(count: int) -> Callable[[], Any]:
    """So many numbers to the next process."""
    group, numbers = Group(dist.group.WORLD), torch.zeros(count)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent, received = ([count * (rank == other) for rank in range(group.size)] for other in (after, before))
    return lambda: group.exchange(numbers, sent, received)()


def _choices(task: Task, model: nn.Module, inputs: Tensor) -> Mapping[str, str]:
    return task.choices if task.choices is not None else plan(model, inputs, group=task.processes).choices


def _in_group(task: Task, rank: int, place: Place) -> float:
    words = {
        "RANK": rank,
        "WORLD_SIZE": task.processes,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": place.port,
    }
    os.environ.update({name: str(word) for name, word in words.items()})
    model, inputs, labels = prepared(task)

    def learner(session: sl.Session) -> float:
        mine = sl.partition(model, _choices(task, model, inputs), inputs)
        optimizer = session.optimizer(mine, make_optimizer)
        return _timed(_stepping(mine, optimizer, inputs, labels), task.steps, lambda: session.mean(0.0))

    seconds: float = sl.launch(learner, learners=1, group=task.processes).returned[0]
    return seconds


def _ddp(task: Task, rank: int) -> Callable[[], None]:
    model, inputs, labels = prepared(task)
    shared = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x, y = inputs.chunk(2)[rank], labels.chunk(2)[rank]
    return _stepping(shared, make_optimizer(shared.parameters()), x, y)


def _ours(task: Task, rank: int) -> Callable[[], None]:
    model, inputs, labels = prepared(task)
    mine = sl.partition(model, _choices(task, model, inputs), inputs)
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
EVERY = (*METHODS, "group")


def predicted(network: Network, task: Task) -> float:
    """Seconds of an update by the plan, from parts measured in all processes at once: each as slow as the slowest has it."""
    found: list[Parts] = run(network, replace(task, method="parts"))
    layers = {name: max(each.layers[name] for each in found) for name in found[0].layers}
    wire = max((each.wire for each in found), key=lambda wire: wire.latency + 1e6 / (wire.bandwidth or 1e12))
    cluster = sl.Cluster(compute=Compute(base=1.0), card=wire, learners_per_machine=1)
    model, inputs, _ = prepared(task)
    step = step_seconds(model, inputs, cluster, task.processes, _choices(task, model, inputs), compute=layers)
    return step + max(each.optimizer for each in found)


def run(network: Network, task: Task) -> list[Any]:
    with Team(START_S + 60 * task.steps) as team:
        places = network.places(task.processes)
        members = [team.start(work, rank, place, task) for rank, place in enumerate(places)]
        return [team.receive(member) for member in members]


def measured(name: str, batch: int, rate: str, methods: list[str], repeats: int, steps: int) -> Row:
    with network_of(rate, 0.0) as network:
        row = Row(name, batch, rate, predicted(network, Task(name, batch, "parts", steps)))
        for _ in range(repeats):
            for method in methods:
                times = run(network, Task(name, batch, method, steps))
                row.seconds.setdefault(method, []).append(max(times))
    return row


def show(row: Row) -> None:
    print(f"\n{row.model}, batch {row.batch} of both, {row.rate}: seconds of an update")
    median = {method: statistics.median(values) for method, values in row.seconds.items()}
    for method, value in median.items():
        spread = f"{min(row.seconds[method]):.3f}..{max(row.seconds[method]):.3f}"
        ratio = f"{median['ddp'] / value:.2f} x ddp" if "ddp" in median else ""
        print(f"  {method:<10}{value:>9.3f}{spread:>18}  {ratio}")
    off = f"{row.predicted / median['ours']:.2f} of what ours takes" if "ours" in median else ""
    print(f"  {'predicted':<10}{row.predicted:>9.3f}{'':>18}  {off}", flush=True)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--models", default="alexnet,dense")
    parser.add_argument("--batches", default="64,8")
    parser.add_argument("--rates", default="loopback,1000")
    parser.add_argument("--methods", default=",".join(EVERY))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    head = machine.describe()
    print(head)
    rows = []
    for rate in options.rates.split(","):
        for name in options.models.split(","):
            for batch in map(int, options.batches.split(",")):
                row = measured(name, batch, rate, options.methods.split(","), options.repeats, options.steps)
                show(row)
                rows.append(row)
    machine.keep(options.json, {"machine": head, "rows": [vars(row) for row in rows]})


if __name__ == "__main__":
    main()
