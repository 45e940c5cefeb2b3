"""The script of plain_pytorch.py on several learners: diff the two."""

import sys
from functools import partial

import torch
import torch.nn.functional as F

import syncline as sl
from syncline.data import digits
from syncline.models import mlp


def train(session: sl.Session, epochs: int) -> float:
    model = mlp([64, 128, 10])
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    loader = session.loader(digits("train"), batch_size=16)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    x, y = digits("test").tensors
    return (model(x).argmax(1) == y).float().mean().item()


print("test accuracy", sl.launch(train, int(sys.argv[1]), learners=4, sync="hardsync").returned[0])
