"""Simulated runs saved and resumed in their middle, to the same bits: every dial, from any checkpoint."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.roles.checkpoint_manifest import restored
from syncline.table.checkpoints import find
from syncline.testing.hunt import DIALS

SCRIPT = "kill learner 1 at 6.3 s; add 1 at 9 s; pause learner 0 for 1.5 s at 4 s"
CLUSTER = "equal:jitter=lognormal:0.4,latency=0.01,setup=0.1"
SIZE = 60


def points() -> TensorDataset:
    x = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def network() -> nn.Module:
    """With batch statistics and random masks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def train(run_dir: Path | None, *, script: str = SCRIPT, handlers: bool = True, **options: Any) -> sl.Result:
    settings: dict[str, Any] = {
        "learners": 4,
        "topology": "servers:2",
        "batch_size": 4,
        "epochs": 3,
        "threads": 1,
        "keep_checkpoints": 100,
        "checkpoint_every": 4 if run_dir else None,
        "run_dir": run_dir,
    }
    engine = sl.Sim(CLUSTER, script=script, check=True, handlers=handlers)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    given = {**settings, **options}
    return sl.train(network(), points(), loss=F.cross_entropy, optimizer=optimizer, engine=engine, **given)


def checkpoints(folder: Path) -> list[Path]:
    """All but the last, which is that of the end."""
    return sorted((folder / "checkpoints").iterdir())[:-1]


def when(checkpoint: Path) -> float:
    found = restored(find(checkpoint)).simulated
    assert found is not None
    return found["seconds"]


def same(a: sl.Result, b: sl.Result) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def equal_ends(a: sl.Result, b: sl.Result) -> None:
    assert same(a, b)
    assert (a.version, a.seconds, a.staleness, a.dropped) == (b.version, b.seconds, b.staleness, b.dropped)
    assert repr(a.history) == repr(b.history)  # losses may be nan
    assert repr(a.statistics.tables) == repr(b.statistics.tables)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("sync", DIALS)
def test_from_any_checkpoint_to_the_same_end(sync: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", sync=sync)
    found = checkpoints(tmp_path / "whole")
    assert found
    for place in (found[0], found[-1]):
        resumed = train(tmp_path / place.name, sync=sync, resume=place)
        equal_ends(whole, resumed)
        later = [
            event for event in whole.events if event.seconds > when(place) and event.kind != "checkpoint"
        ]
        assert [event for event in resumed.events if event.kind != "checkpoint"] == later


@pytest.mark.parametrize("sync", ["hardsync", "softsync:2", "delayed:3"])
def test_learners_on_fibers_too(sync: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", sync=sync, handlers=False)
    equal_ends(whole, train(tmp_path / "handlers", sync=sync))
    place = checkpoints(tmp_path / "whole")[0]
    equal_ends(whole, train(tmp_path / "again", sync=sync, handlers=False, resume=place))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_the_lines_of_the_run_folder_are_the_same_from_there_on(tmp_path: Path) -> None:
    train(tmp_path / "whole", sync="async")
    place = checkpoints(tmp_path / "whole")[2]
    train(tmp_path / "again", sync="async", resume=place)

    def tail(folder: Path) -> list[dict[str, Any]]:
        kept = []
        for line in lines(folder):
            if line.get("kind") in ("start", "end") or not line.get("seconds", 0.0) > when(place):
                continue
            kept.append({key: value for key, value in line.items() if key not in ("what", "details")})
        return kept

    assert tail(tmp_path / "again") == tail(tmp_path / "whole") != []


def test_lockstep_has_the_bits_of_a_run_without_checkpoints(tmp_path: Path) -> None:
    calm = train(None, sync="hardsync", script="")
    assert same(train(tmp_path, sync="hardsync", script=""), calm)


def test_a_lost_shard_in_between(tmp_path: Path) -> None:
    script = f"{SCRIPT}; kill shard 1 at version 14"
    whole = train(tmp_path / "whole", sync="async", script=script)
    assert "recovered" in {event.kind for event in whole.events}
    for place in checkpoints(tmp_path / "whole")[1::3]:
        equal_ends(whole, train(tmp_path / place.name, sync="async", script=script, resume=place))


def test_a_dial_that_was_changed_to_is_remembered(tmp_path: Path) -> None:
    script = "change to ssp:1 at version 6"
    whole = train(tmp_path / "whole", sync="softsync:1", script=script)
    for place in checkpoints(tmp_path / "whole"):
        equal_ends(whole, train(tmp_path / place.name, sync="softsync:1", script=script, resume=place))


def test_time_goes_on_in_a_run_that_gets_more_epochs(tmp_path: Path) -> None:
    first = train(tmp_path, sync="softsync:1", epochs=2, script="")
    second = train(None, sync="softsync:1", epochs=3, script="", resume=tmp_path, checkpoint_every=None)
    assert second.seconds > first.seconds
    assert [record.epoch for record in second.history] == [0, 1, 2]
    assert second.history[:2] == first.history
    spent = second.seconds - first.seconds
    assert second.throughput == pytest.approx(SIZE / spent)


def own_loop(session: sl.Session, data: TensorDataset) -> int:
    model = network()
    optimizer = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
    loader = session.loader(data, batch_size=4)
    steps = 0
    while not session.ending and loader.epoch < 3:
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
    return steps


@pytest.mark.parametrize("sync", ["hardsync", "async", "ssp:1", "downpour:push=3,fetch=4,local_lr=0.1"])
def test_own_loops(sync: str, tmp_path: Path) -> None:
    def launch(folder: Path, **options: Any) -> sl.Result:
        engine = sl.Sim(CLUSTER, check=True, exact=True)
        given = {
            "learners": 3,
            "sync": sync,
            "checkpoint_every": 4,
            "keep_checkpoints": 100,
            "threads": 1,
            **options,
        }
        return sl.launch(own_loop, points(), engine=engine, run_dir=folder, **given)

    whole = launch(tmp_path / "whole")
    for place in checkpoints(tmp_path / "whole")[::2]:
        resumed = launch(tmp_path / place.name, resume=place)
        equal_ends(whole, resumed)
        pairs = zip(resumed.returned, whole.returned, strict=True)
        assert all(mine is None or mine == theirs for mine, theirs in pairs)  # None: it had returned before


def test_functions_of_launch_keep_what_they_have_unless_told_otherwise(tmp_path: Path) -> None:
    result = sl.launch(
        own_loop,
        points(),
        engine="sim",
        learners=3,
        sync="async",
        run_dir=tmp_path,
        checkpoint_every=4,
        threads=1,
    )
    assert sum(result.returned) == result.gradients == 3 * SIZE // 4
