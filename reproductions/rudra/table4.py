"""Table 4 of Rudra: minutes per epoch of ImageNet in four configurations (timing only; no errors).

    python -m reproductions.rudra.table4 [--rounds 30] [--to reproductions/rudra]

Some rounds are simulated and scaled to an epoch. Writes `table4.csv`.
"""

import argparse
import csv
from pathlib import Path

import syncline as sl
from reproductions.rudra.imagenet import EXAMPLES, FAN_IN, PARAMETERS, cluster

ROWS = (  # name, topology, μ, λ, dial, the paper's minutes
    ("base-hardsync", "servers:1", 16, 18, "hardsync", 330),
    ("base-softsync", "servers:1", 16, 18, "softsync:1", 270),
    ("adv-softsync", f"tree:{FAN_IN}", 4, 54, "softsync:1", 212),
    ("adv*-softsync", f"tree:{FAN_IN},broadcast", 4, 54, "softsync:1", 125),
)


def minutes(topology: str, mu: int, learners: int, dial: str, rounds: int) -> tuple[float, float]:
    """Of an epoch; and the mean staleness."""
    timing = sl.Sim(cluster()).timing(
        parameters=PARAMETERS,
        examples=learners * mu * rounds,
        learners=learners,
        batch_size=mu,
        sync=dial,
        topology=topology,
        epochs=1,
    )
    return timing.seconds / timing.examples * EXAMPLES / 60, timing.staleness.mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="gradients of each learner")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    rows = []
    for name, topology, mu, learners, dial, paper in ROWS:
        found, sigma = minutes(topology, mu, learners, dial, given.rounds)
        rows.append((name, topology, mu, learners, dial, f"{found:.0f}", paper, f"{sigma:.2f}"))
        print(
            f"{name:14} {topology:18} μ {mu:2} λ {learners:2} {dial:11} {found:5.0f} min, paper {paper} min; σ {sigma:.2f}"
        )
    order = [float(row[5]) for row in rows]
    print("the paper's order" if order == sorted(order, reverse=True) else "NOT the paper's order")
    with (given.to / "table4.csv").open("w", newline="") as opened:
        head = ("name", "topology", "mu", "learners", "dial", "minutes", "paper", "staleness")
        csv.writer(opened).writerows([head, *rows])


if __name__ == "__main__":
    main()
