"""Groups of seats, before the start: whether they can be, what the model reads, how it is cut over them (M15)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from syncline.engines.local.engine import Local
from syncline.engines.run import Engine
from syncline.errors import NotYetError, UsageError
from syncline.learn.loader import reader
from syncline.learn.server_session import check_whole
from syncline.learn.training import Objective
from syncline.parallel.module import partition
from syncline.parallel.move import Group
from syncline.parallel.trace import skeleton
from syncline.plan import Plan
from syncline.plan import plan as cheapest
from syncline.topologies import AllReduce, parse_topology


def check_group(group: Any, plan: Any, engine: Engine, topology: str) -> None:
    check_whole("group", group)
    if group == 1:
        if plan is not None:
            raise UsageError(
                "plan= says how a model is cut over the seats of a group: give group= of at least 2"
            )
        return
    if isinstance(parse_topology(topology), AllReduce):
        raise UsageError(
            f"group={group} over all-reduce: groups publish to servers; use topology='servers', or sl.partition in your own loop"
        )
    if not isinstance(engine, Local):
        raise NotYetError(f"group={group} works with engine='local' so far, not with {type(engine).__name__}")


class GroupBatches(NamedTuple):
    """What learners read."""

    data: Any
    collate: Any
    batch_size: int
    learners: int


def cut_over(
    group: int,
    plan: Any,
    *,
    model: nn.Module,
    objective: Objective | None,
    batches: GroupBatches,
) -> Plan | None:
    """How `train`'s model is cut over each group; refused here where it cannot be."""
    if group == 1:
        return None
    if objective is None:
        raise UsageError(
            f"group={group}: gradients over seats are made by back-propagation of a loss or an objective, without a regulariser"
        )
    example = _model_inputs(model, objective, batches)
    batch_size, learners = batches.batch_size, batches.learners
    found = Plan.load(plan) if isinstance(plan, str) and plan.endswith(".json") else plan
    if plan is None or plan == "auto":
        joint = {name: _as_shape(tensor, batch_size, learners) for name, tensor in example.items()}
        found = cheapest(model, joint, group=group, workers=group * learners, local_update=False)
    planned = Group()
    planned.size = group
    partition(skeleton(model), found, example, planned)
    inputs = tuple((name, tuple(t.shape), str(t.dtype).split(".")[1]) for name, t in example.items())
    if isinstance(found, Plan):
        return Plan(found.choices, found.rows, group, group * learners, batch_size, found.costs, inputs)
    choices = dict(found) if isinstance(found, Mapping) else {}
    return Plan(choices, (), group, group * learners, batch_size, "", inputs)


class _Caught(Exception):
    """What the model was called with."""


class _Spy(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Caught(args, kwargs)


def _model_inputs(model: nn.Module, objective: Objective, batches: GroupBatches) -> Any:
    """Shapes of a batch as the model gets it, by name."""
    if isinstance(batches.data, IterableDataset):
        raise UsageError(
            "group= with a stream: there is no first batch to look at; use launch with sl.partition"
        )
    batch = reader(batches.data, batches.collate)(torch.arange(min(batches.batch_size, 2)))
    try:
        objective(_Spy(), batch)
    except _Caught as caught:
        args, kwargs = caught.args
    except Exception as error:
        raise UsageError(
            f"group=: the objective has to call model(...) as a whole: {type(error).__name__}: {error}"
        ) from error
    else:
        raise UsageError("group=: the objective does not call model(...)")
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    if not all(isinstance(value, Tensor) for value in bound.values()):
        names = ", ".join(name for name, value in bound.items() if not isinstance(value, Tensor))
        raise UsageError(
            f"group=: the model reads something else than tensors ({names}); use launch with sl.partition"
        )
    return {name: _as_shape(value, batches.batch_size, 1) for name, value in bound.items()}


def _as_shape(tensor: Tensor, batch_size: int, times: int) -> Tensor:
    return torch.empty((batch_size * times, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
