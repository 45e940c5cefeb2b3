"""What a loop with servers says between its steps: whose examples, when it rests, what it cannot go on after."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from syncline import messages as m
from syncline.dial import Sync
from syncline.errors import LoopError, UsageError
from syncline.learn.model_factories import CPU, pack_random
from syncline.learn.server_session import (
    ServerSession,
    batch_of_each,
    check_batches,
    check_joint,
    refuse_weighted,
    shards_for,
)
from syncline.messages import to_leader as say
from syncline.messages.to_leader import NO_LOADER
from syncline.ports import Reset
from syncline.roles.run_plan import Saving
from syncline.topologies import Servers
from tests.unit.learn.servers_of_one import ServersOfOne, session_of_one

RATE = partial(SGD, lr=0.1)
DATA = TensorDataset(torch.arange(6.0))


def begun(sync: str = "hardsync", **plan: Any) -> tuple[ServerSession, ServersOfOne, Any]:
    session, servers = session_of_one(sync, **plan)
    return session, servers, session.optimizer(net(), RATE)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))


def step(session: ServerSession, table: Any) -> None:
    for parameter in table.parameters:
        parameter.grad = torch.ones_like(parameter)
    table.step()


# -- tables ---------------------------------------------------------------------------------------------------


def test_a_new_tables_first_values_are_the_learners() -> None:
    session, servers = session_of_one()
    model = net()
    model[1].weight.requires_grad_(False)
    optimizer = session.optimizer(model, lambda model: SGD(model[0].parameters(), lr=0.1))
    table = servers.tables[0]
    names = [entry.name for entry in table.layout.parameters.entries]
    assert names == ["0.weight", "0.bias"] and optimizer.version == 0
    assert all(
        torch.equal(model.state_dict()[name], value) for name, value in zip(names, table.values, strict=True)
    )
    assert [tensor.shape for tensor in table.buffers] == [(1,), (1,), ()] and table.buffers[1].item() == 1
    assert [tensor.item() for tensor in table.others] == [1.0, 0.0]
    assert [type(each) for each in servers.said[:3]] == [m.Open, m.Initialised, m.Initialised], (
        "written, then said"
    )


def test_who_is_refused_a_table_cannot_go_on() -> None:
    session, servers = session_of_one()
    servers.refusals[m.Open] = UsageError("another layout")
    with pytest.raises(UsageError, match="another layout"):
        session.optimizer(net(), RATE)
    for call in (lambda: session.optimizer(net(), RATE), lambda: session.mean(1.0)):
        with pytest.raises(
            LoopError, match=r"cannot go on after an error that its code caught.*another layout"
        ):
            call()
    session.close()
    assert not servers.of(say.Gradient)


def test_the_set_number_of_updates_ends_the_run() -> None:
    session, _, table = begun(limit=2)
    for ending in (False, False, True):
        assert session.ending == ending
        if not ending:
            step(session, table)


# -- which examples -------------------------------------------------------------------------------------------


def test_a_gradient_has_the_examples_since_the_last_one() -> None:
    session, servers, table = begun()
    one, other = (session.loader(data, batch_size=2, ahead=0) for data in (DATA, [1, 2, 3, 4]))
    loops = iter(one), iter(other)
    next(loops[0]), next(loops[0])
    step(session, table)
    next(loops[0]), next(loops[1])
    step(session, table)
    step(session, table)
    found = [(each.examples, each.loader, each.upto) for each in servers.of(say.Gradient)]
    assert found == [(4, 0, 2), (4, 1, 1), (1, -1, 0)], "the last has no batch of a loader"
    assert servers.of(say.Used) == [say.Used(0, 3)], "of the loader that the gradient does not name"
    for loop in loops:
        loop.close()


def test_new_servers_know_of_no_examples() -> None:
    session, servers, _ = begun()
    loop = iter(session.loader(DATA, batch_size=2, ahead=0))
    next(loop)
    session.rejoin()
    assert session.examples == 0 and session.used == {} and servers.of(m.Rejoin) == [m.Rejoin(1, 1)]
    loop.close()


def test_what_fails_with_the_servers_is_done_again() -> None:
    session, servers, _ = begun()
    answers = [Reset(), Reset(), 7]

    def action() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Reset):
            raise answer
        return answer

    assert session.insist(action) == 7 and len(servers.of(m.Rejoin)) == 2


# -- rests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync, rests", [("hardsync", 0), ("softsync:1", 1)])
def test_after_an_epoch_it_rests_but_in_lockstep(sync: str, rests: int) -> None:
    """There a last step after the loop must still meet the others'."""
    session, servers, table = begun(sync)
    for _ in session.loader(DATA, batch_size=3, ahead=0):
        step(session, table)
    assert len(servers.of(say.Rest)) == rests and session.resting == bool(rests)
    before = session.loader(DATA, batch_size=2)  # others must not wait for a gradient while it waits for them
    assert session.resting and before.epoch == 0
    assert [(each.loader, each.index) for each in servers.of(say.Rest)] == [(0, 3)]


