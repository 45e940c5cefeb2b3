"""A batch method's processes, one message after another: what a shard does to its vectors, which portions a learner computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from syncline import messages as m
from syncline.batch import commands as c
from syncline.batch import messages as b
from syncline.batch.portions import Batch, Cancel
from syncline.engines.local import batch_processes as processes
from syncline.engines.local.batch_processes import (
    BatchLearnerSpec,
    BatchShardSpec,
    run_batch_learner,
    run_batch_shard,
)
from syncline.engines.local.control_channel import NOTHING
from syncline.engines.local.shared_memory import Region, whole_pages
from syncline.engines.run import Task
from syncline.table.checkpoints import FIRST
from syncline.table.layout import Layout
from tests.unit.engines.local.doubles import Post, layout_of

LAYOUT = layout_of(5, 3000, shards=2)


def pool(slots: int, first: float) -> Region:
    """Of so many slots, filled with numbers from the first on."""
    size = whole_pages(LAYOUT.parameters.nbytes)
    region = Region(slots * size)
    assert region.nbytes == slots * size
    for slot in range(slots):
        for segment in LAYOUT.parameters.segments(region.tensor()[slot * size :]):
            segment.fill_(first + slot)
    return region


def values(segments: Sequence[Tensor]) -> list[float]:
    return sorted({value for segment in segments for value in segment.tolist()})


# -- a shard ---------------------------------------------------------------------------------------------------


def shard(
    *letters: Any, layout: Layout = LAYOUT, folder: str | None = None
) -> tuple[list[Any], BatchShardSpec]:
    """The second of two, until its channel closes: what it has said."""
    point, post = Region(layout.parameters.nbytes), Post(*letters)
    spec = BatchShardSpec(1, layout, ("x", "g"), point, [pool(2, 10.0)], Region(8), folder)
    run_batch_shard(post, spec)  # type: ignore[arg-type]
    assert spec.beat.words[0] == len(letters), "each message is a sign of life"
    return post.said, spec


def test_a_shard_adds_sums_to_its_own_part_in_the_order_that_it_is_told() -> None:
    copied = c.Copy("x", "g")
    said, spec = shard(b.Add(1, "g", True), b.Add(0, "g", False), b.Run(7, (copied,)))
    assert said == [b.Ready(), b.Added(1, 1), b.Added(1, 0), b.Ran(1, 7, ())]
    x = LAYOUT.parameters.segments(spec.point.tensor())
    assert values(LAYOUT.parts[1].segments(x)) == [21.0]
    assert values(LAYOUT.parts[0].segments(x)) == [0.0], "the other shard's part"


def test_slots_that_come_later_have_the_next_numbers() -> None:
    said, spec = shard(pool(3, 50.0), b.Add(4, "g", True), b.Run(1, (c.Copy("x", "g"),)))
    assert said[1] == b.Added(1, 4)
    assert values(LAYOUT.parts[1].segments(LAYOUT.parameters.segments(spec.point.tensor()))) == [52.0]


def test_what_a_shard_measures_is_of_its_part() -> None:
    said, _ = shard(b.Add(0, "g", True), b.Run(3, (c.Dot("square", "g", "g"),)))
    numel = sum(
        segment.numel() for segment in LAYOUT.parts[1].segments(LAYOUT.parameters.new(torch.device("cpu")))
    )
    assert said[-1].measured == (100.0 * numel,)


def test_a_shard_writes_its_vectors_at_once(tmp_path: Path) -> None:
    (tmp_path / f".{FIRST}").mkdir()
    said, _ = shard(b.Save(3), folder=str(tmp_path))
    assert isinstance(said[-1], m.Saved) and said[-1].number == 3 and said[-1].written is not None, said[-1]
    assert list(tmp_path.rglob("*.safetensors"))


def test_what_goes_wrong_in_a_shard_is_said_with_where() -> None:
    post: Any = Post(b.Add(99, "g", True))
    spec = BatchShardSpec(1, LAYOUT, ("x", "g"), Region(LAYOUT.parameters.nbytes), [pool(1, 0.0)], Region(8))
    with pytest.raises(SystemExit):
        run_batch_shard(post, spec)
    assert post.said[-1].shard == 1 and "IndexError" in post.said[-1].traceback


# -- a learner -------------------------------------------------------------------------------------------------

BATCH = Batch(100, 10, None)


class Worker:
    """In place of the model: notes what it is asked, and gives portion numbers as losses."""

    notes: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, plan: Any, device: Any) -> None:
        self.notes = Worker.notes = []

    def move(self, x: Sequence[Tensor]) -> None:
        self.notes.append(("move",))

    def begin(self, total: Sequence[Tensor]) -> None:
        self.notes.append(("begin", values(total)[0]))

    def add(self, batch: Batch, portion: int, then: Any) -> tuple[float, int]:
        self.notes.append(("add", portion, then and then[1]))
        return float(portion), 10

    def end(self, total: Sequence[Tensor]) -> None:
        self.notes.append(("end",))


def give(evaluation: int, task: int, portions: range, slot: int = 0) -> b.Give:
    return b.Give(0, evaluation, task, portions.start, portions.stop, BATCH, slot)


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PortionWorker", Worker)


def learner(*letters: Any) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Until it waits for something to do: what it has said, and computed."""

    class Plan:
        seed, layout = 0, LAYOUT

    post: Any = Post(Task(print, (Plan(),)), *letters)
    spec = BatchLearnerSpec("cpu", Region(LAYOUT.parameters.nbytes), [pool(2, 10.0)], Region(8))
    assert run_batch_learner(post, spec) == 0
    assert spec.beat.words[0] == len([note for note in Worker.notes if note[0] == "add"])
    return post.said, Worker.notes


