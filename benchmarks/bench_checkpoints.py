"""What do checkpoints cost a large model, and how long does a lost shard hold it up?

    python -m benchmarks.bench_checkpoints --cost [--repeats 4] [--seconds 15]
    python -m benchmarks.bench_checkpoints --recovery [--shards 1,2,4] [--repeats 3] [--picture FILE]

4096-4096-4096-1000 (38 M parameters), μ 64, SGD with momentum, two learners in lockstep. --cost: examples per second with
a checkpoint every five seconds and with none, runs in turn. --recovery: a shard is killed with -9 shortly after a
checkpoint; until the supervisor says "recovered", and until the next update.
"""

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import syncline as sl
from benchmarks import machine, ticks
from benchmarks.bench_faults import kept
from benchmarks.workload import backward, make_batch, make_model, make_optimizer
from syncline.table.checkpoints import Folder

DIMS = (4096, 4096, 4096, 1000)
BATCH_SIZE = 64
LEARNERS = 2
WARM_UP_STEPS = 3
START_S = 60.0
AGAIN_S = 60.0  # for the first update after a loss
UPDATES_PER_CHECKPOINT = 8  # when a shard is to be killed


def learner(session: sl.Session, folder: Path, dims: tuple[int, ...]) -> None:
    model, batch = make_model(dims), make_batch(dims, BATCH_SIZE, seed=session.rank)
    optimizer = session.optimizer(model, make_optimizer)
    tick = ticks.Ticker(folder, session.rank)
    while not session.ending:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        tick()


def start(folder: Path, dims: tuple[int, ...], **keywords: Any) -> sl.Run:
    """A run that has warmed up."""
    run = sl.launch(
        learner, folder, dims, learners=LEARNERS, sync="hardsync", threads=1, wait=False, **keywords
    )
    warm = ticks.wait_until(
        lambda: all(ticks.count(folder, rank) >= WARM_UP_STEPS for rank in range(LEARNERS)), START_S
    )
    if not warm:
        run.stop()
        run.wait(60)
        raise RuntimeError(f"no {WARM_UP_STEPS} updates within {START_S:.0f} s")
    return run


# -- what checkpoints cost ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Some seconds of training."""

    every: str | None
    rate: float  # examples/s, all learners
    checkpoints: int  # complete, the one at the end included
    longest_step: float


def stretch(dims: tuple[int, ...], seconds: float, every: str | None) -> Stretch:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = {"run_dir": folder / "run", "checkpoint_every": every} if every else {}
        run = start(folder, dims, **place)
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        run.stop()
        result = run.wait(120)
        steps = [
            [step for step in ticks.times(folder, rank) if begin <= step <= end] for rank in range(LEARNERS)
        ]
    rates = [(len(each) - 1) / (each[-1] - each[0]) for each in steps]
    return Stretch(
        every=every,
        rate=BATCH_SIZE * sum(rates),
        checkpoints=sum(event.kind == "checkpoint" for event in result.events),
        longest_step=max(ticks.largest_gap(each, each[0], each[-1])[0] for each in steps),
    )


def cost(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    print(f"examples/s over {given.seconds:g} s, in turn")
    pairs = []
    for _ in range(given.repeats):
        without, with_them = (stretch(given.dims, given.seconds, every) for every in (None, given.every))
        pairs.append((without, with_them))
        print(
            f"  without {without.rate:6.1f} (longest step {without.longest_step:.2f} s), "
            f"every {given.every} {with_them.rate:6.1f} (longest step {with_them.longest_step:.2f} s, "
            f"{with_them.checkpoints} checkpoints): {with_them.rate / without.rate:.3f}",
            flush=True,
        )
        keep({"question": "cost", "dims": given.dims, "runs": [asdict(without), asdict(with_them)]})
    ratios = [with_them.rate / without.rate for without, with_them in pairs]
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f}…{max(ratios):.3f}")


# -- how long a lost shard takes -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One kill of a shard; seconds since the kill, except where said."""

    shards: int
    shard: int  # which was killed
    back: float  # from noticing the loss until all shards are restarted (the event's own figure)
    next_update: float
    usual_step: float
    updates_lost: int


