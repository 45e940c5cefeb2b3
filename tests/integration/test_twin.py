"""The simulated twin against the local engine, and against itself (DESIGN's "what always holds" 3 and 5)."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import syncline as sl
from syncline.protocols.meetings import Meetings
from tests.integration.small_runs import clouds, network, same


def run(engine: str | sl.Sim, **options: Any) -> sl.Result:
    given = {"learners": 3, "batch_size": 16, "epochs": 2, "sync": "hardsync", "seed": 5, **options}
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return sl.train(
        network(), clouds(300), loss=F.cross_entropy, optimizer=optimizer, engine=engine, threads=1, **given
    )


@pytest.mark.parametrize("sync", ["hardsync", "delayed:1", "delayed:3"])
@pytest.mark.parametrize("topology", ["servers", "servers:2"])
def test_local_and_sim_give_the_same_bits_in_lockstep(sync: str, topology: str) -> None:
    local = run("local", sync=sync, topology=topology)
    twin = run("sim", sync=sync, topology=topology)
    assert local.version == twin.version > 0
    assert same(local.state_dict(), twin.state_dict())
    assert local.staleness == twin.staleness


@pytest.mark.parametrize("sync", ["softsync:1", "softsync:2", "async"])
def test_a_simulated_run_repeats_to_the_bit(sync: str) -> None:
    first, second = (run("sim", sync=sync, learners=4, clip_norm=1.0) for _ in range(2))
    assert same(first.state_dict(), second.state_dict())
    assert first.staleness == second.staleness
    assert [record.seconds for record in first.history] == [record.seconds for record in second.history]


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    model, data = nn.Linear(12, 2), clouds(64)
    torch.set_rng_state(before)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    sl.train(model, data, loss=F.cross_entropy, optimizer=optimizer, engine="sim", learners=2, batch_size=8)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("learners", [4, 30])
@pytest.mark.parametrize("sync", ["softsync:1", "softsync:2", "async"])
def test_staleness_in_the_twin(learners: int, sync: str) -> None:
    result = run("sim", sync=sync, learners=learners, batch_size=1, epochs=3)
    expected = (learners - 1) / sl.Sync.parse(sync).quorum(learners)
    assert result.gradients == 900
    assert result.staleness.mean == pytest.approx(expected, rel=0.06)
    beyond = sum(n for sigma, n in result.staleness.histogram.items() if sigma > 2 * (expected + 1))
    assert beyond <= 0.01 * result.gradients


def own_loop(session: sl.Session) -> tuple[int, float]:
    model = nn.Linear(4, 1)
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.01))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    session.log(step=5)
    return session.rank, session.mean(float(session.rank))


def test_own_loops_run_unchanged_in_the_twin() -> None:
    result = sl.launch(own_loop, learners=3, engine=sl.Sim(compute=2.0, transfer=0.5), sync="hardsync")
    assert result.returned == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert result.version == 5
    assert result.seconds >= 5 * 3.0  # five rounds of computing and moving there and back, in virtual time
    assert sorted(rank for rank, _, _ in result.logs) == [0, 1, 2]


def stuck(session: sl.Session) -> None:
    tables = [session.optimizer(nn.Linear(1, 1), partial(torch.optim.SGD, lr=0.1)) for _ in range(2)]
    tables[session.rank].step()


def test_a_run_that_stands_still_says_who_waits_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be a bug: that these loops differ is found before."""
    monkeypatch.setattr(Meetings, "stand_still", lambda *_, **__: [])
    with pytest.raises(sl.RunError, match=r"stands still.*ticket 1 of table 0.*ticket 1 of table 1"):
        sl.launch(stuck, learners=2, engine="sim", sync="hardsync")


def fails(session: sl.Session) -> None:
    raise KeyError("lost shoe")


def test_an_exception_in_a_simulated_learner_reaches_the_caller() -> None:
    with pytest.raises(sl.LearnerError, match="lost shoe") as caught:
        sl.launch(fails, learners=2, engine="sim")
    assert isinstance(caught.value.__cause__, KeyError)
