"""The folder of a study: job.toml, tradeoff.csv with a row for each run as it ends, pictures.

One process writes at a time. A line that was torn is cut off, so that what is there is whole; a folder of another job is
refused with the difference. Not responsible for what rows mean (grid.py).
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from syncline.errors import RunError, UsageError
from syncline.jobs.job import read_table, read_text
from syncline.jobs.keys import JobError
from syncline.jobs.toml import dumps
from syncline.report.event_lines import append_whole, write_whole
from syncline.studies.grid import Point, StudyRow

TABLE, JOB, LOG, LOCK = "tradeoff.csv", "job.toml", "log.txt", ".lock"
MARK = "# syncline tradeoff, job "
VARIED = ("sync", "learners", "batch_size", "seed")  # keys that the grid sets
ELSEWHERE = (
    "run_dir",
    "resume",
    "if_exists",
    "checkpoint_every",
    "keep_checkpoints",
    "clocks",
)  # runs leave rows only


def common(table: Mapping[str, Any]) -> dict[str, Any]:
    """What all runs of a study share: the job without what the grid sets."""
    return {key: value for key, value in table.items() if key not in (*VARIED, *ELSEWHERE)}


def digest(table: Mapping[str, Any]) -> str:
    """Of the job, whatever the order of its keys."""
    return hashlib.sha256(dumps(_sorted(common(table))).encode()).hexdigest()[:16]


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def differences(before: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> list[str]:
    """`epochs: 5 there, 2 here`, key by key."""
    found: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        old, new, path = before.get(key), now.get(key), f"{above}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{path}.")
        elif old != new:
            there, here = ("none" if value is None else repr(value) for value in (old, new))
            found.append(f"{path}: {there} there, {here} here")
    return found


class StudyStore:
    """A study's folder, open for writing; use it in a `with`."""

    def __init__(self, folder: Path, table: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.folder = folder
        self.job = common(table)
        with ExitStack() as opened:
            try:
                if not fresh:
                    self._refuse_other_jobs()  # before anything is left there
                folder.mkdir(parents=True, exist_ok=True)
                opened.enter_context(self._locked())
                for name in (JOB, TABLE) if fresh else ():  # what was there is kept once, under another name
                    with suppress(FileNotFoundError):  # a job without a table would be somebody else's
                        os.replace(folder / name, folder / f"{name}.old")
                self._refuse_other_jobs()
                self.rows = read_rows(folder) if (folder / TABLE).exists() else []
                self._write(self.rows)  # now the file ends with a whole line
                write_whole(folder / JOB, dumps(self.job))
            except OSError as error:
                raise RunError(
                    f"cannot use {folder} for a study: {error.strerror}; give another --out"
                ) from error
            self._opened = opened.pop_all()

    def _locked(self) -> IO[bytes]:
        file = (self.folder / LOCK).open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UsageError(
                f"another study is writing to {self.folder}; wait for it, or give another --out"
            ) from None
        return file

    def _refuse_other_jobs(self) -> None:
        path = self.folder / TABLE
        if not path.exists():
            if (self.folder / JOB).exists():
                raise UsageError(f"{self.folder} has a {JOB} that is not of a study; give another --out")
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
        if not first.endswith("\n"):  # torn, or empty
            return
        if not first.startswith(MARK):
            raise UsageError(f"{path} is no table of a study; give another --out")
        if first.removeprefix(MARK).split()[0] != digest(self.job):
            told = ""
            with suppress(JobError):
                before, _ = read_table(read_text(self.folder / JOB), JOB)
                told = "; ".join(differences(common(before), self.job))
            raise UsageError(
                f"{self.folder} holds the rows of another job ({told or 'its job.toml is gone'}); give another --out, or "
                "start anew with --fresh"
            )

    def _write(self, rows: Sequence[StudyRow]) -> None:
        text = f"{MARK}{digest(self.job)}\n{head()}{''.join(map(line_of, rows))}"
        write_whole(self.folder / TABLE, text)

    def add(self, row: StudyRow) -> None:
        """A run has ended: its line is on the disk when this returns, in whole."""
        self.rows = [each for each in self.rows if each.point != row.point] + [row]
        path = self.folder / TABLE
        try:
            append_whole(path, line_of(row).encode("utf-8", "replace"), lasting=True)
        except OSError as error:
            raise RunError(
                f"cannot write {path}: {error.strerror}; make room, and run again to go on"
            ) from error

    def finish(self, points: Sequence[Point]) -> None:
        """Rows in the order of the grid, whoever ended first; those outside it come after, in their own order."""
        places = {point: place for place, point in enumerate(points)}
        self.rows.sort(key=lambda row: places.get(row.point, len(places)))
        try:
            self._write(self.rows)
        except OSError as error:
            raise RunError(f"cannot write {self.folder / TABLE}: {error.strerror}") from error

    def __enter__(self) -> StudyStore:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()


def left(points: Sequence[Point], rows: Iterable[StudyRow]) -> list[Point]:
    """What is to be done: points without a row, and those that failed."""
    done = {row.point for row in rows if not row.failed}
    return [point for point in points if point not in done]


def read_rows(folder: Path) -> list[StudyRow]:
    """The rows of a study, finished or not."""
    path = folder / TABLE
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} is no study: there is no {TABLE} in it") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    whole = content[: content.rfind("\n") + 1].splitlines()
    return rows_of(line for line in whole if not line.startswith("#"))


# -- CSV: numbers read back equal, an empty cell is a number that is not known ----------------------------------

COLUMNS: tuple[str, ...] = tuple(entry.name for entry in fields(StudyRow))
CHANGING = ("wall_seconds", "commit", "version")  # columns that may differ between equal studies
_READ: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
_KINDS = {entry.name: _READ[str(entry.type).removesuffix(" | None")] for entry in fields(StudyRow)}
_OPTIONAL = {entry.name for entry in fields(StudyRow) if str(entry.type).endswith("| None")}


def line_of(row: StudyRow) -> str:
    """One line with its end; texts are kept on it."""
    cells = []
    for name in COLUMNS:
        value = getattr(row, name)
        text = repr(value) if isinstance(value, float) else " ".join(str(value).split())
        cells.append("" if value is None else text)
    return _line(cells)


def head() -> str:
    return _line(COLUMNS)


def _line(cells: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def rows_of(lines: Iterable[str]) -> list[StudyRow]:
    """The rows of complete lines, head first; of several rows of one point the last. What is no row is left out."""
    found: dict[Point, StudyRow] = {}
    for cells in csv.DictReader(lines):
        values: dict[str, Any] = {}
        with suppress(TypeError, ValueError):
            for name, read in _KINDS.items():
                text = cells.get(name) or ""
                values[name] = None if text == "" and name in _OPTIONAL else read(text)
            row = StudyRow(**values)
            found.pop(row.point, None)
            found[row.point] = row
    return list(found.values())
