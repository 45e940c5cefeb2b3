"""SINGA's Fig. 9: the split of an update's time by group size, on 16, 32 and 48 workers; asynchronous groups (S9).

    python -m reproductions.singa.fig9 [--workers 16,32,48] [--width 1.0] [--csv FILE]

Each group has a mini-batch of 256 images and the cheapest plan for its size; several groups push to servers. Images per second
(Fig. 8) are those of all groups. The wait for servers that are busy with other groups is not in these costs.
"""

import argparse
from pathlib import Path

import torch

from reproductions.singa.fig7 import BATCH, cluster, network
from reproductions.splits import Split, show, split, write

PAPER = (
    "paper: computation halves with each doubling of the group; best throughput 180 images/s, 20x one node"
)


def rows(workers: int, width: float) -> list[Split]:
    model, example = network(width), torch.empty(BATCH, 3, 224, 224, device="meta")
    sizes = [size for size in (1, 2, 4, 8, 16) if workers % size == 0]
    return [split("hybrid", model, example, cluster(), None, group=size, workers=workers) for size in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="16,32,48")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    every: list[Split] = []
    for count in map(int, options.workers.split(",")):
        found = rows(count, options.width)
        show(found, f"SINGA, Fig. 9: {count} workers")
        rates = {row.group: row.workers // row.group * BATCH / row.total for row in found}
        print("  images/s by group size:", ", ".join(f"{size}: {rate:.0f}" for size, rate in rates.items()))
        every += found
    print(PAPER)
    write(every, options.csv)


if __name__ == "__main__":
    main()
