"""How fast are tables on a GPU, beside plain loops that really run at the same time?

    python -m benchmarks.bench_card [--sizes 0,1,2,3] [--learners 1,2] [--seconds 2] [--device cuda] [--host] [--train] [--json FILE]

Own loops on a fixed batch of 256 that lies on the card, SGD with momentum; steps/s of all learners together, and their share of as
many plain loops. with --host also the same with the table in host memory. With --train also
examples/s of a small CNN (2.2 M, batch 128) through `sl.train` beside a plain loop, with data on the card and in host memory.
Leave the machine alone meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import syncline as sl
from benchmarks import machine

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTHS = [[256, 512, 512], [512, 1024, 1024], [1024, 2048, 4096, 1024], [2048, 4096, 8192, 2816]]


def net(widths: list[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def rate(model: nn.Module, optimizer: Any, device: Any, seconds: float, meet: Callable[[], Any]) -> float:
    """Steps per second, with one thread."""
    torch.set_num_threads(1)
    x = torch.randn(256, model[0].in_features, device=device)  # type: ignore[index]
    y = torch.randint(0, 10, (256,), device=device)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()

    steps(30)
    meet()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        steps(20)
        done += 20
    return done / (time.perf_counter() - began)


def learner(session: sl.Session, widths: list[int], seconds: float) -> float:
    model = net(widths).to(session.device)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=1e-4, momentum=0.9))
    return rate(model, optimizer, session.device, seconds, lambda: None)


def plain(widths: list[int], seconds: float, device: str, barrier: Any, found: Any) -> None:
    model = net(widths).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    found.put(rate(model, optimizer, device, seconds, barrier.wait))


def plain_loops(count: int, *given: Any) -> float:
    context = mp.get_context("spawn")
    barrier, found = context.Barrier(count), context.Queue()
    processes = [context.Process(target=plain, args=(*given, barrier, found)) for _ in range(count)]
    for process in processes:
        process.start()
    total = sum(found.get() for _ in processes)
    for process in processes:
        process.join()
    return total


def row(widths: list[int], learners: int, seconds: float, device: str, *, host: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in net(widths).parameters()),
        "learners": learners,
    }
    found["plain"] = plain_loops(learners, widths, seconds, device)
    for sync in ("hardsync", "async"):
        for name, table in ((sync, None), (f"{sync} host", "cpu"))[: 1 + host]:
            run = sl.launch(
                learner, widths, seconds, learners=learners, device=device, sync=sync, table_device=table
            )
            found[name] = sum(run.returned.values() if isinstance(run.returned, dict) else run.returned)
    return found


# -- through sl.train ----------------------------------------------------------------------------------------

EXAMPLES, BATCH, EPOCHS = 25_600, 128, 14
TRAINED = [(1, "hardsync"), (1, "async"), (2, "hardsync"), (2, "async"), (2, "delayed:1")]


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in ((3, 64), (64, 128)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 64, 256), nn.ReLU(), nn.Linear(256, 10))


def plain_epochs(x: torch.Tensor, y: torch.Tensor, device: str, *, there: bool) -> float:
    """Examples per second of the fastest epoch; from host memory a batch is pinned and copied when it is needed."""
    torch.set_num_threads(1)
    model = cnn().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if there:
        x, y = x.to(device), y.to(device)
    best = 0.0
    for _ in range(EPOCHS):
        order, began = torch.randperm(EXAMPLES).to(x.device), time.perf_counter()
        for rows in order.split(BATCH):
            a, b = x[rows], y[rows]
            if not there:
                a, b = (each.pin_memory().to(device, non_blocking=True) for each in (a, b))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
        loss.item()
        best = max(best, EXAMPLES / (time.perf_counter() - began))
    return best


def trained(x: torch.Tensor, y: torch.Tensor, device: str, learners: int, sync: str, *, there: bool) -> float:
    result = sl.train(
        cnn(),
        (x, y),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        learners=learners,
        sync=sync,
        device=device,
        data_device="cuda" if there else None,
        batch_size=BATCH,
        epochs=EPOCHS * learners,
    )
    ends = [record.seconds for record in result.history]
    return EXAMPLES / min(b - a for a, b in pairwise(ends))


def train_rows(device: str) -> dict[str, float]:
    x, y = torch.randn(EXAMPLES, 3, 32, 32), torch.randint(0, 10, (EXAMPLES,))
    found = {}
    for there in (True, False):
        where = "data on the card" if there else "data in host memory"
        whole = found[f"{where}, plain"] = plain_epochs(x, y, device, there=there)
        print(f"{where}: plain {whole:,.0f} examples/s", flush=True)
        for learners, sync in TRAINED:
            rate_ = found[f"{where}, {learners} {sync}"] = trained(x, y, device, learners, sync, there=there)
            print(f"  {learners} learners, {sync}: {rate_:,.0f} ({rate_ / whole:.2f})", flush=True)
    return found


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--sizes", default="0,1,2,3")
    parser.add_argument("--learners", default="1,2")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    head = machine.announce(" · ", **gpu)
    rows = []
    for size in map(int, given.sizes.split(",")):
        for learners in map(int, given.learners.split(",")):
            rows.append(found := row(WIDTHS[size], learners, given.seconds, given.device, host=given.host))
            shares = [
                f"{k} {v:,.0f} ({v / found['plain']:.2f})" for k, v in found.items() if isinstance(v, float)
            ]
            print(f"{found['parameters']:,} parameters, {learners} learners: {', '.join(shares)}", flush=True)
            machine.keep(given.json, {"head": head, "rows": rows})
    if given.train:
        found = train_rows(given.device)
        machine.keep(given.json, {"head": head, "rows": rows, "train": found})


if __name__ == "__main__":
    main()
