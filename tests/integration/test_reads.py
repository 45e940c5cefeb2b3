"""No weights move when the learner has them (R4): they are not sent again, nor copied into its parameters."""

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
from syncline.engines.local import learner
from syncline.sim.server import SimServer
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


def test_shards_send_a_version_once_to_each_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine learners copy for themselves; where they are not, it is sent."""
    send, sent = SimServer._sent, list[tuple[int, int]]()

    def spy(self: SimServer, table: int, lane: Any, version: int) -> Any:
        sent.append((version, id(lane)))
        return send(self, table, lane, version)

    monkeypatch.setattr(SimServer, "_sent", spy)
    result = launched(copies_of, learners=2, sync="softsync:1", engine="sim")
    assert result.version == STEPS // 2 and len(result.returned[0]) == STEPS
    assert len(sent) == len(set(sent)), sent
    assert {version for version, _ in sent} == {0, 1, 2, 3}


def overtaken(session: sl.Session) -> tuple[int, list[torch.Tensor]]:
    """Every second read finds no version that is whole, and one is delivered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 1))
    optimizer = session.optimizer(model, partial(SGD, lr=0.01, momentum=0.9))
    found = 0
    for number in range(2 * STEPS):
        before, learner.TRIES = learner.TRIES, number % 2
        optimizer.zero_grad()
        model(torch.full((2, 50), 0.1 * (1 + session.rank))).square().sum().backward()
        optimizer.step()
        learner.TRIES = before
        found += (
            optimizer.stepper.tickets - number - 2 - found
        )  # a delivery is asked for with a ticket of its own
    return found, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("sync", ["hardsync", "softsync:1", "async", "backup:1", "delayed:1"])
def test_who_is_overtaken_gets_a_version_delivered(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "TRIES", learner.TRIES)  # simulated learners change it in this process
    result = launched(overtaken, learners=3, sync=sync, topology="servers:2", engine="local")
    assert all(found for found, _ in result.returned)  # how many depends on who is how fast
    assert result.gradients + result.dropped == 3 * 2 * STEPS
    if sync == "hardsync":
        undisturbed = launched(overtaken, learners=3, sync=sync, topology="servers:2", engine="sim")
        for (_, mine), (_, theirs) in zip(result.returned, undisturbed.returned, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
