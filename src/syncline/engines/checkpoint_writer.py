"""Files of checkpoints, as every engine writes them: a failure is reported, never raised."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from syncline.messages import Checkpointed, MakeTable, Saved
from syncline.table.checkpoint_content import read_content
from syncline.table.checkpoints import FIRST, NOTES, CheckpointError, Folder, Written, write_tensors

Job = tuple[int, str, dict[str, Tensor], dict[str, Any]]


def with_content(make: MakeTable, folder: Folder | None, shard: int | None = None) -> MakeTable:
    """With what a shard goes on with, read by itself; or with all of the table."""
    if make.source is None or (shard is not None and shard >= make.layout.shards):
        return make
    if make.source.folder is not None:
        where = Path(make.source.folder)
    else:
        assert folder is not None
        where = folder.first
    entries = None if shard is None else [piece.entry for piece in make.layout.parts[shard].pieces]
    return replace(make, content=read_content(make.source, where, make.layout, entries))


def write_part(folder: Folder, job: Job) -> Saved:
    """One file of a checkpoint."""
    number, name, tensors, notes = job
    try:
        if number == FIRST:
            return Saved(number, name, folder.write_first(name, tensors))
        written = write_tensors(folder.join(number) / name, tensors, {NOTES: json.dumps(notes)})
        return Saved(number, name, written)
    except Exception as error:  # whatever it is, the run must hear of it, and goes on
        return Saved(number, name, None, str(error))


def commit(
    folder: Folder, number: int, manifest: Mapping[str, Any], files: Sequence[Written], keep: int | None
) -> Checkpointed:
    """Make the written files a checkpoint; the oldest beyond `keep` go, and the first values of what it holds."""
    try:
        path = folder.commit(number, manifest, files)
        folder.forget_after(number)
        if keep is not None:
            folder.prune(keep)
        folder.forget_first(file.name for file in files)
        return Checkpointed(number, str(path))
    except CheckpointError as error:
        folder.abandon(number)
        return Checkpointed(number, "", str(error))


class Writer:
    """A thread that puts files on the disk while its shard folds on, in their order; each is reported when it is there."""

    def __init__(self, folder: Path, report: Callable[[Saved], None]) -> None:
        self._folder, self._report = Folder(folder), report
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._number: int | None = None
        self._thread = threading.Thread(target=self._run, name="syncline-writer", daemon=True)
        self._thread.start()

    def write(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """First values are on the disk when it returns."""
        job = (number, name, tensors, notes)
        if number == FIRST:
            self._report(write_part(self._folder, job))
        else:
            self._jobs.put(job)

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
