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
from syncline.sim.clock import Action, Clock
from syncline.sim.network import Late, Line
from syncline.sim.owned_memory import SimLane
from syncline.sim.server import SimServer
from syncline.sim.simulation import Simulation
from tests.integration.small_runs import PRESETS, launched, points, same, train


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


@pytest.mark.parametrize("sync", ["hardsync", "delayed:2"])
def test_bulk_that_comes_after_its_note_changes_no_bit_of_lockstep(
    sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = run(sync)
    monkeypatch.setattr(Simulation, "delays", True)
    late = run(sync, check=True)
    assert same(calm.state_dict(), late.state_dict())
    assert late.seconds > calm.seconds


def test_who_acts_before_the_bulk_is_there_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = Line.arrived

    def hasty(self: Line, hand_on: Action, bulk: Action | None = None, least: float = 0.0) -> None:
        hand_on()
        if bulk is not None:
            arrived(self, bulk)

    monkeypatch.setattr(Simulation, "delays", True)
    monkeypatch.setattr(Line, "arrived", hasty)
    with pytest.raises((InvariantError, ValueError)):  # there are no numbers yet, nor even options
        run("hardsync", check=True)


@pytest.mark.parametrize("lost", [False, True])
def test_what_never_comes_takes_with_it_what_was_said_after_it(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Late, "delay", lambda self: 1.0)
    monkeypatch.setattr(Late, "lost", lambda self: lost)
    clock, handed = Clock(), list[str]()
    line = Line(clock, Late(0, 1.0))

    def say(word: str, *, bulk: bool = False) -> None:
        line.arrived(lambda: handed.append(word), (lambda: handed.append(f"{word}'s bulk")) if bulk else None)

    say("asks")
    say("gradient", bulk=True)
    say("rests")
    assert handed == ["asks"]
    assert line.end() == (0.0 if lost else 1.0)
    say("gradient that was under way", bulk=True)
    while clock.step():
        pass
    come = ["gradient's bulk", "gradient", "rests"]
    come += ["gradient that was under way's bulk", "gradient that was under way"]
    assert handed == ["asks", *([] if lost else come)]


@pytest.mark.parametrize("sync", ["hardsync", "async", "softsync:1"])
def test_a_gradient_whose_bulk_never_comes_leaves_no_trace(
    sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its learner dies between the two; its batches come back, and everything is folded once."""
    monkeypatch.setattr(Simulation, "delays", True)
    monkeypatch.setattr(Late, "delay", lambda self: 0.4)
    cut: list[float] = []
    ended = Line.end

    def end(self: Line) -> float:
        before = bool(self._waiting)
        latest = ended(self)
        if before and self._cut:
            cut.append(latest)
        return latest

    monkeypatch.setattr(Late, "lost", lambda self: True)
    monkeypatch.setattr(Line, "end", end)
    engine = sl.Sim(handlers=False, check=True, script="kill learner 1 at 3.2 s; kill learner 2 at 5.3 s")
    result = train(data=points(96), learners=3, sync=sync, topology="servers:2", engine=engine, epochs=2)
    assert cut, "nobody died between note and bulk"
    assert result.statistics.tables[0].examples == 2 * 96


def untrained(session: sl.Session) -> None:
    model = beginning(session.rank)
    optimizer = session.optimizer(model, partial(SGD, lr=0.0))
    for _ in range(3):
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()


def beginning(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.0, track_running_stats=True).eval(), nn.Linear(8, 1)
    )


def test_first_values_are_all_of_one_learner_or_all_of_the_next() -> None:
    found = []
    for moment in ("0 s", "0.0015 s", "0.0025 s", "0.0035 s", "0.0045 s", "0.0055 s", "1.5 s"):
        engine = sl.Sim(handlers=False, check=True, script=f"kill learner 0 at {moment}")
        result = launched(
            untrained, learners=3, sync="async", topology="servers:2", engine=engine
        ).state_dict()
        whose = [rank for rank in (0, 1) if same(result, beginning(rank).state_dict())]
        assert len(whose) == 1, moment
        found += whose
    assert found == sorted(found, reverse=True) and set(found) == {0, 1}
