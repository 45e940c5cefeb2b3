"""Lost shards in the simulator (S7): the recovery of the local engine, in virtual time, checked after every event."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import syncline as sl
from syncline.errors import LostError
from syncline.testing.hunt import Case, play
from tests.integration.small_runs import PRESETS, kinds, points, same

SIZE = 60


def train(script: str = "", *, handlers: bool = True, **options: Any) -> sl.Result:
    engine = sl.Sim(script=script, check=True, handlers=handlers)
    settings: dict[str, Any] = {
        "learners": 3,
        "topology": "servers:2",
        "batch_size": 4,
        "epochs": 3,
        "threads": 1,
    }
    torch.manual_seed(0)
    model = options.pop("model", nn.Linear(4, 2))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    given = {**settings, **options}
    return sl.train(model, points(SIZE), loss=F.cross_entropy, optimizer=optimizer, engine=engine, **given)


@pytest.mark.parametrize("handlers", [True, False])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("sync", PRESETS)
def test_a_lost_shard_comes_back_and_nothing_is_lost_but_time(
    sync: str, shard: int, handlers: bool, tmp_path: Path
) -> None:
    script = f"kill shard {shard} at version 11"
    result = train(script, handlers=handlers, sync=sync, run_dir=tmp_path, checkpoint_every=4)
    assert kinds(result) == ["shard lost", "recovered"]
    table = result.statistics.tables[0]
    assert table.examples == 3 * SIZE or (result.dropped > 0 and table.examples < 3 * SIZE)
    assert [record.epoch for record in result.history] == [0, 1, 2]
    assert result.staleness.gradients == result.gradients and table.pending == 0


@pytest.mark.parametrize("handlers", [True, False])
@pytest.mark.parametrize(
    "script", ["kill shard 0 at version 6", "kill shard 1 at 2 s", "kill shard 1 at 13.005 s"]
)
def test_lockstep_gives_the_bits_of_an_undisturbed_run(script: str, handlers: bool, tmp_path: Path) -> None:
    calm = train(sync="hardsync")
    result = train(script, handlers=handlers, sync="hardsync", run_dir=tmp_path, checkpoint_every=4)
    assert kinds(result) == ["shard lost", "recovered"]
    assert same(result.state_dict(), calm.state_dict()) and result.seconds > calm.seconds


def test_handlers_that_begin_anew_draw_the_same_numbers(tmp_path: Path) -> None:
    """Their random states come back with the checkpoint."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    calm = train(sync="hardsync", model=model())
    disturbed = train(
        "kill shard 0 at version 6", sync="hardsync", model=model(), run_dir=tmp_path, checkpoint_every=4
    )
    assert kinds(disturbed) == ["shard lost", "recovered"] and same(disturbed.state_dict(), calm.state_dict())


def test_without_checkpoints_the_run_ends_and_says_what_to_do() -> None:
    with pytest.raises(LostError, match=r"shard 1 was killed .*give run_dir= and checkpoint_every="):
        train("kill shard 1 at version 3", sync="async")


def test_losses_without_a_checkpoint_in_between_are_bounded(tmp_path: Path) -> None:
    script = "; ".join(f"kill shard 1 at {seconds} s" for seconds in range(2, 6))
    with pytest.raises(LostError, match="4 times without a checkpoint in between; given up"):
        train(script, sync="async", run_dir=tmp_path, checkpoint_every=1000)


# -- what the hunt has found, shortened --------------------------------------------------------------------

