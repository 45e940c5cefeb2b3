"""How long is an iteration of L-BFGS on two learners, against torch.optim.LBFGS in one process on the same full batch?

    python -m benchmarks.bench_sandblaster [--dims 784,2800,2800,1400,10] [--examples 4096] [--portion 256] [--iterations 6] [--json FILE]

Both use strong Wolfe searches and a history of 10 in float32; seconds per evaluation are compared, since searches may take different numbers of trials. torch
runs with one thread and with two. `commands` is the share of an iteration in which no portion is computed: shards work, messages travel. Leave the machine
alone meanwhile.
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncline as sl
from benchmarks import machine
from benchmarks.workload import make_batch, make_model

HISTORY = 10


def by_torch(
    model: nn.Module, batch: tuple[Tensor, Tensor], iterations: int, threads: int, portion: int
) -> dict[str, Any]:
    """One process; the batch is cut as ours is, so that activations fit a cache alike."""
    torch.set_num_threads(threads)
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=1,
        max_eval=25,
        history_size=HISTORY,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    count = [0]

    def closure() -> float:
        optimizer.zero_grad()
        count[0] += 1
        total, size = 0.0, len(batch[1])
        for x, y in zip(batch[0].split(portion), batch[1].split(portion), strict=True):
            value = F.cross_entropy(model(x), y) * (len(y) / size)
            value.backward()
            total += value.item()
        return total

    seconds = []
    for _ in range(iterations):
        start, before = time.perf_counter(), count[0]
        optimizer.step(closure)  # type: ignore[arg-type]
        seconds.append((time.perf_counter() - start) / (count[0] - before))
    loss = closure()
    torch.set_num_threads(1)
    return {
        "who": f"torch, {threads} thread{'s' * (threads > 1)}",
        "seconds": _middle(seconds),
        "loss": loss,
    }


def by_us(model: nn.Module, batch: tuple[Tensor, Tensor], args: argparse.Namespace) -> dict[str, Any]:
    result: sl.Result = sl.train(
        model,
        batch,
        loss=F.cross_entropy,
        sync="sandblaster",
        optimizer=sl.LBFGS(history=HISTORY, tolerance=0.0, decrease=0.0),
        steps=args.iterations,
        learners=args.learners,
        topology=f"servers:{args.shards}",
        batch_size=args.portion,
        threads=1,
    )
    seconds, moments = [], [*((each.seconds, each["evaluations"]) for each in result.history)]
    for (start, before), (end, after) in pairwise(moments):
        seconds.append((end - start) / (after - before))
    return {
        "who": f"syncline, {args.learners} learners, {args.shards} shards",
        "seconds": _middle(seconds),
        "loss": result.history[-1].loss,
        "discarded": result.dropped,
    }


def portion_seconds(model: nn.Module, batch: tuple[Tensor, Tensor], portion: int) -> float:
    """Of one portion's gradient, added to one that is there, on one thread: what an evaluation is at least."""
    torch.set_num_threads(1)
    x, y = batch[0][:portion], batch[1][:portion]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        seconds.append(time.perf_counter() - start)
    model.zero_grad()
    return min(seconds[1:])


def _middle(seconds: list[float]) -> float:
    """The first has imports and page faults in it."""
    return statistics.median(seconds[1:] or seconds)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--dims", default="784,2800,2800,1400,10")
    parser.add_argument("--examples", type=int, default=4096)
    parser.add_argument("--portion", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dims = tuple(int(each) for each in args.dims.split(","))
    batch = make_batch(dims, args.examples, seed=0)
    about = machine.describe()
    for name, value in about.items():
        print(f"{name:8} {value}")
    size = sum(parameter.numel() for parameter in make_model(dims).parameters())
    print(f"{size:,} parameters, {args.examples:,} examples, portions of {args.portion}\n")
    least = (
        portion_seconds(make_model(dims), batch, args.portion) * args.examples / args.portion / args.learners
    )
    ours = by_us(make_model(dims), batch, args)
    rows = [
        ours,
        *(by_torch(make_model(dims), batch, args.iterations, each, args.portion) for each in (1, 2)),
    ]
    for row in rows:
        ratio = row["seconds"] / ours["seconds"]
        print(f"{row['who']:34}{row['seconds']:9.3f} s an evaluation {ratio:6.2f}×   loss {row['loss']:.5f}")
    print(
        f"computing portions alone takes {least:.3f} s: commands and messages {1 - least / ours['seconds']:.1%}"
    )
    machine.keep(args.json, {"machine": about, "rows": rows, "least": least})


if __name__ == "__main__":
    main()
