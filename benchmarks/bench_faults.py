"""What does a killed learner cost: how long do the others stall, and what becomes of the accuracy?

    python -m benchmarks.bench_faults --stall [--kills 30] [--presets hardsync,async] [--peers ddp,torchft:10,torchft:60]
    python -m benchmarks.bench_faults --churn [--data FOLDER] [--presets hardsync,softsync:1] [--seeds 5]

--stall: three learners, one is killed with -9 at a random moment, a fresh run each. Stall: the longest time without
a step of a survivor around the kill, less its usual time between steps; beside it the same just before the
kill, which is what this machine does to a learner anyway. --churn: every two seconds a learner is killed and replaced,
against the same run undisturbed. MNIST with --data, else the digits that come with Syncline.
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import syncline as sl
from benchmarks import machine, ticks
from benchmarks.peers import killed
from benchmarks.peers.team import Failure, Member
from benchmarks.workload import backward, make_batch, make_model, make_optimizer
from syncline.data import digits, mnist
from syncline.models import mlp

STALL_PRESETS = "hardsync softsync:1 async ssp:2 backup:1 delayed:2 downpour:push=2;fetch=2;local_lr=0.01"
CHURN_PRESETS = "hardsync softsync:1"
SIZE: killed.Size = ((784, 128, 10), 32)
LEARNERS = 3
NO_END = 2_000_000  # examples: no epoch ends within a run
WINDOW_S = 0.4  # around a kill
FIRST_STEPS = 30  # before anybody is killed
START_S = 60.0
AFTER_STEPS = 5  # of each survivor, until a kill is over
PEERS = {
    "ddp": killed.ddp,
    "torchft": killed.torchft,
    "torchft-by-hand": partial(killed.torchft, by_hand=True),
}
OVER = ("lost", "returned", "raised", "killed")


# -- stalls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, seen by the survivor that suffered most; times in seconds."""

    usual: float
    stall: float | None  # None where no survivor went on
    before: float  # the same in a window before the kill
    rank: int = -1  # who was killed
    ended: tuple[float, ...] = ()  # since the kill, of survivors that ended instead of going on
    error: str = ""  # their last words


def kill_one(
    folder: Path,
    pids: dict[int, int],
    chance: random.Random,
    limit_s: float,
    gone: Callable[[int], bool] = lambda rank: False,
) -> Kill:
    """Kill one of these at a random moment, and see how the others go on."""
    if not ticks.wait_until(lambda: all(ticks.count(folder, r) >= FIRST_STEPS for r in pids), START_S):
        raise RuntimeError(f"no {FIRST_STEPS} steps within {START_S:.0f} s")
    time.sleep(WINDOW_S + chance.uniform(0, 0.3))
    victim = chance.choice(sorted(pids))
    survivors = [rank for rank in pids if rank != victim]
    act = partial(os.kill, pids[victim], signal.SIGKILL)
    return replace(strike(folder, survivors, act, limit_s, gone), rank=victim)


def strike(
    folder: Path,
    survivors: list[int],
    act: Callable[[], None],
    limit_s: float,
    gone: Callable[[int], bool] = lambda rank: False,
    noticed: Callable[[], bool] = lambda: True,
) -> Kill:
    """Do it now, and see how these go on until it was noticed and for a few steps more."""
    ended: dict[int, float] = {}
    killed_at = time.monotonic()
    late = killed_at + WINDOW_S / 4  # steps that the victim had its part in may still come
    act()

    def over() -> bool:
        nonlocal late
        now = time.monotonic()
        if not noticed():
            late = now
            return False
        ended.update({rank: now for rank in survivors if rank not in ended and gone(rank)})
        going = [rank for rank in survivors if rank not in ended]
        return now > killed_at + WINDOW_S and all(
            ticks.count(folder, rank, since=late) >= AFTER_STEPS for rank in going
        )

    ticks.wait_until(over, limit_s)
    end = time.monotonic()
    seen = {rank: _seen(ticks.times(folder, rank), killed_at, end) for rank in survivors}
    usual, stall, before = max(
        (seen[rank] for rank in survivors if rank not in ended), key=lambda each: each[1], default=(None,) * 3
    )
    if stall is None:
        usual, _, before = max(seen.values())
    since = tuple(sorted(time - killed_at for time in ended.values()))
    return Kill(usual=usual, stall=stall, before=before, ended=since)


def _seen(steps: list[float], killed_at: float, end: float) -> tuple[float, float, float]:
    """(usual gap, stall, the same before the kill) of one survivor."""
    usual = ticks.usual_gap(steps, killed_at)
    earlier = [step for step in steps if step <= killed_at]
    stall, _ = ticks.largest_gap(steps, killed_at, end)
    before, _ = ticks.largest_gap(earlier, killed_at - WINDOW_S, earlier[-1])
    return usual, stall - usual, before - usual


