"""Scripts of events: what a line may say, and when its moment has come."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.engines.event_script import Fault, parse_script
from syncline.errors import UsageError


@pytest.mark.parametrize(
    "line, expected",
    [
        ("kill learner 2 at step 30", {"action": "kill", "role": "learner", "rank": 2, "version": 30}),
        ("kill shard 0 at version 7", {"action": "kill", "role": "shard", "rank": 0, "version": 7}),
        ("add 1 at version 50", {"action": "add", "count": 1, "version": 50}),
        ("add 2 learners at 1.5 s", {"action": "add", "count": 2, "seconds": 1.5}),
        (
            "pause shard 1 for 2 s at 4s",
            {"action": "pause", "role": "shard", "rank": 1, "length": 2.0, "seconds": 4.0},
        ),
        ("change to softsync:1 at step 9", {"action": "change", "dial": "softsync:1", "version": 9}),
        ("stop at 10 s", {"action": "stop", "seconds": 10.0}),
        ("kill node 2 at version 20", {"action": "kill", "role": "node", "rank": 2, "version": 20}),
        (
            "cut link 1-2 for 2.5 s at 3 s",
            {"action": "cut", "role": "link", "rank": 1, "other": 2, "length": 2.5, "seconds": 3.0},
        ),
    ],
)
def test_a_line(line: str, expected: dict[str, Any]) -> None:
    assert Fault.parse(f"  {line} ") == Fault(text=line, **expected)


@pytest.mark.parametrize(
    "line",
    [
        "kill learner at version 3",
        "kill learner 2",
        "kill server 2 at version 3",
        "pause learner 1 at version 3",
        "kill learner 1 for 2 s at version 3",
        "add learners at version 2",
        "stop",
        "kill learner 1 at version soon",
        "cut link 1-2 at 3 s",
        "cut link 1 for 2 s at 3 s",
    ],
)
def test_no_line(line: str) -> None:
    with pytest.raises(UsageError, match="write for example"):
        parse_script(f"stop at 2 s; {line}")


def test_a_script_is_lines_or_parts() -> None:
    script = "kill learner 1 at version 3; add 1 at version 4\n\n stop at 2 s\n"
    assert [fault.action for fault in parse_script(script)] == ["kill", "add", "stop"]


@pytest.mark.parametrize(
    "fault, version, seconds, due",
    [
        ("stop at version 5", 4, 99.0, False),
        ("stop at version 5", 5, 0.0, True),
        ("stop at 2 s", 99, 1.9, False),
        ("stop at 2 s", 0, 2.0, True),
    ],
)
def test_when(fault: str, version: int, seconds: float, due: bool) -> None:
    assert Fault.parse(fault).due(version, seconds) is due
