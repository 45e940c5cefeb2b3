"""The processes of one peer's run: started together, watched, and all gone afterwards, whatever happens.

Not a peer itself. A team fails with an exception when a member fails, dies or is late; it never hangs.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from typing import Any, Self

import torch

from benchmarks.workload import rate

START_S = 120.0  # for starting the processes, connecting them and warming up
END_S = 5.0  # for a member to end by itself once it has answered
WARM_UP_STEPS = 5


class PeerError(RuntimeError):
    """A member of a team failed, died or did not answer in time."""


@dataclass(frozen=True)
class Failure:
    """What a member sends instead of a result: its traceback."""

    text: str


@dataclass(frozen=True)
class Member:
    process: BaseProcess
    connection: Connection


class Team:
    """Processes that run `work(connection, *arguments)`; what each sends, and then returns, is received."""

    def __init__(self, seconds: float, *, method: str = "spawn") -> None:
        self.limit_s = START_S + 10 * seconds
        self._deadline = time.monotonic() + self.limit_s
        self._context = multiprocessing.get_context(method)
        self._members: list[Member] = []

    def barrier(self, parties: int) -> Barrier:
        return self._context.Barrier(parties, timeout=self.limit_s)

    def start(self, work: Callable[..., object], *arguments: object) -> Member:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_run_member, args=(theirs, work, arguments), daemon=True)
        process.start()
        theirs.close()
        self._members.append(Member(process, mine))
        return self._members[-1]

    def receive(self, member: Member) -> Any:
        """The member's next message; raises as soon as any member of the team has failed."""
        watched = [other.process for other in self._members]
        while True:
            remaining = max(0.0, self._deadline - time.monotonic())
            ready = wait([member.connection, *(process.sentinel for process in watched)], timeout=remaining)
            if not ready:
                raise PeerError(f"no answer within {self.limit_s:.0f} s")
            for process in watched:
                if process.sentinel in ready:
                    process.join(END_S)  # its pipe closes a moment before its exit code is there
            self._raise_failures()
            if member.connection in ready:
                return self._message(member)
            watched = [process for process in watched if process.sentinel not in ready]

    def _raise_failures(self) -> None:
        # A failed member ends with an error code right after sending its traceback.
        for other in self._members:
            if other.process.exitcode:
                message = self._message(other)
                raise PeerError(f"{other.process.name} ended with code {other.process.exitcode}: {message}")

    def _message(self, member: Member) -> Any:
        try:
            message = member.connection.recv()
        except EOFError:
            raise PeerError(f"{member.process.name} died without a word") from None
        if isinstance(message, Failure):
            raise PeerError(f"{member.process.name} failed\n{message.text}")
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        patience = time.monotonic() + (END_S if kind is None else 0.0)
        for member in self._members:
            member.connection.close()  # a server that waits for more reads this as the end
        for member in self._members:
            member.process.join(max(0.0, patience - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
            member.process.join()
            member.process.close()


def _run_member(connection: Connection, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    last_word: object
    try:
        last_word = work(connection, *arguments)
    except BaseException:
        last_word = Failure(traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):  # a server ends when nobody listens any more
        connection.send(last_word)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(isinstance(last_word, Failure))  # threads of Gloo and RPC now and then abort in a normal exit


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def wait_for_end(connection: Connection) -> None:
    """For a server: blocks until the team is over."""
    with contextlib.suppress(EOFError):
        connection.recv()


def free_rate(step: Callable[[], None], barrier: Barrier, seconds: float) -> float:
    """Steps per second of one worker that waits for no other, over a window that all begin together."""
    warm_up(step, min(0.5, seconds / 4))
    barrier.wait()
    return rate(step, seconds)


def warm_up(step: Callable[[], None], seconds: float) -> None:
    end = time.perf_counter() + seconds
    for _ in range(WARM_UP_STEPS):
        step()
    while time.perf_counter() < end:
        step()


def command_line(run: Callable[[tuple[int, ...], int, int, float], float]) -> None:
    """`python -m benchmarks.peers.NAME DIMS BATCH_SIZE WORKERS [--seconds S]`, for one peer alone."""
    parser = argparse.ArgumentParser(description="Gradients per second of one peer.")
    parser.add_argument("dims", help="layer widths, for example 784-128-10")
    parser.add_argument("batch_size", type=int)
    parser.add_argument("workers", type=int)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    dims = tuple(int(width) for width in given.dims.split("-"))
    print(f"{run(dims, given.batch_size, given.workers, given.seconds):.1f} gradients/s")