def recovery(dims: tuple[int, ...], shards: int, chance: random.Random) -> Recovery:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = folder / "run"
        run = start(
            folder,
            dims,
            topology=f"servers:{shards}",
            run_dir=place,
            checkpoint_every=UPDATES_PER_CHECKPOINT,
        )
        ticks.wait_until(lambda: bool(Folder(place / "checkpoints").all()), START_S)
        time.sleep(chance.uniform(0, 0.3))
        victim = chance.randrange(shards)
        pids = {p.rank: p.pid for p in run.statistics().processes if p.role == "shard"}
        killed_at = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        time.sleep(0.2)  # a step that had its update already may still be told
        since = time.monotonic()
        again = ticks.wait_until(
            lambda: all(ticks.count(folder, rank, since) >= 2 for rank in range(LEARNERS)), AGAIN_S
        )
        run.stop()
        result = run.wait(120)
        steps = ticks.times(folder, 0)
    events = [event for event in result.events if event.kind == "recovered"]
    if not again or len(events) != 1:
        raise RuntimeError(f"no update within {AGAIN_S:.0f} s of the loss of a shard: {result.events}")
    before = sum(step <= killed_at for step in steps)
    _, over = ticks.largest_gap(steps, killed_at, steps[-1])
    return Recovery(
        shards=shards,
        shard=victim,
        back=events[0].details["seconds_taken"],
        next_update=over - killed_at,
        usual_step=ticks.usual_gap(steps, killed_at),
        updates_lost=before - events[0].details["version"],
    )


def recoveries(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    chance = random.Random(given.seed)
    counts = [int(number) for number in given.shards.split(",")]
    found: dict[int, list[Recovery]] = {count: [] for count in counts}
    for _ in range(given.repeats):
        for count in counts:
            found[count].append(recovery(given.dims, count, chance))
    print("shards   restarted, s   next update, s   usual step, s   updates lost")
    for count, rows in found.items():
        print(
            f"{count:6} {spread([row.back for row in rows]):>14} {spread([row.next_update for row in rows]):>16}"
            f" {statistics.median(row.usual_step for row in rows):15.2f}"
            f"   {min(row.updates_lost for row in rows)}…{max(row.updates_lost for row in rows)}",
            flush=True,
        )
        keep({"question": "recovery", "dims": given.dims, "runs": [asdict(row) for row in rows]})
    if given.picture:
        draw(found, given.picture)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}…{max(values):.2f})"


def draw(found: dict[int, list[Recovery]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(4.6, 3.2))
    for name, label in (("next_update", "until the next update"), ("back", "until shards are restarted")):
        every = [(count, getattr(row, name)) for count, rows in found.items() for row in rows]
        medians = [statistics.median(getattr(row, name) for row in rows) for rows in found.values()]
        (line,) = axis.plot(list(found), medians, "-", label=label)
        axis.plot(*zip(*every, strict=True), "o", color=line.get_color(), markersize=4)
    axis.set_xticks(list(found))
    axis.set_xlabel("shards")
    axis.set_ylabel("seconds")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    head = machine.describe()
    axis.set_title(f"38 M parameters, {head['cpu']}, {head['cores']} cores, {head['commit']}", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


# -- the command -----------------------------------------------------------------------------------------------


def main() -> None:
    parser = machine.parser(__doc__)
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument("--cost", action="store_true")
    question.add_argument("--recovery", action="store_true")
    parser.add_argument("--dims", default="-".join(map(str, DIMS)), help="layer widths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--every", default="5s", help="checkpoint_every of the runs that have checkpoints")
    parser.add_argument("--shards", default="1,2,4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, help="draw the recoveries here")
    parser.add_argument("--json", type=Path, help="add all numbers to this file")
    given = parser.parse_args()
    given.dims = tuple(int(width) for width in given.dims.split("-"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    head = machine.announce()
    with kept(given.json, head) as keep:
        (cost if given.cost else recoveries)(given, keep)


if __name__ == "__main__":
    main()
