"""The coordinator's port on this machine: shared memory, control channels, the folder of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline import messages as m
from syncline.engines.checkpoint_files import commit
from syncline.engines.local.shared_memory import Region
from syncline.engines.local.table_memory import Lane, TableMemory
from syncline.ports import CoordinatorPort
from syncline.roles.checkpoint_manifest import upto
from syncline.table.checkpoints import Written
from syncline.table.layout import Layout

if TYPE_CHECKING:
    from syncline.engines.local.supervisor import Supervisor


class LocalCoordinatorPort(CoordinatorPort):
    """The coordinator's effects, carried out by the supervisor."""

    def __init__(self, run: Supervisor) -> None:
        self._run = run
        self.shards = run.spec.plan.topology.shards
        self._tables: dict[int, Region] = {}
        self._layouts: dict[int, Layout] = {}
        self._lanes: dict[tuple[int, int], Region] = {}  # by table and learner, until the learner has it

    # -- words -------------------------------------------------------------------------------------------

    def reply(self, learner: int, message: Any) -> None:
        process = self._run.staff.learners.get(learner)
        if process is not None:
            process.channel.post(self._with_own(learner, message))

    def tell_shards(self, message: Any) -> None:
        staff, message = self._run.staff, self._with_memory(message)
        staff.tell_shards(message)
        if staff.nodes is None:
            return
        if isinstance(message, m.MakeTable):
            staff.nodes.make_table(message.table, message.layout)
        elif isinstance(message, m.JoinTable):
            layout = self._layouts[message.table]
            staff.nodes.join_table(message.learner, message.table, layout, message.lane)

    def announce(self, what: m.Stop | m.Renewed | m.Call) -> None:
        if isinstance(what, m.Stop):
            self._run.stop_learners()
        elif isinstance(what, m.Renewed):
            self._run.staff.next_generation()
        else:
            self._run.staff.call_learners()

    # -- memory, which goes with them ----------------------------------------------------------------------

    def _with_memory(self, message: Any) -> Any:
        staff = self._run.staff
        if isinstance(message, m.MakeTable):
            region = self._table(message.table, message.layout)
            self._shelf(region, message.layout).clear()
            return replace(message, handle=region)
        if isinstance(message, m.JoinTable):
            staff.know(message.learner)
            layout = self._layouts[message.table]
            if not message.first:  # else it has published there already
                self._make_lane(message.table, message.learner, layout)
            return replace(message, lane=self._lanes[message.table, message.learner])
        if isinstance(message, m.JoinLoader):
            for learner in message.learners:
                staff.know(learner)
        return message

    def _with_own(self, learner: int, message: Any) -> Any:
        staff = self._run.staff
        if isinstance(message, m.Initialise):
            handle = self._table(message.table, message.layout)
            lane = self._make_lane(message.table, learner, message.layout)
            return replace(message, handle=handle, lane=lane)
        if isinstance(message, m.Opened):
            return self._opened(learner, message)
        if isinstance(message, m.Rejoined):
            tables = [self._opened(learner, opened) for opened in message.tables]
            return replace(message, tables=tables, desk=(staff.generation, staff.know(learner)))
        return message

    def _opened(self, learner: int, opened: m.Opened) -> m.Opened:
        lane = self._lanes.pop((opened.table, learner))
        return replace(opened, handle=self._tables[opened.table], lane=lane)

    def _make_lane(self, table: int, learner: int, layout: Layout) -> Region:
        staff = self._run.staff
        lane = staff.region(Lane.nbytes(layout, slots=staff.geometry.slots), learner)
        self._lanes[table, learner] = lane
        return lane

    def _table(self, table: int, layout: Layout) -> Region:
        if table not in self._tables:
            nbytes = TableMemory.nbytes(layout, places=self._run.staff.geometry.places)
            self._tables[table], self._layouts[table] = self._run.staff.region(nbytes), layout
        return self._tables[table]

    def _shelf(self, handle: Region, layout: Layout) -> TableMemory:
        """A mapping of its own: the run's could not be closed while tensors look at it."""
        region = Region(handle.nbytes, os.dup(handle.fd))
        return TableMemory(region, layout, places=self._run.staff.geometry.places)

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
