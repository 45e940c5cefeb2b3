"""How much of the communication is hidden behind the computation? Time per batch by way to communicate (A7, Fig. 1).

    python -m benchmarks.bench_overlap [--models alexnet,googlenet] [--rates balanced,1000] [--methods …]
        [--repeats 3] [--seconds 2] [--json FILE] [--quick]
    python -m benchmarks.bench_overlap --loopback [--sizes 0,1,2,3]

Two learners, each on a core of its own in a network namespace of its own, joined by a link of so many Mbit/s (tc's
token bucket; root and iproute2). `balanced` is the rate at which the link alone takes as long for a gradient as the
computation of a batch; `loopback` has no link and needs no root. All methods run in turn, repeated; the table shows
medians. Overlap is compute / (compute + visible communication), the measure of Rudra's Table 1 (R8).

The second form is DDP against ours by the sizes of bench_throughput on the loopback interface.
Leave the machine alone meanwhile.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import bench_throughput, machine, ours
from benchmarks.link import ADDRESSES, INTERFACE, Link, LinkError
from benchmarks.overlap_learner import METHODS, OURS, WORKLOADS, Place, Task, Times, prepare, work
from benchmarks.peers import ddp, limit
from benchmarks.peers.team import Team

FIRST_PORT = 29500
LEAST_STEPS = 5
OVERHEAD = 1.06  # of headers and of Gloo's own pauses, as measured on links of 100 to 1000 Mbit/s
LOOPBACK = "loopback"
BALANCED = "balanced"
QUICK = {"models": "alexnet-small", "rates": LOOPBACK, "repeats": 1, "seconds": 0.0}


@dataclass
class Network:
    """Places for learners, joined by a link (two of them) or by the loopback interface; no port is used twice."""

    link: Link | None
    _count: int = 0

    def places(self, count: int = 2) -> list[Place]:
        self._count += 1
        port = free_port() if self.link is None else FIRST_PORT + self._count
        cores = sorted(os.sched_getaffinity(0))
        return [
            Place(
                namespace=self.link.namespaces[rank] if self.link else None,
                address=ADDRESSES[0] if self.link else "127.0.0.1",
                port=port,
                interface=INTERFACE if self.link else "lo",
                core=cores[rank % len(cores)] if len(cores) > 1 else None,
            )
            for rank in range(count)
        ]


@dataclass
class Row:
    """One model on one link: the times of every method, by repeat."""

    model: str
    parameters: int
    batch_size: int
    mbit: float | None
    steps: int
    wall: dict[str, list[float]] = field(default_factory=dict)
    core: dict[str, list[float]] = field(default_factory=dict)

    def add(self, method: str, times: Sequence[Times]) -> None:
        """The slower learner's clock, the mean of their cores."""
        self.wall.setdefault(method, []).append(max(each.wall for each in times))
        self.core.setdefault(method, []).append(statistics.fmean(each.core for each in times))


@dataclass(frozen=True)
class Line:
    """What a table says of one method."""

    method: str
    ms: float
    spread: tuple[float, float]
    core_ms: float
    overlap: float | None  # compute / (compute + visible communication)
    over_ddp: float | None  # speed against the best DDP


def lines(row: Mapping[str, Any]) -> list[Line]:
    """The table of a row as it is kept in JSON."""
    median = {name: statistics.median(values) for name, values in row["wall"].items()}
    peers = [value for name, value in median.items() if name.partition(":")[0] == "ddp"]
    compute, best = median.get("none"), min(peers, default=None)
    found = []
    for name, wall in median.items():
        trains = name != "communication"
        values = row["wall"][name]
        found.append(
            Line(
                method=name,
                ms=1e3 * wall,
                spread=(1e3 * min(values), 1e3 * max(values)),
                core_ms=1e3 * statistics.median(row["core"][name]),
                overlap=min(1.0, compute / wall) if compute and trains and name != "none" else None,
                over_ddp=best / wall if best and trains else None,
            )
        )
    return found


def show(row: Mapping[str, Any]) -> None:
    rate = "loopback" if row["mbit"] is None else f"{row['mbit']:g} Mbit/s"
    repeats = len(next(iter(row["wall"].values())))
    print(
        f"\n{row['model']}, {row['parameters'] / 1e6:.2f} M parameters, μ {row['batch_size']}, {rate}: "
        f"ms per batch, median of {repeats} × {row['steps']} batches"
    )
    print(f"  {'':<26}{'ms':>8}{'least..most':>18}{'core ms':>9}{'overlap':>9}{'x DDP':>7}")
    for line in lines(row):
        spread = f"{line.spread[0]:.1f}..{line.spread[1]:.1f}"
        overlap = "" if line.overlap is None else f"{100 * line.overlap:.1f} %"
        ratio = "" if line.over_ddp is None else f"{line.over_ddp:.2f}"
        print(f"  {line.method:<26}{line.ms:>8.1f}{spread:>18}{line.core_ms:>9.1f}{overlap:>9}{ratio:>7}")
    sys.stdout.flush()


