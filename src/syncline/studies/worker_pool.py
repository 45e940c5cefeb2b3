"""Worker processes: pieces of work out, news in. A worker that dies costs its piece only; another takes its place.

Workers get their pieces one at a time, in order. They do not hear Ctrl-C, and end with the caller, however that ends, in the
middle of a piece too: nobody would hear the answer. Not responsible for what is done, nor for keeping answers.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

Say = Callable[[Any], None]
Work = Callable[[Any, Say], Any]  # a piece, and to whom it says how far it is; gives the answer
Prepare = Callable[[], Work]  # travels to a worker, which begins with it


class News(NamedTuple):
    """Of a piece of work."""

    kind: str  # "started", "moved", "ended" or "died"
    piece: Any
    said: Any = None  # how far it is, its answer, or in words how the process ended that had it


class Worker:
    """One process, and the piece that it has."""

    def __init__(self, prepare: Prepare, log: Path | None) -> None:
        self.connection, theirs = Pipe()
        with theirs, log.open("ab") if log is not None else nullcontext() as output:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "syncline.studies.worker_pool", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # the terminal's Ctrl-C is the caller's to handle
            )
        self.piece: Any = None
        self._send(prepare)

    def _send(self, what: Any) -> None:
        with suppress(OSError):  # it has died: its answers will end
            self.connection.send(what)

    def give(self, piece: Any) -> News:
        self.piece = piece
        self._send(piece)
        return News("started", piece)

    def end(self) -> str:
        """How it ended, in words."""
        self.process.kill()
        self.connection.close()
        code = self.process.wait()
        return f"its process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"


class Pool:
    """Up to `jobs` workers; use it in a `with`. What they print goes to the log, if there is one."""

    def __init__(self, prepare: Prepare, jobs: int, log: Path | None = None) -> None:
        self._prepare, self._jobs, self._log = prepare, jobs, log
        self._workers: list[Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *raised: object) -> None:
        while self._workers:
            self._workers.pop().end()

    def run(self, pieces: Sequence[Any], *, every: float = 0.25) -> Iterator[list[News]]:
        """News until all pieces have ended; an empty list at least every so many seconds."""
        waiting = list(reversed(pieces))
        yield self._deal(waiting)
        while busy := [worker.connection for worker in self._workers if worker.piece is not None]:
            ready = wait(busy, every)
            heard = [self._hear(worker) for worker in self._workers[:] if worker.connection in ready]
            yield heard + self._deal(waiting)

    def _deal(self, waiting: list[Any]) -> list[News]:
        free = [worker for worker in self._workers if worker.piece is None]
        missing = min(self._jobs - len(self._workers), len(waiting) - len(free))
        hired = [Worker(self._prepare, self._log) for _ in range(missing)]
        self._workers += hired
        return [worker.give(waiting.pop()) for worker in [*free, *hired] if waiting]

    def _hear(self, worker: Worker) -> News:
        piece = worker.piece
        try:
            over, what = worker.connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(1.0)  # who has said its last word is about to end
            self._workers.remove(worker)
            return News("died", piece, worker.end())
        if over:
            worker.piece = None
        return News("ended" if over else "moved", piece, what)


# -- in the process --------------------------------------------------------------------------------------------


def _main(caller: Connection) -> None:
    work: Work = caller.recv()()
    pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                pieces.put(caller.recv())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        answer = work(pieces.get(), lambda said: caller.send((False, said)))
        caller.send((True, answer))


if __name__ == "__main__":
    _main(Connection(int(sys.argv[1])))
