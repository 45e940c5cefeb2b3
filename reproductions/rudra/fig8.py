"""Fig. 8 of Rudra: speed-ups with up to 30 learners for μ = 128 and μ = 4 under three protocols (timing only).

    python -m reproductions.rudra.fig8 [--epochs 1] [--cluster p775] [--to reproductions/rudra]

The simulator runs hardsync, λ-softsync and 1-softsync on the cluster `p775` with the sizes of cifar10_full and no gradients. Speed-ups
are over one learner with the same μ, as in the paper; times are scaled to its 140 epochs and printed beside those that Tables 2 and 3
give for μ = 128 and μ = 4. Writes `fig8.csv` and `fig8.png`. The cluster's figures come from the paper's own times (docs/howto/simulator.md): that
the baseline and the server-bound row agree is their making, the rest of the shape is not.
"""

import argparse
import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import syncline as sl
from benchmarks import machine
from reproductions.rudra.paper import ROWS
from reproductions.rudra.sizes import CIFAR10_FULL, EPOCHS, EXAMPLES

LEARNERS = (1, 2, 4, 10, 18, 30)
BATCHES = (128, 4)
PROTOCOLS = ("hardsync", "λ-softsync", "1-softsync")


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration: seconds of 140 epochs here, and in the paper's tables where they have it."""

    protocol: str
    mu: int
    learners: int
    seconds: float
    speedup: float
    staleness: float
    overlap: float
    card: float  # share of the time that the server's card receives or sends
    paper: int | None


def dial(protocol: str, learners: int) -> str:
    if learners == 1 or protocol == "hardsync":
        return "hardsync"
    return "softsync:1" if protocol == "1-softsync" else f"softsync:{learners}"


def in_paper(protocol: str, mu: int, learners: int) -> int | None:
    """Seconds, from Tables 2 and 3."""
    sigma = 0 if learners == 1 or protocol == "hardsync" else 1 if protocol == "1-softsync" else learners
    return next((r.seconds for r in ROWS if (r.sigma, r.mu, r.learners) == (sigma, mu, learners)), None)


def measure(cluster: str, epochs: int) -> list[Point]:
    points = []
    for mu in BATCHES:
        alone = 0.0
        for protocol in PROTOCOLS:
            for learners in LEARNERS:
                timing = sl.Sim(cluster).timing(
                    parameters=CIFAR10_FULL,
                    examples=EXAMPLES,
                    learners=learners,
                    batch_size=mu,
                    sync=dial(protocol, learners),
                    epochs=epochs * (5 if mu == 128 else 1),
                )
                seconds = timing.seconds / len(timing.history) * EPOCHS
                alone = alone or seconds
                points.append(
                    Point(
                        protocol,
                        mu,
                        learners,
                        seconds,
                        alone / seconds,
                        timing.staleness.mean,
                        timing.overlap,
                        max(timing.cards.get(-1, (0.0, 0.0))),
                        in_paper(protocol, mu, learners),
                    )
                )
    return points


def show(points: list[Point]) -> None:
    for mu in BATCHES:
        print(f"\nμ = {mu}: speed-up over (0, {mu}, 1); seconds of {EPOCHS} epochs, the paper's in brackets")
        print("   λ " + "".join(f"{protocol:>32}" for protocol in PROTOCOLS))
        for learners in LEARNERS:
            row = [p for p in points if p.mu == mu and p.learners == learners]
            cells = (f"{p.speedup:6.2f}  {p.seconds:7.0f} s ({p.paper or '–'})" for p in row)
            print(f"{learners:4d} " + "".join(f"{cell:>32}" for cell in cells))


def verdicts(points: list[Point]) -> dict[str, bool]:
    """What the paper says of the figure, and whether it is so here."""
    at = {(p.protocol, p.mu, p.learners): p.speedup for p in points}
    hard, lam, one = ([at[protocol, mu, 30] for mu in BATCHES] for protocol in PROTOCOLS)
    return {
        "μ = 128: 1-softsync and λ-softsync are similar up to λ = 30 (within 5 %)": abs(one[0] / lam[0] - 1)
        < 0.05,
        "μ = 4: λ-softsync is behind 1-softsync at λ = 30": lam[1] < 0.95 * one[1],
        "hardsync fares worst at λ = 30, for both": hard[0] < min(lam[0], one[0])
        and hard[1] < min(lam[1], one[1]),
        "times fall with every further learner": all(
            at[protocol, mu, a] < at[protocol, mu, b]
            for protocol in PROTOCOLS
            for mu in BATCHES
            for a, b in pairwise(LEARNERS)
        ),
    }


def write(points: list[Point], file: Path) -> None:
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(
            (
                "protocol",
                "mu",
                "learners",
                "seconds",
                "speedup",
                "staleness",
                "overlap",
                "server_card",
                "paper_seconds",
            )
        )
        for p in points:
            rows.writerow(
                (
                    p.protocol,
                    p.mu,
                    p.learners,
                    f"{p.seconds:.1f}",
                    f"{p.speedup:.3f}",
                    f"{p.staleness:.3f}",
                    f"{p.overlap:.4f}",
                    f"{p.card:.4f}",
                    p.paper or "",
                )
            )


def draw(points: list[Point], picture: Path, head: dict[str, str], cluster: str) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8))
    for axis, mu in zip(axes, BATCHES, strict=True):
        for number, protocol in enumerate(PROTOCOLS):
            mine = [p for p in points if p.mu == mu and p.protocol == protocol]
            axis.plot(
                [p.learners for p in mine],
                [p.speedup for p in mine],
                "o-",
                color=f"C{number}",
                label=protocol,
            )
            alone = next((p.paper for p in mine if p.learners == 1), None)
            known = [(p.learners, alone / p.paper) for p in mine if p.paper and alone]
            axis.plot(*zip(*known, strict=True) if known else ((), ()), "x", color=f"C{number}", ms=9)
        axis.plot((1, 30), (1, 30), ":", color="0.7", lw=1)
        axis.set_title(f"μ = {mu}", fontsize=9)
        axis.set_xlabel("learners λ")
    axes[0].set_ylabel("speed-up")
    axes[0].legend(fontsize=8)
    note = "x: from the paper's Table 2, where the baseline's time is known"
    figure.suptitle(f"cluster {cluster}, simulated, {head['commit']}, {head['date']}; {note}", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--epochs", type=int, default=1, help="simulated of μ = 4; five times as many of μ = 128"
    )
    parser.add_argument("--cluster", default="p775")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    head = machine.describe()
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    points = measure(given.cluster, given.epochs)
    show(points)
    print()
    for claim, holds in verdicts(points).items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    write(points, given.to / "fig8.csv")
    draw(points, given.to / "fig8.png", head, given.cluster)


if __name__ == "__main__":
    main()