def run(network: Network, task: Task, seconds: float) -> list[Times]:
    with Team(seconds) as team:
        barrier = team.barrier(2)
        members = [
            team.start(work, rank, place, task, barrier) for rank, place in enumerate(network.places())
        ]
        return [team.receive(member) for member in members]


def compute_time(model: str, seconds: float) -> float:
    """Per batch, without communication; both learners at the same time."""
    network = Network(None)
    first = run(network, Task(workload=model, method="none", steps=LEAST_STEPS), seconds)
    steps = steps_in(seconds / 2, max(times.wall for times in first))
    second = run(network, Task(workload=model, method="none", steps=steps), seconds)
    return max(times.wall for times in second)


def steps_in(seconds: float, per_step: float) -> int:
    return max(LEAST_STEPS, round(seconds / per_step))


def balanced_rate(parameters: int, compute_s: float) -> float:
    """Mbit/s at which two learners' all-reduce takes as long as the computation; each sends a gradient's bytes once."""
    return float(f"{OVERHEAD * parameters * 4 * 8 / compute_s / 1e6:.2g}")


@contextlib.contextmanager
def network_of(rate: str, balanced: float) -> Iterator[Network]:
    if rate == LOOPBACK:
        yield Network(None)
        return
    with Link(balanced if rate == BALANCED else float(rate)) as link:
        yield Network(link)


def measure(
    model: str, rate: str, methods: Sequence[str], repeats: int, seconds: float, limit_s: float
) -> dict[str, Any]:
    workload, start = WORKLOADS[model], time.monotonic()
    compute_s = compute_time(model, seconds)
    steps = steps_in(seconds, compute_s)
    with network_of(rate, balanced_rate(workload.parameters, compute_s)) as network:
        mbit = network.link.mbit if network.link else None
        row = Row(model, workload.parameters, workload.batch_size, mbit, steps)
        for repeat in range(repeats):
            if repeat and time.monotonic() > start + limit_s:
                break
            for method in methods:
                task = Task(workload=model, method=method, steps=steps)
                row.add(method, run(network, task, 4 * seconds))
    return vars(row)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def loopback(sizes: Sequence[int], repeats: int, seconds: float) -> Iterator[dict[str, Any]]:
    """DDP, ours and the limit on the workload of bench_throughput."""
    names = ("blocking", "layerwise", "delayed:1")
    contenders: dict[str, bench_throughput.Contender] = {"limit": limit.run, "ddp": ddp.run}
    contenders |= {name: partial(ours.run, topology=OURS[name][0], sync=OURS[name][1]) for name in names}
    for index in sizes:
        dims, batch_size = bench_throughput.SIZES[index]
        rates = bench_throughput.measure(contenders, dims, batch_size, 2, seconds, repeats)
        bench_throughput.show(dims, batch_size, 2, rates)
        yield {"dims": dims, "batch_size": batch_size, "workers": 2, "rates": rates}


def rows_of(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if given.loopback:
        yield from loopback([int(index) for index in given.sizes.split(",")], given.repeats, given.seconds)
        return
    for model in given.models.split(","):
        for rate in given.rates.split(","):
            row = measure(model, rate, given.methods, given.repeats, given.seconds, given.limit)
            show(row)
            yield row


def method_names(text: str) -> list[str]:
    """Split at commas that begin a method: 'layerwise,apply=arrival' is one."""
    found: list[str] = []
    for part in text.split(","):
        if "=" in part and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    unknown = [name for name in found if name not in METHODS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no method {unknown[0]!r}; there are: {' '.join(METHODS)}")
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = machine.parser(__doc__)
    parser.add_argument("--models", default="alexnet,googlenet", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rates", default="balanced,1000", help="Mbit/s, balanced, or loopback")
    parser.add_argument("--methods", type=method_names, default=list(METHODS), help=", ".join(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of computation in one measurement")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no repeat begins")
    parser.add_argument("--loopback", action="store_true", help="DDP against ours by size, without a link")
    parser.add_argument("--sizes", default="0,1,2,3", help="which models of --loopback")
    parser.add_argument("--json", type=Path, help="also add all times to this file")
    parser.add_argument("--quick", action="store_true", help="a tiny model on loopback: does it run at all?")
    given = parser.parse_args(words)
    if given.quick:
        vars(given).update(QUICK)
    unknown = [name for name in given.models.split(",") if name not in WORKLOADS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are: {', '.join(WORKLOADS)}")
    return given


def keep(file: Path, head: dict[str, str], row: dict[str, Any]) -> None:
    """At once, behind the rows of earlier commands."""
    rows = json.loads(file.read_text()) if file.exists() else []
    machine.keep(file, [*rows, {"machine": head, **row}])


def main() -> None:
    given = arguments()
    prepare()
    head = machine.announce()
    try:
        for row in rows_of(given):
            if given.json:
                keep(given.json, head, row)
    except LinkError as error:
        sys.exit(f"{error}; --rates loopback goes without a link")


if __name__ == "__main__":
    main()
