"""DistBelief's Fig. 3: speed-up of one model by the machines that it is cut over (D8).

    python -m reproductions.distbelief.fig3 [--machines 1,2,4,8,16,32,64,81] [--nets speech,80m,330m,1.7b] [--csv FILE] [--picture FILE]

`speech` is fully connected (4 sigmoid layers of 2560, softmax of 8192, 440 inputs); the others are locally connected: three
stages on images of 100 x 100, fields of 10 x 10, cut over the image. The paper gives neither batch nor machines: here mini-batches
of 32, machines of 20 cores with 100 GFLOP/s for such products, cards of 1 Gbit/s. Parameters are updated where they are.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from reproductions.splits import Split, draw, options_of, show, split, write
from syncline import Cluster
from syncline.cluster import Compute, Link
from syncline.nn.block_local import StackShape, build_stacks

BATCH, FLOPS = 32, 100e9
PAPER = "paper: speech, 42 M: 2.2x on 8 machines, then falling; images: 1.7 B more than 12x on 81"


def speech(device: str = "meta") -> nn.Module:
    sizes = (440, 2560, 2560, 2560, 2560, 8192)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Sigmoid())]
    return nn.Sequential(*layers[:-1]).to(device)


def local(depth: int, block: int, device: str = "meta") -> Callable[[], nn.Module]:
    shape = StackShape(field=10, step=2, block=(block, block, depth))
    return lambda: build_stacks(3, 100, (shape,) * 3, device=device, dtype=torch.float32)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, str] | None]] = {
    "speech": (speech, (440,), {"*": "model"}),
    "80m": (local(7, 2), (3, 100, 100), None),
    "330m": (local(15, 2), (3, 100, 100), None),
    "1.7b": (local(36, 2), (3, 100, 100), None),
}


def rows(name: str, machines: list[int]) -> list[Split]:
    make, shape, choices = NETS[name]
    model = make()
    count = sum(p.numel() for p in model.parameters())
    seconds = (
        6 * count / FLOPS
    )  # of an example: a multiplication and an addition, up, down, and for the gradient
    cluster = Cluster(
        compute=Compute(base=0.0, per_example=seconds), card=Link(latency=1e-4, bandwidth=125e6)
    )
    example = torch.empty(BATCH, *shape, device="meta")
    label = f"{name} ({count / 1e6:.0f} M)"
    return [split(label, model, example, cluster, choices, group=each) for each in machines]


def main() -> None:
    options = options_of(__doc__, machines="1,2,4,8,16,32,64,81", nets="speech,80m,330m,1.7b")
    every: list[Split] = []
    for name in options.nets.split(","):
        found = rows(name, [int(word) for word in options.machines.split(",")])
        show(found, f"DistBelief, Fig. 3: {name}", found[0].total)
        every += found
    print(PAPER)
    write(every, options.csv)
    draw(every, options.picture, "DistBelief, Fig. 3: one model on many machines", speed=True)


if __name__ == "__main__":
    main()
