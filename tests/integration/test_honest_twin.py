"""In the twin nobody sees another's memory: what is published or read is sent, and what is not owned is no number."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import syncline as sl
from syncline.errors import InvariantError
from syncline.sim.owned_memory import SimLane
from syncline.sim.server import SimServer
from syncline.sim.simulation import Simulation
from tests.integration.small_runs import PRESETS, launched, same


def loop(session: sl.Session) -> None:
    torch.manual_seed(session.rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = session.optimizer(model, partial(SGD, lr=0.05, momentum=0.5))
    for number in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        if number % 3 == 2:
            model[0].bias.grad = None  # whoever looks there finds what lay in the draft before
        optimizer.step()


def run(sync: str, **options: Any) -> sl.Result:
    engine = sl.Sim(handlers=False, **options)
    return launched(loop, learners=3, sync=sync, topology="servers:2", engine=engine)


@pytest.mark.parametrize("sync", [sync for sync in PRESETS if "until" not in sync])
def test_what_a_party_does_not_own_is_in_no_result(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = run(sync)
    assert all(value.isfinite().all() for value in honest.state_dict().values())
    monkeypatch.setattr(Simulation, "honest", False)
    assert same(honest.state_dict(), run(sync).state_dict())


def test_who_looks_into_anothers_memory_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(self: SimServer, table: int, learner: int, number: int) -> Any:
        lane = self._world.lanes[table, learner]
        assert isinstance(lane, SimLane)
        return lane.slots[lane.numbers.index(number)]

    monkeypatch.setattr(SimServer, "receive", receive)
    with pytest.raises(InvariantError):
        run("hardsync", check=True)