def test_a_learner_computes_its_tasks_in_turn_and_reads_ahead_over_their_border() -> None:
    said, notes = learner(give(1, 5, range(2, 4), slot=1), give(1, 6, range(7, 8)))
    assert said == [b.Ready(), b.Answered(1, 5, 5.0, 20), b.Answered(1, 6, 7.0, 10)]
    first = [("move",), ("begin", 11.0), ("add", 2, 3), ("add", 3, 7), ("end",)]
    assert notes == [*first, ("begin", 10.0), ("add", 7, None), ("end",)]


def test_the_point_is_read_once_for_each_evaluation() -> None:
    _, notes = learner(give(1, 5, range(1)), give(1, 6, range(1)), give(2, 7, range(1)))
    assert [note[0] for note in notes if note[0] in ("move", "begin")] == [
        "move",
        "begin",
        "begin",
        "move",
        "begin",
    ]


def test_a_task_that_is_cancelled_in_its_middle_is_dropped_and_the_next_begins_at_its_own_start() -> None:
    task = give(1, 5, range(3))
    said, notes = learner(task, give(1, 6, range(8, 9)), NOTHING, Cancel(0, 1, 5))
    assert said == [b.Ready(), b.Dropped(1, 5), b.Answered(1, 6, 8.0, 10)]
    assert [note for note in notes if note[0] == "add"] == [("add", 0, 1), ("add", 8, None)]


def test_a_task_behind_the_one_that_is_computed_is_dropped_and_the_other_goes_on() -> None:
    said, notes = learner(give(1, 5, range(2)), give(1, 6, range(8, 9)), NOTHING, Cancel(0, 1, 6))
    assert said == [b.Ready(), b.Dropped(1, 6), b.Answered(1, 5, 1.0, 20)]
    assert [note[1] for note in notes if note[0] == "add"] == [0, 1]


def test_a_cancel_that_comes_after_the_answer_is_not_answered_again() -> None:
    assert learner(give(1, 5, range(1)), NOTHING, Cancel(0, 1, 5))[0] == [
        b.Ready(),
        b.Answered(1, 5, 0.0, 10),
    ]


def test_sums_go_into_slots_that_came_later() -> None:
    assert ("begin", 41.0) in learner(pool(2, 40.0), give(1, 5, range(1), slot=3))[1]


def test_what_a_learner_raises_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "add", lambda *given: 1 / 0)
    post: Any = Post(Task(print, (type("Plan", (), {"seed": 0, "layout": LAYOUT}),)), give(1, 5, range(1)))
    spec = BatchLearnerSpec("cpu", Region(LAYOUT.parameters.nbytes), [pool(1, 0.0)], Region(8))
    assert run_batch_learner(post, spec) == 1
    assert isinstance(post.said[-1].error, ZeroDivisionError)
