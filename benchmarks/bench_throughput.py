"""How many gradients per second are folded, against DDP, torchft, torch RPC and the no-communication limit?

    python -m benchmarks.bench_throughput [--workers 2] [--repeats 3] [--seconds 3] [--sizes 0,1,2,3] [--json FILE]

Every row is one run of all contenders in turn, repeated; the table shows medians and the ratios of medians.
Leave the machine alone meanwhile.
"""

import importlib
import os
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks import machine, ours

SIZES: list[tuple[tuple[int, ...], int]] = [
    ((784, 128, 10), 32),
    ((784, 512, 10), 64),
    ((440, 2560, 2560, 2560, 10), 64),
    ((4096, 4096, 4096, 1000), 64),
]
Contender = Callable[[tuple[int, ...], int, int, float], float]


def contenders(names: list[str]) -> dict[str, Contender]:
    """Those of `names` that can run here; a peer that is not installed is left out and named."""
    ours_by_name: dict[str, Contender] = {
        "hardsync": lambda *arguments: ours.run(*arguments, sync="hardsync"),
        "async": lambda *arguments: ours.run(*arguments, sync="async"),
        "softsync:1": lambda *arguments: ours.run(*arguments, sync="softsync:1"),
        "delayed:1": lambda *arguments: ours.run(*arguments, sync="delayed:1"),
    }
    found: dict[str, Contender] = {}
    for name in names:
        if name in ours_by_name:
            found[name] = ours_by_name[name]
            continue
        try:
            found[name] = importlib.import_module(f"benchmarks.peers.{name}").run
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return found


def measure(
    chosen: dict[str, Contender],
    dims: tuple[int, ...],
    batch_size: int,
    workers: int,
    seconds: float,
    repeats: int,
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(repeats):
        for name, run in chosen.items():
            rates[name].append(run(dims, batch_size, workers, seconds))
    return rates


def show(dims: tuple[int, ...], batch_size: int, workers: int, rates: dict[str, list[float]]) -> None:
    median = {name: statistics.median(values) for name, values in rates.items()}
    size = "-".join(map(str, dims))
    print(
        f"\n{size}, μ {batch_size}, {workers} workers: gradients/s, median of {len(next(iter(rates.values())))}"
    )
    for name, values in rates.items():
        ratios = [f"{median[name] / median['limit']:.2f} of the limit"] if "limit" in median else []
        ratios += [
            f"{median[name] / median[peer]:.2f}x {peer}" for peer in ("ddp", "torchft_ps") if peer in median
        ]
        spread = f"{min(values):.1f}..{max(values):.1f}"
        print(f"  {name:<11} {median[name]:>9.1f}  {spread:>17}   {', '.join(ratios)}", flush=True)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--workers", default="2", help="numbers of workers, for example 2,4,8")
    parser.add_argument("--sizes", default="0,1,2,3", help="which of the four models")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--contenders", default="limit,hardsync,async,ddp,torchft_ps,torch_rpc")
    parser.add_argument("--json", type=Path, help="also write all rates here")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    head = machine.announce()
    chosen = contenders(given.contenders.split(","))
    rows = []
    for index in map(int, given.sizes.split(",")):
        dims, batch_size = SIZES[index]
        for workers in map(int, given.workers.split(",")):
            rates = measure(chosen, dims, batch_size, workers, given.seconds, given.repeats)
            show(dims, batch_size, workers, rates)
            rows.append({"dims": dims, "batch_size": batch_size, "workers": workers, "rates": rates})
            machine.keep(given.json, {"machine": head, "rows": rows})


if __name__ == "__main__":
    main()
