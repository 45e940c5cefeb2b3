"""Fig. 4 of Rudra: how stale gradients are with 30 learners under 1-, 2- and 30-softsync (timing only).

    python -m reproductions.rudra.fig4 [--updates 2000] [--to reproductions/rudra]

The simulator runs the protocols on the cluster `p775` with the sizes of cifar10_full (μ = 128) and no gradients. Prints the mean staleness
and its distribution beside what the paper says, and writes `fig4.csv` (mean staleness along the updates, and the distribution) and
`fig4.png`. Seconds on a laptop.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import syncline as sl
from benchmarks import machine
from reproductions.rudra.sizes import CIFAR10_FULL, EXAMPLES

LEARNERS = 30
PAPER = {  # what section 5.1 says
    1: "close to 1, values 0, 1, 2",
    2: "close to 2, values 0 to 4",
    30: "close to 30, above 60 with a probability below 0.0001",
}


def measure(splits: int, updates: int) -> tuple[Any, list[float]]:
    """The timing, and the mean staleness of each update."""
    means: list[float] = []
    timing = sl.Sim("p775").timing(
        parameters=CIFAR10_FULL,
        examples=EXAMPLES,
        learners=LEARNERS,
        batch_size=128,
        sync=f"softsync:{splits}",
        steps=updates,
        on_update=lambda version, seconds, staleness: means.append(staleness),
    )
    return timing, means


def beyond(histogram: dict[int, int], most: int) -> float:
    """Share of gradients that are staler."""
    return sum(n for sigma, n in histogram.items() if sigma > most) / sum(histogram.values())


def show(splits: int, timing: Any) -> None:
    found = timing.staleness
    share = beyond(found.histogram, 2 * splits)
    expected = (LEARNERS - 1) / max(1, LEARNERS // splits)
    print(
        f"{splits:2d}-softsync: mean {found.mean:6.3f} (paper: {PAPER[splits]}; theory {expected:.3f}), "
        f"max {found.max}, above 2n = {2 * splits}: {share:.6f}, over {timing.gradients} gradients"
    )


def write(found: dict[int, tuple[Any, list[float]]], folder: Path) -> None:
    with (folder / "fig4.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("n", "kind", "x", "value"))  # mean: σ of update x; share: of gradients with σ = x
        for splits, (timing, means) in found.items():
            every = max(1, len(means) // 500)
            rows.writerows((splits, "mean", x + 1, f"{means[x]:.4f}") for x in range(0, len(means), every))
            total = sum(timing.staleness.histogram.values())
            for sigma, count in timing.staleness.histogram.items():
                rows.writerow((splits, "share", sigma, f"{count / total:.6f}"))


def draw(found: dict[int, tuple[Any, list[float]]], picture: Path, head: dict[str, str]) -> None:
    figure, (left, right, shares) = plt.subplots(1, 3, figsize=(12, 3.4))
    for splits in (1, 2):
        left.plot(found[splits][1], label=f"{splits}-softsync")
    left.set_ylim(0, 4)
    left.legend(fontsize=8)
    right.plot(found[LEARNERS][1], lw=0.4)
    right.set_ylim(0, 70)
    right.set_title(f"{LEARNERS}-softsync", fontsize=9)
    for axis in (left, right):
        axis.set_xlabel("update")
        axis.set_ylabel("mean σ of its gradients")
    histogram = found[LEARNERS][0].staleness.histogram
    total = sum(histogram.values())
    shares.bar(list(histogram), [count / total for count in histogram.values()])
    shares.set_xlabel("σ")
    shares.set_title(f"share of gradients, {LEARNERS}-softsync", fontsize=9)
    figure.suptitle(f"λ = {LEARNERS}, cluster p775, simulated, {head['commit']}, {head['date']}", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--updates", type=int, default=2000, help="of 1- and 2-softsync; 30-softsync makes ten times as many"
    )
    parser.add_argument("--to", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    head = machine.describe()
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    found = {splits: measure(splits, given.updates * (10 if splits == LEARNERS else 1)) for splits in PAPER}
    for splits, (timing, _) in found.items():
        show(splits, timing)
    write(found, given.to)
    draw(found, given.to / "fig4.png", head)


if __name__ == "__main__":
    main()
