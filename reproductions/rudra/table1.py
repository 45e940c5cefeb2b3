"""Table 1 of Rudra: how much of the communication base, adv and adv* hide behind the computation (timing only).

    python -m reproductions.rudra.table1 [--rounds 30] [--to reproductions/rudra]

300 MB, μ = 4, 60 learners under 1-softsync on the simulated p775. Writes `table1.csv`.
"""

import argparse
import csv
from pathlib import Path

import syncline as sl
from reproductions.rudra.imagenet import FAN_IN, cluster
from syncline.sim.timing.run_times import Timing

LEARNERS, MU, PARAMETERS = 60, 4, 75_000_000
ROWS = (
    ("Rudra-base", "servers:1", 11.52),
    ("Rudra-adv", f"tree:{FAN_IN}", 56.75),
    ("Rudra-adv*", f"tree:{FAN_IN},broadcast", 99.56),
)


def measure(topology: str, rounds: int) -> Timing:
    return sl.Sim(cluster()).timing(
        parameters=PARAMETERS,
        examples=LEARNERS * MU * rounds,
        learners=LEARNERS,
        batch_size=MU,
        sync="softsync:1",
        topology=topology,
        epochs=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="gradients of each learner")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    rows = []
    for name, topology, paper in ROWS:
        timing = measure(topology, given.rounds)
        each = timing.times.compute / timing.times.steps, timing.times.communication / timing.times.steps
        rows.append((name, topology, f"{100 * timing.overlap:.2f}", paper, f"{timing.staleness.mean:.2f}"))
        print(
            f"{name:11} {topology:18} overlap {100 * timing.overlap:6.2f} %, paper {paper:5.2f} %; a gradient: "
            f"{each[0]:.2f} s computed, {each[1]:.2f} s of visible communication; mean σ {timing.staleness.mean:.2f}"
        )
    with (given.to / "table1.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([("name", "topology", "overlap", "paper", "staleness"), *rows])


if __name__ == "__main__":
    main()
