"""Table 1 in small, on Fashion-MNIST: what does a delayed gradient cost in accuracy after so many batches?

    python -m reproductions.agd.table1 --data FOLDER [--columns serial,SGD,AGD-1,AGD-2] [--seeds 0,1,2] [--csv FILE] [--picture FILE]

A narrow AlexNet by Caffe's settings (rate 0.01, momentum 0.9, decay 0.0005), the effective batch fixed (A6): `serial` is a
plain PyTorch loop with batches of 64; the others are two learners with 32 each on disjoint halves of the data (A5),
over all-reduce: SGD in lockstep, AGD-k with gradients k iterations late. Accuracy on the test set after every 100
batches, then at the end, behind one cut of the rate to a tenth.
"""

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import syncline as sl
from benchmarks import machine
from syncline.data import fashion_mnist
from syncline.models import AlexNet

EFFECTIVE_BATCH = 64
LEARNERS = 2
EVERY = 100  # batches between two tests
TESTS = 5
CUT, END = 900, 1500  # batches: when the rate is cut to a tenth, and when training ends
RATE = 0.01
DIALS = {"SGD": "hardsync", "AGD-1": "delayed:1", "AGD-2": "delayed:2", "AGD-3": "delayed:3"}
PAPER = {  # Table 1: AlexNet on ImageNet, after 1000 … 5000 batches
    "serial": (0.0124, 0.05164, 0.10102, 0.13432, 0.16454),
    "SGD": (0.01116, 0.03984, 0.07594, 0.10622, 0.13052),
    "AGD-1": (0.0039, 0.01324, 0.02632, 0.05076, 0.07362),
    "AGD-2": (0.00104, 0.00356, 0.00636, 0.01282, 0.01688),
}
PAPER_END = 0.54  # of all


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A column: what every learner needs to know."""

    train: TensorDataset
    test: TensorDataset
    every: int
    tests: int
    cut: int
    end: int
    seed: int

    def due(self, batches: int) -> bool:
        """Test now?"""
        return batches == self.end or (batches % self.every == 0 and batches <= self.every * self.tests)

    def marks(self) -> list[int]:
        """After how many batches it is tested."""
        return [batches for batches in range(1, self.end + 1) if self.due(batches)]


@dataclass(frozen=True)
class Score:
    batches: int
    accuracy: float


def make_model() -> nn.Module:
    return AlexNet(10, image=28, channels=1, width=0.125, hidden=256, norm=False)


make_optimizer = partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=0.0005)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = [
            (model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500), strict=True)
        ]
    model.train()
    return float(sum(right)) / len(labels)


def cut_rate(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = RATE / 10


def serial(plan: Plan) -> list[Score]:
    """One process, plain PyTorch."""
    torch.manual_seed(plan.seed)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    images, labels = plan.train.tensors
    tests = []
    for batches, chosen in zip(range(1, plan.end + 1), batches_of(len(labels), plan.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        if batches == plan.cut:
            cut_rate(optimizer)
        if plan.due(batches):
            tests.append(Score(batches, accuracy(model, *plan.test.tensors)))
    return tests


def batches_of(size: int, seed: int) -> Iterator[Tensor]:
    """Indices, epoch after epoch, each in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(size, generator=generator)
        yield from order[: size // EFFECTIVE_BATCH * EFFECTIVE_BATCH].split(EFFECTIVE_BATCH)


def learner(session: sl.Session, plan: Plan) -> list[Score]:
    """One of two; both test, each on its part of the test set, since their copies are equal."""
    torch.manual_seed(plan.seed + session.rank)
    model = make_model()
    optimizer = session.optimizer(model, make_optimizer)
    part = [values[session.rank :: session.learners] for values in plan.test.tensors]
    tests = []
    for batches, (images, labels) in zip(range(1, plan.end + 1), endless(session, plan), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if batches == plan.cut:
            cut_rate(optimizer)
        if plan.due(batches):
            tests.append(Score(batches, float(session.mean(accuracy(model, *part)))))
    return tests


def endless(session: sl.Session, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
    loader = session.loader(plan.train, batch_size=EFFECTIVE_BATCH // session.learners, policy="partition")
    while True:
        yield from loader


def run(column: str, plan: Plan) -> list[Score]:
    if column == "serial":
        return serial(plan)
    result = sl.launch(
        learner, plan, learners=LEARNERS, sync=DIALS[column], topology="allreduce", seed=plan.seed, threads=1
    )
    tests: list[Score] = result.returned[0]
    return tests


def load(folder: Path, most: int | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images as floats, the first `most` of each."""
    found = []
    for split in ("train", "test"):
        data = fashion_mnist(folder, split, floats=True)
        assert isinstance(data, TensorDataset)
        found.append(TensorDataset(*(values[:most] for values in data.tensors)))
    return found[0], found[1]


Measured = dict[str, dict[int, list[Score]]]  # column to seed to tests


def show(measured: Measured) -> None:
    """A table, seeds averaged, with the paper's beside it."""
    first = next(iter(next(iter(measured.values())).values()))
    heads = [str(test.batches) for test in first]
    print(
        "| batches | " + " | ".join(heads) + " | paper: 1000 … 5000 |\n|---" + "|---" * (len(heads) + 1) + "|"
    )
    for column, by_seed in measured.items():
        cells = [f"{mean:.3f}" for mean in means(by_seed)]
        paper = ", ".join(f"{value:.4f}" for value in PAPER.get(column, ()))
        print(f"| {column} | " + " | ".join(cells) + f" | {paper} |")


def means(by_seed: dict[int, list[Score]]) -> list[float]:
    rows = [[test.accuracy for test in tests] for tests in by_seed.values()]
    return [statistics.fmean(values) for values in zip(*rows, strict=True)]


def write_csv(file: Path, head: dict[str, str], measured: Measured) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        stream.write(f"# {json.dumps(head)}\n")
        writer = csv.writer(stream)
        writer.writerow(["column", "seed", "batches", "accuracy"])
        for column, by_seed in measured.items():
            for seed, tests in by_seed.items():
                writer.writerows([column, seed, test.batches, f"{test.accuracy:.4f}"] for test in tests)


def read_csv(file: Path) -> tuple[dict[str, str], Measured]:
    with file.open(newline="", encoding="utf-8") as stream:
        head: dict[str, str] = json.loads(stream.readline().removeprefix("# "))
        found: Measured = {}
        for row in csv.DictReader(stream):
            tests = found.setdefault(row["column"], {}).setdefault(int(row["seed"]), [])
            tests.append(Score(int(row["batches"]), float(row["accuracy"])))
    return head, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with Fashion-MNIST")
    parser.add_argument("--columns", default="serial,SGD,AGD-1,AGD-2")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--cut", type=int, default=CUT)
    parser.add_argument("--end", type=int, default=END)
    parser.add_argument("--most", type=int, help="images of each set, for a trial")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    unknown = [name for name in given.columns.split(",") if name != "serial" and name not in DIALS]
    if unknown:
        parser.error(f"no column {unknown[0]!r}; there are: serial, {', '.join(DIALS)}")
    torch.set_num_threads(1)
    head = machine.describe()
    print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
    train, test = load(given.data, given.most)
    measured: Measured = {}
    for seed in map(int, given.seeds.split(",")):
        plan = Plan(
            train=train,
            test=test,
            every=given.every,
            tests=TESTS,
            cut=given.cut,
            end=given.end,
            seed=seed,
        )
        for column in given.columns.split(","):
            start = time.perf_counter()
            measured.setdefault(column, {})[seed] = run(column, plan)
            print(f"{column}, seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    show(measured)
    if given.csv:
        write_csv(given.csv, head, measured)
    if given.picture:
        from reproductions.agd.pictures import accuracy_picture

        accuracy_picture(head, measured, given.picture)


if __name__ == "__main__":
    main()
