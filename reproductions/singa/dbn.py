"""SINGA's deep belief network on MNIST, 784-500-500-2000-10: does pre-training by contrastive divergence lower the test error?

    python -m reproductions.singa.dbn --data FOLDER [--seeds 0,1] [--json FILE] [--pictures FOLDER] [--device cuda]

FOLDER holds MNIST (IDX files or mnist.npz). Three RBMs, greedily, by CD-1 with two learners in lockstep and joint batches of 100;
then back-propagation of the whole net. Beside it the same net from a random start (Glorot's), for as many epochs of
back-propagation, and for those of pre-training on top. `--examples`, `--epochs` and `--tune` make it small.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import syncline as sl
from benchmarks import machine
from syncline.data import mnist
from syncline.nn import DBN

SIZES = [784, 500, 500, 2000]
CLASSES = 10
JOINT_BATCH = 100
LITERATURE = "1.2 (Hinton, Salakhutdinov 2006), 1.25 (Hinton, Osindero, Teh 2006)"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One seed's training."""

    train: TensorDataset
    test: TensorDataset
    epochs: int = 30  # of each RBM
    tune: int = 50  # of back-propagation
    sizes: tuple[int, ...] = tuple(SIZES)
    seed: int = 0
    learners: int = 2
    engine: str = "local"
    device: str | None = None
    threads: int | None = 1

    def common(self) -> dict[str, Any]:
        return {
            "sync": "hardsync",
            "engine": self.engine,
            "learners": self.learners,
            "global_batch_size": JOINT_BATCH,
            "seed": self.seed,
            "device": self.device,
            "threads": self.threads,
        }


@dataclass(frozen=True)
class Row:
    """A way to the classifier, and what came of it."""

    way: str
    seed: int
    epochs: int
    test_error: float  # per cent, after the last epoch
    errors: list[float]  # after every epoch
    seconds: float


def pretrain(plan: Plan) -> DBN:
    """One RBM after the other."""
    torch.manual_seed(plan.seed)
    dbn = DBN(list(plan.sizes), decay=2e-4)
    for number in range(len(dbn.rbms)):
        result = sl.train(
            dbn.only(number),
            plan.train,
            gradient="cd:1",
            optimizer=partial(SGD, lr=0.1, momentum=0.5),
            schedule=partial(CosineAnnealingLR, T_max=plan.epochs),
            epochs=plan.epochs,
            **plan.common(),
        )
        dbn = result.model  # type: ignore[assignment]
        print(f"  RBM {number + 1}: reconstruction error {result.history[-1].loss:.2f}", flush=True)
    return dbn.only(None)


def random_start(plan: Plan) -> nn.Sequential:
    torch.manual_seed(plan.seed)
    net = DBN(list(plan.sizes)).classifier(CLASSES)
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return net


def fine_tune(net: nn.Module, plan: Plan, epochs: int, way: str, before: float = 0.0) -> Row:
    """Back-propagation; `before` are seconds that were spent already."""
    began = time.monotonic()
    result = sl.train(
        net,
        plan.train,
        loss=F.cross_entropy,
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        schedule=partial(CosineAnnealingLR, T_max=epochs),
        epochs=epochs,
        evaluate=plan.test,
        **plan.common(),
    )
    errors = [round(100 * (1 - record.metrics["accuracy"]), 3) for record in result.history]
    seconds = round(before + time.monotonic() - began, 1)
    print(f"  {way}: {errors[-1]:.2f} % after {epochs} epochs, {seconds:.0f} s", flush=True)
    return Row(way, plan.seed, epochs, errors[-1], errors, seconds)


def run(plan: Plan) -> tuple[list[Row], DBN]:
    """All ways, and the DBN as it was pre-trained."""
    began = time.monotonic()
    dbn = pretrain(plan)
    spent = time.monotonic() - began
    torch.manual_seed(plan.seed)
    rows = [fine_tune(dbn.classifier(CLASSES), plan, plan.tune, "pre-trained", spent)]
    more = plan.tune + plan.epochs * len(dbn.rbms)
    rows.append(fine_tune(random_start(plan), plan, plan.tune, "random start"))
    rows.append(fine_tune(random_start(plan), plan, more, "random start, as many epochs in all"))
    return rows, dbn


def read(folder: str, split: str, examples: int | None) -> TensorDataset:
    found = mnist(folder, split, floats=True)
    assert isinstance(found, TensorDataset)
    return TensorDataset(*(tensor[:examples] for tensor in found.tensors))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a folder with MNIST")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int, default=Plan.epochs, help="of each RBM")
    parser.add_argument("--tune", type=int, default=Plan.tune, help="epochs of back-propagation")
    parser.add_argument("--examples", type=int, help="the first of the training set alone")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path, help="a folder for the filters' picture")
    return parser


def main(arguments: list[str]) -> None:
    given = options().parse_args(arguments)
    train, test = (read(given.data, split, given.examples) for split in ("train", "test"))
    rows = []
    for seed in map(int, given.seeds.split(",")):
        print(f"seed {seed}", flush=True)
        plan = Plan(
            train=train, test=test, epochs=given.epochs, tune=given.tune, seed=seed, device=given.device
        )
        found, dbn = run(plan)
        rows += found
        if given.pictures:
            from reproductions.singa.pictures import filters

            given.pictures.mkdir(parents=True, exist_ok=True)
            filters(dbn.rbms[0].weight.detach().cpu(), given.pictures / "singa_filters.png")  # type: ignore[operator]
    print(f"literature: {LITERATURE} %")
    if given.json:
        whole = {"machine": machine.describe(), "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
