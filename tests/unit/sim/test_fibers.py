"""Fibers: one runs at a time, in the same order whatever they are made of, and who is ended unwinds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.sim import fibers
from syncline.sim.fibers import Fiber, Green, Handler, Killed, Thread, make_fiber

KINDS: list[Any] = [Thread, *([Green] if fibers.greenlet is not None else [])]
either = pytest.mark.parametrize("kind", KINDS)


def started(kind: Any, body: Callable[[Fiber], None]) -> Any:
    """A fiber that runs this, given itself; not resumed yet."""

    def main() -> None:
        with suppress(Killed):
            body(fiber)

    fiber: Any = kind(main)
    return fiber


@either
@given(turns=st.lists(st.integers(0, 2), max_size=8))
def test_one_runs_at_a_time_in_the_order_of_the_scheduler(kind: Any, turns: list[int]) -> None:
    said: list[tuple[int, int]] = []

    def counts(name: int) -> Callable[[Fiber], None]:
        def body(fiber: Fiber) -> None:
            for step in range(8):
                said.append((name, step))
                fiber.block()

        return body

    everybody = [started(kind, counts(name)) for name in range(3)]
    for name in turns:
        everybody[name].resume()
    assert said == [(name, turns[:place].count(name)) for place, name in enumerate(turns)]
    for fiber in everybody:
        fiber.end()
    assert all(fiber.done for fiber in everybody) and len(said) == len(turns)


@either
def test_who_is_ended_unwinds_and_can_wait_for_nothing_more(kind: Any) -> None:
    said: list[str] = []

    def body(fiber: Fiber) -> None:
        try:
            fiber.block()
            said.append("goes on")
        finally:
            said.append("unwinds")
            with pytest.raises(Killed):
                fiber.block()

    fiber = started(kind, body)
    fiber.resume()
    assert not fiber.done
    fiber.end()
    assert fiber.done and said == ["unwinds"]


@either
def test_who_is_ended_before_it_began_never_runs(kind: Any) -> None:
    said: list[int] = []
    fiber = started(kind, lambda _: said.append(1))
    fiber.end()
    assert fiber.done and not said
    over = started(kind, lambda _: said.append(2))
    over.resume()
    over.end()  # once it is done that is nothing
    assert over.done and said == [2]


@either
def test_a_fiber_takes_its_modes_with_it_and_leaves_the_others_theirs(kind: Any) -> None:
    seen = []

    def modes() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def body(fiber: Fiber) -> None:
        seen.append(modes())
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            fiber.block()
            seen.append((*modes(), torch.get_autocast_dtype("cpu")))  # type: ignore[arg-type]
        seen.append(modes())

    fiber, usual = started(kind, body), torch.get_autocast_dtype("cpu")
    with torch.no_grad():
        fiber.resume()
        assert modes() == (False, False), "of whoever resumes"
    fiber_stands, torch_says = fiber.done, (*modes(), torch.get_autocast_dtype("cpu"))
    assert not fiber_stands and torch_says == (True, False, usual)
    fiber.resume()
    assert seen == [(True, False), (False, True, torch.float16), (True, False)] and modes() == (True, False)


def test_a_handler_goes_on_from_yield_to_yield() -> None:
    said: list[str] = []

    def steps() -> Generator[None, None, None]:
        try:
            said.append("begins")
            yield
            said.append("goes on")
            yield
        finally:
            said.append("unwinds")

    handler = Handler(steps())
    handler.resume(), handler.resume()
    assert said == ["begins", "goes on"] and not handler.done
    handler.resume()
    assert handler.done and said[-1] == "unwinds"
    ended = Handler(steps())
    ended.resume()
    ended.end()
    assert ended.done and said[-2:] == ["begins", "unwinds"]
    with pytest.raises(AssertionError, match="by yielding"):
        Handler(steps()).block()


def test_threads_where_there_are_no_greenlets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_fiber(lambda: None)) is KINDS[-1]
    monkeypatch.setattr(fibers, "greenlet", None)
    assert type(make_fiber(lambda: None)) is Thread
