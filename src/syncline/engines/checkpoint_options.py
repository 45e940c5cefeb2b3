"""Checkpoints of a run, as they are asked for and found: checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from syncline.engines.run import Storage
from syncline.engines.run_lock import RunLock
from syncline.errors import SynclineError, UsageError
from syncline.learn.server_session import check_whole
from syncline.roles.checkpoint_manifest import Restored, restored
from syncline.roles.run_plan import RunPlan, Saving
from syncline.table.checkpoints import Checkpoint, CheckpointError, Folder, find

AUTO, END = "auto", "end"  # values of checkpoint_every
MINUTE = 60.0  # seconds
EVENTS = "events.jsonl"  # in a run folder: a run is in it


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints go, how often, and which one a run goes on from."""

    run_dir: str | Path | None
    resume: str | Path | None
    every: int | str | None
    keep: int
    clocks: bool = False  # the run folder keeps the vector clock of every update
    virtual: bool = False  # a simulated run's seconds are none in which work is lost
    rank: int | None = (
        None  # under torchrun: the first writes, all read, and all must hear what one is refused
    )
    read: Callable[[Checkpoint], Restored] = restored

    def opened(self, plan: RunPlan) -> tuple[Saving, Storage]:
        """How often, and where: the folder is there, and locked."""
        updates, seconds = self._every()
        check_whole("keep_checkpoints", self.keep)
        if not isinstance(self.clocks, bool):
            raise UsageError(f"clocks is True or False, got {self.clocks!r}")
        if self.clocks and self.run_dir is None and self.resume is None:
            raise UsageError("clocks=True needs run_dir=, the folder to write to")
        cuts = self.run_dir is not None or self.resume is not None
        saving = Saving(cuts=cuts, every=updates, seconds=seconds, clocks=self.clocks)
        try:
            return saving, self._found(plan)
        except SynclineError as error:
            if self.rank is None:
                raise
            return saving, Storage(refused=error)

    def _found(self, plan: RunPlan) -> Storage:
        """The folder to write to, locked, and the state to go on from."""
        root = self._root() if not self.rank else None
        there = root is not None and (self.run_dir is not None or root.parent.is_dir())
        lock = _locked(root.parent) if root is not None and there else None
        try:
            checkpoint = find(self.resume) if self.resume is not None else None
            found = self._restored(plan, checkpoint)
            if root is not None:
                Folder(root).prepare()
                Folder(root).forget_first()
                Folder(root).forget_adopted()
            if (
                root is not None
                and checkpoint is not None
                and root.resolve() not in checkpoint.path.resolve().parents
            ):
                adopted = self.read(Folder(root).adopt(checkpoint))
                found = replace(adopted, name=str(checkpoint.path))
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return Storage(str(root.resolve()) if root is not None else None, self.keep, lock, found)

    def _restored(self, plan: RunPlan, checkpoint: Checkpoint | None) -> Restored | None:
        found = self.read(checkpoint) if checkpoint is not None else None
        flights = sum(len(each.flights) for each in found.pipelines.values()) if found is not None else 0
        if found is not None and flights and not plan.topology.fixed_members:
            raise UsageError(
                f"{found.name} holds {flights} averages of an all-reduce run ({found.sync}) that are not applied yet, which "
                "servers cannot take over; resume with topology='allreduce'"
            )
        if found is not None and found.seed != plan.seed:
            raise UsageError(
                f"{found.name} was made with seed={found.seed}, this run has seed={plan.seed}: the rest of its data would "
                f"be dealt in another order; give seed={found.seed}"
            )
        return found

    def _every(self) -> tuple[int | None, float | None]:
        if self.every is None or self.every == END:
            return None, None
        if self.every == AUTO:
            return None, None if self.virtual else MINUTE
        if self.run_dir is None and self.resume is None:
            raise UsageError(f"checkpoint_every={self.every!r} needs run_dir=, the folder to write to")
        if isinstance(self.every, str):
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*s", self.every.strip())
            if match is None or float(match[1]) <= 0:
                raise UsageError(
                    f'checkpoint_every is a number of updates, seconds such as "30s", "auto" or "end", got {self.every!r}'
                )
            return None, float(match[1])
        check_whole("checkpoint_every", self.every)
        return self.every, None

    def _root(self) -> Path | None:
        """Of the run's checkpoints; a run that goes on writes where it was, unless told otherwise."""
        if self.run_dir is not None:
            root = Path(self.run_dir) / "checkpoints"
            same = self.resume is not None and root.resolve() in (
                *Path(self.resume).resolve().parents,
                Path(self.resume).resolve() / "checkpoints",
                Path(self.resume).resolve(),
            )
            if (Folder(root).all() or (root.parent / EVENTS).exists()) and not same:
                raise UsageError(
                    f"{self.run_dir} holds a run already: go on with it by resume={str(self.run_dir)!r}, "
                    "or give another run_dir"
                )
            return root
        if self.resume is None:
            return None
        path = Path(self.resume).resolve()
        return next(
            (each for each in (path, *path.parents) if each.name == "checkpoints"), path / "checkpoints"
        )


def _locked(folder: Path) -> RunLock:
    try:
        return RunLock(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot use {folder} for a run: {error.strerror} ({error.filename}); use a writable one"
        ) from error
