"""Doubles for the tests of roles: small tables and gradients, ports that only remember what they were told."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

from syncline import messages as m
from syncline.messages.to_leader import NO_LOADER, Gradient
from syncline.ports import CoordinatorPort, ServerPort
from syncline.table.layout import Layout, lay_out
from syncline.table.optimizer_template import OptimizerTemplate

SHORT, LONG = 3, 512  # elements of the parameters; the long one lies on both of two shards


def model() -> nn.Module:
    found = nn.Module()
    found.long, found.short = nn.Parameter(torch.zeros(LONG)), nn.Parameter(torch.zeros(SHORT))
    return found


def layout(shards: int = 1, *, buffers: int = 0) -> Layout:
    made = model()
    for number in range(buffers):
        made.register_buffer(f"seen{number}", torch.zeros(2))
    return lay_out(made, [made.parameters()], cuttable=True, shards=shards)[0]


def template(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> OptimizerTemplate:
    """Without an optimizer to take it from: the first one of a process takes seconds."""
    return OptimizerTemplate(kind, {}, [options], {})


def table(number: int = 0, *, learners: int = 1, of: Layout | None = None, **options: Any) -> m.MakeTable:
    """Of these learners, whose ranks are their numbers."""
    given: dict[str, Any] = {
        "table": number,
        "layout": of or layout(),
        "template": template(),
        "dial": 0,
        "initial": {learner: learner for learner in range(learners)},
        "learners": learners,
        "warm": 0,
        "batch_size": None,
        "limit": None,
        "clip_norm": None,
    }
    return m.MakeTable(**{**given, **options})


def gradient(number: int = 1, table: int = 0, **said: Any) -> Gradient:
    given: dict[str, Any] = {
        **{"stamp": 0, "step": 0, "examples": 1, "loader": NO_LOADER, "upto": 0, "options": 0, "full": True},
        **{"silent": False, "states": b"", "loss": math.nan},
    }
    return Gradient(table=table, number=number, **{**given, **said})


def server_port(shard: int = 0, shards: int = 1) -> Any:
    return MagicMock(spec=ServerPort, shard=shard, shards=shards)


def coordinator_port(shards: int = 1) -> Any:
    return MagicMock(spec=CoordinatorPort, shards=shards)


def told(method: Any, *kinds: type) -> list[Any]:
    """What a port's method was told of these kinds, or all, and forgets."""
    found = [call.args[0] if len(call.args) == 1 else call.args for call in method.call_args_list]
    method.reset_mock()
    return [each for each in found if not kinds or isinstance(each, kinds)]
