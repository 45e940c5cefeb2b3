"""Pictures of the AGD reproduction: time per batch by way to communicate (Fig. 1), accuracy by batches (Table 1).

python -m reproductions.agd.pictures fig1 benchmarks/results/overlap-2-cores.json docs/pictures/agd_fig1.png
python -m reproductions.agd.pictures table1 reproductions/agd/table1.csv docs/pictures/agd_table1.png
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.bench_overlap import lines
from reproductions.agd.table1 import PAPER, Measured, means, read_csv

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"none": "0.7", "communication": "0.85", "ddp": "C3"}


def bars_picture(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """One panel per model and link; the line is the time without communication."""
    figure, axes = plt.subplots(1, len(rows), figsize=(4.4 * len(rows), 3.8), squeeze=False)
    for axis, row in zip(axes[0], rows, strict=True):
        shown = lines(row)
        names = [line.method for line in shown]
        colours = [COLOURS.get(name.partition(":")[0], "C0") for name in names]
        axis.bar(range(len(names)), [line.ms for line in shown], color=colours)
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        alone = [line.ms for line in shown if line.method == "none"]
        for level in alone:
            axis.axhline(level, color="black", linewidth=0.8, linestyle=":")
        rate = "loopback" if row["mbit"] is None else f"{row['mbit']:g} Mbit/s"
        axis.set_title(f"{row['model']}, {row['parameters'] / 1e6:.1f} M, {rate}", fontsize=9)
    axes[0][0].set_ylabel("ms per batch")
    figure.suptitle(words(rows[0]["machine"]), fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def accuracy_picture(head: dict[str, str], measured: Measured, file: Path) -> None:
    """Ours at the left, the paper's at the right, both as lines over batches."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
    for number, (column, by_seed) in enumerate(measured.items()):
        batches = [test.batches for test in next(iter(by_seed.values()))]
        kept = [at for at, count in enumerate(batches) if count <= 10 * batches[0]]  # the end stands far off
        mean = means(by_seed)
        left.plot(
            [batches[at] for at in kept], [mean[at] for at in kept], "o-", color=f"C{number}", label=column
        )
        if column in PAPER:
            right.plot(range(1000, 6000, 1000), PAPER[column], "o-", color=f"C{number}", label=column)
    left.set_title("two cores, narrow AlexNet, Fashion-MNIST", fontsize=9)
    right.set_title("paper: AlexNet, ImageNet, DGX-1", fontsize=9)
    for axis in (left, right):
        axis.set_xlabel("batches")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    left.set_ylabel("test accuracy")
    figure.suptitle(words(head), fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def words(head: dict[str, str]) -> str:
    return f"{head['cpu']}, {head['cores']} cores, torch {head['torch']}, {head['commit']}, {head['date']}"


def main() -> None:
    kind, source, file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if kind == "fig1":
        bars_picture([row for row in json.loads(source.read_text()) if "wall" in row], file)
    elif kind == "table1":
        accuracy_picture(*read_csv(source), file)
    else:
        sys.exit(f"no picture {kind!r}; there are: fig1, table1")


if __name__ == "__main__":
    main()
