"""The language check and the count of code lines, on small texts."""

from pathlib import Path

import pytest

from tools.code_lines import code_lines
from tools.language import Finding, count, docstring_rule, risen


@pytest.mark.parametrize(
    "docstring, rule",
    [
        ("It has been read.", "opening"),
        ("Where the table lies.", "opening"),
        ("Return the version.\n\nNobody waits for it.", "person"),
        ("Release the slot and go on.", "riddle"),
        ("Return the version the parameters currently hold.", None),
    ],
)
def test_a_docstring_breaks_the_first_rule_that_matches(docstring: str, rule: str | None) -> None:
    found = docstring_rule(docstring)
    assert (found[0] if found else None) == rule


@pytest.mark.parametrize(
    "path, room",
    [
        ("src/syncline/dial.py", "dial.py"),
        ("src/syncline/table/layout.py", "table"),
        ("src/syncline/sim/timing/run_times.py", "sim"),
        ("src/syncline/engines/run.py", "engines"),
        ("src/syncline/engines/local/server.py", "engines/local"),
        ("tests/unit/test_dial.py", "tests"),
    ],
)
def test_a_finding_belongs_to_the_room_of_its_file(path: str, room: str) -> None:
    assert Finding(Path(path), 1, "opening", "").room == room


def test_a_count_that_rose_is_reported_and_one_that_fell_is_not() -> None:
    findings = [Finding(Path("src/syncline/dial.py"), line, "person", "who") for line in (1, 2)]
    now = count([*findings, Finding(Path("tests/test_dial.py"), 1, "D400", "")])
    assert risen(now, {"dial.py": {"person": 1}, "tests": {"D400": 3}}) == [("dial.py", "person", 1, 2)]
    assert risen(now, {"dial.py": {"person": 2}, "tests": {"D400": 1}}) == []


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    text = '"""Title.\n\nMore.\n"""\n\n# a comment\ndef f():  # code and a comment\n    """Do."""\n    return [\n        1,\n    ]\n'
    assert code_lines(text) == 4
