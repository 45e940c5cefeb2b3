"""Runs that a script forgot are stopped at its end, all before any is waited for, and that is said."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any, cast

import pytest

from syncline.engines import live_runs as live


class Run:
    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said
        live.began(cast(Any, self))

    def stop(self) -> None:
        self._said.append(f"stop {self._name}")

    def end(self, seconds: float) -> None:
        self._said.append(f"end {self._name}")
        live.ended(cast(Any, self))


def test_all_are_told_before_any_is_waited_for() -> None:
    said: list[str] = []
    runs = [Run(name, said) for name in "abc"]
    assert set(live.live()) == set(runs)
    assert set(live.end_all()) == set(runs)
    assert sorted(said[:3]) == ["stop a", "stop b", "stop c"] and sorted(said[3:]) == [
        "end a",
        "end b",
        "end c",
    ]
    assert live.end_all() == [] and len(said) == 6


def test_a_run_that_has_ended_is_left_alone_however_often_it_says_so() -> None:
    said: list[str] = []
    run = cast(Any, Run("a", said))
    for _ in range(2):
        live.ended(run)
    assert live.live() == [] and live.end_all() == [] and not said


@pytest.mark.parametrize("count, words", [(0, ""), (1, "a run was still"), (2, "2 runs were still")])
def test_the_end_of_the_script_ends_them_once(
    count: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", lambda each: each in at_exit and at_exit.remove(each))
    said: list[str] = []
    over = cast(Any, Run("over", said))
    live.ended(over)
    for name in range(count):
        Run(str(name), said)
    (function,) = at_exit  # once, after all that was registered before the last run
    function()
    assert capsys.readouterr().err.removeprefix("syncline: ").startswith(words)
    assert len(said) == 2 * count and live.live() == []
