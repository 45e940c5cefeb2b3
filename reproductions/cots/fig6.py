"""COTS-HPC's Fig. 6: one joint update of all layers by size of the net and number of GPUs (C5).

    python -m reproductions.cots.fig6 [--gpus 1,4,9,16,36,64] [--nets 1.8b,11b] [--teraflops 1.0] [--csv FILE] [--picture FILE]

Several GPUs were not there: times are `sl.plan`'s costs for nets cut over the image (C4), 96 images, GPUs of so many TFLOP/s (the
paper's kernels had about 1), InfiniBand of 56 Gbit/s between machines of 4 GPUs. What one GPU really takes is in README.md.
"""

import torch

from reproductions.cots.networks import IMAGE, cots_network
from reproductions.splits import Split, draw, options_of, show, split, write
from syncline import Cluster
from syncline.cluster import Compute, Link

IMAGES = 96
PAPER = "paper: an update of the 11 B net on 64 GPUs takes less than 0.6 s (third stack)"


def cluster(weights: int, teraflops: float) -> Cluster:
    """Up, down and the gradient: six operations a weight and image."""
    return Cluster(
        compute=Compute(base=0.0, per_example=6 * weights / (teraflops * 1e12)),
        card=Link(latency=5e-6, bandwidth=6.5e9),
        memory=Link(latency=5e-6, bandwidth=6e9),
        learners_per_machine=4,
    )


def rows(name: str, gpus: list[int], teraflops: float) -> list[Split]:
    model = cots_network(name, device="meta")
    weights = sum(p.numel() for p in model.parameters())
    example = torch.empty(IMAGES, IMAGE[0], IMAGE[1], IMAGE[1], device="meta", dtype=torch.bfloat16)
    machines = cluster(weights, teraflops)
    return [
        split(f"{name} ({weights / 1e9:.1f} G)", model, example, machines, None, group=count)
        for count in gpus
    ]


def main() -> None:
    options = options_of(__doc__, gpus="1,4,9,16,36,64", nets="1.8b,11b", teraflops="1.0")
    every: list[Split] = []
    for name in options.nets.split(","):
        found = rows(name, [int(word) for word in options.gpus.split(",")], float(options.teraflops))
        show(found, f"COTS-HPC, Fig. 6: {name}, {IMAGES} images", found[0].total)
        every += found
    print(PAPER)
    write(every, options.csv)
    draw(every, options.picture, "COTS-HPC, Fig. 6: one update, by plan", speed=True)


if __name__ == "__main__":
    main()
