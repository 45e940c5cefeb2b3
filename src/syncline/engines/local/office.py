"""The coordinator's port on this machine: shared memory, control channels, the folder of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.engines.files import commit
from syncline.engines.local.cargo import pack
from syncline.engines.local.memory import Region
from syncline.engines.local.server import Lane, Shelf
from syncline.ports import CoordinatorPort
from syncline.table.checkpoints import Written
from syncline.table.layout import Layout

if TYPE_CHECKING:
    from syncline.engines.local.supervisor import Supervisor


class Office(CoordinatorPort):
    """The coordinator's effects, carried out by the supervisor."""

    def __init__(self, run: Supervisor) -> None:
        self._run = run
        self.shards = run.spec.plan.topology.shards

    # -- memory ------------------------------------------------------------------------------------------

    def make_table(self, table: int, layout: Layout) -> Region:
        return self._run.staff.region(Shelf.nbytes(layout, places=self._run.staff.geometry.places))

    def fill_table(self, handle: Region, layout: Layout, values: Sequence[Tensor]) -> None:
        shelf = self._shelf(handle, layout)
        shelf.norms.clear()
        with torch.no_grad():
            for view, value in zip(layout.parameters.views(shelf.weights), values, strict=True):
                view.copy_(value)

    def read_table(self, handle: Region, layout: Layout) -> list[Tensor]:
        return [view.clone() for view in layout.parameters.views(self._shelf(handle, layout).weights)]

    def _shelf(self, handle: Region, layout: Layout) -> Shelf:
        """A mapping of its own: the run's could not be closed while tensors look at it."""
        region = Region(handle.nbytes, os.dup(handle.fd))
        return Shelf(region, layout, places=self._run.staff.geometry.places)

    def make_lane(self, table: int, learner: int, layout: Layout) -> Region:
        return self._run.staff.region(Lane.nbytes(layout, slots=self._run.staff.geometry.slots), learner)

    # -- words -------------------------------------------------------------------------------------------

    def reply(self, learner: int, message: Any) -> None:
        process = self._run.staff.learners.get(learner)
        if process is not None:
            process.channel.post(message)

    def tell_shards(self, message: Any) -> None:
        parcel = pack(message)  # once: a table's state is as large as the model
        for process in reversed(self._run.staff.shards):
            process.channel.post(parcel)
        parcel.close()

    def reset_learners(self) -> None:
        self._run.staff.next_generation()

    def call_learners(self) -> None:
        self._run.staff.call_learners()

    def new_desk(self, learner: int) -> tuple[int, Region]:
        return self._run.staff.generation, self._run.staff.introduce(learner)

    def stop_learners(self) -> None:
        self._run.stop_learners()

    def emit(self, record: Any) -> None:
        self._run.recorder.emit(record)

    # -- checkpoints -------------------------------------------------------------------------------------

    def commit(self, number: int, manifest: dict[str, Any], files: Sequence[Written]) -> bool:
        assert self._run.folder is not None
        done = commit(self._run.folder, number, manifest, files, self._run.spec.storage.keep)
        self.emit(done)
        if not done.problem:
            self._run.checkpointed(Path(done.path))
        return not done.problem

    def abandon(self, number: int) -> None:
        assert self._run.folder is not None
        self._run.folder.abandon(number)

    def history(self) -> list[dict[str, Any]]:
        return self._run.recorder.history()
