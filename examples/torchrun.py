"""All-reduce, layer by layer, in a loop of your own; the same script with and without torchrun.

python examples/torchrun.py --learners 2
torchrun --nproc-per-node=2 examples/torchrun.py
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import syncline as sl
from syncline.data import digits


def learner(session: sl.Session, epochs: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(session.device)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    loader = session.loader(digits(), global_batch_size=64)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()  # averages of last layers travel meanwhile
            optimizer.step()
    inputs, targets = digits("test")[:]
    return float((model(inputs).argmax(1) == targets).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sync", default="hardsync")
    given = parser.parse_args()
    result = sl.launch(
        learner, given.epochs, learners=given.learners, sync=given.sync, topology="allreduce:layerwise"
    )
    if os.environ.get("RANK", "0") == "0":
        accuracies = ", ".join(f"{value:.3f}" for value in result.returned)
        print(f"{result.updates} updates, mean staleness {result.staleness.mean:.2f}")
        print(f"test accuracy by learner: {accuracies}")


main()
