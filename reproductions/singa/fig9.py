"""SINGA's Fig. 9: the split of an update's time by group size, on 16, 32 and 48 workers; asynchronous groups (S9).

    python -m reproductions.singa.fig9 [--workers 16,32,48] [--width 1.0] [--csv FILE] [--picture FILE]

Each group has a mini-batch of 256 images and the cheapest plan for its size; groups push to 7 servers and wait for nobody, in the
simulator, where they share the servers' cards. Images per second (Fig. 8) are those of all groups.
"""

import torch

from reproductions.singa.fig7 import BATCH, SERVERS, cluster, network
from reproductions.splits import Split, draw_split, options_of, show, simulated, write

PAPER = (
    "paper: computation halves with each doubling of the group; best throughput 180 images/s, 20x one node"
)


def rows(workers: int, width: float) -> list[Split]:
    model, example = network(width), torch.empty(BATCH, 3, 224, 224, device="meta")
    sizes = [size for size in (1, 2, 4, 8, 16) if workers % size == 0]
    served = {"workers": workers, "shards": SERVERS, "sync": "async"}
    return [simulated("hybrid", model, example, cluster(), None, group=size, **served) for size in sizes]  # type: ignore[arg-type]


def main() -> None:
    options = options_of(__doc__, workers="16,32,48", width="1.0")
    every: list[Split] = []
    for count in map(int, options.workers.split(",")):
        found = rows(count, float(options.width))
        show(found, f"SINGA, Fig. 9: {count} workers")
        rates = {row.group: row.workers // row.group * BATCH / row.total for row in found}
        print("  images/s by group size:", ", ".join(f"{size}: {rate:.0f}" for size, rate in rates.items()))
        every += found
    print(PAPER)
    write(every, options.csv)
    draw_split(every, options.picture, "SINGA, Fig. 9: asynchronous groups, 256 images each")


if __name__ == "__main__":
    main()
