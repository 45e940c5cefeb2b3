"""What does each kind of loss on a cluster cost: how long do the survivors stall?

    python -m benchmarks.bench_cluster_faults [--repeats 20] [--faults learner,agent] [--presets hardsync,async] [--peers torchft:10]

Three nodes of one learner each on this machine (`syncline.testing.Nodes`: agents, relays and connections as with Ray), a fresh
run each. Something of node 1 is killed, frozen or cut off at a random moment. Stall: the longest time without a step of
a survivor until the loss was noticed and five steps later, less its usual time between steps. Shards are on the caller's node, but
for the faults of shards: there on nodes 0 and 1, with a checkpoint every 200 updates. A peer's worker is killed as a learner is.
"""

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import syncline as sl
from benchmarks import machine, ticks
from benchmarks.bench_faults import (
    FIRST_STEPS,
    START_S,
    WINDOW_S,
    Kill,
    kept,
    learner,
    listed,
    peer_kill,
    said_at_the_end,
    strike,
)
from syncline.testing import Nodes
from tests.integration.wires import ControlConnection, wire

LIMIT_S = 30.0  # that a fault may take
NODE, RANK = 1, 1  # what it is done to
Act = Callable[[sl.Run, Nodes, ControlConnection], None]


def to_node(number: int, *, all_of_it: bool) -> Act:
    def act(run: sl.Run, engine: Nodes, way: ControlConnection) -> None:
        engine.cluster.agents[NODE].signal(number, all_of_it=all_of_it)

    return act


def to_process(name: str, number: int = signal.SIGKILL) -> Act:
    def act(run: sl.Run, engine: Nodes, way: ControlConnection) -> None:
        os.kill(run._handle.pids()[name], number)

    return act


FAULTS: dict[str, tuple[Act, bool]] = {  # what is done; whether shards are on its node, too
    "learner": (to_process(f"learner {RANK}"), False),
    "agent": (to_node(signal.SIGKILL, all_of_it=False), False),
    "node": (to_node(signal.SIGKILL, all_of_it=True), False),
    "frozen-agent": (to_node(signal.SIGSTOP, all_of_it=False), False),
    "frozen-node": (to_node(signal.SIGSTOP, all_of_it=True), False),
    "cut-link": (lambda run, engine, way: way.cut(), False),
    "silent-link": (lambda run, engine, way: way.silence(), False),
    "shard": (to_process("shard 1"), True),
    "node-with-shard": (to_node(signal.SIGKILL, all_of_it=True), True),
}


def one(fault: str, preset: str, chance: random.Random) -> Kill:
    """A run, and this fault."""
    act, shards = FAULTS[fault]
    survivors = [0, 1, 2] if fault == "shard" else [0, 2]
    with tempfile.TemporaryDirectory() as name, wire() as way:
        folder, engine = Path(name), Nodes(3, 1, apart=True, through=first_through(way))
        options: dict[str, Any] = {"sync": preset, "learners": 3, "threads": 1, "engine": engine}
        if shards:
            options |= {"topology": "servers:2", "run_dir": folder / "run", "checkpoint_every": 200}
        run = sl.launch(learner, folder, wait=False, **options)
        try:
            if not ticks.wait_until(lambda: begun(run, folder, shards=shards), START_S):
                raise RuntimeError(f"no {FIRST_STEPS} steps within {START_S:.0f} s")
            time.sleep(WINDOW_S + chance.uniform(0, 0.3))
            return strike(
                folder, survivors, partial(act, run, engine, way), LIMIT_S, noticed=partial(lost, run)
            )
        finally:
            way.speak()
            run.stop()
            run.wait(60)


def first_through(way: ControlConnection) -> Callable[[tuple[str, int]], tuple[str, int]]:
    """The first agent is behind the wire, the others are not."""
    before: list[None] = []

    def through(address: tuple[str, int]) -> tuple[str, int]:
        before.append(None)
        return way.through(address) if len(before) == NODE else address

    return through


def begun(run: sl.Run, folder: Path, *, shards: bool) -> bool:
    """With shards elsewhere there is a checkpoint to go back to."""
    kept = not shards or any((folder / "run" / "checkpoints").glob("[0-9]*"))
    return kept and all(ticks.count(folder, rank) >= FIRST_STEPS for rank in range(3))


def lost(run: sl.Run) -> bool:
    return any(each.state in ("lost", "killed") for each in run.statistics().processes)


def show(name: str, kills: list[Kill]) -> None:
    usual = 1000 * statistics.median(kill.usual for kill in kills)
    stalls = sorted(kill.stall for kill in kills if kill.stall is not None)
    found = f"{statistics.median(stalls):9.2f} {stalls[-1]:9.2f}" if stalls else f"{'–':>9} {'–':>9}"
    before = max(kill.before for kill in kills)
    print(
        f"{name:36} {len(kills):6} {usual:10.2f} {found} {before:10.2f}{said_at_the_end(kills)}", flush=True
    )


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--faults", default=" ".join(FAULTS))
    parser.add_argument("--presets", default="hardsync async", help="with semicolons for commas within one")
    parser.add_argument("--peers", default="", help="for example torchft:10")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="add all numbers to this file")
    given = parser.parse_args()
    if unknown := set(listed(given.faults)) - set(FAULTS):
        parser.error(f"--faults are {', '.join(FAULTS)}; not {', '.join(sorted(unknown))}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    head = machine.announce()
    print(f"{'':36} {'losses':>6} {'usual, ms':>10} {'stall, s':>9} {'max':>9} {'before it':>10}")
    rows: list[tuple[str, Callable[[random.Random], Kill]]] = [
        (f"{fault}, {preset}", partial(one, fault, preset))
        for fault in listed(given.faults)
        for preset in listed(given.presets)
    ]
    rows += [(peer, partial(peer_kill, peer)) for peer in listed(given.peers)]
    with kept(given.json, head) as keep:
        for name, make in rows:
            chance = random.Random(given.seed)
            kills = [make(chance) for _ in range(given.repeats)]
            show(name, kills)
            keep({"contender": name, "kills": [asdict(kill) for kill in kills]})


if __name__ == "__main__":
    main()
