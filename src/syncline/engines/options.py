"""Options of a run that engines carry out: what happens at faults, and checkpoints. Checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from syncline.errors import NotYetError, UsageError
from syncline.learn.session import check_whole
from syncline.table.checkpoints import Folder, find
from syncline.topology.restore import restored

PATIENCE = 60.0  # seconds
EVENTS = "events.jsonl"  # in a run folder: a run is in it


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens when learners raise, die or hang."""

    on_error: str
    replace: bool
    patience: float | None
    kill_hung: bool

    def fields(self) -> dict[str, Any]:
        if self.on_error not in ("raise", "continue"):
            raise UsageError(f'on_error is "raise" or "continue", got {self.on_error!r}')
        if self.patience is not None and not self.patience > 0:
            raise UsageError(f"patience is a number of seconds > 0, or None, got {self.patience!r}")
        if self.kill_hung and self.patience is None:
            raise UsageError("kill_hung=True needs patience=, the seconds after which a learner hangs")
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints go, how often, and which one a run goes on from."""

    run_dir: str | Path | None
    resume: str | Path | None
    every: int | str | None
    keep: int
    clocks: bool = False  # the run folder keeps the vector clock of every update

    def fields(self, seed: int) -> dict[str, Any]:
        updates, seconds = self._every()
        check_whole("keep_checkpoints", self.keep)
        if not isinstance(self.clocks, bool):
            raise UsageError(f"clocks is True or False, got {self.clocks!r}")
        if self.clocks and self.run_dir is None and self.resume is None:
            raise UsageError("clocks=True needs run_dir=, the folder to write to")
        found = restored(find(self.resume)) if self.resume is not None else None
        if found is not None and found.seed != seed:
            raise UsageError(
                f"{found.name} was made with seed={found.seed}, this run has seed={seed}: the rest of its data would "
                f"be dealt in another order; give seed={found.seed}"
            )
        return {
            "folder": self._folder(),
            "cut_every": updates,
            "cut_seconds": seconds,
            "keep": self.keep,
            "clocks": self.clocks,
            "restored": found,
        }

    def refuse_all_reduce(self) -> None:
        """A run folder is written; checkpoints are the servers' so far."""
        for name, value in (("resume", self.resume), ("checkpoint_every", self.every)):
            if value is not None:
                raise NotYetError(
                    f"{name}={value!r} over all-reduce is understood but not built yet; use topology='servers', or save "
                    "what you need in a loop of your own"
                )

    def _every(self) -> tuple[int | None, float | None]:
        if self.every is None:
            return None, None
        if self.run_dir is None and self.resume is None:
            raise UsageError(f"checkpoint_every={self.every!r} needs run_dir=, the folder to write to")
        if isinstance(self.every, str):
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*s", self.every.strip())
            if match is None or float(match[1]) <= 0:
                raise UsageError(
                    f'checkpoint_every is a number of updates or seconds such as "30s", got {self.every!r}'
                )
            return None, float(match[1])
        check_whole("checkpoint_every", self.every)
        return self.every, None

    def _folder(self) -> str | None:
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
        elif self.resume is not None:
            path = Path(self.resume).resolve()
            root = next(
                (each for each in (path, *path.parents) if each.name == "checkpoints"), path / "checkpoints"
            )
        else:
            return None
        Folder(root).prepare()
        return str(root.resolve())
