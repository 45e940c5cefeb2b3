"""Figures 4 and 5: accuracy against time, and time to a fixed accuracy by machines, for SGD, Downpour and Sandblaster L-BFGS (D8).

    python -m reproductions.distbelief.figures45 [--data fsdd.npz] [--width 128] [--workers 20,200] [--target 0.8] [--csv FILE] [--picture FILE.svg]

A net of the paper's shape, four sigmoid layers and a softmax, on real speech features (without --data: 8×8 digits, to try it). Gradients are real, time is
the simulator's: machines on 1 Gbit/s whose links are slowed so that weights take as long as the 42 M of the paper, `--per-example` seconds for an example.
All begin with the same warm start of plain SGD.
"""

import argparse
import csv
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl
from benchmarks import machine
from reproductions.distbelief import speech
from syncline.cluster import Compute, Jitter
from syncline.data import digits
from syncline.models import mlp
from syncline.report import svg_plots as svg

PAPER_PARAMETERS = 42_000_000
PAPER_ORDER = "Downpour + Adagrad (200) > Sandblaster (2000) > Downpour + Adagrad (20) > Downpour (20) > SGD"


class Point(NamedTuple):
    """One test."""

    seconds: float
    accuracy: float
    loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    train: TensorDataset
    test: TensorDataset
    model: nn.Module
    cluster: sl.Cluster
    batch: int
    epochs: int
    iterations: int
    seed: int


def net(inputs: int, width: int, classes: int) -> nn.Module:
    """With first weights large enough for sigmoids: four times Glorot's."""
    made = mlp([inputs, width, width, width, width, classes], "sigmoid")
    for layer in made:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight, gain=4.0)
            nn.init.zeros_(layer.bias)
    return made


