"""What `train` refuses before a process starts; its model and optimizer, built. Not responsible for what every run needs (spec.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from syncline.dial import Course
from syncline.errors import UsageError
from syncline.learn.session import (
    batch_of_each,
    check_batches,
    check_joint,
    check_policy,
    check_whole,
    make_optimizer,
    refuse_sparse,
    refuse_weighted,
)
from syncline.topology.parse import AllReduce, parse_topology
from syncline.train.spec import Dial


def batches_of(
    batch_size: int, joint: int | None, learners: int, sync: Dial, topology: str
) -> tuple[int, int | None]:
    """(the largest batch of a learner, the batch of all together where it was given and need not divide)"""
    check_whole("learners", learners)
    if joint is None:
        return batch_size, None
    if isinstance(parse_topology(topology), AllReduce):
        check_joint(None, joint, learners)
        return -(-joint // learners), joint
    return max(batch_of_each(None, joint, learners, dial) for _, dial in Course.of(sync).dials), None


def check_training(
    model: Any,
    data: Any,
    loss: Any,
    objective: Any,
    optimizer: Any,
    batch_size: int,
    epochs: int | None,
    steps: int | None,
    policy: str,
    seed: int,
    sync: Dial,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Everything that can be refused before a process starts; model and optimizer come back built."""
    if (loss is None) == (objective is None):
        raise UsageError("give either loss=(output, target) -> scalar or objective=(model, batch) -> scalar")
    if epochs is not None and steps is not None:
        raise UsageError(f"give either epochs= or steps=, got epochs={epochs} and steps={steps}")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            check_whole(name, value)
    _check_data(data, batch_size)
    built = _built(model, seed)
    check_policy(policy)
    refuse_sparse(built)
    made = make_optimizer(built, optimizer)
    for _, dial in Course.of(sync).dials:
        refuse_weighted(dial, made)
    return built, made


def _check_data(data: Any, batch_size: int) -> None:
    if not isinstance(data, Dataset) and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UsageError(
            f"data must be a torch Dataset, got {type(data).__name__}; wrap tensors in TensorDataset"
        )
    if isinstance(data, IterableDataset):
        check_whole("batch_size", batch_size)
    else:
        check_batches(len(data), batch_size)


def _built(model: Any, seed: int) -> nn.Module:
    """A made model is the one that a plain script makes with this seed."""
    made = model
    if not isinstance(model, nn.Module) and callable(model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = model()
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"model must be an nn.Module or a callable that makes one, got {type(made).__name__}"
        )
    return made
