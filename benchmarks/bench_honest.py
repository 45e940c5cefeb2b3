"""Does the simulator tell the truth? Steps per second of the local engine, measured and predicted.

    python -m benchmarks.bench_honest [--learners 2] [--sizes 0,1,2] [--seconds 15,15,40] [--window 0.2] [--json FILE]

The prediction knows one learner on a machine that plain loops keep busy, and microbenchmarks of the shard's work or, where each process
has a core, of what all of them do to the memory (`tools.calibration.calibrate`), nothing of the runs that it predicts. Calibration and runs take turns, in windows of a fraction of a
second between which nobody starts or ends, since the machine's speed drifts by a third within seconds: every run's window lies
between two of the one learner's, and is compared in units of these.

Two and eight learners on 16 cores in under four minutes, from a checkout (torch, numpy, cloudpickle; the package need not be installed):

    PYTHONPATH=src python -m benchmarks.bench_honest --learners 2,8 --json honest-16-cores.json

Leave the machine alone meanwhile.
"""

import dataclasses
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.bench_throughput import SIZES
from benchmarks.workload import Batch, make_batch, make_model, make_optimizer
from tools.calibration.calibrate import Calibration, Workload, table_shards
from tools.calibration.fitting import simulate
from tools.calibration.window_benchmark import Turns, Window

PRESETS = ("hardsync", "softsync:1", "async")
AIM = 0.15
LEAST_ROUNDS = 2
LINKS = 3  # windows of a run in one chain
STEPS = 5  # of a window, where these take longer than it should


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


class Cell:
    """One model under one dial: windows of the run, each between two samples of one learner."""

    def __init__(self, calibration: Calibration, run: Turns, sync: str) -> None:
        self._calibration, self._run, self._sync = calibration, run, sync
        self.runs: list[list[Window]] = []
        self.steps: list[float] = []  # of a learner, from all learners' rates
        self.units: list[float] = []  # steps of the one learner around each of them

    def look(self, seconds: float) -> None:
        """Some windows of the run, each between two of the one learner's."""
        self._calibration.look_at_crowd(self._sync)
        before = self._calibration.sample(self._sync, seconds)
        for _ in range(LINKS):
            windows = self._run.window(seconds)
            self._calibration.look_at_crowd(self._sync)
            after = self._calibration.sample(self._sync, seconds)
            self.runs.append(windows)
            self.steps.append(len(windows) / sum(window.rate for window in windows))
            self.units.append((before.one.step + after.one.step) / 2)
            before = after

    def compare(self, learners: int) -> dict[str, Any]:
        """Gradients per second over all learners: the run's, and the predicted."""
        measured = self._calibration.measured(self._sync)
        cluster = measured.cluster()
        told = simulate(cluster, measured, learners=learners).step
        ratios = [step / unit for step, unit in zip(self.steps, self.units, strict=True)]
        seen = median(ratios) * measured.step
        return {
            "sync": self._sync,
            "local": learners / seen,
            "quartiles": [learners / (ratio * measured.step) for ratio in reversed(quantiles(ratios))],
            "raw": learners / median(self.steps),
            "simulated": learners / told,
            "error": seen / told - 1,
            "measured": dataclasses.asdict(measured),
            "decisions": [dataclasses.asdict(each) for each in self._calibration.decisions[self._sync]],
            "looks": [dataclasses.asdict(looked) for looked in self._calibration.works[self._sync]],
            "cluster": cluster.record(),
            "parts": parts(self.runs),
            "steps": self.steps,
            "units": self.units,
        }


def parts(runs: list[list[Window]]) -> dict[str, float]:
    """What a learner's step consisted of: not used, but shown."""
    windows = [window for run in runs for window in run]
    names = ("step", "compute", "publish", "wait", "read", "inequality")
    return {name: median(getattr(window, name) for window in windows) for name in names}


def compare(index: int, learners: int, seconds: float, window: float) -> list[dict[str, Any]]:
    dims, batch_size = SIZES[index]
    work = workload(dims, batch_size)
    with ExitStack() as stack:
        calibration = stack.enter_context(Calibration(work, PRESETS, learners=learners))
        cells = []
        for sync in PRESETS:
            shards = table_shards(work, learners, sync)
            run = stack.enter_context(
                Turns(work, learners=learners, sync=sync, shards=shards, fixed_shards=True)
            )
            run.window(0.0)
            cells.append(Cell(calibration, run, sync))
        rounds = take_turns(calibration, cells, seconds, window)
    rows = [cell.compare(learners) for cell in cells]
    for row in rows:
        row |= {"dims": dims, "batch_size": batch_size, "learners": learners, "windows": LINKS * rounds}
    show(rows)
    return rows


def take_turns(calibration: Calibration, cells: list[Cell], seconds: float, window: float) -> int:
    """Rounds until the time is over; how many."""
    step = calibration.sample(PRESETS[0], window).one.step
    window = max(window, STEPS * step)
    end, rounds = time.monotonic() + seconds, 0
    while rounds < LEAST_ROUNDS or time.monotonic() < end:
        calibration.fold()
        for cell in cells:
            cell.look(window)
        rounds += 1
    return rounds


def show(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(
        f"\n{'-'.join(map(str, first['dims']))}, μ {first['batch_size']}, {first['learners']} learners, ",
        end="",
    )
    print(f"{first['windows']} windows; µs")
    for row in rows:
        print_row(row)


def print_row(row: dict[str, Any]) -> None:
    low, _, high = row["quartiles"]
    seen = row["measured"]
    print(
        f"  {row['sync']:<11} local {row['local']:>7.1f} ({low:.1f} to {high:.1f})  simulated {row['simulated']:>7.1f}  "
        f"error {100 * row['error']:+.1f} %"
    )
    latency = 1e6 * row["cluster"]["memory"]["latency"]
    told = _told(seen, ("step", "lost", "note", "reply"))
    print(
        f"    one learner: {told}, spread {seen['spread']:.2f}, latency {latency:.0f}, shards {seen['shards']}"
    )
    names = ("compute", "copy", "take", "fold", "serve")
    print(f"    parts: {_told(seen['one'], names)}")
    if seen["all"] is not None:
        print(f"    where all exchange gradients: {_told(seen['all'], names)}")
    told = _told(row["parts"], ("step", "compute", "publish", "wait", "read"))
    print(f"    in the run: {told}, inequality {row['parts']['inequality']:.2f}", flush=True)


def _told(values: dict[str, float], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {1e6 * values[name]:.0f}" for name in names)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--learners", default="2", help="numbers of learners, e.g. 2,8")
    parser.add_argument("--sizes", default="0,1,2", help="which of the models of bench_throughput")
    parser.add_argument("--seconds", default="15,15,40", help="of measuring, for each of the models")
    parser.add_argument("--window", type=float, default=0.2, help="seconds of each window")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    head = machine.announce()
    rows: list[dict[str, Any]] = []
    seconds = list(map(float, given.seconds.split(",")))
    for learners in map(int, given.learners.split(",")):
        for index in map(int, given.sizes.split(",")):
            rows += compare(index, learners, seconds[min(index, len(seconds) - 1)], given.window)
            machine.keep(given.json, {"machine": head, "rows": rows})
    errors = [abs(row["error"]) for row in rows]
    within = sum(error <= AIM for error in errors)
    print(f"\n{within} of {len(rows)} within {100 * AIM:.0f} %, the largest error {100 * max(errors):.1f} %")


if __name__ == "__main__":
    main()
