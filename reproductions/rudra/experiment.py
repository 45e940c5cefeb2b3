"""One row of Rudra's CIFAR-10 experiments: cifar10_full, real gradients, simulated learners.

    python -m reproductions.rudra.experiment --data FOLDER --row 1,4,30 [--seed 0] [--epochs 140] [--device cuda] [--json FILE]

The learners of the p775 cluster are simulated; gradients, updates and test errors are real. Writes the test error of every
epoch, exact staleness, virtual and real seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import syncline as sl
from benchmarks import machine
from reproductions.rudra.paper import find
from syncline.data import cifar10
from syncline.models import Cifar10Full, cifar10_full_sgd

EPOCHS = 140
DROPS = (120, 130)  # epochs after which the rate is a tenth
CLUSTER = "p775"


class Tester:
    """Test error in percent, on the device of the run."""

    def __init__(self, data: TensorDataset, device: str) -> None:
        self._images, self._labels = (tensor.to(device) for tensor in data.tensors)
        self._device = device

    def __call__(self, model: nn.Module) -> dict[str, float]:
        model.to(self._device)
        with torch.no_grad():
            right = sum(self._right(model, start) for start in range(0, len(self._labels), 1000))
        return {"error": 100.0 - 100.0 * float(right) / len(self._labels)}

    def _right(self, model: nn.Module, start: int) -> Tensor:
        chosen = slice(start, start + 1000)
        return (model(self._images[chosen]).argmax(1) == self._labels[chosen]).sum()


def steps_down(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=DROPS, gamma=0.1)


def run(
    *,
    sync: str,
    learners: int,
    batch_size: int,
    data: TensorDataset,
    test: TensorDataset,
    epochs: int = EPOCHS,
    seed: int = 0,
    device: str = "cpu",
    batched: bool = True,
) -> dict[str, Any]:
    """Train once; what came out, as plain values."""
    began = time.perf_counter()
    result = sl.train(
        Cifar10Full,
        data,
        loss=F.cross_entropy,
        optimizer=cifar10_full_sgd,
        schedule=steps_down,
        sync=sync,
        engine=sl.Sim(CLUSTER, batched=batched),
        learners=learners,
        batch_size=batch_size,
        epochs=epochs,
        evaluate=Tester(test, device),
        device=device,
        seed=seed,
    )
    wall = time.perf_counter() - began
    return {
        "sync": sync,
        "learners": learners,
        "batch_size": batch_size,
        "seed": seed,
        "epochs": epochs,
        "error": result.history[-1]["error"],
        "errors": [round(record["error"], 2) for record in result.history],
        "losses": [round(record.loss, 4) for record in result.history],
        "staleness": {"mean": result.staleness.mean, "max": result.staleness.max},
        "updates": result.updates,
        "gradients": result.gradients,
        "simulated_seconds": result.seconds,
        "seconds": wall,
        "gradients_per_second": result.gradients / wall,
    }


def read(folder: str) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set, pixels minus the mean image."""
    sets = [cifar10(folder, split, pixels="centred", floats=True) for split in ("train", "test")]
    train, test = sets
    assert isinstance(train, TensorDataset) and isinstance(test, TensorDataset)
    return train, test


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, help="a folder with CIFAR-10, as syncline.data.cifar10 reads it"
    )
    parser.add_argument("--row", default="0,128,1", help="(σ, μ, λ) of Table 2 or 3")
    parser.add_argument("--sync", help="another dial than the row's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--unbatched", action="store_true", help="one gradient at a time")
    parser.add_argument("--commit", help="where the copy has no repository")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    (row,) = find(given.row)
    train, test = read(given.data)
    outcome = run(
        sync=given.sync or row.sync,
        learners=row.learners,
        batch_size=row.mu,
        data=train,
        test=test,
        epochs=given.epochs,
        seed=given.seed,
        device=given.device,
        batched=not given.unbatched,
    )
    outcome |= {
        "row": row.name,
        "paper": row.error,
        "paper_seconds": row.seconds,
        "machine": described(given),
    }
    print(
        f"({row.name}) {outcome['sync']} seed {given.seed}: error {outcome['error']:.2f} % (paper {row.error} %), "
        f"σ {outcome['staleness']['mean']:.2f}, {outcome['gradients']} gradients in {outcome['seconds']:.0f} s, "
        f"simulated {outcome['simulated_seconds']:.0f} s (paper {row.seconds} s)",
        flush=True,
    )
    if given.json:
        given.json.write_text(json.dumps(outcome, indent=1) + "\n")


def described(given: argparse.Namespace) -> dict[str, str]:
    known = machine.describe()
    if given.commit:
        known["commit"] = given.commit
    if given.device.startswith("cuda"):
        known["gpu"] = torch.cuda.get_device_name()
    return known


if __name__ == "__main__":
    main()