def read(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Inputs are flat."""
    if args.data is not None:
        train, test = speech.read(args.data)
    else:
        train, test = (
            TensorDataset(x.flatten(1), y) for x, y in (digits(s).tensors for s in ("train", "test"))
        )
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(args.seed))[: args.examples]
    return TensorDataset(*(tensor[chosen] for tensor in train.tensors)), test


def cluster(parameters: int, per_example: float) -> sl.Cluster:
    """1 Gbit/s for the paper's weights: ours are fewer, on links that are as much slower."""
    plain = sl.Cluster.named("ethernet-1g")
    share = parameters / PAPER_PARAMETERS
    card = dataclasses.replace(plain.card, bandwidth=plain.card.bandwidth * share)
    costs = {
        name: dataclasses.replace(getattr(plain, name), per_byte=getattr(plain, name).per_byte / share)
        for name in ("take", "fold", "serve")
    }
    compute = Compute(base=0.01, per_example=per_example)
    return dataclasses.replace(
        plain, card=card, compute=compute, jitter=Jitter(kind="lognormal", spread=0.1), **costs
    )


def run(setting: Setting, workers: int, **options: Any) -> list[Point]:
    """The tests of one run, in virtual seconds."""
    with_shards = {"topology": f"servers:{max(1, min(8, workers // 4))}", "learners": workers, **options}
    result: sl.Result = sl.train(
        setting.model,
        setting.train,
        loss=F.cross_entropy,
        evaluate=setting.test,
        engine=sl.Sim(setting.cluster),
        seed=setting.seed,
        threads=1,
        **with_shards,
    )
    return [Point(each.seconds, each["accuracy"], each.metrics["loss"]) for each in result.history]


def by_gradients(setting: Setting, workers: int, sync: str, optimizer: Any) -> list[Point]:
    return run(
        setting, workers, sync=sync, optimizer=optimizer, batch_size=setting.batch, epochs=setting.epochs
    )


def sandblaster(setting: Setting, workers: int) -> list[Point]:
    """Portions of which every worker has several."""
    portion = max(1, min(setting.batch, len(setting.train) // (8 * workers)))
    method = sl.LBFGS(history=10, tolerance=0.0, decrease=0.0)
    return run(
        setting, workers, sync="sandblaster", optimizer=method, batch_size=portion, steps=setting.iterations
    )


def warm_start(setting: Setting, epochs: int, lr: float) -> nn.Module:
    """The paper's was ten hours of plain SGD."""
    if epochs == 0:
        return setting.model
    result: sl.Result = sl.train(
        setting.model,
        setting.train,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=lr),
        sync="hardsync",
        engine="sim",
        learners=1,
        batch_size=setting.batch,
        epochs=epochs,
        seed=setting.seed,
        threads=1,
    )
    assert result.model is not None
    return result.model


def curves(
    setting: Setting, workers: list[int], lr: float, adagrad: float
) -> dict[tuple[str, int], list[Point]]:
    sgd, ada = partial(torch.optim.SGD, lr=lr), partial(torch.optim.Adagrad, lr=adagrad)
    found = {("SGD", 1): by_gradients(setting, 1, "async", sgd)}
    for count in workers:
        found["Downpour", count] = by_gradients(setting, count, "downpour", sgd)
        found["Downpour + Adagrad", count] = by_gradients(setting, count, "downpour", ada)
        found["Sandblaster L-BFGS", count] = sandblaster(setting, count)
    return found


def reached(points: list[Point], target: float) -> float | None:
    """Seconds until a test is at least so good."""
    return next((point.seconds for point in points if point.accuracy >= target), None)


def write_csv(file: Path, found: dict[tuple[str, int], list[Point]]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["method", "workers", *Point._fields])
        for (method, workers), points in found.items():
            writer.writerows([method, workers, *point] for point in points)


def draw(file: Path, found: dict[tuple[str, int], list[Point]]) -> None:
    series = [
        (f"{method} ({workers})", [(point.seconds, point.accuracy) for point in points])
        for (method, workers), points in found.items()
    ]
    file.write_text(svg.lines("Test accuracy against time", series, x="virtual seconds", y="accuracy"))


def report(found: dict[tuple[str, int], list[Point]], target: float) -> None:
    print(f"\n{'method':22}{'workers':>8}{'best':>9}{f's to {target:.0%}':>14}")
    ranked = sorted(found, key=lambda key: reached(found[key], target) or float("inf"))
    for method, workers in ranked:
        points = found[method, workers]
        seconds = reached(points, target)
        best = max((point.accuracy for point in points), default=0.0)
        print(f"{method:22}{workers:8}{best:9.2%}{f'{seconds:.1f}' if seconds is not None else '–':>14}")
    print(f"the paper's order, fastest first: {PAPER_ORDER}")


def parsed(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="fsdd.npz")
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--workers", default="20,200")
    parser.add_argument("--batch", type=int, default=32, help="of a gradient; at most so many in a portion")
    parser.add_argument("--epochs", type=int, default=10, help="of SGD and Downpour")
    parser.add_argument("--iterations", type=int, default=60, help="of Sandblaster")
    parser.add_argument("--warm", type=int, default=1, help="epochs of plain SGD that all begin with")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--adagrad", type=float, default=0.05)
    parser.add_argument("--per-example", type=float, default=0.01, help="seconds")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--picture", type=Path)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> dict[tuple[str, int], list[Point]]:
    args = parsed(sys.argv[1:] if given is None else given)
    for name, value in machine.describe().items():
        print(f"{name:8} {value}")
    torch.manual_seed(args.seed)
    train, test = read(args)
    model = net(train.tensors[0].shape[1], args.width, int(train.tensors[1].max()) + 1)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {len(train):,} examples, {len(test):,} for testing")
    setting = Setting(
        train=train,
        test=test,
        model=model,
        cluster=cluster(size, args.per_example),
        batch=args.batch,
        epochs=args.epochs,
        iterations=args.iterations,
        seed=args.seed,
    )
    setting = dataclasses.replace(setting, model=warm_start(setting, args.warm, args.lr))
    found = curves(setting, [int(each) for each in args.workers.split(",")], args.lr, args.adagrad)
    report(found, args.target)
    if args.csv is not None:
        write_csv(args.csv, found)
    if args.picture is not None:
        draw(args.picture, found)
    return found


if __name__ == "__main__":
    main()
