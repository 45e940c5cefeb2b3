"""A batch method's record: when a checkpoint is cut and when it is whole, what the end is called, and what memory is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, seed, settings
from torch import nn
from torch.utils.data import TensorDataset

from syncline.batch import messages as b
from syncline.batch.commands import End, Iteration, Record
from syncline.batch.methods import GradientDescent
from syncline.batch.portions import Batch, Samples, Statistics
from syncline.engines import batch_method_record
from syncline.engines.batch_method_record import (
    BatchRecord,
    check_memory,
    check_restored,
    coordinator_of,
    read_batch,
    readable,
    state_of,
    write_first,
)
from syncline.engines.checkpoint_writer import write_part
from syncline.engines.run import RunSpec, Storage
from syncline.errors import RunError, SynclineWarning, UsageError
from syncline.learn.portion_worker import BatchPlan, batch_layout
from syncline.messages import Saved
from syncline.roles.run_plan import Saving
from syncline.table.checkpoints import Checkpoint, CheckpointError, Folder, find
from tests.unit.engines.recorded_runs import NotedRun, spec_of
from tests.unit.made_up import check_read_or_refused, spoiled

METHOD = GradientDescent(lr=0.1)


class Coordinator:
    """Has counted so much since the run began, or went on."""

    iteration, examples = 4, 40

    def statistics(self) -> Statistics:
        return Statistics(taken=8, discarded=3)


def plan_of(shards: int = 2, size: int = 10) -> BatchPlan:
    model = nn.Linear(3, 2)
    return BatchPlan(
        model=model,
        data=TensorDataset(torch.zeros(size, 3)),
        objective=cast(Any, None),
        collate=None,
        samples=Samples(size, 5),
        seed=0,
        layout=batch_layout(model, shards),
        method=METHOD,
        deterministic=True,
        fixed={},
    )


def spec(folder: Path | None = None, saving: Saving = Saving(), **changes: Any) -> RunSpec:  # noqa: B008 - frozen
    found = spec_of(batch=plan_of(), storage=Storage(str(folder) if folder else None, keep=1), **changes)
    return replace(found, plan=replace(found.plan, saving=saving))


class Noted(NotedRun):
    """With a batch method's record, whose clock is the recorder's."""

    def __init__(self, given: RunSpec) -> None:
        super().__init__(given)
        self.record = BatchRecord(self.spec, self.recorder, cast(Any, Coordinator()), lambda: self.clock)

    def reach(self, number: int) -> None:
        standing = {"method": METHOD.name, "iteration": number}
        self.record.iteration(reached(number, standing), None)


def reached(number: int, state: dict[str, Any] | None = None, **changes: Any) -> b.Reached:
    record = Record(
        **{"iteration": number, "loss": 0.5, "step": 0.1, "gradient_norm": 2.0, "evaluations": 7, **changes}
    )
    return b.Reached(Iteration(state or {}, record), Batch(10, 2, None))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(tmp_path / "checkpoints")
    found.prepare()
    return found


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "saving, iteration, seconds, due, due_last",
    [
        (Saving(every=3), 2, 0.0, False, True),
        (Saving(every=3), 3, 0.0, True, True),
        (Saving(seconds=5.0), 3, 4.9, False, True),
        (Saving(seconds=5.0), 3, 5.0, True, True),
        (Saving(), 3, 99.0, False, True),
        (Saving(every=1), 0, 0.0, True, False),
    ],
)
def test_when_a_checkpoint_is_due(
    saving: Saving, iteration: int, seconds: float, due: bool, due_last: bool, folder: Folder
) -> None:
    run = Noted(spec(folder.root, saving))
    assert not run.record.due() and not run.record.due(last=True), "nothing is reached"
    run.reach(iteration)
    run.clock = seconds
    assert (run.record.due(), run.record.due(last=True)) == (due, due_last)
    without = Noted(spec(None, saving))
    without.reach(iteration)
    assert not without.record.due() and not without.record.due(last=True)


def test_seconds_count_from_the_last_cut_and_no_iteration_is_cut_twice(folder: Folder) -> None:
    run = Noted(spec(folder.root, Saving(seconds=5.0)))
    run.clock = 6.0
    run.reach(3)
    assert run.record.cut() == b.Save(3) and run.record.cutting
    run.clock = 12.0
    assert not run.record.due() and not run.record.due(last=True), "one is being written"
    for shard in range(2):
        run.record.saved(write(folder, 3, shard))
    assert run.record.due() and not run.record.due(last=True)


def write(folder: Folder, number: int, shard: int) -> Saved:
    return write_part(folder, (number, f"table0-shard{shard}.safetensors", {"x": torch.ones(1)}, {}))


def test_a_checkpoint_is_there_when_all_shards_have_written(folder: Folder) -> None:
    run = Noted(spec(folder.root))
    run.reach(4)
    run.record.cut()
    assert run.record.saved(write(folder, 4, 1)) is None
    assert run.record.saved(Saved(3, "s", None, "of an earlier one")) is None and run.record.cutting
    done = run.record.saved(write(folder, 4, 0))
    assert done is not None and Path(done.path) == folder.root / "000000004" and not run.record.cutting
    assert run.record.saved(write(folder, 4, 0)) is None
    found = read_batch(find(folder.root))
    assert (found.version, found.batch and found.batch.state["iteration"], found.counts.examples) == (
        4,
        4,
        {0: 40},
    )
    assert [record.version for record in found.history] == [4]
    account = found.tables[0].account
    assert (account.gradients, account.dropped, account.histogram) == (8, 3, {0: 8})


def test_a_shard_that_says_it_twice_is_counted_once(folder: Folder) -> None:
    run = Noted(spec(folder.root))
    run.reach(4)
    run.record.cut()
    for _ in range(2):
        assert run.record.saved(write(folder, 4, 1)) is None


def test_one_shard_s_problem_is_the_checkpoint_s(folder: Folder) -> None:
    run = Noted(spec(folder.root))
    run.reach(4)
    run.record.cut()
    run.record.saved(Saved(4, "s1", None, "the disk is full"))
    with pytest.warns(
        SynclineWarning, match="checkpoint of version 4 failed: the disk is full; there is none"
    ):
        done = run.record.saved(write(folder, 4, 0))
    assert done is not None and done.problem and list(folder.root.iterdir()) == []


def test_who_goes_back_has_nothing_under_way_and_counts_from_there(folder: Folder) -> None:
    run = Noted(spec(folder.root, Saving(every=1)))
    run.reach(4)
    run.record.cut()
    run.record.go_back(None)
    assert run.record.saved(write(folder, 4, 0)) is None and not run.record.cutting
    assert run.recorder.outcome.history == [] and not run.record.due()
    run.reach(4)
    assert run.record.due(last=True), "it is another fourth one"


def test_a_run_that_goes_on_counts_on(folder: Folder) -> None:
    run = Noted(spec(folder.root))
    run.reach(4)
    run.record.cut()
    for shard in range(2):
        run.record.saved(write(folder, 4, shard))
    found = read_batch(find(folder.root))
    again = Noted(spec(folder.root, restored=found))
    table = again.record.statistics(9, {0: 2}, {}).tables[0]
    assert (table.gradients, table.dropped, table.examples) == (16, 6, 80)
    assert table.staleness.histogram == {0: 16} and table.staleness.max == 0
    assert (
        coordinator_of(replace(again.spec, batch=replace(plan_of(), method=cast(Any, Resumes())))).iteration
        == 4
    )


class Resumes:
    """A method that notes what it goes on from."""

    vectors = ("x", "g")

    def __call__(self, state: Any) -> Any:
        assert state["iteration"] == 4
        return iter(())


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "of a dial": (
        lambda m: m.pop("batch"),
        UsageError,
        "was not written by a batch method but under sandblaster",
    ),
    "without a seed": (lambda m: m.pop("seed"), CheckpointError, "missing required field `seed`"),
    "without sums": (lambda m: m["batch"].pop("sums"), CheckpointError, "missing required field `sums`"),
}


@pytest.mark.parametrize("spoil, error, words", BAD.values(), ids=BAD.keys())
def test_what_is_no_whole_checkpoint_of_a_batch_method_is_refused(
    spoil: Callable[[dict[str, Any]], Any], error: type[Exception], words: str, folder: Folder
) -> None:
    run = Noted(spec(folder.root))
    run.reach(4)
    run.record.cut()
    for shard in range(2):
        run.record.saved(write(folder, 4, shard))
    manifest = find(folder.root).manifest
    assert read_batch(Checkpoint(folder.root, 4, manifest)).version == 4
    with pytest.raises(UsageError, match="made with 10 examples, this run has 12"):
        check_restored(plan_of(size=12), read_batch(Checkpoint(folder.root, 4, whole_state(manifest))))
    spoil(manifest)
    with pytest.raises(error, match=words):
        read_batch(Checkpoint(folder.root, 4, manifest))


def manifest_of(root: Path) -> dict[str, Any]:
    """Write the checkpoint of a fourth iteration, and return what its manifest says."""
    folder = Folder(root)
    folder.prepare()
    run = Noted(spec(folder.root))
    run.reach(4)
    run.record.cut()
    for shard in range(2):
        run.record.saved(write(folder, 4, shard))
    return whole_state(find(folder.root).manifest)


def test_a_manifest_of_any_content_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """The checksum is right."""
    manifest = manifest_of(tmp_path)

    @settings(max_examples=500)
    @seed(12)
    @given(spoiled(manifest))
    def check(content: dict[str, Any]) -> None:
        checkpoint = Checkpoint(Path("/run/4"), 4, content)
        check_read_or_refused(lambda: check_restored(plan_of(), read_batch(checkpoint)), "/run/4")

    check()


def whole_state(manifest: dict[str, Any]) -> dict[str, Any]:
    """With a state that the method itself can go on from."""
    steps = METHOD(None)
    steps.send(None)
    numbers = {"g.g": 1.0, "largest": 1.0, "loss": 1.0}
    while not isinstance(found := steps.send(numbers), Iteration):
        pass
    return {**manifest, "batch": {**manifest["batch"], "state": found.state}}


# -- iterations and the end ----------------------------------------------------------------------------------


def test_an_iteration_is_an_epoch_with_what_the_method_says_of_it() -> None:
    run = Noted(spec())
    run.record.iteration(reached(1, restarted=True), None)
    (record,) = run.recorder.outcome.history
    assert (record.epoch, record.version, record.examples) == (0, 1, 10)
    assert record.notes == {"step": 0.1, "evaluations": 7.0, "gradient": 2.0, "restarted": 1.0}
    run.record.iteration(reached(2), {"weight": torch.ones(1)})
    assert [epoch for epoch, _ in run.evaluations] == [1] and len(run.recorder.outcome.history) == 1


@pytest.mark.parametrize(
    "why, iterations, kind, warned",
    [
        ("gradient", 3, "converged", False),
        ("decrease", 3, "converged", False),
        ("line search", 3, "ended", False),
        ("line search", 0, "ended", True),
        ("not finite", 3, "ended", True),
        ("its own word", 3, "ended", False),
    ],
)
def test_how_an_end_is_told(
    why: str, iterations: int, kind: str, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    run = Noted(spec())
    run.record.ended(b.Over(None))
    assert run.recorder.outcome.events == [], "it was told to"
    run.record.ended(b.Over(End(why, "said so", iterations, 9, 0.5)))
    assert [(event.kind, event.what) for event in run.recorder.outcome.events] == [(kind, "said so")]
    assert [str(each.message) for each in recwarn] == [
        "the method has ended: said so; the best weights are kept"
    ] * warned


def test_what_is_not_finite_where_it_begins_is_an_error() -> None:
    with pytest.raises(RunError, match="not finite where the run begins: nan; look at the data"):
        Noted(spec()).record.ended(b.Over(End("not finite", "nan", 0, 1, 0.5)))


# -- memory and weights --------------------------------------------------------------------------------------


def test_memory_that_is_not_there_is_refused_with_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "meminfo"
    monkeypatch.setattr(batch_method_record, "MEMINFO", file)
    plan = plan_of()
    check_memory(plan, 2)  # where the system does not say, nobody is refused
    vectors, sums = 4, 2 * 2 + 4 * 2 + 2  # of the method; two of each learner, the window, two more
    needed = plan.layout.parameters.nbytes * (vectors + sums + 2)
    assert needed % 1024 == 0, "the file counts in 1024 bytes"
    file.write_text(f"MemTotal: 9 kB\nMemAvailable:   {needed // 1024} kB\n")
    check_memory(plan, 2)
    file.write_text(f"MemAvailable:   {needed // 1024 - 1} kB\n")
    with pytest.raises(
        UsageError, match=rf"GradientDescent needs 4 vectors of .* {sums} sums .*: {needed / 1000:.1f} kB"
    ):
        check_memory(plan, 2)


@pytest.mark.parametrize(
    "number, words",
    [(999, "999 bytes"), (1000, "1.0 kB"), (2_540_000, "2.5 MB"), (10**9, "1.0 GB"), (10**12, "1000.0 GB")],
)
def test_bytes_in_words(number: int, words: str) -> None:
    assert readable(number) == words


def test_weights_go_to_the_method_and_come_back_by_name() -> None:
    plan = plan_of()
    x = plan.layout.parameters.segments(torch.zeros(plan.layout.parameters.nbytes, dtype=torch.uint8))
    write_first(plan, x)
    state, model = state_of(plan, x), cast(nn.Linear, plan.model)
    assert list(state) == ["weight", "bias"]
    assert torch.equal(state["weight"], model.weight) and torch.equal(state["bias"], model.bias)
    for segment in x:
        segment.zero_()
    assert torch.equal(state["weight"], model.weight), "a copy"
