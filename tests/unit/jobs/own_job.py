"""A job, and a user's module beside it."""

SMALL = """\
learners = 2
batch_size = 8
steps = 3

[model]
name = "mlp"
sizes = [64, 10]

[data]
name = "digits"

[loss]
name = "cross_entropy"
label_smoothing = 0.1

[optimizer]
name = "sgd"
lr = 0.1
"""

OWN = '''\
"""A user's module."""
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

made = nn.Linear(64, 10)
points = TensorDataset(torch.ones(9, 64), torch.zeros(9, dtype=torch.long))
number = 3

class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)

def drawn():
    return TensorDataset(torch.randn(9, 64), torch.zeros(9, dtype=torch.long))

def data(count=5, *, kind="x"):
    return TensorDataset(torch.ones(count, 64), torch.zeros(count, dtype=torch.long))

def single():
    return TensorDataset(torch.ones(9, 64))

class Endless(Dataset):
    def __getitem__(self, index):
        return torch.ones(64), 0

def objective(model, batch, *, weight=1.0):
    return weight * model(batch[0]).square().mean()

def vector(model, batch):
    return model(batch[0]).mean(1)

def constant(model, batch):
    return torch.tensor(1.0)

def score(model):
    return {"score": 1.0}

def stop(record, *, after=1):
    return record.epoch >= after

def broken():
    raise RuntimeError("two\\nlines")
'''
