"""The optimizer among equals: every learner takes the step that plain PyTorch takes on the joint batch, at once or k steps later."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.learn.allreduce_optimizer import AllReduceOptimizer
from syncline.learn.allreduce_session import AllReduceSession
from syncline.ports import Progress
from syncline.protocols.sequence import Account
from syncline.roles.allreduce_coordinator import Deeper
from syncline.roles.checkpoint_manifest import Restored, TableState
from syncline.table.checkpoint_content import Content
from tests.unit.learn.among_equals import Crowd

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.05)
LAYERWISE = "allreduce:layerwise,bucket=20"
ORDERS = ["allreduce:blocking", LAYERWISE, f"{LAYERWISE},apply=reverse", f"{LAYERWISE},apply=arrival"]
SHARES = (3, 1)  # examples of each learner in every step


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def examples(step: int, rank: int | None = None) -> Tensor:
    """A learner's, or all of them."""
    x = torch.randn(sum(SHARES), 2, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x.split(SHARES)[rank]


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return loss


def plain(factory: Any, steps: int, clip: float | None = None, rates: tuple[float, ...] = ()) -> list[Tensor]:
    model = net()
    optimizer = factory(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, examples(step))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for rate in rates[step : step + 1]:
            optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def take(session: AllReduceSession, optimizer: AllReduceOptimizer, model: nn.Module, step: int) -> None:
    """A step of this learner's examples, as its loader would hand them out."""
    x = examples(step, session.rank)
    session.consume(0, len(x), more=True)
    optimizer.zero_grad()
    backward(model, x)


def opened(session: AllReduceSession, factory: Any = SGD) -> tuple[nn.Sequential, AllReduceOptimizer]:
    session.reference = max(SHARES)
    model = net()
    if session.rank:
        nn.init.zeros_(model[0].weight)  # the first learner's values are everybody's
    return model, session.optimizer(model, factory)  # type: ignore[return-value]


def trained(steps: int, factory: Any = SGD) -> Any:
    def loop(session: AllReduceSession) -> tuple[list[Tensor], AllReduceOptimizer]:
        model, optimizer = opened(session, factory)
        for step in range(steps):
            take(session, optimizer, model, step)
            optimizer.step()
        optimizer.flush()
        return [parameter.detach() for parameter in model.parameters()], optimizer

    return loop


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("factory", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("topology", ORDERS)
def test_two_learners_take_the_steps_of_one_on_both_batches(topology: str, factory: Any) -> None:
    (first, table), (second, other) = Crowd(2, topology).run(trained(3, factory))
    assert close(first, plain(factory, 3))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    account = table.account()
    assert account.checksum == other.account().checksum
    assert (account.version, account.gradients, account.examples) == (3, 6, 12)


@pytest.mark.parametrize("topology", ORDERS[:2])
def test_the_norm_that_is_clipped_is_that_of_the_mean(topology: str) -> None:
    (first, _), (second, _) = Crowd(2, topology, clip_norm=0.05).run(trained(3))
    assert close(first, plain(SGD, 3, clip=0.05)) and close(first, second)


@pytest.mark.parametrize("topology", ORDERS[:2])
def test_a_delayed_gradient_is_applied_k_steps_later_with_the_options_it_had(topology: str) -> None:
    rates, versions = (0.1, 0.3, 0.25), []

    def loop(session: AllReduceSession) -> Any:
        model, optimizer = opened(session, partial(torch.optim.SGD, lr=0.0))
        start = [parameter.detach().clone() for parameter in model.parameters()]
        means = []
        for step, rate in enumerate(rates):
            take(session, optimizer, model, 0)
            means.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            versions.append((session.rank, step, optimizer.version))
            assert torch.equal(model[2].bias.grad, means[-1][-1]), "the loop's own gradient stays its own"  # type: ignore[arg-type]
        optimizer.flush()
        return start, means, [parameter.detach() for parameter in model.parameters()], optimizer.account()

    found = Crowd(2, topology, "delayed:2").run(loop)
    assert [each for each in versions if each[0] == 0] == [(0, 0, 0), (0, 1, 0), (0, 2, 1)]
    for start, _, end, account in found:
        mean = [
            [(SHARES[0] * a + SHARES[1] * b) / sum(SHARES) for a, b in zip(*pair, strict=True)]
            for pair in zip(found[0][1], found[1][1], strict=True)
        ]
        wanted = [
            each - sum(rate * mean[step][index] for step, rate in enumerate(rates))
            for index, each in enumerate(start)
        ]
        assert close(end, wanted)
        assert account.staleness.histogram == {0: 2, 1: 2, 2: 2}


def test_a_loop_that_ends_its_updates_applies_what_is_in_flight() -> None:
    crowd = Crowd(2, sync="delayed:2", limit=3)

    def loop(session: AllReduceSession) -> int:
        model, optimizer = opened(session)
        for step in range(3):
            take(session, optimizer, model, step)
            optimizer.step()
        return optimizer.version

    assert crowd.run(loop) == [3, 3]
    reports = crowd.ports[0].heard(Progress)
    assert [each.version for each in reports] == [0, 0, 1, 2, 3]
    assert [each.started for each in reports][:3] == [1, 2, 3]


def test_a_step_takes_a_closure_and_returns_its_loss() -> None:
    def loop(session: AllReduceSession) -> Any:
        model, optimizer = opened(session)
        session.consume(0, 4, more=True)
        with torch.no_grad():
            loss = optimizer.step(lambda: backward(model, examples(0)))
        assert optimizer.last_loss == pytest.approx(loss.item())
        return [parameter.detach() for parameter in model.parameters()], loss.item()

    ((found, loss),) = Crowd().run(loop)
    assert close(found, plain(SGD, 1)) and loss == pytest.approx(backward(net(), examples(0)).item())


@pytest.mark.parametrize("topology", ORDERS)
def test_applications_in_any_order_are_a_step(topology: str) -> None:
    def loop(session: AllReduceSession) -> list[Tensor]:
        model, optimizer = opened(session, ADAM)
        for step in range(3):
            take(session, optimizer, model, step)
            with optimizer.applications() as queue:
                assert len(queue) == len(optimizer.reducer.buckets)
                if step == 1:
                    queue.take("0.bias").apply()  # the others when the block ends
                elif step == 2:
                    for part in queue:
                        part.apply()
        assert optimizer.version == 3
        return [parameter.detach() for parameter in model.parameters()]

    first, second = Crowd(2, topology).run(loop)
    assert close(first, plain(ADAM, 3)) and close(first, second)


class Whole(torch.optim.SGD):
    """Nobody knows whether it works on each parameter by itself."""


@pytest.mark.parametrize("factory, sync", [(Whole, "hardsync"), (ADAM, "delayed:1")])
def test_applications_are_refused_where_parts_do_not_make_the_whole(factory: Any, sync: str) -> None:
    def loop(session: AllReduceSession) -> None:
        _, optimizer = opened(session, factory)
        with optimizer.applications():
            pass

    with pytest.raises(UsageError, match="applications in any order need hardsync and an optimizer"):
        Crowd(sync=sync).run(loop)


def test_the_depth_follows_the_vote_and_the_first_learner_tells_of_it() -> None:
    crowd = Crowd(2, sync="delayed:auto<=4")

    def loop(session: AllReduceSession) -> int:
        model, optimizer = opened(session)
        for step in range(20):
            take(session, optimizer, model, step)
            optimizer.reducer.waited = 0.5  # of a second of each step
            session.port.clock += 1.0  # type: ignore[attr-defined]
            optimizer.step()
        return optimizer.delay

    assert crowd.run(loop) == [3, 3]
    told = crowd.ports[0].heard(Deeper)
    assert [(each.before, each.depth) for each in told] == [(1, 2), (2, 3)]
    assert told[1].share == pytest.approx(0.5) and not crowd.ports[1].heard(Deeper)


def test_parameters_that_nobody_has_a_gradient_of_stay() -> None:
    def loop(session: AllReduceSession) -> tuple[bool, bool]:
        model, optimizer = opened(session)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        session.consume(0, 1, more=True)
        if session.rank:  # one learner alone has gradients of the first layer
            model[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        return all(moved[:2]), any(moved[2:])

    assert Crowd(2).run(loop) == [(True, False), (True, False)]


def test_what_is_put_is_the_first_learners() -> None:
    def loop(session: AllReduceSession) -> float:
        model, _ = opened(session)
        nn.init.constant_(model[2].bias, 5.0 + session.rank)
        session.put(model)
        return model[2].bias.item()

    assert Crowd(2).run(loop) == [5.0, 5.0]


def test_a_state_that_is_loaded_is_the_real_optimizers() -> None:
    def loop(session: AllReduceSession) -> Any:
        model, optimizer = opened(session)
        take(session, optimizer, model, 0)
        optimizer.step()
        kept = optimizer.state_dict()
        kept["param_groups"][0]["lr"] = 0.7
        optimizer.load_state_dict(kept)
        assert optimizer.param_groups is optimizer.inner.param_groups
        return optimizer.inner.param_groups[0]["lr"]

    assert Crowd().run(loop) == [0.7]


# -- going on ------------------------------------------------------------------------------------------------


class Kept(TableState):
    """With its content at hand."""

    def __init__(self, optimizer: AllReduceOptimizer) -> None:
        values = dict(enumerate(value.clone() for value in optimizer.values()))
        state = {
            n: {k: v.clone() for k, v in each.items() if v is not None}
            for n, each in optimizer.states().items()
        }
        kind = optimizer.kind
        vars(self).update(
            layout=optimizer.layout,
            optimizer=f"{kind.__module__}.{kind.__qualname__}",
            account=optimizer.counted(),
            content=Content(values, state, [], None),
        )


@pytest.mark.parametrize("sync", ["hardsync", "delayed:2"])
@pytest.mark.parametrize("topology", ORDERS[:2])
def test_a_run_goes_on_with_the_bits_it_would_have_had(topology: str, sync: str) -> None:
    kept: list[Restored] = []

    def whole(session: AllReduceSession) -> Any:
        model, optimizer = opened(session)
        for step in range(6):
            if step == 3 and session.rank == 0:
                pipelines = {0: optimizer.pipeline()}
                kept.append(Restored(name="there", seed=0, tables={0: Kept(optimizer)}, pipelines=pipelines))
            take(session, optimizer, model, step)
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
        optimizer.flush()
        return optimizer.account()

    def rest(session: AllReduceSession) -> Any:
        model, optimizer = opened(session)
        assert isinstance(optimizer.counted(), Account)
        optimizer.param_groups[0]["lr"] = 0.1 / 3
        for step in range(3, 6):
            take(session, optimizer, model, step)
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
        optimizer.flush()
        return optimizer.account()

    wanted = Crowd(2, topology, sync).run(whole)
    found = Crowd(2, topology, sync).run(rest, restored=kept[0])
    assert [each.checksum for each in found] == [each.checksum for each in wanted]
    assert found[0].version == wanted[0].version == 6
