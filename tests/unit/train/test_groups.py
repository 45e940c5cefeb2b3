"""Groups of seats before the start: what is refused, the dial of one group under torchrun, what a table and seats take (no GPU needed)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from syncline.dial import Course
from syncline.engines.torchrun.engine import Torchrun
from syncline.engines.torchrun.rank_and_store import TorchrunPlace
from syncline.errors import NotYetError, UsageError
from syncline.learn.gradient_ways import Backprop, Divergence, Given, Way
from syncline.plan import Plan
from syncline.roles.run_plan import RunPlan
from syncline.sim.engine import Sim
from syncline.topologies import parse_topology
from syncline.train import groups
from tests.unit.train.still_engine import StillEngine

SEATS = Torchrun(TorchrunPlace(rank=0, learners=2, local_rank=0, local=2, master="host"))
INPUTS = TensorDataset(torch.zeros(16, 6))


def whole(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).sum()  # type: ignore[no-any-return]


GROUPED = groups.Grouped(nn.Sequential(nn.Linear(6, 4)), Backprop(whole), INPUTS, None, 8, 1)


def plan(sync: str) -> RunPlan:
    return RunPlan(course=Course.of(sync), learners=2, topology=parse_topology("servers:1"), seed=0)


@pytest.mark.parametrize(("sync", "most"), [("async", 3 + 2 * 3 + 4), ("delayed:2", 6 + 2 * 4 + 4)])
def test_what_a_table_takes(sync: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1000, bias=False)  # 4 MB
    monkeypatch.setattr(groups, "free_memory", lambda device: most * 4_000_000)
    groups.check_card("cuda:0", ["cuda:0", "cuda:0"], plan(sync), model)
    monkeypatch.setattr(groups, "free_memory", lambda device: most * 4_000_000 - 1)
    with pytest.raises(
        UsageError, match=r"does not fit on cuda:0: \d versions take .* MB.*table_device=\"cpu\""
    ):
        groups.check_card("cuda:0", ["cuda:0", "cuda:0"], plan(sync), model)


@pytest.mark.parametrize("group, given, topology, words", [
    (0, None, "servers", "group must be a whole number of at least 1, got 0"),
    (1, "data", "servers", "give group= of at least 2"),
    (2, "data", "allreduce", "groups publish to servers"),
])  # fmt: skip
def test_groups_that_cannot_be_are_refused(group: Any, given: Any, topology: str, words: str) -> None:
    groups.check_group(1, None, StillEngine(), topology)
    groups.check_group(2, None, SEATS, "allreduce")
    with pytest.raises(UsageError, match=words):
        groups.check_group(group, given, StillEngine(), topology)


@pytest.mark.parametrize("sync, expected", [
    ("hardsync", "hardsync"), ("async", "hardsync"), ("hardsync until 2 then softsync:1", "hardsync until 2 then hardsync"),
])  # fmt: skip
def test_one_group_under_torchrun_waits_for_nobody_and_has_no_servers(sync: str, expected: str) -> None:
    course, topology = groups.under_torchrun(SEATS, 2, sync, "servers")
    assert (str(course), topology) == (expected, "allreduce:layerwise")
    assert groups.under_torchrun(SEATS, 1, sync, "servers") == (sync, "servers")
    assert groups.under_torchrun(StillEngine(), 2, sync, "servers") == (sync, "servers")


@pytest.mark.parametrize("sync, topology, local, kind, words", [
    ("hardsync", "servers:2", True, UsageError, "with topology='servers:2': one group has no servers"),
    ("hardsync", "allreduce:layerwise,apply=arrival", True, UsageError, "one group has no servers"),
    ("hardsync", "servers", False, UsageError, "with local_update=False: one group"),
    ("delayed:1", "servers", True, NotYetError, "a step takes its own gradient; use hardsync"),
    ("downpour:push=2,fetch=2,local_lr=0.1", "servers", True, NotYetError, "use hardsync"),
    ("backup:1", "servers", True, UsageError, "needs b < learners"),
])  # fmt: skip
def test_what_one_group_under_torchrun_cannot_do_is_refused(
    sync: str, topology: str, local: bool, kind: type[UsageError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        groups.under_torchrun(SEATS, 2, sync, topology, local_update=local)


@pytest.mark.parametrize("sync, learners, optimizer, plain, expected", [
    ("hardsync", 1, torch.optim.SGD, True, True),
    ("async", 1, torch.optim.Adam, True, True),
    ("hardsync", 2, torch.optim.SGD, True, False),
    ("hardsync", 1, torch.optim.SGD, False, False),
    ("hardsync", 1, torch.optim.Adafactor, True, False),
    ("delayed:1", 1, torch.optim.SGD, True, False),
    ("hardsync until 1 then async", 1, torch.optim.SGD, True, False),
    ("hardsync:reference_batch=32", 1, torch.optim.SGD, True, False),
])  # fmt: skip
def test_seats_update_themselves_where_a_step_takes_its_own_gradient_as_it_is(
    sync: str, learners: int, optimizer: Any, plain: bool, expected: bool
) -> None:
    made = optimizer(nn.Linear(3, 1).parameters(), lr=0.1)
    trained = GROUPED._replace(learners=learners)
    assert groups.updates_locally(Course.of(sync), made, trained, plain=plain) is expected


def test_the_cut_says_what_the_model_reads_and_how_large_a_batch_is(tmp_path: Path) -> None:
    trained = GROUPED._replace(model=nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert groups.cut_over(1, None, trained) is None
    by_hand = groups.cut_over(2, {"0": "model"}, trained)
    assert by_hand is not None and by_hand.choices == {"0": "model"}
    assert (by_hand.group, by_hand.workers, by_hand.batch) == (2, 2, 8)
    assert by_hand.inputs == (("", (8, 6), "float32"),)
    three = groups.cut_over(2, "auto", trained._replace(learners=3))
    assert three is not None and set(three.choices) == {"0", "2"} and three.workers == 6
    assert three.inputs == by_hand.inputs  # of one learner
    three.save(tmp_path / "plan.json")
    again = groups.cut_over(2, str(tmp_path / "plan.json"), trained)
    assert isinstance(again, Plan) and again.choices == three.choices


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor, scale: Any = None) -> torch.Tensor:
        return super().forward(input)


@pytest.mark.parametrize("changes, words", [
    ({"way": Divergence(2, persistent=True)}, r"group=2: gradient='pcd:2' samples from whole layers"),
    ({"way": Given(whole)}, "group=2: a gradient= of your own does not know which slices a seat has"),
    ({"data": Stream()}, "there is no first batch to look at"),
    ({"way": lambda model, batch: model.weight.sum()}, r"has to call model\(...\) as a whole: AttributeError"),
    ({"way": lambda model, batch: batch[0].sum()}, r"does not call model\(...\)"),
    ({"way": lambda model, batch: model(batch[0], scale=2).sum()}, r"something else than tensors \(scale\)"),
    ({"way": lambda model, batch: model(batch[0]).sum() + isinstance(model, Scaled)}, r"looks at the model's type or attributes"),
])  # fmt: skip
def test_a_model_is_cut_only_where_a_first_batch_says_what_it_reads(
    changes: dict[str, Any], words: str
) -> None:
    if "way" in changes and not isinstance(changes["way"], Way):
        changes = {"way": Backprop(changes["way"])}
    with pytest.raises(UsageError, match=words):
        groups.cut_over(2, "data", GROUPED._replace(**{"model": Scaled(6, 2), **changes}))


def test_looking_at_the_objective_leaves_the_model_and_random_numbers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert groups.cut_over(2, "data", GROUPED._replace(model=model)) is not None
    assert not model.training and not model[1].training
    torch.testing.assert_close(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), draws)


def test_the_memory_of_a_seat_counts_only_on_this_machine_under_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four seats two are here, and there is no table."""
    model, data = nn.Sequential(nn.Linear(1000, 32)), TensorDataset(torch.zeros(16, 1000))
    trained = GROUPED._replace(model=model, data=data)
    place = TorchrunPlace(rank=2, learners=4, local_rank=0, local=2, master="host")
    needed = 2 * (2 * 8 * 1001 * 4 + 8 * 1000 * 4)
    monkeypatch.setattr(groups, "free_memory", lambda device: needed)
    assert groups.cut_over(4, {"0": "model"}, trained, devices=("cpu",), place=place)
    monkeypatch.setattr(groups, "free_memory", lambda device: needed - 1)
    with pytest.raises(UsageError, match="group=4: a seat needs at least"):
        groups.cut_over(4, {"0": "model"}, trained, devices=("cpu",), place=place)


def test_a_simulated_group_is_one_learner_and_the_engine_given_stays_as_it_was() -> None:
    engine = Sim()
    assert groups.simulated(engine, 1, None, GROUPED) is engine
    before = engine.cluster
    made = groups.simulated(engine, 2, "data", GROUPED)
    assert engine.cluster is before and made is not engine
    compute = made.cluster.compute
    assert compute.base >= 0 and compute.per_example >= 0 and compute != before.compute
    with pytest.raises(UsageError, match="no layers inside it that take time"):
        groups.simulated(engine, 2, "data", GROUPED._replace(model=nn.Linear(6, 4)))
