"""Files of checkpoints, as every engine writes them: a failure is reported, never raised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from syncline.messages import Checkpointed, Saved
from syncline.table.checkpoints import NOTES, CheckpointError, Folder, Written, write_tensors

Job = tuple[int, str, dict[str, Tensor], dict[str, Any]]


def write_part(folder: Folder, job: Job) -> Saved:
    """One file of a checkpoint."""
    number, name, tensors, notes = job
    try:
        written = write_tensors(folder.join(number) / name, tensors, {NOTES: json.dumps(notes)})
        return Saved(number, name, written)
    except Exception as error:  # whatever it is, the run must hear of it, and goes on
        return Saved(number, name, None, str(error))


def commit(
    folder: Folder, number: int, manifest: Mapping[str, Any], files: Sequence[Written], keep: int
) -> Checkpointed:
    """Make the written files a checkpoint; the oldest beyond `keep` go."""
    try:
        path = folder.commit(number, manifest, files)
        folder.forget_after(number)
        folder.prune(keep)
        return Checkpointed(number, str(path))
    except CheckpointError as error:
        folder.abandon(number)
        return Checkpointed(number, "", str(error))
