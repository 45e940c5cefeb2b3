"""How fast are tables on a GPU, beside plain loops that really run at the same time?

    python -m benchmarks.bench_card [--sizes 0,1,2,3] [--learners 1,2] [--seconds 2] [--device cuda] [--host] [--json FILE]

Own loops on a fixed batch of 256 that lies on the card, SGD with momentum; steps/s of all learners together, and their share of as
many plain loops. with --host also the same with the table in host memory. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="0,1,2,3")
    parser.add_argument("--learners", default="1,2")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    head = machine.describe()
    if torch.cuda.is_available():
        head["gpu"] = torch.cuda.get_device_name()
    print(" · ".join(f"{key} {value}" for key, value in head.items()), flush=True)
    rows = []
    for size in map(int, given.sizes.split(",")):
        for learners in map(int, given.learners.split(",")):
            rows.append(found := row(WIDTHS[size], learners, given.seconds, given.device, host=given.host))
            shares = [
                f"{k} {v:,.0f} ({v / found['plain']:.2f})" for k, v in found.items() if isinstance(v, float)
            ]
            print(f"{found['parameters']:,} parameters, {learners} learners: {', '.join(shares)}", flush=True)
            if given.json:
                given.json.write_text(json.dumps({"head": head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
