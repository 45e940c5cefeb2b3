"""Checkpoints of a run, as they are asked for and found: checked before anything starts; and the lock of the folder they are in."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from syncline.engines.run import Storage
from syncline.errors import SynclineError, UsageError
from syncline.learn.server_session import check_whole
from syncline.roles.checkpoint_manifest import Restored, restored
from syncline.roles.run_plan import RunPlan, Saving
from syncline.table.checkpoints import Checkpoint, CheckpointError, Folder, find

AUTO, END = "auto", "end"  # values of checkpoint_every
MINUTE = 60.0  # seconds
EVENTS = "events.jsonl"  # in a run folder: a run is in it
LOCK = "run.lock"
REFUSE, RESUME, REPLACE, NEW = IF_EXISTS = "refuse", "resume", "replace", "new"
RUN_FILES = (
    "run.json",
    "job.toml",
    "clocks.bin",
    "report.html",
    "best.safetensors",
    "model*.safetensors",
    EVENTS,
)
RUN_FOLDERS = ("tensorboard", "checkpoints")
RECORD = 5.0  # seconds that the owner of a run folder gets to write its record


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints go, how often, and which one a run goes on from."""

    run_dir: str | Path | None
    resume: str | Path | None
    every: int | str | None
    keep: int
    clocks: bool = False  # the run folder keeps the vector clock of every update
    virtual: bool = False  # a simulated run's seconds are none in which work is lost
    rank: int | None = None  # under torchrun: the first writes, all read, and hear what one is refused
    if_exists: str = REFUSE  # a word of IF_EXISTS: what happens to a run that `run_dir` holds
    read: Callable[[Checkpoint], Restored] = restored

    def settled(self) -> Checkpoints:
        """Return these options with `run_dir` and `resume` as `if_exists` wants them."""
        if self.if_exists not in IF_EXISTS:
            words = ", ".join(map(repr, IF_EXISTS))
            raise UsageError(f"if_exists is one of {words}, got {self.if_exists!r}")
        if not self._holds_another_run():
            return self
        assert self.run_dir is not None
        if self.if_exists == NEW and not self.rank:
            return replace(self, run_dir=_next_free(Path(self.run_dir), claim=True))
        if self.if_exists == RESUME and Folder(Path(self.run_dir) / "checkpoints").all():
            return replace(self, resume=self.run_dir)
        return self

    @property
    def folder(self) -> Path | None:
        """The run folder; None where the run has none."""
        if self.run_dir is not None:
            return Path(self.run_dir)
        return checkpoints_of(Path(self.resume)).parent if self.resume is not None else None

    def _holds_another_run(self) -> bool:
        """Return whether `run_dir` holds a run that is not the one to resume."""
        if self.run_dir is None:
            return False
        root = Path(self.run_dir) / "checkpoints"
        return not self._is_own(root) and bool(Folder(root).all() or has_trained(root.parent / EVENTS))

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
        lock = RunLock(root.parent) if root is not None and there else None
        folder = Folder(root) if root is not None else None
        try:
            if root is not None and self._holds_another_run():
                _remove_run(root.parent)
            checkpoint = self._chosen(folder)
            found = self._restored(plan, checkpoint)
            if folder is not None:
                folder.prepare()
                folder.forget_first()
                if checkpoint is None or checkpoint.source is None:
                    folder.forget_adopted()
                if self.resume is None:
                    (folder.root.parent / EVENTS).unlink(missing_ok=True)  # of one that trained nothing
        except BaseException:
            if folder is not None:
                folder.forget_adopted()
            if lock is not None:
                lock.release()
            raise
        return Storage(str(root.resolve()) if root is not None else None, self.keep, lock, found)

    def _chosen(self, folder: Folder | None) -> Checkpoint | None:
        """Return the checkpoint to resume from. One in another folder is linked here: the run there may be alive and prune it."""
        if self.resume is None:
            return None
        try:
            own = folder is None or self._is_own(folder.root)
            return find(self.resume) if own or folder is None else folder.adopt(self.resume)
        except CheckpointError as error:
            root = checkpoints_of(Path(self.resume).resolve())
            story = what_happened(root.parent / EVENTS) if not Folder(root).all() else ""
            if not story:
                raise
            again = "nothing of it can be resumed: start it without resume; checkpoint_every= sets how often one is written"
            raise CheckpointError(f"no checkpoint at {root.parent}: {story}; {again}") from error

    def _is_own(self, root: Path) -> bool:
        """Return whether `resume` means the run folder of these checkpoints, or one of them."""
        own = Path(self.resume).resolve() if self.resume is not None else None
        return own is not None and root.resolve() in (*own.parents, own / "checkpoints", own)

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
            if self.if_exists == REFUSE and self._holds_another_run():
                raise UsageError(
                    f"{self.run_dir} holds a run already. if_exists (--if-exists) says what to do: 'resume' continues it, 'replace' "
                    f"deletes it, 'new' writes to {_next_free(Path(self.run_dir))}"
                )
            return Path(self.run_dir) / "checkpoints"
        if self.resume is None:
            return None
        return checkpoints_of(Path(self.resume).resolve())


