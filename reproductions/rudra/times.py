"""Rudra's training times (Tables 2 and 3) on the simulated p775, by sizes alone: one epoch of each row, times 140.

    python -m reproductions.rudra.times

Prints every row beside the paper's seconds, then how many are how near (docs/measured/simulator.md cites them).
"""

from __future__ import annotations

import syncline as sl
from reproductions.rudra.paper import ROWS
from reproductions.rudra.sizes import CIFAR10_FULL, EPOCHS, EXAMPLES


def main() -> None:
    errors = []
    for row in (row for row in ROWS if row.seconds is not None):
        timing = sl.Sim("p775").timing(
            parameters=CIFAR10_FULL,
            examples=EXAMPLES,
            learners=row.learners,
            batch_size=row.mu,
            sync=row.sync,
            epochs=1,
        )
        seconds = timing.seconds * EPOCHS
        errors.append(seconds / row.seconds - 1)
        print(f"({row.name})".ljust(14), f"{seconds:7.0f} s, paper {row.seconds:5} s, {errors[-1]:+.1%}")
    near = [sum(abs(error) <= bound for error in errors) for bound in (0.1, 0.23, 0.25)]
    root = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    print(
        f"{len(errors)} rows; within 10 %: {near[0]}, 23 %: {near[1]}, 25 %: {near[2]}; "
        f"largest {max(map(abs, errors)):.1%}, root mean square {root:.1%}"
    )


if __name__ == "__main__":
    main()
