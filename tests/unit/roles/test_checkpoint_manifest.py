"""What a checkpoint says of a run comes back as it was; what does not fit the run is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline import messages as m
from syncline.dial import Sync
from syncline.errors import LayoutError, UsageError
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.sequence import Account
from syncline.roles.checkpoint_manifest import (
    FLIGHTS,
    LEARNERS,
    EpochRecord,
    LoaderState,
    MeanInFlight,
    PipelineState,
    Restored,
    TableState,
    flight_tensors,
    learner_tensors,
    manifest,
    pipelines_json,
    restored,
)
from syncline.table.checkpoint_content import Source
from syncline.table.checkpoints import Checkpoint, CheckpointError
from tests.unit.made_up import check_read_or_refused, spoiled
from tests.unit.roles.doubles import layout

STANDING = Standing(
    done=1,
    newest=2,
    fresh={1: {0: (4, 8), 1: (10, 12)}, 2: {}},
    returned=[(1, 2, 4)],
    skipped={1: 3, 2: 0},
    broken=[1],
)
ACCOUNT = Account(version=12, gradients=24, dropped=1, histogram={0: 20, 3: 4})
COUNTS = m.Counts(examples={0: 96}, losses={1: {0: [2.5, 8.0]}}, steps={0: 12, 1: 11})
ADAM = "torch.optim.adam.Adam"


class Disk(Checkpoint):
    """Its files are at hand; the manifest has been through JSON."""

    def __init__(self, content: dict[str, Any], files: dict[str, dict[str, Tensor]]) -> None:
        super().__init__(Path("/run/12"), 12, json.loads(json.dumps(content)), 99)
        self.__dict__["files"] = files

    def tensors(self, name: str) -> dict[str, Tensor]:
        return self.__dict__["files"][name]


def done_at(version: int) -> EpochRecord:
    return EpochRecord(
        epoch=version // 5,
        version=version,
        seconds=1.5,
        examples=8 * version,
        loss=0.5,
        losses={0: 0.25, 1: 0.75},
    )


def written(**options: Any) -> dict[str, Any]:
    opened = m.OpenLoader(0, 40, 4, "partition", None)
    return manifest(
        m.Cut(12, [], {0: ACCOUNT}, {0: STANDING}, COUNTS),
        seed=3,
        sync="hardsync",
        chosen=[(Sync.parse("delayed:2"), 1)],
        learners=2,
        tables={0: (layout(2), ADAM)},
        loaders={0: (opened, 2)},
        history=[asdict(done_at(version)) for version in (5, 12, 13)],
        **options,
    )


def read(content: dict[str, Any] | None = None, **files: dict[str, Tensor]) -> Restored:
    return restored(Disk(written() if content is None else content, {LEARNERS: {}, **files}))


def test_a_run_goes_on_from_what_was_written_of_it() -> None:
    found = read()
    assert (found.name, found.seed, found.seal, found.sync) == ("/run/12", 3, 99, "hardsync")
    assert found.chosen == [(Sync.parse("delayed:2"), 1)] and found.counts == COUNTS
    assert found.tables == {
        0: TableState(layout=layout(2), optimizer=ADAM, account=ACCOUNT, source=Source("/run/12", 0, 2))
    }
    assert found.loaders == {0: LoaderState(size=40, policy="partition", parts=2, standing=STANDING)}
    assert found.history == [done_at(5), done_at(12)]  # none of what came after it
    assert (found.version, found.epoch) == (12, 1)
    assert [found.has_done(epoch) for epoch in (0, 1, 2, 3)] == [True, False, False, False]


def test_losses_that_are_of_no_epoch_are_of_another_version() -> None:
    content = written()
    content["counts"]["losses"] = {0: [2.5, 8.0]}
    with pytest.raises(
        CheckpointError, match=r"Expected `object`, got `array` - at `\$.losses|array.*losses"
    ):
        read(content)


def test_a_run_without_loaders_has_done_no_epoch() -> None:
    start = Restored(name="the start", seed=0)
    assert (start.version, start.epoch, start.has_done(0)) == (0, 0, False)


def test_every_rank_gets_back_its_random_states_and_buffers_in_their_order() -> None:
    buffers = {(0, 1): [torch.tensor([float(index)]) for index in range(12)], (2, 1): [torch.tensor([7])]}
    found = read(**{LEARNERS: dict(reversed(learner_tensors({0: b"ab", 5: b"c"}, buffers).items()))})
    assert {rank: (each.steps, each.random) for rank, each in found.learners.items()} == {
        0: (12, b"ab"),
        1: (11, b""),
        5: (0, b"c"),
    }
    assert found.learners[1].buffers == {table: values for (table, _), values in buffers.items()}
    assert found.learners[0].buffers == {}


def test_gradients_on_their_way_come_back_with_the_losses_of_all_ranks() -> None:
    flight = MeanInFlight(
        iteration=4,
        stamp=3,
        epochs=[1],
        options=[{"lr": 0.5}],
        header=[8.0],
        factor=0.25,
        gradients={0: torch.ones(2)},
    )
    state = PipelineState(started=6, void=1, depth=2, groups=[{"k": 1}], flights=[flight])
    losses = {0: {7: [(2.0, 4)]}, 1: {7: [(3.0, 5)]}}
    content = written() | {"pipelines": pipelines_json({7: state.without_tensors()}, losses)}
    found = read(content, **{FLIGHTS: flight_tensors({7: state})}).pipelines
    (back,) = found[7].flights
    assert back.losses == {0: (2.0, 4), 1: (3.0, 5)} and torch.equal(back.gradients[0], torch.ones(2))
    assert (back.iteration, back.stamp, back.epochs, back.factor) == (4, 3, [1], 0.25)
    assert (found[7].started, found[7].void, found[7].depth, found[7].groups) == (6, 1, 2, [{"k": 1}])


def in_flight() -> dict[str, Any]:
    """Build the manifest of an all-reduce run with a gradient that is not applied yet."""
    flight = MeanInFlight(iteration=4, stamp=3, epochs=[1], options=[{"lr": 0.5}], header=[8.0], factor=0.25)
    state = PipelineState(started=6, groups=[{}], flights=[flight])
    return written() | {"pipelines": pipelines_json({0: state}, {0: {0: [(2.0, 4)]}})}


@settings(max_examples=1000)
@seed(12)
@given(st.one_of(spoiled(json.loads(json.dumps(written()))), spoiled(json.loads(json.dumps(in_flight())))))
def test_a_manifest_of_any_content_is_read_or_refused_in_one_line(content: dict[str, Any]) -> None:
    """The checksum is right."""
    check_read_or_refused(lambda: read(content, **{FLIGHTS: {"0/4/0": torch.ones(2)}}), "/run/12")


@pytest.mark.parametrize("name", ["random/x", "random/", "buffer/0/1", "buffer/0/1/-1", "x"])
def test_tensors_of_learners_with_odd_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"/run/12 cannot be used, .* a tensor '{name}'"):
        read(**{LEARNERS: {name: torch.zeros(1, dtype=torch.uint8)}})


@pytest.mark.parametrize("key", ["seed", "tables", "counts", "sync"])
def test_a_manifest_that_lacks_something_is_of_another_version(key: str) -> None:
    content = written()
    del content[key]
    with pytest.raises(CheckpointError, match=f"/run/12 cannot be used, .* missing required field `{key}`"):
        read(content)


def test_a_batch_methods_checkpoint_is_refused_with_the_way_to_resume_it() -> None:
    with pytest.raises(UsageError, match=r"is a batch method's: resume it with sync='sandblaster'"):
        read({"batch": {"method": "LBFGS"}})


def test_a_run_that_does_not_fit_is_refused() -> None:
    found = read()
    found.check_layout(0, layout(1))  # cut for fewer shards
    found.check_optimizer(0, ADAM)
    found.check_loader(0, 40, "partition")
    (
        found.check_layout(1, layout(1, buffers=1)),
        found.check_optimizer(1, "x"),
        found.check_loader(1, 1, "ledger"),
    )
    with pytest.raises(LayoutError, match="table 0 there and here, buffers: 0 against 1"):
        found.check_layout(0, layout(2, buffers=1))
    with pytest.raises(UsageError, match=r"holds the state of torch.optim.adam.Adam, this run has SGD"):
        found.check_optimizer(0, "SGD")
    for size, policy in ((41, "partition"), (40, "ledger")):
        with pytest.raises(
            UsageError, match=rf"40 examples in loader 0 \(partition\), this run has {size} \({policy}\)"
        ):
            found.check_loader(0, size, policy)
