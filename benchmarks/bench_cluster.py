"""How many gradients per second does a cluster of two nodes fold, against DDP over Gloo and a parameter server of Ray actors?

    python -m benchmarks.bench_cluster [--rates unlimited,1000] [--sizes 1,2,3] [--workers 2] [--repeats 3] [--seconds 5]
        [--contenders hardsync,softsync:1,async,delayed:1,ddp,actors,actors-sync,hardsync@tree:2] [--server-node] [--json FILE] [--predict] [--quick]

Two network namespaces joined by a link, as fast as it is or held to so many Mbit/s (tc's token bucket), a Ray node in each,
so many workers on each, half of the cores for each; the actor that serves is on the first. With --server-node a third one, behind
a switch of the same rate, has the shards and no worker (and the actor that serves). A dial of ours may name its topology, with "+"
for ",": async@tree:2+servers=2. Sizes are those of bench_throughput: 0.4 M, 14 M, 38 M parameters. All contenders of a row run in turn, repeated; the table shows medians and the ratios of medians. `link` is the
share of the link's rate that the busier direction used, as its counters say. With --predict the simulator says for each of ours what it
would come to, from one learner and the link. `overlap` is a worker's time computing over all of it (Rudra's Table 1). Needs root and iproute2; says so and ends where it cannot be.
Leave the machine alone meanwhile.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks import cluster_learner, machine
from benchmarks.bench_overlap import FIRST_PORT, keep
from benchmarks.bench_throughput import SIZES
from benchmarks.cluster_driver import together
from benchmarks.cluster_learner import Pace
from benchmarks.cluster_nodes import RayNodes, shares
from benchmarks.link import ADDRESSES, Link, LinkError
from benchmarks.peers.team import START_S, PeerError, Team

CONTENDERS = ("hardsync", "softsync:1", "async", "delayed:1", "ddp", "actors", "actors-sync")
PEERS = ("ddp", "actors", "actors-sync")
UNLIMITED = "unlimited"
BURST_KB, LATENCY_MS = 1000, 50  # of the token bucket
LONG_STEP_S = 10.0  # of the largest model on a slow link
QUICK = {"rates": "1000", "sizes": "0", "repeats": 1, "seconds": 0.2}


class Bench:
    """One link, its two nodes, and whoever runs on them."""

    def __init__(self, link: Link, nodes: RayNodes, workers: int) -> None:
        self._link, self._nodes, self._workers = link, nodes, workers
        self._servers = len(link.namespaces) - 2
        self._count = 0

    def run(self, contender: str, dims: tuple[int, ...], batch_size: int, seconds: float) -> Pace:
        if contender == "ddp":
            return self._ddp(dims, batch_size, seconds)
        order = {"contender": contender, "dims": dims, "batch_size": batch_size, "seconds": seconds}
        order |= {"servers": self._servers}
        limit = START_S + 10 * (seconds + LONG_STEP_S)
        return Pace(**self._nodes.ask({**order, "workers": self._workers}, limit))

    def predict(self, sync: str, dims: tuple[int, ...], batch_size: int) -> float:
        order = {"contender": sync, "dims": dims, "batch_size": batch_size, "seconds": 0.0}
        limit = START_S + 60 * LONG_STEP_S
        return float(self._nodes.ask({**order, "workers": self._workers, "predict": True}, limit)["rate"])

    def _ddp(self, dims: tuple[int, ...], batch_size: int, seconds: float) -> Pace:
        self._count += 1
        world, cores = 2 * self._workers, shares(sorted(os.sched_getaffinity(0)))
        meeting = f"tcp://{ADDRESSES[self._servers]}:{FIRST_PORT + self._count}"
        with Team(seconds + LONG_STEP_S) as team:
            members = [
                team.start(
                    cluster_learner.ddp,
                    rank,
                    world,
                    self._link.namespaces[self._servers + side],
                    cores[side],
                    meeting,
                    dims,
                    batch_size,
                    seconds,
                )
                for rank, side in enumerate(side for side in range(2) for _ in range(self._workers))
            ]
            return together([team.receive(member) for member in members])


def measure(
    run: Callable[[str], Pace], contenders: Sequence[str], repeats: int
) -> tuple[dict[str, list[Pace]], dict[str, str]]:
    """What each did, and why some did not."""
    paces: dict[str, list[Pace]] = {}
    failed: dict[str, str] = {}
    for _ in range(repeats):
        for name in contenders:
            if name in failed:
                continue
            try:
                paces.setdefault(name, []).append(run(name))
            except PeerError as error:
                paces.pop(name, None)
                failed[name] = str(error)
    return paces, failed


def lines(row: Mapping[str, Any]) -> list[str]:
    """The table of a row as it is kept in JSON."""
    rates = {name: [pace["rate"] for pace in paces] for name, paces in row["paces"].items()}
    median = {name: statistics.median(values) for name, values in rates.items()}
    found = []
    for name, values in rates.items():
        ratios = [
            f"{median[name] / median[peer]:.2f}x {peer}"
            for peer in PEERS
            if peer in median and name not in PEERS
        ]
        spread = f"{min(values):.1f}..{max(values):.1f}"
        used = link_share(row["paces"][name], row["mbit"])
        share = "" if used is None else f"{100 * used:.0f} %"
        computing = statistics.median(pace.get("computing", 0.0) for pace in row["paces"][name])
        overlap = f"{100 * computing:.1f} %" if computing else ""
        if name in row["predicted"]:
            said = row["predicted"][name]
            ratios.append(f"predicted {said:.1f} ({100 * (said / median[name] - 1):+.0f} %)")
        found.append(
            f"  {name:<26}{median[name]:>9.1f}{spread:>18}{share:>8}{overlap:>9}   {', '.join(ratios)}"
        )
    return found


def link_share(paces: Sequence[Mapping[str, float]], mbit: float | None) -> float | None:
    """Of the link's rate, in the busier direction."""
    if mbit is None:
        return None
    return statistics.median(max(pace["sent"], pace["received"]) for pace in paces) * 8 / (mbit * 1e6)


