"""A generative adversarial network: two models, two optimizers, so two tables; both follow the dial.

The generator learns to draw points from a Gaussian at (3, −2).
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.models import mlp

CENTRE = torch.tensor([3.0, -2.0])
NOISE = 8


def verdict(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def learner(session: sl.Session, points: TensorDataset, epochs: int) -> nn.Module:
    generator = mlp([NOISE, 32, 2])
    critic = mlp([2, 32, 1])
    adam = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.999))
    of_generator = session.optimizer(generator, adam)  # table 0
    of_critic = session.optimizer(critic, adam)  # table 1
    loader = session.loader(points, batch_size=64)
    for _ in range(epochs):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE))

            of_critic.zero_grad()
            (verdict(critic(real), True) + verdict(critic(fake.detach()), False)).backward()
            of_critic.step()

            of_generator.zero_grad()
            verdict(critic(fake), True).backward()
            of_generator.step()
    return generator


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--points", type=int, default=8192)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--learners", type=int, default=2)
parser.add_argument("--sync", default="hardsync")
given = parser.parse_args()
torch.manual_seed(0)
points = TensorDataset(CENTRE + 0.5 * torch.randn(given.points, 2))
result = sl.launch(learner, points, given.epochs, learners=given.learners, sync=given.sync, threads=1)
generator = result.returned[0]
with torch.no_grad():
    drawn = generator(torch.randn(2000, NOISE))
print(f"{len(result.statistics.tables)} tables, {result.updates} updates of the first")
print(f"mean {drawn.mean(0).tolist()}, wanted {CENTRE.tolist()}")
print(f"distance {(drawn.mean(0) - CENTRE).norm().item():.2f}")