def checkpoints_of(path: Path) -> Path:
    """The folder of checkpoints of a run, or the one that this checkpoint is in."""
    return next((each for each in (path, *path.parents) if each.name == "checkpoints"), path / "checkpoints")


def _next_free(folder: Path, *, claim: bool = False) -> Path:
    """Return the first of folder-2, folder-3 … that does not exist; `claim` creates it, for this run alone."""
    for number in count(2):
        path = folder.with_name(f"{folder.name}-{number}")
        try:
            if claim:
                path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise CheckpointError(
                f"cannot use {path} for a run: {error.strerror}; use a writable one"
            ) from error
        if claim or not path.exists():
            return path
    raise AssertionError


def _remove_run(folder: Path) -> None:
    """Delete what a run has left in its folder, but no other files. The caller holds the folder's lock."""
    try:
        for path in (found for pattern in RUN_FILES for found in folder.glob(pattern)):
            path.unlink()
        for path in (folder / name for name in RUN_FOLDERS if (folder / name).exists()):
            shutil.rmtree(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot replace the run in {folder}: {error.strerror} ({error.filename})"
        ) from error


def has_trained(events: Path) -> bool:
    """What failed before its first example was folded leaves nothing to keep: its script is mended and run again."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), events.open(errors="replace") as lines:
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:
                return True
            said = line.get("kind"), line.get("how")
            if said not in (("start", None), ("end", "failed")) and line.get("examples") != 0:
                return True
    return False


def what_happened(events: Path) -> str:
    """Say how a run without a checkpoint ended, by its lines; nothing where there are none of a run."""
    version, end, problem, started = 0, None, "", False
    with contextlib.suppress(OSError), events.open(errors="replace") as lines:
        for text in lines:
            with contextlib.suppress(ValueError, RecursionError, AttributeError):
                line = json.loads(text)
                kind = line.get("kind")
                started, end = started or kind == "start", line if kind == "end" else end
                version = number if isinstance(number := line.get("version"), int) else version
                problem = str(line.get("what")) if line.get("event") == "checkpoint failed" else problem
    if not started:
        return ""
    how = end.get("how", "finished") if end is not None else "was killed, or is still running,"
    error = str(end.get("error") or "").strip() if end is not None else ""
    after = f" after {version} updates" if version else " before its first update"
    return f"the run there {how}{after}{f' ({error})' if error else ''}, and no checkpoint was written{f' ({problem})' if problem else ''}"


class RunLock:
    """The exclusive right to write to a run folder, held while its run is alive.

    Raises where another run has it, or nothing can be written. The system releases it also after kill -9. Where a file system
    has no locks, every run gets it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            deadline = time.monotonic() + RECORD
            while not self._take(last=time.monotonic() > deadline):
                time.sleep(0.01)
            self._file.truncate(0)
            own = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
            self._file.write(json.dumps(own))
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"cannot use {folder} for a run: {error.strerror} ({error.filename}); use a writable one"
            ) from error

    def _take(self, *, last: bool) -> bool:
        """Return False where another try is needed; the `last` one raises instead.

        The previous owner may have just removed the file, or the new one may not have written its record yet.
        """
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner, pid = self._owner()
            if owner or last:
                raise UsageError(
                    f"{self._path.parent} holds a run that is alive: {owner or 'which process it is, is not written yet'}. Wait "
                    f"for it, end it (kill {pid or 'PID'} leaves a last checkpoint), or give another run_dir"
                ) from None
            return False
        except OSError:  # no locks there
            return True
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                return True
        self._file.close()
        return False

    def _owner(self) -> tuple[str, int]:
        """Return process, host and start in words, and the process.

        Return nothing while they are being written, or where the file names a process that has ended: its successor has the lock
        but has not written its record yet.
        """
        with self._file, contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            self._file.seek(0)
            owner = json.loads(self._file.read())
            pid, host = owner["pid"], owner["host"]
            if host == socket.gethostname():
                with contextlib.suppress(PermissionError):  # it is another user's, and alive
                    os.kill(pid, 0)
            return f"process {pid} on {host} since {time.ctime(owner['started'])}", pid
        return "", 0

    def release(self) -> None:
        """The file goes, too; only a process that was killed leaves one."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
            self._file.close()