def learner(session: sl.Session, folder: Path) -> None:
    """Steps on one batch; the ledger hands out numbers, so that a loss has something to hand out again."""
    dims, batch_size = SIZE
    model, batch = make_model(dims), make_batch(dims, batch_size, seed=session.rank)
    optimizer = session.optimizer(model, make_optimizer)
    loader = session.loader(TensorDataset(torch.arange(NO_END)), batch_size=batch_size)
    tick = ticks.Ticker(folder, session.rank)
    for _ in loader:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        tick()
        if session.ending:
            return


def our_kill(preset: str, chance: random.Random) -> Kill:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = sl.launch(learner, folder, learners=LEARNERS, sync=preset, threads=1, wait=False)
        try:
            kill = kill_one(folder, learner_pids(run), chance, limit_s=10)
        finally:
            run.stop()
        run.wait(60)
        return kill


def learner_pids(run: sl.Run) -> dict[int, int]:
    """Of the learners that are at work, by rank."""
    while True:
        found = {
            process.rank: process.pid
            for process in run.statistics().processes
            if process.role == "learner" and process.state not in OVER
        }
        if found:
            return found
        time.sleep(0.01)


def peer_kill(peer: str, chance: random.Random) -> Kill:
    """`ddp`, or `torchft:SECONDS` and `torchft-by-hand:SECONDS` with the time-out of manager and process group."""
    name, _, seconds = peer.partition(":")
    timeout_s = float(seconds or 1800)  # DDP's own default over Gloo
    contender = PEERS[name]
    limit_s = 20.0 if name == "ddp" else 3 * timeout_s
    with tempfile.TemporaryDirectory() as folder, contender(Path(folder), SIZE, LEARNERS, timeout_s) as team:
        pids = {rank: member.process.pid or 0 for rank, member in enumerate(team)}
        kill = kill_one(Path(folder), pids, chance, limit_s, lambda rank: not team[rank].process.is_alive())
        return replace(kill, error=last_words([m for rank, m in enumerate(team) if rank != kill.rank]))


def last_words(survivors: list[Member]) -> str:
    """The last line of a survivor's traceback, if one ended with an error."""
    for member in survivors:
        if not member.process.is_alive() and member.connection.poll():
            message = member.connection.recv()
            if isinstance(message, Failure):
                return message.text.strip().splitlines()[-1]
    return ""


def show_stalls(name: str, kills: list[Kill]) -> None:
    def both(values: list[float]) -> str:
        if not values:
            return f"{'–':>9} {'–':>9}"
        return f"{1000 * statistics.median(values):9.1f} {1000 * max(values):9.1f}"

    usual = 1000 * statistics.median(kill.usual for kill in kills)
    stalls = both([kill.stall for kill in kills if kill.stall is not None])
    before = both([kill.before for kill in kills])
    print(f"{name:36} {len(kills):5} {usual:8.2f} {stalls} {before}{said_at_the_end(kills)}", flush=True)


def said_at_the_end(kills: list[Kill]) -> str:
    ended = [seconds for kill in kills for seconds in kill.ended]
    if not ended:
        return ""
    error = next(kill.error for kill in kills if kill.ended)
    span = f"{min(ended):.2f}…{max(ended):.2f} s"
    return f"   {len(ended)} of {len(kills) * (LEARNERS - 1)} survivors ended, after {span}: {error[:60]}"


