"""The folder of a study: going on, torn lines, other jobs, two writers."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.errors import RunError, UsageError
from syncline.jobs import Job
from syncline.studies.rows import StudyRow
from syncline.studies.store import TABLE, StudyStore, common, differences, digest, read_rows
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
