"""Where a run goes back to when a shard is lost, and who repeats what was lost with it: the same for every engine (S7).

Not responsible for starting anything, nor for noticing a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from syncline.errors import LostError
from syncline.protocols.restarts import Restarts
from syncline.table.checkpoints import Checkpoint, CheckpointError, Folder, find
from syncline.topology.restore import Restored, restored


class Recovery:
    """The last checkpoint of a run, and how often it was gone back to."""

    def __init__(
        self,
        folder: Folder | None,
        start: Restored | None,
        read: Callable[[Checkpoint], Restored] = restored,
    ) -> None:
        self._folder, self._start, self._read = folder, start, read
        self._last: Path | None = None
        self.restarts = Restarts()

    def checkpointed(self, path: Path) -> None:
        self._last = path
        self.restarts.checkpointed()

    def refuse(self, lost: str) -> LostError | None:
        """Why the run cannot go on after this loss of a shard, if it cannot."""
        if self._folder is None:
            return LostError(
                f"{lost}, and there is no checkpoint to go back to: give run_dir= and checkpoint_every="
            )
        if not self.restarts.shard_lost():
            return LostError(
                f"{lost}, {self.restarts.shards} times without a checkpoint in between; given up"
            )
        return None

    def go_back(self, lost: str) -> Restored | None:
        """The state that new shards begin with; None: the first values of the tables."""
        assert self._folder is not None
        try:
            last = self._read(find(self._last)) if self._last else self._start
        except CheckpointError as error:
            raise LostError(f"{lost}, and the last checkpoint cannot be read: {error}") from error
        self._folder.prepare()  # removes what was being written
        return last