FOUND = {
    "a slot was used again before the fold, where the dial turned to delayed:k": Case(
        seed=23,
        sync="async until 1 then delayed:2 until 2 then ssp:1",
        script="kill learner 3 at version 1",
        examples=29,
        warmstart=1,
        cluster="equal:jitter=pareto:1,latency=0.001,setup=0.01",
    ),
    "a joiner without a part of its own ran through epochs without end": Case(
        seed=56,
        sync="async until 1 then delayed:2 until 2 then ssp:1",
        script="add 1 at 0.003 s",
        examples=34,
        batch_size=3,
        steps=11,
        policy="partition",
        cluster="equal:latency=0,setup=0.2",
    ),
    "loops over two loaders got out of step when a shard was lost": Case(
        seed=9,
        sync="hardsync until 1 then softsync:1",
        learners=4,
        script="kill shard 0 at 7.5631 s; kill shard 0 at 8.1821 s",
        loop="odd",
        examples=13,
        epochs=3,
        replace=True,
        checkpoint_every=1000,
        cluster="equal:jitter=uniform:0.5,latency=0,setup=0,message=0.05",
    ),
    "a slot was used again before the fold, after gradients beyond the last update were dropped": Case(
        seed=374,
        sync="delayed:1",
        shards=2,
        examples=15,
        steps=16,
        warmstart=8,
        cluster="equal:jitter=none,latency=0.001,setup=0.2,stragglers=0.4,slowdown=5",
    ),
    "who was to work alone in a warm start came second after a lost shard, and all waited for it": Case(
        seed=406,
        sync="ssp:2",
        learners=2,
        script="kill learner 1 at 2 s; kill shard 0 at 1.6 s",
        examples=1,
        batch_size=1,
        epochs=1,
        warmstart=1,
        replace=True,
        checkpoint_every=4,
        cluster="equal:stragglers=0.4",
    ),
    "a learner in a meeting had batches that it had not published, and the others waited for them": Case(
        seed=483,
        sync="backup:1",
        shards=2,
        script="pause learner 3 for 9 s at 0.003 s; kill learner 3 at 3.0484 s",
        loop="odd",
        examples=12,
        epochs=1,
        cluster="equal:jitter=pareto:1,latency=0,setup=1.5,message=0.05",
    ),
    "a joiner began an epoch of the second loader that the others had not asked for": Case(
        seed=380,
        sync="delayed:1",
        learners=1,
        script="kill learner 1 at 99 s; add 2 at 0.01 s",
        loop="odd",
        examples=27,
        batch_size=1,
        epochs=3,
        replace=True,
        cluster="equal:jitter=pareto:1,setup=0.2",
    ),
    "a paused learner forgot what the new shards had given it": Case(
        seed=435,
        sync="async:rate=staleness",
        learners=1,
        script="pause learner 1 for 9 s at 35 s; add 1 at version 16; add 1 at version 27; kill shard 0 at version 64",
        examples=33,
        batch_size=1,
        checkpoint_every=9,
        cluster="equal:setup=0",
    ),
    "a version that was being read under delayed:k was overwritten when the dial changed": Case(
        seed=185,
        sync="delayed:3",
        learners=4,
        script="kill learner 0 at 0.003 s; kill learner 1 at 4.6880 s; change to async at version 4",
        loop="bare",
        examples=30,
        batch_size=3,
        epochs=1,
        steps=7,
        cluster="equal:jitter=pareto:1,latency=0.3,setup=0.01",
    ),
    "a handler read a version of which one shard's part was not there": Case(
        seed=223,
        sync="hardsync until 1 then softsync:1",
        learners=2,
        shards=2,
        loop="train",
        examples=1,
        batch_size=1,
        cluster="equal:message=0.05",
    ),
    "lockstep waited for who was in a meeting with batches that were in no gradient yet": Case(
        seed=507, sync="delayed:1", learners=4, loop="odd", examples=28, batch_size=3, epochs=1
    ),
    "who had gone back met, the others were at a barrier": Case(
        seed=627,
        sync="delayed:1",
        shards=2,
        script="kill shard 1 at 25 s",
        loop="odd",
        examples=32,
        batch_size=1,
        checkpoint_every=2,
        cluster="equal:jitter=lognormal:0.5",
    ),
    "the same with one epoch": Case(
        seed=666,
        sync="delayed:3",
        learners=2,
        script="kill shard 0 at 14 s",
        loop="odd",
        examples=15,
        batch_size=1,
        epochs=1,
        checkpoint_every=2,
    ),
    "the run ended while somebody met, and another was too far ahead of it": Case(
        seed=708, sync="ssp:0", learners=2, loop="odd", examples=2, batch_size=1, epochs=1, steps=3
    ),
    "who had heard of the end met, the others were at a barrier and had not": Case(
        seed=621,
        sync="delayed:1",
        learners=4,
        script="kill learner 3 at version 3; kill learner 2 at 0 s",
        loop="odd",
        steps=10,
        checkpoint_every=9,
        cluster="equal:jitter=uniform:0.5,latency=0.3,setup=0.01",
    ),
    "the dial turned from hardsync while somebody read the table where it lies": Case(
        seed=2024,
        sync="hardsync until 1 then softsync:1",
        learners=4,
        script="kill learner 2 at version 1; pause learner 3 for 3 s at version 1",
        loop="odd",
        examples=10,
        batch_size=3,
        policy="sample",
        cluster="equal:jitter=none,latency=0.001,setup=0.01,message=0.05",
    ),
    "batches of a gradient that waited for its fold were done with one that was dropped after it": Case(
        seed=3368,
        sync="delayed:3",
        script="kill learner 1 at 4 s",
        examples=4,
        batch_size=1,
        epochs=1,
        steps=1,
        cluster="equal:stragglers=0.4,slowdown=5",
    ),
    "the dial changed after the last shard had finished": Case(
        seed=941,
        sync="softsync:1",
        learners=2,
        shards=2,
        script="change to downpour:push=2,fetch=3,local_lr=0.1 at version 8",
        examples=9,
        epochs=3,
        clip=True,
        cluster="equal:message=0.05",
    ),
    "a fetch under way when the dial turned to ssp did not wait for the slowest": Case(
        seed=2066,
        sync="downpour:push=1,fetch=6,local_lr=0.1",
        learners=2,
        script="change to ssp:1 at 3 s",
        examples=13,
        batch_size=1,
        epochs=1,
        cluster="equal:jitter=exponential:0.5",
    ),
    "a dead learner's late words came after its leave, and it was waited for in a meeting": Case(
        seed=298,
        sync="downpour:push=3,fetch=4,local_lr=0.1",
        script="kill learner 1 at version 10; kill learner 0 at 11 s",
        examples=25,
        batch_size=3,
        epochs=3,
        warmstart=1,
        cluster="equal:latency=0.01,beside=true,learners_per_machine=2,delay=0.3",
        late=True,
    ),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_what_the_hunt_found_stays_fixed(case: Case) -> None:
    assert play(case) is None
