"""Finished worlds do not pile up."""

import gc
from pathlib import Path

import pytest

from syncline.sim import garbage_collection as debris


class Loop:
    """Garbage that counts of references do not find."""

    alive = 0

    def __init__(self) -> None:
        self.self = self
        Loop.alive += 1

    def __del__(self) -> None:
        Loop.alive -= 1


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the process is said to have, in turn; the last one again and again."""
    said: list[int] = []
    monkeypatch.setattr(debris, "_resident", lambda: said.pop(0) if len(said) > 1 else said[0])
    return said


def test_swept_only_after_much_growth(sizes: list[int]) -> None:
    much, mine = debris.MUCH, debris.Garbage()
    gc.disable()
    try:
        Loop()
        sizes[:] = [1000]
        assert not mine.sweep()
        sizes[:] = [1000 + much]
        assert not mine.sweep() and Loop.alive == 1
        sizes[:] = [1001 + much, 500 + much]  # now, and after the sweep
        assert mine.sweep() and Loop.alive == 0
        sizes[:] = [500 + 2 * much]
        assert not mine.sweep()  # growth counts from the last sweep
        sizes[:] = [10]
        assert not mine.sweep()
        sizes[:] = [11 + much]
        assert mine.sweep()  # and from the least since
    finally:
        gc.enable()


def test_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debris, "STATM", Path("/nowhere/statm"))
    assert not debris.Garbage().sweep()


def test_this_system_says_something_plausible() -> None:
    assert debris._resident() > 10 << 20
