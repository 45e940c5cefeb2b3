"""clocks.bin: rows by version that grow, are cut where the run went back, and are read while the last one is torn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.report.clock_file import CLOCKS, append_clocks, clock_lines, cut_clocks, read_clocks

Row = tuple[int, int, int]


def content(rows: list[Row]) -> bytes:
    return np.array(rows, dtype="<u4").tobytes()


ROWS: list[Row] = [(1, 0, 0), (2, 1, 0), (2, 0, 1), (4, 3, 2)]


def test_a_line_for_each_update_names_its_gradients(tmp_path: Path) -> None:
    append_clocks(tmp_path, content(ROWS))
    assert list(clock_lines(tmp_path)) == ["1 0:0", "2 1:0 0:1", "4 3:2"]
    assert list(clock_lines(tmp_path / CLOCKS)) == list(clock_lines(str(tmp_path)))
    assert read_clocks(tmp_path)["stamp"].tolist() == [0, 0, 1, 2]


def test_a_row_that_is_not_whole_yet_is_left_out(tmp_path: Path) -> None:
    (tmp_path / CLOCKS).write_bytes(content(ROWS)[:-5])
    assert read_clocks(tmp_path).tolist() == ROWS[:-1]
    (tmp_path / CLOCKS).write_bytes(b"")
    assert list(clock_lines(tmp_path)) == []


def test_a_folder_without_clocks_says_how_they_are_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no clocks.bin there; .* clocks=True \(--clocks\)"):
        read_clocks(tmp_path)
    cut_clocks(tmp_path, 3)
    assert not (tmp_path / CLOCKS).exists()


@pytest.mark.parametrize("version, left", [(0, 0), (1, 1), (2, 3), (3, 3), (4, 4), (9, 4)])
def test_what_came_after_a_version_is_forgotten(version: int, left: int, tmp_path: Path) -> None:
    append_clocks(tmp_path, content(ROWS))
    cut_clocks(tmp_path, version)
    assert read_clocks(tmp_path).tolist() == ROWS[:left]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=6))
def test_a_run_that_goes_back_writes_over_what_was_there(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, int]]
) -> None:
    """Each piece begins so many updates back, and has so many; the rows are those of the last time a version was made."""
    folder = tmp_path_factory.mktemp("clocks")
    expected: list[Row] = []
    for number, (back, count) in enumerate(pieces):
        first = max(1, (expected[-1][0] if expected else 0) + 1 - back)
        rows = [(first + more, rank, number) for more in range(count) for rank in (0, 1)]
        expected = [row for row in expected if row[0] < first] + rows
        append_clocks(folder, content(rows))
        assert read_clocks(folder).tolist() == expected
