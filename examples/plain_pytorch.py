"""A plain PyTorch script; with_syncline.py is the same on several learners."""

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from syncline.data import digits
from syncline.models import mlp


def train(epochs: int) -> float:
    model = mlp([64, 128, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(digits("train"), batch_size=16, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    x, y = digits("test").tensors
    return (model(x).argmax(1) == y).float().mean().item()


torch.manual_seed(0)
print("test accuracy", train(int(sys.argv[1])))
