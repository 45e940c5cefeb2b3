"""Draws scaling curves from the JSON that `bench_throughput --json` writes.

python -m benchmarks.plot_scaling RESULT.json PICTURE.png
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {"limit": ("0.6", ":"), "hardsync": ("C0", "-"), "async": ("C1", "-"), "ddp": ("C3", "--")}


def curves(rows: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Contender to (workers, median rate)."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in sorted(rows, key=lambda row: row["workers"]):
        for name, rates in row["rates"].items():
            workers, medians = found.setdefault(name, ([], []))
            workers.append(row["workers"])
            medians.append(statistics.median(rates))
    return found


def main() -> None:
    source, picture = map(Path, sys.argv[1:3])
    result = json.loads(source.read_text())
    sizes = list(dict.fromkeys("-".join(map(str, row["dims"])) for row in result["rows"]))
    figure, axes = plt.subplots(1, len(sizes), figsize=(4.2 * len(sizes), 3.6), squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        rows = [row for row in result["rows"] if "-".join(map(str, row["dims"])) == size]
        for name, (workers, rates) in curves(rows).items():
            color, line = STYLES.get(name, ("C4", "-."))
            axis.plot(workers, rates, line, color=color, marker="o", label=name)
        axis.set_title(f"{size}, μ {rows[0]['batch_size']}", fontsize=9)
        axis.set_xlabel("learners")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("gradients/s")
    axes[0][0].legend(fontsize=8)
    head = result["machine"]
    figure.suptitle(
        f"{head['cpu']}, {head['cores']} cores, torch {head['torch']}, {head['commit']}, {head['date']}",
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
