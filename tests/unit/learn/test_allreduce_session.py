"""A session among equals: what all must open alike, when they cut and leave, and what each reports."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from syncline.errors import LayoutError, UsageError
from syncline.learn.allreduce_session import AllReduceSession
from syncline.ports import RunStopped
from syncline.protocols.epoch_positions import Standing
from syncline.roles.allreduce_coordinator import PeerClosed, PeerCut, PeerEpoch, PeerTable
from syncline.roles.run_plan import Saving
from tests.unit.learn.among_equals import Crowd

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DATA = TensorDataset(torch.arange(12.0).view(12, 1))


def step(session: AllReduceSession, model: nn.Module, optimizer: Any, x: Any) -> None:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    session.loss = loss
    loss.backward()
    optimizer.step()


def epochs(count: int) -> Any:
    """The usual loop; how many batches it had."""

    def loop(session: AllReduceSession) -> int:
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        nn.init.ones_(model.bias)
        optimizer = session.optimizer(model, SGD)
        loader = session.loader(DATA, global_batch_size=4)
        batches = 0
        for _ in range(count):
            for (x,) in loader:
                batches += 1
                step(session, model, optimizer, x)
        return batches

    return loop


def test_models_that_differ_are_refused_with_the_difference() -> None:
    def loop(session: AllReduceSession) -> None:
        session.optimizer(nn.Linear(1, 1 + session.rank), SGD)

    with pytest.raises(LayoutError, match="learner 0 and learner 1 opened table 0 with different models"):
        Crowd(2).run(loop)


def test_parts_are_applied_before_others_only_where_the_optimizer_survives_it() -> None:
    class Whole(torch.optim.SGD):
        pass

    def loop(session: AllReduceSession) -> None:
        session.optimizer(nn.Linear(1, 1), partial(Whole, lr=0.1))

    with pytest.raises(LayoutError, match="which Whole may not survive; use apply=end"):
        Crowd(topology="allreduce:layerwise,apply=arrival").run(loop)
    Crowd(topology="allreduce:layerwise").run(loop)


def test_loaders_that_differ_are_refused() -> None:
    def loop(session: AllReduceSession) -> None:
        session.loader(DATA, batch_size=2 + session.rank)

    with pytest.raises(
        UsageError, match=r"differ: \[\(12, \(2, 2\), 'ledger'\), \(12, \(3, 3\), 'ledger'\)\]"
    ):
        Crowd(2).run(loop)


def test_buffers_and_parameters_begin_as_the_first_learners() -> None:
    def loop(session: AllReduceSession) -> tuple[float, float]:
        model = nn.BatchNorm1d(1)
        nn.init.constant_(model.weight, 3.0 + session.rank)
        model.running_mean.fill_(7.0 + session.rank)  # type: ignore[union-attr, operator]
        session.optimizer(model, SGD)
        return model.weight.item(), model.running_mean.item()  # type: ignore[union-attr, operator, return-value]

    crowd = Crowd(2)
    assert crowd.run(loop) == [(3.0, 7.0), (3.0, 7.0)]
    assert [len(port.heard(PeerTable)) for port in crowd.ports] == [1, 0]


def test_a_mean_is_of_all_and_of_the_kind_that_was_brought() -> None:
    def loop(session: AllReduceSession) -> Any:
        number = session.mean(float(session.rank))
        return number, session.mean(torch.tensor([1.0, 3.0 * session.rank]))

    for number, tensor in Crowd(3).run(loop):
        assert number == 1.0 and torch.equal(tensor, torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("sync", ["hardsync", "delayed:1"])
def test_an_epoch_ends_with_the_gradient_of_its_last_batch(sync: str) -> None:
    crowd = Crowd(2, sync=sync, snapshots=True)
    assert crowd.run(epochs(2)) == [6, 6]
    for port in crowd.ports:
        reports = port.heard(PeerEpoch)
        assert [(each.epoch, each.version, each.examples, each.count) for each in reports] == [
            (0, 3, 12, 6),
            (1, 6, 24, 6),
        ]
        assert [each.copies[0].version for each in reports] == [3, 6]
    first = crowd.ports[0].heard(PeerEpoch)[0].copies[0]
    assert first.segments is not None and crowd.ports[1].heard(PeerEpoch)[0].copies[0].segments is None
    closed = [port.heard(PeerClosed)[0] for port in crowd.ports]
    assert [each.steps for each in closed] == [6, 6]
    assert closed[0].accounts[0].checksum == closed[1].accounts[0].checksum


def test_a_course_turns_its_dial_with_the_epoch() -> None:
    def loop(session: AllReduceSession) -> list[int]:
        model, depths = nn.Linear(1, 1), []
        optimizer = session.optimizer(model, SGD)
        loader = session.loader(DATA, batch_size=6)
        for _ in range(2):
            for (x,) in loader:
                step(session, model, optimizer, x)
            depths.append(optimizer.delay)  # type: ignore[attr-defined]
        return depths

    assert Crowd(sync={0: "hardsync", 1: "delayed:1"}).run(loop) == [[0, 1]]


def test_all_leave_after_the_same_step_when_one_is_to_stop() -> None:
    def loop(session: AllReduceSession) -> int:
        with pytest.raises(KeyboardInterrupt):
            epochs(2)(session)
        return session.steps

    crowd = Crowd(2)
    crowd.ports[1].stop = True
    assert crowd.run(loop) == [1, 1], "the wish travels with the first gradient"


def test_a_step_after_the_end_does_not_return() -> None:
    def loop(session: AllReduceSession) -> None:
        model = nn.Linear(1, 1)
        optimizer = session.optimizer(model, SGD)
        for _ in range(5):
            step(session, model, optimizer, torch.ones(1, 1))

    crowd = Crowd(limit=2)
    with pytest.raises(RunStopped):
        crowd.run(loop)
    assert crowd.ports[0].told[-1].version == 2


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_all_cut_after_the_same_updates_and_as_they_end() -> None:
    crowd = Crowd(2, saving=Saving(cuts=True, every=2), limit=5)
    crowd.run(epochs(3))
    cuts = [port.heard(PeerCut) for port in crowd.ports]
    assert [[each.number for each in own] for own in cuts] == [[2, 4, 5], [2, 4, 5]]
    assert [each.joint is not None for own in cuts for each in own] == [True] * 3 + [False] * 3
    joint = cuts[0][0].joint
    assert joint is not None and len(joint.files) == 1
    assert joint.standings[0].fresh == {0: {0: (8, 12)}} and joint.examples == {0: 8}
    last = cuts[0][-1].joint
    assert last is not None and last.standings[0].fresh == {1: {0: (8, 12)}}
    assert last.accounts[0].version == 5 and last.loaders[0].size == 12
    assert set(crowd.ports[0].saved) == {(number, joint.files[0]) for number in (2, 4, 5)}
    assert not crowd.ports[1].saved


def test_the_first_learners_clock_says_for_all_when_a_checkpoint_is_due() -> None:
    crowd = Crowd(2, saving=Saving(cuts=True, seconds=10.0))

    def loop(session: AllReduceSession) -> None:
        model = nn.Linear(1, 1)
        optimizer = session.optimizer(model, SGD)
        for _ in range(4):  # without a loader: behind the step
            step(session, model, optimizer, torch.ones(1, 1))
            session.port.clock += 6.0 if session.rank == 0 else 100.0  # type: ignore[attr-defined]

    crowd.run(loop)
    numbers = [[each.number for each in port.heard(PeerCut)] for port in crowd.ports]
    assert numbers == [[3, 4], [3, 4]]


def test_gradients_on_their_way_are_in_the_checkpoint() -> None:
    crowd = Crowd(2, sync="delayed:2", saving=Saving(cuts=True, every=1), limit=4)
    crowd.run(epochs(2))
    cut = crowd.ports[0].heard(PeerCut)[0]
    assert cut.number == 1 and cut.joint is not None
    state = cut.joint.pipelines[0]
    assert state.started == 3 and [each.iteration for each in state.flights] == [1, 2]
    assert not state.flights[0].gradients, "they are in a file of their own"
    tensors, _ = crowd.ports[0].saved[1, cut.joint.files[-1]]
    assert set(tensors) == {"0/1/0", "0/1/1", "0/2/0", "0/2/1"}
    assert [count for _, count in cut.flights[0]] == [2, 2]
    assert cut.joint.standings[0] == Standing.before(1)
