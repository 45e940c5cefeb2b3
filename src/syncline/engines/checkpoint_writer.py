"""A shard's writer: a thread that puts the files of checkpoints on the disk while the shard folds on."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from syncline.engines.checkpoint_files import Job, write_part
from syncline.messages import Saved
from syncline.table.checkpoints import Folder


class Writer:
    """Files in the order they were given; each is reported when it is on the disk."""

    def __init__(self, folder: Path, report: Callable[[Saved], None]) -> None:
        self._folder, self._report = Folder(folder), report
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._number: int | None = None
        self._thread = threading.Thread(target=self._run, name="syncline-writer", daemon=True)
        self._thread.start()

    def write(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        self._jobs.put((number, name, tensors, notes))

    def write_after(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """The same, when the checkpoint before is on the disk: whoever cuts faster than it writes waits."""
        if number != self._number:
            self._jobs.join()
        self._number = number
        self.write(number, name, tensors, notes)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # behind the folds, where the system allows it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        while (job := self._jobs.get()) is not None:
            self._report(write_part(self._folder, job))
            self._jobs.task_done()

    def close(self) -> None:
        """When all of it is on the disk."""
        self._jobs.put(None)
        self._thread.join()
