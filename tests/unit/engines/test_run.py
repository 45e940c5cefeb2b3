"""What an engine is given and gives back: devices dealt out, records that answer by name."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.dial import Course
from syncline.engines.run import EpochRecord, Outcome, RunSpec, Task
from syncline.messages import Statistics, TableStatistics
from syncline.protocols.staleness import Staleness
from syncline.roles.run_plan import RunPlan


def spec(learners: int = 3, **changes: Any) -> RunSpec:
    plan = RunPlan(course=Course.of("softsync:1"), learners=learners)
    return RunSpec(task=Task(print), plan=plan, **changes)


@pytest.mark.parametrize(
    "devices, group, dealt",
    [
        (("cpu",), 1, ["cpu", "cpu", "cpu"]),
        (("cuda:0", "cuda:1"), 1, ["cuda:0", "cuda:1", "cuda:0"]),
        (("cuda:0", "cuda:1", "cuda:2"), 2, ["cuda:0 cuda:1", "cuda:2 cuda:0", "cuda:1 cuda:2"]),
    ],
)
def test_devices_are_dealt_out_seat_by_seat(devices: tuple[str, ...], group: int, dealt: list[str]) -> None:
    given = spec(devices=devices, group=group)
    seats = [given.seat(rank) for rank in range(3)]
    assert [" ".join(seat.devices) for seat in seats] == dealt
    assert [seat.device for seat in seats] == [each.split()[0] for each in dealt]
    assert [(seat.rank, seat.seats) for seat in seats] == [(rank, group) for rank in range(3)]
    assert given.processes == 3 * group


def test_the_dial_in_words() -> None:
    batch: Any = object()
    assert spec().sync == "softsync:1" and spec(batch=batch).sync == "sandblaster"


def test_an_epoch_answers_by_name_and_its_metrics_come_first() -> None:
    record = EpochRecord(epoch=1, version=7, seconds=2.0, examples=10, loss=0.5, losses={})
    record.notes.update(step=0.25, accuracy=0.0)
    record.metrics.update(loss=0.4, accuracy=0.9)
    assert (record["version"], record["accuracy"], record["step"]) == (7, 0.9, 0.25)
    assert record["loss"] == 0.4 and record.loss == 0.5, "of the test, and of training"
    with pytest.raises(AttributeError):
        record["recall"]


def test_staleness_is_the_first_table_s() -> None:
    one, two = (Staleness(gradients=n, mean=1.0, max=n, histogram={1: n}) for n in (4, 9))
    tables = {1: TableStatistics(1, 9, 0, 0, two, {}, [], 0), 0: TableStatistics(1, 4, 0, 0, one, {}, [], 0)}
    assert Outcome(statistics=Statistics(0, tables)).staleness == one
    assert Outcome().staleness.gradients == 0
