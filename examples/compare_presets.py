"""Four settings of the dial on one plot: test accuracy over time and over epochs. Needs matplotlib.

python examples/compare_presets.py --out presets.png
"""

from __future__ import annotations

import argparse

import syncline as sl
from syncline.jobs import Job

PRESETS = ("hardsync", "delayed:1", "softsync:1", "async")


def run(preset: str, given: argparse.Namespace) -> sl.Result:
    overrides = [
        f"sync={preset}",
        f"learners={given.learners}",
        f"epochs={given.epochs}",
        f"engine={given.engine}",
    ]
    return sl.train(**Job.builtin(overrides).build())


def plot(results: dict[str, sl.Result], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for preset, result in results.items():
        label = f"{preset}, σ = {result.staleness.mean:.2f}"
        accuracies = [record["accuracy"] for record in result.history]
        axes[0].plot([record.seconds for record in result.history], accuracies, label=label)
        axes[1].plot([record.epoch + 1 for record in result.history], accuracies, label=label)
    axes[0].set(xlabel="seconds", ylabel="test accuracy")
    axes[1].set(xlabel="epochs")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--out", default="presets.png")
    given = parser.parse_args()
    run(PRESETS[0], given)  # not counted: the first run also starts what later runs share
    results = {}
    for preset in PRESETS:
        results[preset] = result = run(preset, given)
        last = result.history[-1]
        print(
            f"{preset:12} accuracy {last['accuracy']:.3f}  {result.updates} updates  σ {result.staleness.mean:.2f}"
        )
    plot(results, given.out)
    print(f"see {given.out}")


main()
