"""How many events per second does a timing-only simulation handle on one core, and does its memory stay flat?

    python -m benchmarks.bench_simulator [--learners 30 1000 10000] [--gradients 60000] [--json FILE]

An event is an entry of the clock's queue that was carried out: a computation's end, an arrival at a shard or a learner, the end
of a piece of a shard's work. Sizes are those of a billion parameters on four shards of the cluster `ethernet-1g`, and of cifar10_full on `p775`.
Each case runs in a process of its own; memory is that process's, at a tenth of the run and at its end.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import syncline as sl
from benchmarks import machine

DIALS = ("hardsync", "softsync:1", "async")
SIZES: dict[str, dict[str, Any]] = {
    "p775": {"parameters": 89_578, "shards": 1, "batch_size": 4},
    "ethernet-1g": {"parameters": 1_000_000_000, "shards": 4, "batch_size": 4},
}


def resident() -> float:
    """MiB of memory that this process holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS in /proc/self/status")


def case(cluster: str, sync: str, learners: int, gradients: int) -> dict[str, Any]:
    """One timing, with the memory on its way."""
    quorum = sl.Sync.parse(sync).quorum(learners)
    steps = max(10, gradients // quorum)
    memory: dict[int, float] = {}
    marks = {max(1, steps // 10), steps}

    def look(version: int, seconds: float, staleness: float) -> None:
        if version in marks:
            memory[version] = resident()

    began, cpu = time.perf_counter(), time.process_time()
    timing = sl.Sim(cluster).timing(
        examples=10**9, learners=learners, sync=sync, steps=steps, on_update=look, **SIZES[cluster]
    )
    return {
        "cluster": cluster,
        "sync": sync,
        "learners": learners,
        "gradients": timing.gradients,
        "events": timing.events,
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
        "virtual": timing.seconds,
        "staleness": timing.staleness.mean,
        "memory": [memory[version] for version in sorted(memory)],
    }


def show(row: dict[str, Any]) -> None:
    rate, memory = row["events"] / row["seconds"], [round(value) for value in row["memory"]]
    print(
        f"{row['cluster']:12} {row['sync']:11} λ {row['learners']:6,}  {row['gradients']:8,} gradients  "
        f"{row['events']:9,} events  {rate:9,.0f} events/s  {row['gradients'] / row['seconds']:7,.0f} gradients/s  "
        f"{memory[0]} → {memory[-1]} MiB",
        flush=True,
    )


def in_a_process(cluster: str, sync: str, learners: int, gradients: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_simulator",
        "--case",
        cluster,
        sync,
        str(learners),
        str(gradients),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, nargs="+", default=[30, 1000, 10_000])
    parser.add_argument("--gradients", type=int, default=60_000)
    parser.add_argument("--clusters", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        cluster, sync, learners, gradients = given.case
        print(json.dumps(case(cluster, sync, int(learners), int(gradients))))
        return
    head = machine.announce()
    rows = []
    for cluster in given.clusters:
        for learners in given.learners:
            for sync in DIALS:
                rows.append(in_a_process(cluster, sync, learners, given.gradients))
                show(rows[-1])
    machine.keep(given.json, {"machine": head, "rows": rows})


if __name__ == "__main__":
    main()
