"""Rudra's Fig. 5: rates divided by the staleness, or not. λ = 30, μ = 128, n = 4 and 30.

    python -m reproductions.rudra.fig5 --data FOLDER [--epochs 140] [--jobs 4] [--out FOLDER] [--picture FILE]
    python -m reproductions.rudra.fig5 --picture FILE       of what is there

The paper: at α₀ 30-softsync stays at 90 % error; at α₀/30 it learns; for n = 4 the smaller rate gives the lower error.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from reproductions.rudra import experiment
from reproductions.rudra.table2 import HERE

LEARNERS, BATCH = 30, 128
CURVES = ("softsync:4,rate=given", "softsync:4", "softsync:30,rate=given", "softsync:30")


def one(sync: str, given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    train, test = experiment.read(given.data)
    outcome = experiment.run(
        sync=sync,
        learners=LEARNERS,
        batch_size=BATCH,
        data=train,
        test=test,
        epochs=given.epochs,
        seed=given.seed,
        device=given.device,
    )
    return outcome | {"machine": experiment.described(given)}


def rate(n: int) -> str:
    """α₀/n, or α₀·c/λ where n does not divide λ."""
    taken = LEARNERS // n
    return f"α₀/{n}" if taken * n == LEARNERS else f"α₀·{taken}/{LEARNERS}"


def picture(outcomes: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for outcome in outcomes:
        given = outcome["sync"].endswith("rate=given")
        n = outcome["sync"].partition(":")[2].partition(",")[0]
        label = f"{n}-softsync, {'α₀' if given else rate(int(n))}"
        epochs = range(1, len(outcome["errors"]) + 1)
        style, colour = "--" if given else "-", "C0" if n == "4" else "C3"
        axes.plot(epochs, outcome["errors"], style, color=colour, label=label)
    axes.set(xlabel="epoch", ylabel="test error %", title=f"λ = {LEARNERS}, μ = {BATCH}", ylim=(15, 95))
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a folder with CIFAR-10")
    parser.add_argument("--epochs", type=int, default=experiment.EPOCHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / "fig5.json"
    if given.data:
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            outcomes = list(pool.map(one, CURVES, [given] * len(CURVES)))
        kept.write_text(json.dumps(outcomes, indent=1) + "\n")
    elif kept.exists():
        outcomes = json.loads(kept.read_text())
    else:
        raise SystemExit(f"--data is missing: a folder with CIFAR-10 (there is no {kept} to draw)")
    for outcome in outcomes:
        print(f"{outcome['sync']:24} error {outcome['error']:.1f} %, best {min(outcome['errors']):.1f} %")
    if given.picture:
        picture(outcomes, given.picture)


if __name__ == "__main__":
    main()
