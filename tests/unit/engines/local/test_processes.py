"""A run's processes: whatever was ready may have been read by another handler of the same round."""

from __future__ import annotations

import os
import select
import selectors
from collections.abc import Iterator
from typing import Any

import pytest

from syncline.engines.local.learner import run_evaluator
from syncline.engines.local.processes import Process, Processes, say
from syncline.errors import LostError


@pytest.fixture
def ended() -> list[tuple[int, str]]:
    return []


@pytest.fixture
def processes(ended: list[tuple[int, str]]) -> Iterator[Processes]:
    found = Processes(lambda process, message: None, lambda process, how: ended.append((process.pid, how)))
    yield found
    found.close(kill=True)


def idle(processes: Processes) -> Process:
    """A process that waits for something to test."""
    return processes.fork("evaluator", 0, 0, run_evaluator)


def wait_readable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(30_000)


class InThisOrder:
    """A selector whose ready descriptors come in a given order."""

    def __init__(self, inner: selectors.BaseSelector, first: int) -> None:
        self._inner, self._first = inner, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def select(self, timeout: float | None = None) -> list[Any]:
        return sorted(self._inner.select(timeout), key=lambda item: item[0].fd != self._first)


@pytest.mark.timeout(30)
def test_an_end_that_a_start_has_read_already_is_not_waited_for(
    processes: Processes, ended: list[tuple[int, str]]
) -> None:
    """One is gone, and in the same round, before that is handled, somebody starts another."""
    first = idle(processes)
    asked, ask = os.pipe()
    started: list[Process] = []

    def start() -> None:
        os.read(asked, 1)
        started.append(idle(processes))

    processes.watch(asked, start)
    processes._selector = InThisOrder(processes._selector, asked)  # type: ignore[assignment]
    os.kill(first.pid, 9)
    wait_readable(processes._server.fileno())
    os.write(ask, b"x")
    processes.work(1.0)
    assert started and ended == [(first.pid, "signal SIGKILL")]
    os.close(asked)
    os.close(ask)


@pytest.mark.timeout(30)
def test_last_words_that_were_heard_with_the_end_are_not_waited_for(processes: Processes) -> None:
    """Its channel is ready, but its end, handled first, has read it."""
    process = idle(processes)
    os.kill(process.pid, 9)
    wait_readable(processes._server.fileno())
    wait_readable(process.channel.fileno())
    processes._selector = InThisOrder(processes._selector, processes._server.fileno())  # type: ignore[assignment]
    processes.work(1.0)
    assert process.reaped and process.channel.fileno() < 0


@pytest.mark.timeout(30)
def test_a_readiness_that_is_not_so_blocks_nobody(processes: Processes) -> None:
    """For every descriptor that is watched: its handler finds nothing, and goes on."""
    idle(processes)
    for key in list(processes._selector.get_map().values()):
        key.data()


def test_a_lost_fork_server_is_said_so(processes: Processes) -> None:
    processes._server.close()
    with pytest.raises(LostError, match="fork server was lost"):
        processes._from_forkserver()


def test_what_a_terminal_cannot_show_is_escaped(tmp_path: Any) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as target:
        say(target, "σ = 1\n")
    assert (tmp_path / "out").read_text() == "\\u03c3 = 1\n"
    say(target, "a closed one is no reason to fail")
