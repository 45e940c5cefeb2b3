"""A process that runs points, one after another: `python -m syncline.studies.worker`.

Takes lines of JSON on its standard input (the job, then points) and answers on its standard output; whatever else is
printed goes to standard error. It ends, in the middle of a run too, when its input does: nobody would hear the answer.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import asdict
from typing import IO, Any

import torch

from syncline.engines.local import forkserver
from syncline.errors import SynclineError
from syncline.jobs import Job
from syncline.studies.grid import Point
from syncline.studies.point_run import overrides, run_point, said
from syncline.studies.rows import StudyRow, asked


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    source = json.loads(sys.stdin.readline())
    if source["local"]:
        forkserver.start_here()  # before there is another thread
    else:
        torch.set_num_threads(1)
    tasks: queue.Queue[Point] = queue.Queue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    while True:
        point = tasks.get()
        row = _run(source, point, answers)
        _say(answers, row=asdict(row))


def _listen(tasks: queue.Queue[Point]) -> None:
    for line in sys.stdin:
        tasks.put(Point(**json.loads(line)))
    os._exit(0)


def _run(source: dict[str, Any], point: Point, answers: IO[str]) -> StudyRow:
    try:
        job = Job.parse(source["job"], overrides(point), name=source["name"], folder=source["folder"])
    except SynclineError as error:
        return asked(point, error=said(error))
    return run_point(job, point, lambda epochs: _say(answers, epochs=epochs), timing=source["timing"])


def _say(answers: IO[str], **content: Any) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
