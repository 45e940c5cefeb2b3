"""The coordinator's port: the machines of its run, and the folder of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline import messages as m
from syncline.engines.checkpoint_files import commit
from syncline.ports import CoordinatorPort
from syncline.roles.checkpoint_manifest import upto
from syncline.table.checkpoints import Written

if TYPE_CHECKING:
    from syncline.engines.local.supervisor import Supervisor


class LocalCoordinatorPort(CoordinatorPort):
    """The coordinator's effects, carried out by the supervisor."""

    def __init__(self, run: Supervisor) -> None:
        self._run = run
        self.shards = run.spec.plan.topology.shards

    def reply(self, learner: int, message: Any) -> None:
        self._run.staff.reply(learner, message)

    def tell_shards(self, message: Any) -> None:
        self._run.staff.tell_shards(message)

    def announce(self, what: m.Stop | m.Renewed | m.Call) -> None:
        if isinstance(what, m.Stop):
            self._run.stop_learners()
        elif isinstance(what, m.Renewed):
            self._run.staff.next_generation()
        else:
            self._run.staff.call_learners()

    def tell(self, message: Any) -> None:
        self._run.recorder.emit(message)

    # -- checkpoints -------------------------------------------------------------------------------------

    def commit(
        self, number: int, manifest: dict[str, Any] | None, files: Sequence[Written], *, prune: bool = True
    ) -> bool:
        run = self._run
        assert run.folder is not None
        if manifest is None:
            run.folder.abandon(number)
            return False
        manifest["history"] = upto(number, run.recorder.history())
        done = commit(run.folder, number, manifest, files, run.spec.storage.keep if prune else None)
        self.tell(done)
        if not done.problem:
            run.checkpointed(Path(done.path))
        return not done.problem
