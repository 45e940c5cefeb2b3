"""The folder of a study: going on, torn lines, other jobs, two writers; its rows as CSV, and what is left to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import RunError, UsageError
from syncline.jobs import Job
from syncline.studies.grid import Point, StudyRow, asked
from syncline.studies.store import (
    TABLE,
    StudyStore,
    common,
    differences,
    digest,
    head,
    left,
    line_of,
    read_rows,
    rows_of,
)
from tests.unit.studies.studies import grid, row, whole

JOB = Job.builtin(["engine=sim"]).table()


def opened(folder: Path, *overrides: str, fresh: bool = False) -> StudyStore:
    return StudyStore(folder, Job.builtin(["engine=sim", *overrides]).table(), fresh=fresh)


def filled(folder: Path, rows: list[StudyRow], *overrides: str) -> None:
    with opened(folder, *overrides) as store:
        for each in rows:
            store.add(each)


def rows_in(folder: Path, *overrides: str, fresh: bool = False) -> list[StudyRow]:
    with opened(folder, *overrides, fresh=fresh) as store:
        return store.rows


def test_rows_are_there_when_it_is_opened_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    filled(folder, whole()[:3])
    assert rows_in(folder) == whole()[:3] == read_rows(folder)
    first, head, *_ = (folder / TABLE).read_text().splitlines()
    assert digest(JOB) in first and head.startswith(
        "sync,n,learners,batch_size,mu_lambda,seed,epochs,seconds"
    )


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_line_is_forgotten_and_never_continued(tmp_path: Path, cut: int) -> None:
    filled(tmp_path, whole()[:3])
    path = tmp_path / TABLE
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_rows(tmp_path) == whole()[:2]
    filled(tmp_path, [whole()[2]])
    assert read_rows(tmp_path) == whole()[:3]


@pytest.mark.parametrize("size", range(0, 60, 7))
def test_a_file_torn_in_its_first_lines_begins_anew(tmp_path: Path, size: int) -> None:
    filled(tmp_path, [])
    path = tmp_path / TABLE
    path.write_bytes(path.read_bytes()[:size])
    assert rows_in(tmp_path) == []
    assert path.read_text().startswith("# syncline tradeoff, job ")


def test_the_last_row_of_a_point_counts(tmp_path: Path) -> None:
    point = whole()[0].point
    with opened(tmp_path) as store:
        store.add(row(point, error="no luck"))
        store.add(whole()[1])
        store.add(row(point, loss=7.0))
        assert read_rows(tmp_path) == store.rows == [whole()[1], row(point, loss=7.0)]
        store.finish(grid().points()[0])
    assert read_rows(tmp_path) == [row(point, loss=7.0), whole()[1]]


def test_another_job_is_refused_with_the_difference(tmp_path: Path) -> None:
    filled(tmp_path, whole()[:1])
    varied = ("learners=9", "sync=async", "batch_size=3", "seed=5", "run_dir=x")
    assert rows_in(tmp_path, *varied) == whole()[:1], "what the grid sets is no other job"
    told = r"epochs: 20 there, 3 here; optimizer.lr: 0.05 there, 0.1 here.*--fresh"
    with pytest.raises(UsageError, match=told):
        opened(tmp_path, "epochs=3", "optimizer.lr=0.1")
    (tmp_path / "job.toml").unlink()
    with pytest.raises(UsageError, match=r"its job\.toml is gone"):
        opened(tmp_path, "epochs=3")
    assert rows_in(tmp_path, "epochs=3", fresh=True) == []
    assert (tmp_path / f"{TABLE}.old").exists(), "once"


def test_the_digest_does_not_see_order_or_the_grid() -> None:
    table = dict(reversed(JOB.items()))
    assert digest(table) == digest(JOB) == digest({**JOB, "learners": 99})
    assert digest({**JOB, "epochs": 99}) != digest(JOB)
    assert "learners" not in common(JOB)
    assert differences({"a": {"b": 1}}, {"a": {"b": 1}, "c": 2}) == ["c: none there, 2 here"]


def test_two_writers_and_folders_that_cannot_be(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(UsageError, match="another study is writing"):
        opened(tmp_path)
    assert rows_in(tmp_path) == [], "the other has ended"
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="give another --out"):
        opened(tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / TABLE).write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="no table of a study"):
        opened(tmp_path / "other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "job.toml").write_text("learners = 3")
    with pytest.raises(UsageError, match="that is not of a study"):
        opened(tmp_path / "mine")
    assert (tmp_path / "mine" / "job.toml").read_text() == "learners = 3"
    assert [len(list((tmp_path / name).iterdir())) for name in ("other", "mine")] == [1, 1], "no lock stays"
    with pytest.raises(UsageError, match="is no study"):
        read_rows(tmp_path / "nowhere")


def test_the_order_is_the_grid_s_whoever_ended_first(tmp_path: Path) -> None:
    other = row(Point(sync="ssp:1", learners=2, batch_size=2))
    with opened(tmp_path) as store:
        for each in [other, *whole()[::-1]]:
            store.add(each)
        store.finish(grid().points()[0])
    assert read_rows(tmp_path) == [*whole(), other]


# -- rows as CSV, and what is left to do ---------------------------------------------------------------------

words = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=30).map(
    lambda text: " ".join(text.split())
)
points = st.builds(
    Point,
    sync=st.sampled_from(["hardsync", "downpour:push=2,fetch=3,local_lr=0.1", "async:rate=given"]),
    learners=st.integers(1, 1000),
    batch_size=st.integers(1, 1000),
    seed=st.integers(0, 9),
)
known: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "seconds": st.floats(0, allow_infinity=False),
        "loss": st.floats(allow_nan=False),
        "updates": st.integers(0, 2**40),
        "test_error": st.none(),
        "error": words,
    },
)


@given(st.lists(st.builds(lambda point, more: asked(point, **more), points, known), max_size=6))
def test_what_is_written_reads_back_equal(rows: list[StudyRow]) -> None:
    text = head() + "".join(map(line_of, rows))
    assert text.count("\n") == len(rows) + 1, "one line each"
    last = {each.point: each for each in rows}
    assert {each.point: each for each in rows_of(text.splitlines())} == last


def test_numbers_that_are_not_finite_and_errors_of_many_lines() -> None:
    strange = row(Point(sync="async", learners=2, batch_size=4), loss=math.nan, error="a\n b,\t'c' \"d\"")
    (read,) = rows_of([head(), line_of(strange)])
    assert read.loss is not None and math.isnan(read.loss)
    assert read.error == "a b, 'c' \"d\"" and read.failed


def test_what_is_no_row_is_left_out() -> None:
    good = whole()[0]
    lines = [head(), "garbage\n", ",,,\n", line_of(good), "hardsync,x,1\n", '"open quote']  # fmt: skip
    assert rows_of(lines) == [good]
    assert rows_of([]) == []


def test_left_is_what_has_no_row_or_failed() -> None:
    wanted, _ = grid().points()
    rows = [row(point) for point in wanted[:5]] + [asked(wanted[5], error="no luck")]
    assert left(wanted, rows) == wanted[5:]
    assert left(wanted, whole()) == []
