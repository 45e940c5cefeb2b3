"""What a forked process does: sets itself up, then becomes a learner, a shard, a node or an evaluator.

Every process watches the caller's life line (a pipe whose only write end is the caller's) and ends when it
breaks.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import torch

from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.shared_memory import crash_at
from syncline.engines.malloc_tuning import keep_freed_memory

Run = Callable[[Channel], int | None]  # gives its exit code

TERM_GRACE = 20.0  # seconds that a process goes on after SIGTERM


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a child."""

    role: str  # "learner", "shard", "node" or "evaluator"
    threads: int
    path: list[str]
    folder: str
    environment: dict[str, str]
    crash: int | None  # for tests: the operation it dies in
    run: Run  # what the process does, until it is told that nothing more comes


def main(control: int, out: int, err: int, life_line: int) -> int:
    """The whole life of a child; the exit code comes back."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _outlive_sigterm()
    _redirect(out, err)
    threading.Thread(target=_watch, args=(life_line,), daemon=True).start()
    channel = Channel(socket.socket(fileno=control))
    try:
        setup: Setup = channel.receive()
        _settle(setup)
        if setup.role in ("learner", "relay"):
            keep_freed_memory()
        return setup.run(channel) or 0
    except Closed:
        return 1


def _outlive_sigterm() -> None:
    """Schedulers send it to all processes at once: it is the caller's to end the run well, while this one works on.

    Whoever means this one alone has it gone a while later. What the user's code forks goes at once, as anywhere.
    """
    own = os.getpid()

    def heed(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        end = threading.Timer(TERM_GRACE, os.kill, (own, signal.SIGKILL))
        end.daemon = True
        end.start()

    signal.signal(signal.SIGTERM, heed)
    signal.siginterrupt(signal.SIGTERM, False)


def _redirect(out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _watch(life_line: int) -> None:
    os.read(life_line, 1)
    os._exit(3)


def _settle(setup: Setup) -> None:
    sys.path[:] = setup.path
    os.environ.clear()
    os.environ.update(setup.environment)
    if os.path.isdir(setup.folder):
        os.chdir(setup.folder)
    torch.set_num_threads(setup.threads)
    if setup.crash is not None:
        crash_at(setup.crash)
