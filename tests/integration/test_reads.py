"""No weights move when the learner has them (R4): neither from the shards to its inbox, nor from there to its parameters."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import SGD

import syncline as sl
from syncline.table.shard import Shard
from tests.integration.small_runs import launched

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 6


def copies_of(session: sl.Session) -> list[tuple[int, bool]]:
    """Learner 0 steps alone while the other meets: (version, whether its parameters were written to) after each step.

    Under softsync:1 two gradients make an update, so that every second step reads the version that it has.
    """
    model = nn.Linear(3, 2)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    mine = {parameter.data_ptr() for parameter in model.parameters()}
    copy, seen = torch._foreach_copy_, []
    written: list[int] = []

    def spy(targets: Any, *rest: Any, **named: Any) -> Any:
        written.extend(target.data_ptr() for target in targets if target.data_ptr() in mine)
        return copy(targets, *rest, **named)

    for _ in range(STEPS if session.rank == 0 else 0):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        written.clear()
        torch._foreach_copy_ = spy  # type: ignore[assignment]
        try:
            optimizer.step()
        finally:
            torch._foreach_copy_ = copy
        seen.append((optimizer.version, bool(written)))
    session.mean(0.0)
    return seen


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_a_learner_copies_a_version_once(engine: str) -> None:
    result = launched(copies_of, learners=2, sync="softsync:1", engine=engine)
    assert result.returned[0] == [(0, False), (1, True), (1, False), (2, True), (2, False), (3, True)]


def test_shards_copy_a_version_once_to_each_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code in processes; here it can be looked at."""
    read, copied = Shard.read, list[tuple[int, int]]()

    def spy(self: Shard, version: int, into: Any) -> None:
        copied.append((version, into[0].data_ptr()))
        read(self, version, into)

    monkeypatch.setattr(Shard, "read", spy)
    result = launched(copies_of, learners=2, sync="softsync:1", engine="sim")
    assert result.version == STEPS // 2 and len(result.returned[0]) == STEPS
    assert len(copied) == len(set(copied)), copied
    assert {version for version, _ in copied} == {0, 1, 2, 3}