@pytest.mark.parametrize("sync, rests", [("ssp:1", 1), ("softsync:1", 0), ("async", 0)])
def test_what_is_opened_in_the_middle_of_a_gradient_is_waited_for_at_rest(sync: str, rests: int) -> None:
    session, servers, _ = begun(sync)
    loop = iter(session.loader(DATA, batch_size=2, ahead=0))
    next(loop)
    session.loader(DATA, batch_size=3)
    assert [each.loader for each in servers.of(say.Rest)] == [NO_LOADER] * rests
    assert session.resting == bool(rests)
    loop.close()


def test_in_lockstep_it_reads_what_the_others_did_while_something_was_opened() -> None:
    session, servers, _ = begun()
    loop = iter(session.loader(DATA, batch_size=2, ahead=0))
    next(loop)
    servers.said.clear()
    session.loader(DATA, batch_size=3)
    found = [type(each) for each in servers.of(say.Rest, m.OpenLoader, say.Reread)]
    assert found == [say.Rest, m.OpenLoader, say.Reread] and not session.resting
    loop.close()


def test_a_mean_is_met_at_rest_and_read_after() -> None:
    session, servers, _ = begun("softsync:1")
    servers.said.clear()
    assert session.mean(3) == 3.0
    assert torch.equal(session.mean(torch.tensor([1, 2])), torch.tensor([1.0, 2.0]))
    assert [type(each) for each in servers.said] == [say.Rest, say.Meet, m.MeanOf] * 2
    assert not session.resting
    with pytest.raises(UsageError, match="takes a number or a tensor of real numbers, got str"):
        session.mean("3")  # type: ignore[arg-type]


def test_after_a_mean_that_all_refuse_the_loop_goes_on_but_not_after_loops_that_differ() -> None:
    session, servers, _ = begun()
    servers.refusals[m.MeanOf] = UsageError("every learner must bring the same shape")
    for _ in range(2):
        with pytest.raises(UsageError, match="the same shape"):
            session.mean(1.0)
        assert session.refused is None and not session.resting
    servers.refusals[m.MeanOf] = LoopError("learner 1 is at its end")
    with pytest.raises(LoopError, match="at its end"):
        session.mean(1.0)
    with pytest.raises(LoopError, match="cannot go on"):
        session.mean(1.0)


def test_of_several_tables_it_says_which_one_it_waits_for() -> None:
    session, servers, _ = begun()
    session.awaits(0, 5)
    assert not servers.of(say.Await)
    session.optimizer(net(), RATE)
    session.awaits(1, 6)
    assert servers.of(say.Await) == [say.Await(1, 6)]


# -- the end --------------------------------------------------------------------------------------------------


