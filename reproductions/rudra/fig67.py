"""Rudra's Figs. 6 and 7: test error over training time for hardsync, λ-softsync and 1-softsync.

    python -m reproductions.rudra.fig67 [--out FOLDER] [--picture FILE]

Draws the rows of Tables 2 and 3 that `table2` has stored, ours beside the paper's. The paper's figures have more points (every
λ in 1, 2, 4, 10, 18, 30 with every μ in 4 … 128) without printing their values; the two tables are what it prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reproductions.rudra.paper import BASELINE
from reproductions.rudra.table2 import HERE, outcomes, table

PANELS = ("Fig. 6: hardsync", "Fig. 7(a): λ-softsync", "Fig. 7(b): 1-softsync")


def panel_of(line: dict[str, Any]) -> str | None:
    """Return the panel that shows a row; None for the baseline, which every panel shows."""
    if line["learners"] == 1:
        return None
    return PANELS[{0: 0, 1: 2}.get(line["sigma"], 1)]


def picture(lines: list[dict[str, Any]], file: Path) -> None:
    """Draw one panel per protocol; rows of one μ are joined in the order of λ."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({line["mu"] for line in lines})
    colours = {mu: f"C{index}" for index, mu in enumerate(sizes)}
    figure, panels = plt.subplots(1, len(PANELS), figsize=(13, 4.2), sharex=True, sharey=True)
    for axes, title in zip(panels, PANELS, strict=True):
        axes.axhline(BASELINE.error, color="black", linestyle="--", linewidth=0.8)
        for mu in sizes:
            rows = [row for row in lines if row["mu"] == mu and panel_of(row) in (None, title)]
            rows.sort(key=lambda row: row["learners"])
            for name, style in (("", "o-"), ("paper_", "x:")):
                times = [row[f"{name or 'simulated_'}seconds"] for row in rows]
                axes.plot(
                    times,
                    [row[f"{name}error"] for row in rows],
                    style,
                    color=colours[mu],
                    alpha=0.5 if name else 1,
                )
            for row in rows:
                place = (row["simulated_seconds"], row["error"])
                axes.annotate(
                    f"λ={row['learners']}", place, fontsize=6, xytext=(3, 3), textcoords="offset points"
                )
        axes.set(xscale="log", xlabel="training time, s", title=title)
    for mu in sizes:
        panels[-1].plot([], [], "o-", color=colours[mu], label=f"μ = {mu}")
    panels[0].set(ylabel="test error %  (o ours, x paper)")
    panels[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of table2's results")
    parser.add_argument("--picture", type=Path, default=Path("fig67.png"))
    options = parser.parse_args()
    picture(table(outcomes(options.out)), options.picture)


if __name__ == "__main__":
    main()
