"""Nodes of a simulated cluster that die, stand still or cannot be reached, and messages that are late: by script, the same every time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import syncline as sl
from syncline.cluster import Compute, Link
from syncline.errors import NotYetError
from tests.integration.small_runs import clouds, kinds, network, same

NODES = sl.Cluster(  # three of two learners, the shards on the first
    compute=Compute(base=1.0),
    learners_per_machine=2,
    shards_per_machine=None,
    beside=True,
    card=Link(latency=0.01, bandwidth=1e6),
)


def run(script: str | None = None, cluster: sl.Cluster = NODES, **options: Any) -> sl.Result:
    given = {
        "learners": 6,
        "batch_size": 4,
        "epochs": 2,
        "sync": "hardsync",
        "topology": "servers:2",
        **options,
    }
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    engine = sl.Sim(cluster, script=script, check=True)
    return sl.train(
        network(), clouds(120), loss=F.cross_entropy, optimizer=optimizer, engine=engine, seed=5, **given
    )


@pytest.mark.parametrize("sync", ["hardsync", "async", "ssp:1"])
def test_a_killed_node_takes_its_learners_along(sync: str) -> None:
    result = run("kill node 2 at version 3", sync=sync)
    lost = [event for event in result.events if event.kind == "lost"]
    assert [event.rank for event in lost] == [4, 5] and all("with its node" in event.what for event in lost)
    assert result.statistics.tables[0].examples == 2 * 120


def test_others_take_their_places() -> None:
    result = run("kill node 1 at version 3; kill node 1 at version 5", replace=True)
    assert kinds(result).count("lost") == kinds(result).count("replaced") == 4


def test_a_killed_node_with_the_shards_is_a_way_back_to_the_checkpoint(tmp_path: Path) -> None:
    result = run("kill node 0 at version 5", run_dir=tmp_path, checkpoint_every=2)
    assert "recovered" in kinds(result) and kinds(result).count("lost") == 2
    assert result.statistics.tables[0].examples == 2 * 120


def test_what_goes_over_a_cut_link_waits_and_nothing_is_lost() -> None:
    plain, cut = run(), run("cut link 0-2 for 7 s at version 3")
    assert same(plain.state_dict(), cut.state_dict()) and kinds(cut) == ["cut"]
    assert plain.seconds + 5 < cut.seconds < plain.seconds + 8  # virtual: what was under way has arrived
    elsewhere = run("cut link 1-2 for 7 s at version 3")
    assert elsewhere.seconds == plain.seconds  # nothing goes from the one to the other


def test_a_node_that_is_paused_keeps_all_waiting_in_lockstep() -> None:
    plain, paused = run(), run("pause node 1 for 7 s at version 3")
    assert same(plain.state_dict(), paused.state_dict()) and paused.seconds > plain.seconds + 6


def test_late_messages_change_times_and_in_lockstep_no_bits() -> None:
    late = replace(NODES, delay=0.5)
    found, again = run(cluster=late), run(cluster=late)
    assert found.seconds == again.seconds > run().seconds
    assert same(found.state_dict(), run().state_dict())
    free = [run(cluster=late, sync="async") for _ in range(2)]
    assert same(free[0].state_dict(), free[1].state_dict())
    assert not same(free[0].state_dict(), run(sync="async").state_dict())  # gradients come in another order


@pytest.mark.parametrize("sync", ["hardsync", "async"])
def test_a_run_on_such_nodes_goes_on_from_any_checkpoint_to_the_same_end(sync: str, tmp_path: Path) -> None:
    """A cut that a checkpoint falls into ends with it, in the run that goes on and in the one that is resumed."""
    script, late = "cut link 0-1 for 3 s at 4 s; kill node 2 at 7 s", replace(NODES, delay=0.3)
    options: dict[str, Any] = {"sync": sync, "checkpoint_every": 3, "keep_checkpoints": 100}
    whole = run(script, late, run_dir=tmp_path / "whole", **options)
    places = sorted((tmp_path / "whole" / "checkpoints").iterdir())[:-1]
    assert len(places) > 2
    for place in (places[0], places[1], places[-1]):
        resumed = run(script, late, run_dir=tmp_path / place.name, resume=place, **options)
        assert same(resumed.state_dict(), whole.state_dict()) and resumed.seconds == whole.seconds


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        (
            "cut link 0-1 for 1 s at 1 s",
            {"cluster": replace(NODES, beside=False)},
            "use one with beside=True",
        ),
        ("cut link 0-1 for 1 s at 1 s", {"topology": "tree:2"}, "nodes are those of the tree"),
        (
            "kill node 1 at 1 s",
            {"topology": "allreduce", "sync": "hardsync"},
            "learners can be killed and the run stopped",
        ),
    ],
)
def test_what_a_run_cannot_do_is_refused(script: str, options: dict[str, Any], words: str) -> None:
    options = {"topology": "servers", **options}
    cluster = options.pop("cluster", NODES)
    with pytest.raises((sl.UsageError, NotYetError), match=words):
        sl.train(
            network(),
            clouds(20),
            loss=F.cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            learners=2,
            batch_size=4,
            epochs=1,
            engine=sl.Sim(cluster, script=script),
            **options,
        )


def test_a_timing_has_no_way_back_for_a_node_with_shards() -> None:
    sizes: dict[str, Any] = {"parameters": 1000, "examples": 60, "learners": 6, "batch_size": 2, "epochs": 2}
    with pytest.raises(sl.UsageError, match="a timing has no checkpoints to go back to"):
        sl.Sim(NODES, script="kill node 0 at 1 s").timing(**sizes)
    happened = sl.Sim(NODES, script="kill node 1 at 2 s").timing(**sizes).happened
    assert [event.kind for event in happened].count("lost") == 2