def stall(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    print(f"{'':36} {'kills':>5} {'usual':>8} {'stall, ms':>9} {'max':>9} {'before it':>9} {'max':>9}")
    chosen: list[tuple[str, Callable[[random.Random], Kill], int]] = [
        (preset, partial(our_kill, preset), given.kills) for preset in listed(given.presets or STALL_PRESETS)
    ]
    chosen += [(peer, partial(peer_kill, peer), given.peer_kills) for peer in listed(given.peers)]
    for name, make, count in chosen:
        chance = random.Random(given.seed)
        kills = [make(chance) for _ in range(count)]
        show_stalls(name, kills)
        keep({"contender": name, "kills": [asdict(kill) for kill in kills]})


# -- churn -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run to its end."""

    seed: int
    accuracy: float
    seconds: float
    examples: int
    kills: int
    replaced: int
    handed_out_again: int


@dataclass(frozen=True, kw_only=True)
class Task:
    train: Dataset[Any]
    test: TensorDataset
    sizes: tuple[int, ...]
    batch_size: int
    epochs: int
    delay_s: float  # per batch, to make a small task last


class Objective:
    """Cross-entropy, after a rest."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self._delay_s:
            time.sleep(self._delay_s)
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)


def make_task(data: Path | None, epochs: int | None) -> Task:
    if data is None:
        parts = [digits(split) for split in ("train", "test")]
        return Task(
            train=parts[0],
            test=parts[1],
            sizes=(64, 64, 10),
            batch_size=16,
            epochs=epochs or 60,
            delay_s=0.005,
        )
    train, test = (mnist(data, split, floats=True) for split in ("train", "test"))
    return Task(train=train, test=test, sizes=(784, 128, 10), batch_size=32, epochs=epochs or 12, delay_s=0.0)


def training(task: Task, preset: str, seed: int, every_s: float | None) -> Training:
    run = sl.train(
        partial(mlp, list(task.sizes)),
        task.train,
        objective=Objective(task.delay_s),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        sync=preset,
        learners=LEARNERS,
        batch_size=task.batch_size,
        epochs=task.epochs,
        seed=seed,
        threads=1,
        replace=every_s is not None,
        wait=False,
    )
    chance, kills = random.Random(seed), 0
    while True:
        try:
            result = run.wait(every_s or 600)
            break
        except TimeoutError:
            kills += kill_any(run, chance)
    return Training(
        seed=seed,
        accuracy=accuracy(result.model, task.test),
        seconds=result.seconds,
        examples=result.statistics.tables[0].examples,
        kills=kills,
        replaced=sum(event.kind == "replaced" for event in result.events),
        handed_out_again=sum(event.details.get("handed_out_again", 0) for event in result.events),
    )


def kill_any(run: sl.Run, chance: random.Random) -> int:
    pids = sorted(
        process.pid
        for process in run.statistics().processes
        if process.role == "learner" and process.state not in OVER
    )
    if not pids:
        return 0
    try:
        os.kill(chance.choice(pids), signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    inputs, labels = test[:]
    model.eval()
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())


def churn(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    task = make_task(given.data, given.epochs)
    where = "digits" if given.data is None else "MNIST"
    print(
        f"{where}, {'-'.join(map(str, task.sizes))}, μ {task.batch_size}, {task.epochs} epochs, {LEARNERS} learners"
    )
    for preset in listed(given.presets or CHURN_PRESETS):
        rows: dict[str, list[Training]] = {"undisturbed": [], "churn": []}
        for seed in range(given.seed, given.seed + given.seeds):
            rows["undisturbed"].append(training(task, preset, seed, None))
            rows["churn"].append(training(task, preset, seed, given.every))
        for name, runs in rows.items():
            show_runs(f"{preset}, {name}", runs)
            keep(
                {
                    "data": where,
                    "dial": preset,
                    "name": name,
                    "epochs": task.epochs,
                    "runs": [asdict(run) for run in runs],
                }
            )


def show_runs(name: str, runs: list[Training]) -> None:
    def spread(values: list[float]) -> str:
        return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0:.2f}"

    def span(values: list[int]) -> str:
        return f"{min(values)}" if min(values) == max(values) else f"{min(values)}…{max(values)}"

    print(
        f"{name:26} accuracy {spread([100 * run.accuracy for run in runs])} %, "
        f"{spread([run.seconds for run in runs])} s, kills {span([run.kills for run in runs])}, "
        f"replaced {span([run.replaced for run in runs])}, examples {span([run.examples for run in runs])}, "
        f"handed out again {span([run.handed_out_again for run in runs])}",
        flush=True,
    )


# -- the command -----------------------------------------------------------------------------------------------


def listed(text: str) -> list[str]:
    """Names between blanks or commas; a preset's own commas are written as semicolons."""
    return [name.replace(";", ",") for name in text.replace(",", " ").split()]


@contextmanager
def kept(file: Path | None, head: dict[str, str]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that keeps a row in the file at once, behind those of earlier commands."""
    results: list[dict[str, Any]] = json.loads(file.read_text()) if file and file.exists() else []
    results.append({"machine": head, "rows": []})

    def keep(row: dict[str, Any]) -> None:
        results[-1]["rows"].append(row)
        machine.keep(file, results)

    yield keep


def main() -> None:
    parser = machine.parser(__doc__)
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument("--stall", action="store_true")
    question.add_argument("--churn", action="store_true")
    parser.add_argument("--presets", help="dials, with semicolons for commas within one")
    parser.add_argument("--peers", default="", help="for example ddp,torchft:10")
    parser.add_argument("--kills", type=int, default=30, help="per dial")
    parser.add_argument("--peer-kills", type=int, default=3, help="per peer")
    parser.add_argument("--data", type=Path, help="folder with MNIST; without it the digits")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between kills")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--json", type=Path, help="add all numbers to this file")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    head = machine.announce()
    with kept(given.json, head) as keep:
        (stall if given.stall else churn)(given, keep)


if __name__ == "__main__":
    main()