def show(row: Mapping[str, Any]) -> None:
    size = "-".join(map(str, row["dims"]))
    rate = UNLIMITED if row["mbit"] is None else f"{row['mbit']:g} Mbit/s"
    repeats = max(map(len, row["paces"].values()), default=0)
    print(
        f"\n{size}, μ {row['batch_size']}, {rate}, 2 nodes with {row['workers']} workers each{', one for the shards' if row.get('server_node') else ''}: gradients/s, median of {repeats}"
    )
    print(f"  {'':<26}{'':>9}{'least..most':>18}{'link':>8}{'overlap':>9}")
    for line in lines(row):
        print(line)
    for name, why in row["failed"].items():
        print(f"  {name} failed: {why.strip().splitlines()[-1]}")
    print(end="", flush=True)


def rows_on(bench: Bench, mbit: float | None, given: argparse.Namespace) -> None:
    head = machine.describe() | {"ray": ray.__version__}
    for index in map(int, given.sizes.split(",")):
        dims, batch_size = SIZES[index]
        paces, failed = measure(
            lambda name, dims=dims, size=batch_size: bench.run(name, dims, size, given.seconds),  # type: ignore[misc]
            given.contenders.split(","),
            given.repeats,
        )
        row = {"dims": dims, "batch_size": batch_size, "mbit": mbit, "workers": given.workers}
        row |= {"server_node": given.server_node}
        row |= {"paces": {name: [vars(pace) for pace in found] for name, found in paces.items()}}
        ours = [name for name in paces if name not in PEERS and given.predict]
        row |= {"failed": failed, "predicted": {name: bench.predict(name, dims, batch_size) for name in ours}}
        show(row)
        if given.json:
            keep(given.json, head, row)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = machine.parser(__doc__)
    parser.add_argument("--rates", default="unlimited,1000", help="Mbit/s, or unlimited")
    parser.add_argument("--sizes", default="1,2,3", help="which models of bench_throughput")
    parser.add_argument("--workers", type=int, default=2, help="of each node")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--server-node", action="store_true", help="a third node, for the shards alone")
    parser.add_argument("--json", type=Path, help="also add all figures to this file")
    parser.add_argument(
        "--predict", action="store_true", help="also what the simulator says; about a minute each"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, once: does it run at all?")
    given = parser.parse_args(words)
    if given.quick:
        vars(given).update(QUICK)
    unknown = [name for name in given.contenders.split(",") if name.split("@")[0] not in CONTENDERS]
    if unknown:
        parser.error(f"no contender {unknown[0]!r}; there are: {', '.join(CONTENDERS)}")
    return given


def main() -> None:
    given = arguments()
    print(", ".join(f"{key} {value}" for key, value in machine.describe().items()), f"ray {ray.__version__}")
    try:
        for rate in given.rates.split(","):
            mbit = None if rate == UNLIMITED else float(rate)
            with (
                Link(mbit, burst_kb=BURST_KB, latency_ms=LATENCY_MS, sides=2 + given.server_node) as link,
                RayNodes(link, given.workers) as nodes,
            ):
                rows_on(Bench(link, nodes, given.workers), mbit, given)
    except LinkError as error:
        print(f"skipped: {error}")


if __name__ == "__main__":
    main()
