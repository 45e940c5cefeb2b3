"""Does the simulator tell the truth? Steps per second of the local engine, measured and predicted.

    python -m benchmarks.bench_honest [--learners 2] [--sizes 0,1,2] [--repeats 3] [--seconds 3] [--json FILE]

The prediction knows one learner alone and a microbenchmark of the shard's work (`syncline.engines.sim.calibrate`), nothing of the runs
that it predicts. Calibration and runs take turns. The best of many short windows is compared: whatever else the machine does only
makes it slower. Leave it alone meanwhile all the same.
"""

import argparse
import dataclasses
import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import syncline as sl
from benchmarks import machine, ours
from benchmarks.bench_throughput import SIZES
from benchmarks.workload import Batch, backward, make_batch, make_model, make_optimizer
from syncline.engines.sim.calibrate import Measured, Workload, measure

PRESETS = ("hardsync", "softsync:1", "async")
WINDOW = 0.4  # seconds


def objective(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def workload(dims: tuple[int, ...], batch_size: int) -> Workload:
    return Workload(
        model=partial(make_model, dims),
        batch=lambda size: make_batch(dims, size, seed=0),
        objective=objective,
        optimizer=make_optimizer,
        batch_size=batch_size,
    )


def simulated_loop(session: sl.Session, dims: tuple[int, ...], batch_size: int, steps: int) -> None:
    model, batch = make_model(dims), make_batch(dims, batch_size, seed=session.rank)
    optimizer = session.optimizer(model, make_optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def predict(measured: Measured, dims: tuple[int, ...], batch_size: int, learners: int, sync: str) -> float:
    """Gradients per second, summed over learners."""
    steps = max(20, min(200, int(2.0 / (learners * measured.compute.base))))
    engine = sl.Sim(measured.cluster())
    result = sl.launch(
        simulated_loop, dims, batch_size, steps, learners=learners, sync=sync, engine=engine, threads=1
    )
    return result.gradients / result.seconds


def local_rates(
    dims: tuple[int, ...], batch_size: int, learners: int, sync: str, seconds: float
) -> list[float]:
    """Gradients per second of the local engine, summed over learners, in one window after another."""
    result = sl.launch(local_loop, dims, batch_size, seconds, learners=learners, sync=sync, threads=1)
    windows = [sum(window) for window in zip(*result.returned, strict=True)]
    return windows[: max(1, 3 * len(windows) // 4)]  # at the end the slower one may be alone


def local_loop(session: sl.Session, dims: tuple[int, ...], batch_size: int, seconds: float) -> list[float]:
    """Rates of windows of as many steps; learners that go their own ways are measured in their own windows."""
    model, batch = make_model(dims), make_batch(dims, batch_size, seed=session.rank)
    optimizer = session.optimizer(model, make_optimizer)

    def step() -> None:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()

    taken = session.mean(ours.timed(step, ours.WARM_UP_STEPS)) / ours.WARM_UP_STEPS
    taken = session.mean(ours.timed(step, max(3, int(0.2 / taken)))) / max(3, int(0.2 / taken))
    count = max(3, int(WINDOW / taken))
    windows = max(3, int(seconds / (count * taken)))
    return [count / ours.timed(step, count) for _ in range(windows)]


def best(many: list[Measured]) -> Measured:
    """Each figure's best: whatever disturbs makes it longer."""
    names = [field.name for field in dataclasses.fields(Measured) if field.name not in ("compute", "nbytes")]
    least: dict[str, Any] = {name: min(getattr(each, name) for each in many) for name in names}
    compute = min((each.compute for each in many), key=lambda each: each.base)
    return Measured(compute=compute, nbytes=many[0].nbytes, **least)


def compare(index: int, learners: int, repeats: int, seconds: float) -> list[dict[str, Any]]:
    dims, batch_size = SIZES[index]
    work, calibrations = workload(dims, batch_size), []
    rates: dict[str, list[float]] = {sync: [] for sync in PRESETS}
    for _ in range(repeats):
        calibrations.append(measure(work))
        for sync in PRESETS:
            rates[sync] += local_rates(dims, batch_size, learners, sync, seconds)
    measured = best(calibrations)
    rows = []
    for sync in PRESETS:
        seen, told = max(rates[sync]), predict(measured, dims, batch_size, learners, sync)
        rows.append(
            {
                "dims": dims,
                "batch_size": batch_size,
                "learners": learners,
                "sync": sync,
                "local": seen,
                "median": statistics.median(rates[sync]),
                "windows": len(rates[sync]),
                "simulated": told,
                "error": told / seen - 1,
                "calibration": dataclasses.asdict(measured),
            }
        )
    show(dims, batch_size, learners, measured, rows)
    return rows


def show(
    dims: tuple[int, ...], batch_size: int, learners: int, measured: Measured, rows: list[dict[str, Any]]
) -> None:
    parts = ("copy", "take", "fold", "serve", "handle", "latency", "step", "full_compute")
    told = ", ".join(f"{name} {1e6 * getattr(measured, name):.0f}" for name in parts)
    print(f"\n{'-'.join(map(str, dims))}, μ {batch_size}, {learners} learners")
    print(f"  one learner, µs: compute {1e6 * measured.compute.base:.0f}, {told}")
    for row in rows:
        seen = f"local {row['local']:>7.1f} (median of {row['windows']} windows {row['median']:.1f})"
        print(
            f"  {row['sync']:<11} {seen}  simulated {row['simulated']:>7.1f}  error {100 * row['error']:+.1f} %",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--sizes", default="0,1,2", help="which of the models of bench_throughput")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path, help="also write all figures here")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    head = machine.describe()
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    rows: list[dict[str, Any]] = []
    for index in map(int, given.sizes.split(",")):
        rows += compare(index, given.learners, given.repeats, given.seconds)
        if given.json:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps({"machine": head, "rows": rows}, indent=1) + "\n")
    worst = max(abs(row["error"]) for row in rows)
    print(f"\nlargest error {100 * worst:.1f} %")


if __name__ == "__main__":
    main()
