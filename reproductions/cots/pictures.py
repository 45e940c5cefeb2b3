"""Pictures of the COTS reproduction: best stimuli (Fig. 7) and update times by size (Fig. 5).

python -m reproductions.cots.pictures benchmarks/results/block_local-h200.json docs/pictures
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def stimuli_picture(stimuli: Sequence[tuple[str, Tensor, Tensor]], file: Path) -> None:
    """A column per neuron: its name, its best stimulus as the net sees it, whitened, and as pixels, both (H, W)."""
    figure, axes = plt.subplots(2, len(stimuli), figsize=(1.4 * len(stimuli), 3.1), squeeze=False)
    for column, (name, *images) in zip(axes.T, stimuli, strict=True):
        for axis, image in zip(column, images, strict=True):
            reach = float(image.abs().max())
            axis.imshow(image, cmap="gray", vmin=-reach, vmax=reach)
            axis.set_xticks([]), axis.set_yticks([])
        column[0].set_title(name, fontsize=7)
    for axis, name in zip(axes[:, 0], ("whitened", "as pixels"), strict=True):
        axis.set_ylabel(name, fontsize=7)
    figure.subplots_adjust(wspace=0.05, hspace=0.05)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)


def sizes_picture(results: Path, file: Path) -> None:
    """Time of a joint update against the number of weights, with the memory's limit."""
    measured = json.loads(results.read_text(encoding="utf-8"))
    rows = sorted(measured["sizes"] + measured["networks"], key=lambda row: row["weights"])
    counts = torch.tensor([row["weights"] for row in rows], dtype=torch.float64)
    times = torch.tensor([row["update ms"] for row in rows])
    limit = torch.tensor([row["update ms"] * row["of the memory's limit"] for row in rows])
    figure, axes = plt.subplots(figsize=(6, 3.6))
    axes.loglog(counts, times, "o-", label=f"one {measured['machine']['gpu']}, 96 images, bfloat16")
    axes.loglog(counts, limit, "--", label="weights and momentum moved at the copy bandwidth")
    axes.axhline(600, color="gray", linewidth=0.8, linestyle=":")
    axes.text(
        counts[0], 620, "paper: third stack of the 11 B net on 64 GPUs, < 0.6 s", fontsize=7, va="bottom"
    )
    axes.set_xlabel("weights")
    axes.set_ylabel("one joint update, ms")
    axes.set_ylim(top=1500)
    axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sizes_picture(Path(sys.argv[1]), Path(sys.argv[2]) / "cots_sizes.png")
