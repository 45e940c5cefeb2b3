"""The optimizer that users step: what it publishes, and what it leaves in the model."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from syncline import messages as m
from syncline.errors import LayoutError
from syncline.messages import to_leader as say
from syncline.ports import RunStopped
from tests.unit.learn.servers_of_one import ServersOfOne, session_of_one

PLAIN = partial(SGD, lr=0.5, momentum=0.9)


def begun(
    factory: Any = PLAIN, sync: str = "hardsync", **plan: Any
) -> tuple[nn.Sequential, Any, ServersOfOne]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    session, servers = session_of_one(sync, **plan)
    return model, session.optimizer(model, factory), servers


def backward(model: nn.Sequential, number: int) -> torch.Tensor:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    loss = model(inputs).square().sum() + model[0].weight.sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("factory", [PLAIN, partial(Adam, lr=0.1)])
def test_steps_give_the_bits_of_a_plain_loop(factory: Any) -> None:
    model, optimizer, servers = begun(factory)
    plain = copy.deepcopy(model)
    own = factory(plain.parameters())
    for number in range(4):
        for net, each in ((model, optimizer), (plain, own)):
            each.zero_grad()
            backward(net, number)
            each.step()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert [gradient.step for gradient in servers.of(say.Gradient)] == [0, 1, 2, 3]
    assert [gradient.stamp for gradient in servers.of(say.Gradient)] == [0, 1, 2, 3]
    assert torch.equal(servers.tables[0].buffers[0], plain[1].running_mean), "buffers go with each gradient"
    state = optimizer.state_dict()["state"]
    for number, entry in own.state_dict()["state"].items():
        assert all(torch.equal(state[number][key], value) for key, value in entry.items())


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    model, optimizer, servers = begun()
    before = model[1].weight.clone()
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not servers.of(say.Gradient)[0].full and torch.equal(model[1].weight, before)
    backward(model, 0)
    optimizer.step()
    assert servers.of(say.Gradient)[1].full


def test_options_are_counted_where_they_change_only() -> None:
    model, optimizer, servers = begun()
    for rate in (0.5, 0.25, 0.25, torch.tensor(0.125)):
        optimizer.param_groups[0]["lr"] = rate
        backward(model, 0)
        optimizer.step()
    assert [gradient.options for gradient in servers.of(say.Gradient)] == [0, 1, 1, 2]
    optimizer.param_groups[0]["lr"].fill_(0.0625)  # in place
    backward(model, 0)
    optimizer.step()
    assert servers.of(say.Gradient)[-1].options == 3
    assert servers.tables[0].optimizer.param_groups[0]["lr"] == 0.0625


def test_a_version_that_is_here_is_not_copied_again() -> None:
    model, optimizer, servers = begun()
    table = servers.tables[0]
    backward(model, 0)
    optimizer.step()
    optimizer.rested(0)
    assert [copied > 0 for _, copied in table.reads] == [True, True, False]


def test_of_an_overtaken_read_one_version_is_delivered() -> None:
    model, optimizer, servers = begun()
    servers.tables[0].overtakes = 1
    backward(model, 0)
    optimizer.step()
    assert [fetch.deliver for fetch in servers.of(say.Fetch)] == [True] and optimizer.version == 1
    assert torch.equal(model[0].weight, servers.tables[0].values[0])


def test_a_closure_is_called_once_with_gradients_and_its_loss_is_said() -> None:
    model, optimizer, servers = begun()
    losses = []

    def closure() -> torch.Tensor:
        losses.append(backward(model, 0))
        return losses[-1]

    with torch.no_grad():
        assert optimizer.step(closure) is losses[0] and len(losses) == 1
    assert float(servers.of(say.Gradient)[0].loss) == losses[0].item()


def test_local_steps_are_pushed_as_their_sum() -> None:
    model, optimizer, servers = begun(partial(SGD, lr=1.0), "downpour:push=2,fetch=2,local_lr=0.25")
    before = model[0].bias.detach().clone()
    sums = torch.zeros(2)
    for number in range(2):
        optimizer.zero_grad()
        model[0](torch.full((1, 3), float(number))).square().sum().backward()
        sums += model[0].bias.grad
        assert not servers.of(say.Gradient)
        optimizer.step()
        if number == 0:
            assert torch.allclose(model[0].bias, before - 0.25 * sums)
    assert len(servers.of(say.Gradient)) == 1 and not servers.of(say.Gradient)[0].full
    assert torch.allclose(model[0].bias, before - sums), "fetched: own movement is lost"


def test_own_movement_is_lost_at_a_fetch_of_the_version_that_it_had() -> None:
    model, optimizer, servers = begun(partial(SGD, lr=1.0), "downpour:push=4,fetch=2,local_lr=0.25")
    before = copy.deepcopy(model[0].state_dict())
    for moved in (True, False):
        optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()
        assert torch.equal(model[0].weight, before["weight"]) != moved
    assert not servers.of(say.Gradient)


def test_a_sparse_gradient_is_refused_before_it_is_published() -> None:
    model, optimizer, servers = begun()
    model[0].weight.grad = torch.eye(2, 3).to_sparse()
    with pytest.raises(LayoutError, match="sparse gradient"):
        optimizer.step()
    assert not servers.of(say.Gradient)


def test_what_is_put_is_the_next_version() -> None:
    model, optimizer, servers = begun()
    torch.nn.init.ones_(model[0].weight)
    optimizer.put()
    assert torch.equal(servers.tables[0].values[0], torch.ones(2, 3)) and servers.tables[0].version == 1


def test_options_of_a_loaded_state_hold_until_the_loop_changes_them() -> None:
    model, optimizer, servers = begun()
    state = PLAIN(model.parameters()).state_dict()
    state["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(state)
    assert servers.of(m.LoadState)[0].options[0]["lr"] == 0.125 and servers.of(say.Load)
    assert optimizer.param_groups[0]["lr"] == 0.125
    backward(model, 0)
    optimizer.step()
    assert servers.of(say.Gradient)[0].options == 0, "the shards have loaded it themselves"
    optimizer.param_groups[0]["lr"] = 0.0625
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.0625
    backward(model, 0)
    optimizer.step()
    assert servers.of(say.Gradient)[1].options == 1


def test_a_run_that_ends_unwinds_the_step() -> None:
    model, optimizer, servers = begun()
    backward(model, 0)
    servers.stops = True
    with pytest.raises(RunStopped):
        optimizer.step()
    assert not servers.of(say.Gradient)


def test_a_step_that_loses_its_servers_reads_the_new_ones() -> None:
    model, optimizer, servers = begun()
    backward(model, 0)
    servers.renewed = True
    optimizer.step()
    assert servers.of(m.Rejoin) == [m.Rejoin(1, 0)]
    assert torch.equal(model[0].weight, servers.tables[0].values[0])
