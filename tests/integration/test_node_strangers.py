"""Who is not of the run, or says what is no frame, is refused and counted while the run goes on (no Ray needed)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import syncline as sl
from syncline.engines.authentication import HELLO, NONCE, Secret, Stranger, connect
from syncline.engines.ray import machine_membership
from syncline.engines.ray.agent import Agent, Begin
from syncline.engines.ray.bulk_connection import _HEAD, Connection
from syncline.engines.ray.frame_kinds import AGENT, Kind
from syncline.testing import Nodes
from tests.integration.small_runs import PATIENCE, kinds, same, until
from tests.integration.wires import Repeating, wire

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def slowly(model: nn.Module, batch: Any) -> Any:
    time.sleep(0.005)
    return F.cross_entropy(model(batch[0]), batch[1])


steps = 0


def held(gate: str, model: nn.Module, batch: Any) -> Any:
    """Waits after a few steps until the gate is open."""
    global steps
    steps += 1
    while steps > 5 and not Path(gate).exists():
        time.sleep(0.005)
    return slowly(model, batch)


def begin(**options: Any) -> sl.Run:
    torch.manual_seed(0)
    data = torch.randn(96, 6), torch.zeros(96, dtype=torch.long)
    settings = {
        "objective": slowly,
        "optimizer": partial(SGD, lr=0.1),
        "sync": "hardsync",
        "learners": 2,
        "batch_size": 8,
        "epochs": 12,
        "threads": 1,
    }
    return sl.train(nn.Linear(6, 2), data, wait=False, **{**settings, **options})


def raw(address: tuple[str, int], words: bytes) -> None:
    """Says so to whoever listens, and waits until that has closed the connection."""
    with socket.create_connection(address) as end:
        end.recv(len(HELLO) + NONCE, socket.MSG_WAITALL)
        end.sendall(words)
        read_on(end)


def read_on(end: socket.socket) -> None:
    while True:
        try:
            if not end.recv(4096):
                return
        except ConnectionResetError:
            return


def strangers(address: tuple[str, int]) -> int:
    """Those that do not know the secret; how many."""
    raw(address, b"GET / HTTP/1.1\r\nHost: somewhere in the network, it does not matter where\r\n\r\n")
    raw(address, os.urandom(1 << 16))
    with socket.create_connection(address) as end:
        end.sendall(b"half a nonce")
    with pytest.raises(Stranger):
        connect(address, Secret.new())
    return 4


def bad_frames(address: tuple[str, int], secret: Secret) -> int:
    """By one that knows it: no frame, a huge one, an unknown one, half of one, one of another run."""
    huge = _HEAD.pack(b"SL1", Kind.SAID, secret.run, 0, AGENT, 0, 0, 0, 1 << 50)
    half = _HEAD.pack(b"SL1", Kind.SAID, secret.run, 0, AGENT, 0, 0, 0, 1 << 10) + b"and no more"
    for words in (os.urandom(100), huge):
        with connect(address, secret) as end:
            end.sendall(words)
            read_on(end)
    with connect(address, secret) as end:
        end.sendall(half)
    with connect(address, secret) as end:
        Connection(end, run=b"another!", incarnation=AGENT, into=lambda head: None).send(Kind.SAID, b"void")
    with connect(address, secret) as end:
        Connection(end, run=secret.run, incarnation=AGENT, into=lambda head: None).send(99, b"unknown")
        end.setblocking(True)
        read_on(end)
    return 4  # an unknown one is no offence


def test_strangers_and_what_is_no_frame_are_counted_and_change_nothing(tmp_path: Path) -> None:
    engine, gate = Nodes(2, 1), tmp_path / "open"
    run = begin(engine=engine, objective=partial(held, str(gate)))
    (agent,), (about,) = engine.cluster.agents.values(), engine.cluster.about.values()
    count = strangers(about.address) + bad_frames(about.address, agent._secret)
    until(lambda: run.statistics().refused == count)
    gate.touch()
    result = run.wait(PATIENCE)
    assert result.statistics.refused == count
    assert kinds(result) == [] and same(result.state_dict(), begin().wait(PATIENCE).state_dict())


def test_a_conversation_that_was_recorded_is_refused_when_it_is_said_again() -> None:
    with wire() as way:
        engine = Nodes(2, 1, through=way.through)
        run = begin(engine=engine, epochs=100_000)
        until(lambda: len(way.said) >= 3 and len(run.statistics().steps) == 2)  # pulse, control, relay
        agent = engine.cluster.agents[1]
        recorded = [bytes(said) for said in way.said]
        for said in recorded:
            raw(agent.about().address, said)
        until(lambda: run.statistics().refused == len(recorded))
        assert len(agent.host.learners) == 1
        run.stop()
        assert kinds(run.wait(PATIENCE)) == []


def test_a_frame_that_is_said_again_on_its_own_connection_is_discarded() -> None:
    """Somebody in the middle repeats a learner's words; what was folded once is not folded again."""
    with wire(Repeating) as way:
        run = begin(engine=Nodes(2, 1, through=way.through))
        result = run.wait(PATIENCE)
    assert result.statistics.refused > 10
    assert kinds(result) == [] and same(result.state_dict(), begin().wait(PATIENCE).state_dict())


def test_versions_that_differ_are_refused_with_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_membership, "versions", lambda: ("3.11.0", "1.0", "0.0"))
    with pytest.raises(
        sl.UsageError, match=r"node 127.0.0.1 \(node 1\) has other versions: Python .*torch"
    ) as error:
        begin(engine=Nodes(2, 1))
    assert "\n" not in str(error.value)


def nowhere(address: tuple[str, int]) -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        found: tuple[str, int] = door.getsockname()[:2]
    return found


def test_an_agent_that_cannot_be_reached_is_refused_with_both_nodes() -> None:
    with pytest.raises(
        sl.RunError, match=r"\(node 0\) cannot reach the agent on .*\(node 1\) at 127"
    ) as error:
        begin(engine=Nodes(2, 1, through=nowhere))
    assert "\n" not in str(error.value)


def test_a_way_that_is_blocked_between_two_other_nodes_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocked(spec: Any, sites: Any, site: int, others: dict[int, Any], token: Any) -> Begin:
        return Begin(spec, sites, site, {each: nowhere(way) for each, way in others.items()}, token)

    monkeypatch.setattr(machine_membership, "Begin", blocked)
    words = r"\(node 1\) cannot reach the agent on .*\(node 2\) at .*refused; open that way"
    with pytest.raises(sl.RunError, match=words) as error:
        begin(engine=Nodes(3, 1), learners=3, topology="servers:3", run_dir=tmp_path)
    assert "\n" not in str(error.value)


def test_an_agent_listens_on_its_nodes_own_address_alone() -> None:
    """A machine may have several network cards."""
    with contextlib.closing(Agent(Secret.new(), "127.0.0.2", path=[], folder=os.getcwd())) as agent:
        host, port = agent.about().address
        assert host == "127.0.0.2"
        socket.create_connection((host, port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
