"""What every run needs before it starts: engine, devices, where the table lies, a dial and a topology that fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncline.dial import Course
from syncline.engines.local.engine import Local
from syncline.engines.run import RunSpec, Task
from syncline.engines.torchrun.engine import Torchrun
from syncline.engines.torchrun.rank_and_store import NEEDED
from syncline.errors import UsageError
from syncline.protocols.lifecycle import Faults
from syncline.roles.run_plan import RunPlan
from syncline.sim.engine import Sim
from syncline.topologies import SHARD_BYTES, Servers, parse_topology
from syncline.train import spec
from tests.unit.train.still_engine import StillEngine

GIVEN: dict[str, Any] = {
    "threads": None, "run_dir": None, "resume": None, "on_error": "raise", "replace": False, "patience": 60.0,
    "kill_hung": False, "checkpoint_every": "auto", "keep_checkpoints": 2, "clocks": False, "if_exists": "refuse", "device": None,
    "table_device": None,
}  # fmt: skip


def plan(topology: str = "servers:2", sync: str = "hardsync", **changes: Any) -> RunPlan:
    course = Course.of(sync)
    return RunPlan(course=course, learners=4, topology=parse_topology(topology), seed=0, **changes)


def made(engine: Any, described: RunPlan, **changes: Any) -> RunSpec:
    return spec.run_spec(engine, Task(print), described, {**GIVEN, **changes})


class Dealing(StillEngine):
    deals_devices = True


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("given, expected", [
    (None, ("cpu", "cpu", "cpu")),
    ("cuda", ("cuda:0", "cuda:1", "cuda:0")),
    ("cuda:1", ("cuda:1", "cuda:1", "cuda:1")),
    (["cuda:1", "cpu"], ("cuda:1", "cpu", "cuda:1")),
    (torch.device("cpu"), ("cpu", "cpu", "cpu")),
])  # fmt: skip
def test_devices_are_dealt_to_learners_in_turn(given: Any, expected: tuple[str, ...]) -> None:
    assert spec.devices_of(given, 3) == expected


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("given", ["cuda:2", ["cuda:0", "cuda:7"], "abacus", [], [0], 0])
def test_devices_that_are_not_there_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="device"):
        spec.devices_of(given, 2)


ON_GPUS, MIXED = ("cuda:1", "cuda:0"), ("cuda:0", "cpu")


@pytest.mark.parametrize("given, devices, group, topology, expected", [
    (None, ON_GPUS, 1, "servers:2", "cuda:1"),
    ("cuda:0", ON_GPUS, 1, "servers:2", "cuda:0"),
    ("cpu", ON_GPUS, 1, "servers:2", None),
    (None, MIXED, 1, "servers:2", None),
    (None, ON_GPUS, 2, "servers:2", None),
    (None, ON_GPUS, 1, "tree:2", None),
])  # fmt: skip
def test_a_table_lies_with_its_learners_where_all_are_on_gpus(
    given: Any, devices: tuple[str, ...], group: int, topology: str, expected: str | None
) -> None:
    assert spec.card_of(given, devices, StillEngine(), plan(topology), group) == expected


@pytest.mark.parametrize("given, devices, group, topology, engine, words", [
    ("cuda:3", ON_GPUS, 1, "servers:2", StillEngine, "it is 'cpu' or one of their GPUs"),
    ("cuda:0", MIXED, 1, "servers:2", StillEngine, "the learners are on cpu, cuda:0"),
    ("cuda:0", ON_GPUS, 2, "servers:2", StillEngine, "seats share a table"),
    ("cuda:0", ON_GPUS, 1, "tree:2", StillEngine, "leaves add gradients"),
    ("cuda:0", ("cuda",), 1, "servers:2", Dealing, "on a cluster tables lie"),
])  # fmt: skip
def test_a_table_where_it_cannot_lie_is_refused(
    given: str, devices: tuple[str, ...], group: int, topology: str, engine: type, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        spec.card_of(given, devices, engine(), plan(topology), group)


@pytest.mark.usefixtures("two_gpus")
def test_a_table_on_a_card_is_not_cut_and_one_on_a_cluster_is_cut_coarsely() -> None:
    on_card = made(StillEngine(), plan("servers"), device="cuda:1")
    assert (on_card.card, on_card.plan.topology.shards) == ("cuda:1", 1)
    far = made(Dealing(), plan("servers"), device="cuda")
    assert (far.devices, far.card) == (("cuda",), None)
    assert isinstance(far.plan.topology, Servers) and far.plan.topology.least == SHARD_BYTES


def test_a_table_that_does_not_fit_on_its_card_is_refused(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    with pytest.raises(UsageError, match="does not fit on cuda:0"):
        spec.run_spec(
            StillEngine(), Task(print), plan(), {**GIVEN, "device": "cuda"}, model=nn.Linear(99, 99)
        )


@pytest.mark.parametrize("described, changes, words", [
    (plan(warm=-1), {}, "warmstart is a number of updates, at least 0, got -1"),
    (plan(warm=True), {}, "warmstart .* got True"),
    (plan(clip_norm=True), {}, "clip_norm must be a number > 0, got True"),
    (plan(clip_norm=0), {}, "clip_norm must be a number > 0, got 0"),
    (plan(sync="hardsync until 2 then softsync:5"), {}, "n <= learners"),
    (plan("tree:2", "backup:1"), {}, "a leaf's sum is taken whole"),
    (plan("tree:2"), {}, "topology 'tree:2,servers=2' is not built yet on this engine"),
    (plan(), {"threads": 0}, "threads must be a whole number"),
    (plan(), {"run_dir": ""}, "run_dir must be the path of a folder, got ''"),
    (plan(), {"resume": 3}, "resume must be the path of a folder, got 3"),
    (plan(), {"on_error": "shrug"}, "on_error is"),
    (plan(), {"checkpoint_every": 5}, "checkpoint_every=5 needs run_dir="),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(
    described: RunPlan, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        made(StillEngine(), described, **changes)


def test_trees_go_over_engines_that_start_their_nodes_and_broadcast_reaches_no_seats() -> None:
    for engine in (Local(), Sim()):
        spec.check_plan(plan("tree:2,broadcast"), engine, Faults(), 1, clocks=False)
        with pytest.raises(UsageError, match="with group=2, whose seats must read one version"):
            spec.check_plan(plan("tree:2,broadcast"), engine, Faults(), 2, clocks=False)


def test_a_run_folder_is_locked_and_says_how_often_to_save(tmp_path: Path) -> None:
    found = made(StillEngine(), plan(), run_dir=tmp_path / "run", checkpoint_every="2.5s")
    assert found.storage.lock is not None and found.storage.folder == str(tmp_path / "run" / "checkpoints")
    assert (found.plan.saving.seconds, found.plan.saving.every, found.plan.snapshots) == (2.5, None, False)
    with pytest.raises(UsageError, match="holds a run that is alive"):
        made(StillEngine(), plan(), run_dir=tmp_path / "run")
    found.storage.lock.release()


def test_the_number_of_shards_is_the_users_or_one_that_the_machine_has_cores_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spec.os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert spec.topology_of("servers:7", 2, Course.of("hardsync")).shards == 7
    assert spec.topology_of("servers", 2, Course.of("async")).shards == 4
    assert spec.topology_of("servers", 5, Course.of("hardsync")).shards == 5


def test_engines_go_by_name_and_local_under_torchrun_is_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
    mine = StillEngine()
    assert spec.engine_of(mine) is mine
    assert type(spec.engine_of("local")) is Local and type(spec.engine_of("sim")) is Sim
    for wrong, words in (
        ("cloud", "use one of local, ray, sim"),
        (Local, "Local is a class, give Local()"),
        ([], "unknown"),
    ):
        with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
            spec.engine_of(wrong)
    for name, value in zip(NEEDED, ("1", "3", "host", "1"), strict=True):
        monkeypatch.setenv(name, value)
    started = spec.engine_of("local")
    assert isinstance(started, Torchrun) and type(spec.engine_of("sim")) is Sim
    place = spec.place_of(started)
    assert place is not None and (place.rank, place.learners, place.local) == (1, 3, 3)
    assert spec.learners_of(started, 2, "allreduce", True, 1) == 3
    assert spec.learners_of(mine, 2, "allreduce", True, 1) == 2


def test_processes_of_torchrun_have_one_device_each_and_only_the_first_speaks(
    two_gpus: None, capsys: pytest.CaptureFixture[str]
) -> None:
    place = spec.TorchrunPlace(rank=3, learners=97, local_rank=1, local=2, master="host")
    assert made(Torchrun(place), plan("allreduce"), device="cuda").devices == ("cuda:1",)
    for rank, said in ((3, 0), (0, 1), (0, 0)):
        spec.learners_of(Torchrun(dataclasses.replace(place, rank=rank)), 2, "allreduce", True, 1)
        words = "the 97 processes that torchrun started are the learners"
        assert capsys.readouterr().err.count(words) == said
