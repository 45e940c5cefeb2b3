"""SINGA's Fig. 7: one mini-batch of 256 images through AlexNet (62 M) on 1 Gbit/s, by kind of parallelism and workers (S9).

    python -m reproductions.singa.fig7 [--workers 1,2,4,8,16,32] [--width 1.0] [--csv FILE] [--picture FILE]

One group; one node takes 27.3 s, as the paper has it. Times are those of `sl.plan`'s costs: partitioned parameters are updated
where they are (S4), the others are added up in the group. The last row is the simulator's: every worker a learner of its own that
sends all parameters to 7 servers in lockstep, as the paper's data parallelism does.
"""

import torch
from torch import nn

from reproductions.splits import Split, draw, options_of, show, simulated, split, write
from syncline import Cluster
from syncline.cluster import Compute, Link
from syncline.models import AlexNet

BATCH, ONE_NODE, SERVERS = 256, 27.3, 7
WAYS = {"model-parallel": {"*": "model"}, "data-parallel": {"*": "data"}, "hybrid": None}
PAPER = "paper: model-parallel gets slower with nodes; data-parallel turns at 4; hybrid gains up to about 16, 5x one node, 20x model-parallel"


def cluster() -> Cluster:
    link = Link(latency=1e-4, bandwidth=125e6)
    return Cluster(compute=Compute(base=0.0, per_example=ONE_NODE / BATCH), card=link)


def network(width: float = 1.0) -> nn.Module:
    with torch.device("meta"):
        return AlexNet(groups=1, norm=False, dropout=0.0, width=width)


def rows(workers: list[int], width: float) -> list[Split]:
    model, example = network(width), torch.empty(BATCH, 3, 224, 224, device="meta")
    found = [
        split(name, model, example, cluster(), choices, group=count)
        for name, choices in WAYS.items()
        for count in workers
    ]
    served = {"group": 1, "shards": SERVERS, "sync": "hardsync"}
    name, choices = f"data-parallel, {SERVERS} servers", WAYS["data-parallel"]
    return found + [
        simulated(name, model, example, cluster(), choices, workers=count, **served) for count in workers
    ]  # type: ignore[arg-type]


def main() -> None:
    options = options_of(__doc__, workers="1,2,4,8,16,32", width="1.0")
    found = rows([int(word) for word in options.workers.split(",")], float(options.width))
    show(found, "SINGA, Fig. 7", ONE_NODE)
    print(PAPER)
    write(found, options.csv)
    draw(found, options.picture, "SINGA, Fig. 7: AlexNet, 256 images, 1 Gbit/s")


if __name__ == "__main__":
    main()
