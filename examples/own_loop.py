"""Your own loop on several learners: the code that a single process would run, with a session.

python examples/own_loop.py --learners 4 --sync softsync:1
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F

import syncline as sl
from syncline.data import digits
from syncline.models import mlp


def learner(session: sl.Session, width: int, epochs: int) -> float:
    """What every learner runs; the table's version is shared, everything else is its own."""
    model = mlp([64, width, 10])
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loader = session.loader(digits("train"), batch_size=16)
    for epoch in range(epochs):
        losses = []
        for x, y in loader:  # this learner's part of the epoch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()  # publishes the gradient, and reads weights as the dial says
            losses.append(loss.item())
        scheduler.step()
        session.log(epoch=epoch, loss=sum(losses) / max(1, len(losses)), batches=len(losses))
    x, y = digits("test").tensors
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--sync", default="softsync:1")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args()
    result = sl.launch(
        learner, given.width, given.epochs, learners=given.learners, sync=given.sync, threads=1
    )
    for rank, seconds, metrics in result.logs[-given.learners :]:
        print(f"learner {rank} after {seconds:.1f} s: {metrics}")
    print(
        f"{result.updates} updates of {result.gradients} gradients, mean staleness {result.staleness.mean:.2f}"
    )
    print(f"test accuracy by learner: {', '.join(f'{accuracy:.3f}' for accuracy in result.returned)}")


main()
