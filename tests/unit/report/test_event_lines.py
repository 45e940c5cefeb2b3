"""events.jsonl: whole lines only, whatever happens to the disk or the writer."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import RunError
from syncline.report.event_lines import LineWriter, number, plain, read_lines, write_whole


def test_what_json_does_not_know() -> None:
    value = {
        1: float("nan"),
        "b": (1, float("inf")),
        "c": torch.tensor(2.5),
        "d": np.int64(3),
        "e": Path("x"),
    }
    assert plain(value) == {"1": "nan", "b": [1, "inf"], "c": 2.5, "d": 3, "e": "x"}
    json.dumps(plain(value), allow_nan=False)


@given(st.floats() | st.integers(-(2**53), 2**53))
def test_every_number_comes_back_through_json(value: float) -> None:
    found = number(json.loads(json.dumps(plain(value), allow_nan=False)))
    assert found == value or (found is not None and math.isnan(found) and math.isnan(value))
    assert number(10**400) == math.inf and number(-(10**400)) == -math.inf
    assert [number(each) for each in (None, True, "1", "infinity", [1])] == [None] * 5


def test_lines_are_readable_while_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = LineWriter(path)
    for count in range(3):
        writer.write({"n": count, "text": "λ\nμ"})
        assert [line["n"] for line in read_lines(path)] == list(range(count + 1))
    assert path.read_bytes().count(b"\n") == 3


def test_torn_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n":1}\n\xff\xfe{{\n[1]\n{"n":2}\n{"n":3')
    assert [line["n"] for line in read_lines(path)] == [1, 2]
    writer = LineWriter(path)  # a run that goes on after a kill
    writer.write({"n": 4})
    assert [line["n"] for line in read_lines(path)] == [1, 2, 4]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    writer = LineWriter(path)
    writer.write({"n": 1})
    real, room = os.write, [10]

    def full(fd: int, content: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, content[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        writer.write({"n": 2, "text": "x" * 100})
    assert path.read_bytes() == b'{"n":1}\n'
    monkeypatch.setattr(os, "write", real)  # there is room again
    writer.write({"n": 3})
    assert [line["n"] for line in read_lines(path)] == [1, 3]


def test_whole_files_are_there_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "first")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "second")
    assert path.read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_place_that_takes_no_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .* give another run folder"):
        LineWriter(tmp_path / "missing" / "events.jsonl")
