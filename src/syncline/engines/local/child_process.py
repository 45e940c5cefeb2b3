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
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from syncline.engines.local.allreduce_learner import AllReduceLearnerSpec, run_peer
from syncline.engines.local.batch_processes import (
    BatchLearnerSpec,
    BatchShardSpec,
    run_batch_learner,
    run_batch_shard,
)
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.learner import run_evaluator, run_learner
from syncline.engines.local.seat_processes import run_group
from syncline.engines.local.server import run_server
from syncline.engines.local.shared_memory import crash_at
from syncline.engines.local.tree_node import run_node
from syncline.engines.malloc_tuning import keep_freed_memory

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
    spec: Any  # the role's own, unpacked only after path and folder are set


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
        if isinstance(setup.spec, BatchShardSpec):
            run_batch_shard(channel, setup.spec)
        elif setup.role == "shard":
            run_server(channel, setup.spec)
        elif setup.role == "node":
            run_node(channel, setup.spec)
        elif setup.role == "evaluator":
            run_evaluator(channel)
        else:
            keep_freed_memory()
            if callable(setup.spec):  # a learner of another engine
                return int(setup.spec(channel))
            if isinstance(setup.spec, AllReduceLearnerSpec):
                return run_peer(channel, setup.spec)
            if isinstance(setup.spec, BatchLearnerSpec):
                return run_batch_learner(channel, setup.spec)
            return (run_group if setup.spec.seat.seats > 1 else run_learner)(channel, setup.spec)
    except Closed:
        return 1
    return 0


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
