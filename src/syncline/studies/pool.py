"""Worker processes: points out, news in. A worker that dies costs its point only; another takes its place.

Workers get their points one at a time, in order. They end with the caller, however that ends. Not responsible for
keeping rows (store.py).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from syncline.jobs import Job
from syncline.studies.grid import Point
from syncline.studies.rows import StudyRow, asked

COMMAND = (sys.executable, "-m", "syncline.studies.worker")


@dataclass(frozen=True, slots=True)
class Started:
    point: Point


@dataclass(frozen=True, slots=True)
class Moved:
    """So many epochs of a point's run are done."""

    point: Point
    epochs: int


@dataclass(frozen=True, slots=True)
class Ended:
    row: StudyRow


News = Started | Moved | Ended


class Worker:
    """One process, and the point that it has."""

    def __init__(self, source: str, log: Path) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # the terminal's Ctrl-C is the caller's to handle
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self.answers = self.process.stdin, self.process.stdout
        self._held = b""
        self.point: Point | None = None
        self._send(source)

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it has died: its answers will end
            self._to.write(line.encode() + b"\n")
            self._to.flush()

    def give(self, point: Point) -> None:
        self.point = point
        self._send(json.dumps(asdict(point)))

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """What it has said, and whether that was its last word."""
        content = os.read(self.answers.fileno(), 1 << 16)
        *lines, self._held = (self._held + content).split(b"\n")
        return [json.loads(line) for line in lines], content == b""

    def end(self) -> int:
        self.process.kill()
        for pipe in (self._to, self.answers):
            with suppress(BrokenPipeError):
                pipe.close()
        return self.process.wait()


class Pool:
    """Up to `jobs` workers for one job; use it in a `with`."""

    def __init__(self, job: Job, jobs: int, log: Path, *, timing: bool = False) -> None:
        content = {
            "job": job.dumps(),
            "name": job.source.name,
            "folder": job.source.folder,
            "local": job.engine.name == "local",
            "timing": timing,
        }
        self._source, self._jobs, self._log = json.dumps(content), jobs, log
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *raised: object) -> None:
        while self._workers:
            self._dismiss(self._workers[0])
        self._selector.close()

    def run(self, points: Sequence[Point], *, every: float = 0.25) -> Iterator[list[News]]:
        """News until all points have their rows; an empty list at least every so many seconds."""
        waiting = list(reversed(points))
        for _ in range(min(self._jobs, len(waiting))):
            self._hire()
        yield self._deal(waiting)
        while any(worker.point for worker in self._workers):
            news: list[News] = []
            for key, _ in self._selector.select(every):
                news += self._hear(key.data)
            if len(self._workers) < min(self._jobs, len(waiting) + self._busy()):
                self._hire()
            yield news + self._deal(waiting)

    def _busy(self) -> int:
        return sum(worker.point is not None for worker in self._workers)

    def _deal(self, waiting: list[Point]) -> list[News]:
        news: list[News] = []
        for worker in self._workers:
            if worker.point is None and waiting:
                point = waiting.pop()
                worker.give(point)
                news.append(Started(point))
        return news

    def _hear(self, worker: Worker) -> list[News]:
        lines, last = worker.read()
        news: list[News] = []
        for line in lines:
            assert worker.point is not None
            if "row" in line:
                news.append(Ended(StudyRow(**line["row"])))
                worker.point = None
            else:
                news.append(Moved(worker.point, line["epochs"]))
        if last:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(1.0)  # who has said its last word is about to end
            code = self._dismiss(worker)
            if worker.point is not None:
                news.append(Ended(asked(worker.point, error=self._died(code))))
        return news

    def _hire(self) -> None:
        worker = Worker(self._source, self._log)
        self._workers.append(worker)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)

    def _dismiss(self, worker: Worker) -> int:
        self._selector.unregister(worker.answers)
        self._workers.remove(worker)
        return worker.end()

    def _died(self, code: int) -> str:
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return f"its process ended with {how}; {self._log} may say why"
