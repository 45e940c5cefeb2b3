"""On one machine each byte of a gradient, and of a version that is read, is copied once: by the learner."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import syncline as sl
from tests.integration.small_runs import launched

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIDE = 512
BYTES = 4 * SIDE * SIDE


def tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [each for value in values for each in tensors(value)] if isinstance(values, list | tuple) else []


class Moved(TorchDispatchMode):
    """Bytes of large tensors that operations have written, by operation; views write nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        written = tensors(args[0]) if name.endswith("_") else tensors(result)
        known = {each.untyped_storage().data_ptr() for each in tensors(args)}
        if not name.endswith("_"):
            written = [each for each in written if each.untyped_storage().data_ptr() not in known]
        self.bytes[name] += sum(each.nbytes for each in written if each.nbytes >= BYTES // 8)
        return result


def shared(tensor: Tensor) -> bool:
    """It lies in memory that processes share."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            low, high = (int(text, 16) for text in line.split()[0].split("-"))
            if low <= tensor.data_ptr() < high:
                return "memfd:" in line
    return False


class Plain(torch.optim.Optimizer):
    """Steps on a shard; refuses what it would have been given a copy of."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert shared(parameter) and shared(parameter.grad), "a copy of a gradient or of weights"
                parameter.add_(parameter.grad, alpha=-group["lr"])


def loop(session: sl.Session, factory: Any) -> dict[str, int]:
    model = nn.Linear(SIDE, SIDE, bias=False)
    optimizer = session.optimizer(model, factory)
    moved = Moved()
    for number in range(6):
        model.weight.grad = torch.full((SIDE, SIDE), float(number + session.rank))
        with moved if number else torch.no_grad():  # the first makes what the others use again
            optimizer.step()
    return {name: count for name, count in moved.bytes.items() if count}


@pytest.mark.parametrize("learners, sync", [(1, "hardsync"), (1, "async"), (3, "hardsync"), (2, "delayed:1")])
def test_each_byte_is_copied_once_each_way(learners: int, sync: str) -> None:
    """Where nobody is overtaken while it reads."""
    factory = Plain if learners == 1 else torch.optim.SGD
    found = launched(loop, factory, learners=learners, sync=sync, topology="servers:1", engine="local")
    for moved in found.returned:
        assert set(moved) <= {"copy_", "_foreach_copy_"}, moved
        assert sum(moved.values()) <= 5 * 2 * BYTES, moved