def test_the_end_brings_what_was_not_pushed_and_the_random_states_of_the_last_gradient() -> None:
    local = "downpour:push=3,fetch=9,local_lr=0.1"
    session, servers, table = begun(local, saving=Saving(cuts=True))
    step(session, table)
    assert not servers.of(say.Gradient)
    session.gradient_states(keep=False)
    marked = pack_random(CPU)
    torch.rand(3)
    session.push()
    session.gradient_states(keep=False)
    wanted = pack_random(CPU)
    torch.rand(3)
    session.close()
    assert len(servers.of(say.Gradient)) == 1
    assert servers.of(say.Farewell) == [say.Farewell(0, wanted)] and wanted != marked
    assert servers.said[-1] == m.Closed()


def test_who_fails_or_was_told_to_end_says_no_closed() -> None:
    session, servers, _ = begun()
    try:
        raise KeyError
    except KeyError:
        session.close()
    assert not servers.of(m.Closed, say.Farewell)
    session, servers, table = begun("downpour:push=3,fetch=9,local_lr=0.1")
    step(session, table)
    servers.stops = True
    session.close()
    assert not servers.of(m.Closed, say.Gradient)


# -- checks ---------------------------------------------------------------------------------------------------


class Own(SGD):
    """Not torch's: it may compute something over all its parameters."""


class Holds(SGD):
    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.inner = SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    "kind, servers, size, shards",
    [
        (RATE, Servers(4, True), None, 4),
        (Own, Servers(4, True), None, 4),
        (Holds, Servers(4, True), None, 1),
        (Own, Servers(4, False, least=1), None, 1),
        (RATE, Servers(4, False, least=6), None, 2),  # 12 bytes
        (RATE, Servers(4, False, least=13), None, 1),
        (RATE, Servers(4, False, least=6), 60, 4),
    ],
)
def test_a_table_goes_to_as_many_shards_as_are_worth_it(
    kind: Any, servers: Any, size: Any, shards: int
) -> None:
    assert shards_for(kind(nn.Linear(2, 1).parameters()), servers, size) == shards


def test_weighted_gradients_are_not_for_optimizers_that_divide_the_scale_out() -> None:
    weighs, parameters = Sync.parse("softsync:1,rate=staleness"), list(nn.Linear(1, 1).parameters())
    with pytest.raises(UsageError, match="weights each gradient by its staleness, but Adam divides"):
        refuse_weighted(weighs, RATE(parameters), Adam(parameters))
    refuse_weighted(weighs, RATE(parameters))
    refuse_weighted(Sync.parse("softsync:1"), Adam(parameters))


@pytest.mark.parametrize(
    "size, batch, words",
    [
        (0, 1, "the data set is empty"),
        (3, 4, "batch_size 4 is larger than the data set of 3 examples; use at most 3"),
        (3, 0, "batch_size must be"),
        (3, 1.5, "batch_size must be"),
        (3, True, "batch_size must be"),
    ],
)
def test_batches_must_fit_the_data(size: int, batch: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_batches(size, batch)
    check_batches(3, 3)


@pytest.mark.parametrize(
    "batch, joint, words",
    [
        (None, None, "give either batch_size="),
        (2, 4, "got batch_size=2 and global_batch_size=4"),
        (None, 0, "global_batch_size must be"),
        (None, 2, "global_batch_size=2 over 3 learners: each needs at least one example"),
    ],
)
def test_the_batch_is_given_of_each_or_of_all(batch: Any, joint: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_joint(batch, joint, 3)


def test_a_joint_batch_is_for_lockstep_in_equal_shares() -> None:
    lockstep, free = Sync.parse("hardsync"), Sync.parse("async")
    assert batch_of_each(None, 6, 3, lockstep) == 2 and batch_of_each(5, None, 3, free) == 5
    for joint, sync in ((7, lockstep), (6, free)):
        with pytest.raises(UsageError, match="with servers every learner has the same batch_size"):
            batch_of_each(None, joint, 3, sync)
