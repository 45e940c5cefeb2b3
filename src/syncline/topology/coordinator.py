"""The coordinator: opens tables and loaders, gathers means and states, sees learners come and go.

A handler beside the learners' fast path: it never sees a gradient. Runs in the supervisor of the local
engine and inside the simulator; effects go out through its port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from syncline.dial import Course, Sync
from syncline.errors import LayoutError, UsageError
from syncline.ports import CoordinatorPort
from syncline.protocols.rendezvous import Rendezvous
from syncline.protocols.sequence import Account
from syncline.table.layout import Layout
from syncline.table.template import OptimizerTemplate
from syncline.topology import messages as m
from syncline.topology.cuts import Cuts
from syncline.topology.restore import Restored, TableState, manifest
from syncline.topology.waiting_room import WaitingRoom

PAST = -1  # the epoch of a dial that does not begin by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the coordinator must know of a run."""

    course: Course
    learners: int
    seed: int = 0
    warm: int = 0  # updates that the first learner makes alone
    batch_size: int | None = None
    limit: int | None = None
    clip_norm: float | None = None
    snapshots: bool = False  # the first loader's epochs end with a snapshot
    cuts: bool = False  # checkpoints are written
    every: int | None = None  # a checkpoint every so many versions


@dataclass(slots=True)
class _Table:
    layout: Layout
    handle: Any = None
    template: OptimizerTemplate | None = None  # once it is made
    start: TableState | None = None  # its first values, where a lost shard may need them
    initialiser: int | None = None
    waiting: set[int] = field(default_factory=set)

    @property
    def made(self) -> bool:
        return self.template is not None


class Coordinator:
    """Learners, tables and loaders of one run."""

    def __init__(
        self,
        port: CoordinatorPort,
        plan: Plan,
        learners: dict[int, int],
        restored: Restored | None = None,
    ) -> None:
        self._port, self._plan = port, plan
        self._restored = restored or Restored(name="the start", seed=plan.seed)
        self._dials: list[tuple[Sync, int | None]] = []  # with the epoch it begins with; None: at once
        self._chosen: dict[int, int] = {}  # dials that the user chose, by number, with the epoch in which
        self._epoch = self._restored.epoch  # of the first loader
        self.live = dict(learners)  # learner -> rank
        self._tables: dict[int, _Table] = {}
        self._loaders: dict[int, m.OpenLoader] = {}
        self._expect(learners)
        self._room = WaitingRoom(port, self.live, self._withdrawn)
        self._stale: set[int] = set()  # learners that know only servers that are gone
        self._rejoining: dict[int, m.Rejoin] = {}
        self._parts: dict[tuple[int, int, int], dict[int, m.StatePart]] = {}
        self._loads: dict[tuple[int, int, int], int] = {}
        self._cuts = Cuts()
        self._finish_later = False
        self._stopping = self._exact = False  # waits for a last checkpoint; has it
        self.reached = False

    def _expect(self, learners: Mapping[int, int]) -> None:
        """The first fold and the first epoch wait for these; in a warm start for one alone."""
        self._initial = dict(learners)
        if learners and self._restored.version < self._plan.warm:
            first = min(learners, key=lambda learner: learners[learner])
            self._initial = {first: learners[first]}
        self._openings = Rendezvous(self._initial)

    def layout(self, table: int) -> Layout:
        return self._tables[table].layout

    @property
    def tables(self) -> list[int]:
        return [number for number, table in sorted(self._tables.items()) if table.made]

    @property
    def cutting(self) -> bool:
        """A checkpoint is being written."""
        return self._cuts.open

    def stale(self, learner: int) -> bool:
        """It has not noticed that the servers are new ones."""
        return learner in self._stale

    def meeting(self) -> set[int]:
        """Learners that wait for others outside the sequence."""
        return set(self._room.asked)

    # -- the run -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The shards are there: they learn the dials first, and where the run stands."""
        for epoch, sync in self._plan.course.dials:
            self._add_dial(sync, epoch)
        if self._restored.sync == str(self._plan.course):  # else this run has another dial on purpose
            for sync, epoch in self._restored.chosen:
                self._chosen[len(self._dials)] = epoch
                self._add_dial(sync, PAST)
        self._tell_standing()

    def change(self, sync: Sync) -> None:
        """Another dial, at the next version."""
        self._chosen[len(self._dials)] = self._epoch
        self._add_dial(sync, None)

    def _add_dial(self, sync: Sync, epoch: int | None) -> None:
        number = len(self._dials)
        self._dials.append((sync, epoch))
        self._port.add_dial(number, sync)
        self._port.tell_shards(m.Dial(number, sync, epoch))

    def _tell_standing(self) -> None:
        self._port.tell_shards(
            m.Resume(
                self._plan.every,
                self._plan.cuts,
                self._restored.counts,
                tuple(self._initial),
                bool(self._stale),
            )
        )

    @property
    def _dial(self) -> int:
        """The dial to begin with: the one of the epoch, or the last that the user chose since its turn."""
        turned = self._plan.course.at(self._restored.epoch)
        begin = self._plan.course.dials[turned][0]
        chosen = [number for number, epoch in self._chosen.items() if epoch >= begin]
        return chosen[-1] if chosen else turned

    def stop(self) -> None:
        """End soon. In lockstep first a checkpoint of a whole round: what learners that leave still fold is less than one."""
        self._room.ending = True
        lockstep = any(sync.lockstep for sync, _ in self._dials)
        if self._plan.cuts and lockstep and self.tables and not self._stopping:
            self._stopping = True
            self.ask_cut()
        elif not self._stopping:
            self._port.stop_learners()

    def finish(self) -> None:
        """All learners have left."""
        if self._cuts.open:
            self._finish_later = True
        else:
            self._port.tell_shards(m.Finish(cut=not self._exact))

    # -- learners ----------------------------------------------------------------------------------------

    def join(self, learner: int, rank: int) -> None:
        """A new one starts; it will open tables and loaders when it is there."""
        self.live[learner] = rank

    def begin_anew(self, learners: Mapping[int, int]) -> None:
        """Nobody is left: these open tables and loaders together, as in the beginning."""
        self.live.update(learners)
        self._expect(learners)

    def from_learner(self, learner: int, message: Any) -> None:
        """A learner's request, in words of `topology.messages`."""
        if isinstance(message, m.Log):
            self._port.emit((self.live.get(learner), message))
            return
        if learner not in self.live:  # its last words came late
            return
        self._room.enter(learner, message)
        if learner in self._stale and not isinstance(message, m.Rejoin):
            self._reply(learner, m.Stale())
            return
        handlers: dict[type, Callable[[int, Any], None]] = {
            m.Open: self._open,
            m.Initialised: self._initialised,
            m.OpenLoader: self._open_loader,
            m.MeanOf: lambda *_: self._room.try_met(),
            m.LoadState: self._load,
            m.AwaitState: self._await_state,
            m.Rejoin: self._rejoin,
        }
        try:
            handlers[type(message)](learner, message)
        except (UsageError, LayoutError) as error:
            self._reply(learner, m.Refused(error))
        self._room.look(learner)

    def _reply(self, learner: int, message: Any) -> None:
        self._room.reply(learner, message)

    def leave(self, learner: int, *, lost: bool) -> None:
        """It returned, raised or died."""
        rank = self.live.pop(learner, None)
        if rank is None:
            return
        self._room.leave(learner)
        self._rejoining.pop(learner, None)
        self._stale.discard(learner)
        self._port.tell_shards(m.Leave(learner, rank, lost))
        for (_, loader), brought in self._openings.leave(learner):
            self._join_loader(loader, self._room.by_rank(brought))
        self._room.try_met()
        for number, table in self._tables.items():
            table.waiting.discard(learner)
            if table.initialiser == learner and not table.made:
                table.initialiser = None
            self._choose_initialiser(number, table)
        self._try_rejoin()
        self._room.tell()

    # -- tables ------------------------------------------------------------------------------------------

    def _open(self, learner: int, message: m.Open) -> None:
        table = self._tables.setdefault(message.table, _Table(message.layout))
        if difference := table.layout.difference(message.layout):
            rank = self.live[learner]
            raise LayoutError(
                f"table {message.table}: learner {rank} built another layout than the learners before it, {difference}. "
                "Every learner must create the same model and optimizer in the same order; "
                "seeds may differ, shapes and groups may not."
            )
        kept = self._restored.tables.get(message.table)
        if kept is not None and (difference := kept.layout.difference(message.layout)):
            raise LayoutError(
                f"{self._restored.name} was made by another model: table {message.table} there and here, {difference}. "
                "Resume with the model and parameter groups it was made with."
            )
        if table.made:
            self._join(message.table, table, learner)
            return
        table.waiting.add(learner)
        self._choose_initialiser(message.table, table)

    def _choose_initialiser(self, number: int, table: _Table) -> None:
        """The lowest live rank's parameters initialise the table (M6)."""
        if table.made or table.initialiser is not None or not self.live:
            return
        lowest = min(self.live, key=lambda learner: self.live[learner])
        if lowest in table.waiting:
            table.initialiser = lowest
            if table.handle is None:
                table.handle = self._port.make_table(number, table.layout)
            self._reply(lowest, m.Initialise(table.handle))

    def _initialised(self, learner: int, message: m.Initialised) -> None:
        table = self._tables[message.table]
        kept = self._restored.tables.get(message.table)
        if kept is not None and kept.optimizer != _name(message.template):
            raise UsageError(
                f"{self._restored.name} holds the state of {kept.optimizer}, this run has {_name(message.template)} "
                "for that table; resume with the optimizer it was made with"
            )
        table.template = message.template
        if self._plan.cuts:
            values = self._port.read_table(table.handle, table.layout)
            table.start = TableState(
                layout=table.layout,
                optimizer=_name(message.template),
                values=values,
                state=message.template.state,
            )
        self._make(message.table, table)
        for waiting in sorted(table.waiting, key=lambda waiting: self.live[waiting]):
            self._join(message.table, table, waiting)
        table.waiting.clear()

    def _make(self, number: int, table: _Table) -> None:
        """Tell the shards of a table: its first values, or those of the checkpoint."""
        plan, kept = self._plan, self._restored.tables.get(number)
        assert table.template is not None
        if kept is not None:
            self._port.fill_table(table.handle, table.layout, kept.values)
        known = self._restored.tables.get(number, table.start)
        self._port.tell_shards(
            m.MakeTable(
                table=number,
                layout=table.layout,
                template=replace(table.template, state=known.state) if known else table.template,
                dial=self._dial,
                initial={learner: rank for learner, rank in self._initial.items() if learner in self.live},
                learners=plan.learners,
                warm=plan.warm if number == 0 else 0,
                batch_size=plan.batch_size,
                limit=plan.limit if number == 0 else None,
                clip_norm=plan.clip_norm,
                handle=table.handle,
                account=known.account if known else Account(),
            )
        )

    def _join(self, number: int, table: _Table, learner: int) -> None:
        self._reply(learner, self._opened(number, table, learner))

    def _opened(self, number: int, table: _Table, learner: int) -> m.Opened:
        rank = self.live[learner]
        lane = self._port.make_lane(number, learner, table.layout)
        personal = self._restored.learners.get(rank)
        buffers = personal.buffers.get(number) if personal else None
        self._port.tell_shards(m.JoinTable(number, learner, rank, lane, buffers))
        return m.Opened(number, table.layout, table.handle, lane, personal)

    # -- loaders -----------------------------------------------------------------------------------------

    def _open_loader(self, learner: int, message: m.OpenLoader) -> None:
        first = self._loaders.get(message.loader, message)
        if first != message:
            raise UsageError(
                f"learner {self.live[learner]} opened loader {message.loader} with {message.size} examples in batches "
                f"of {message.batch_size} ({message.policy}), another learner with {first.size} in batches of "
                f"{first.batch_size} ({first.policy}). Every learner must open the same loaders in the same order."
            )
        if message.loader not in self._loaders:
            self._make_loader(message)
            self._loaders[message.loader] = message
        if learner in self._initial:  # all begin with the first epoch, and a joint round is cut for all
            brought = self._openings.bring(("loader", message.loader), learner, message)
            if brought is not None:
                self._join_loader(message.loader, self._room.by_rank(brought))
        else:
            self._join_loader(message.loader, [learner])

    def _make_loader(self, opened: m.OpenLoader) -> None:
        kept = self._restored.loaders.get(opened.loader)
        if kept is not None and (kept.size, kept.policy) != (opened.size, opened.policy):
            raise UsageError(
                f"{self._restored.name} was made with {kept.size} examples in loader {opened.loader} ({kept.policy}), "
                f"this run has {opened.size} ({opened.policy}); resume with the data it was made with"
            )
        self._port.tell_shards(
            m.MakeLoader(
                loader=opened.loader,
                size=opened.size,
                batch_size=opened.batch_size,
                policy=opened.policy,
                epochs=opened.epochs,
                dial=self._dial,
                parts=self._parts_of(opened.loader),
                snapshot=self._plan.snapshots and opened.loader == 0,
                standing=kept.standing if kept else None,
            )
        )

    def _parts_of(self, loader: int) -> int:
        kept = self._restored.loaders.get(loader)
        return kept.parts if kept else self._plan.learners

    def _join_loader(self, loader: int, learners: Sequence[int]) -> None:
        self._port.tell_shards(m.JoinLoader(loader, {learner: self.live[learner] for learner in learners}))
        for learner in learners:
            self._reply(learner, self._parts_of(loader))

    def _withdrawn(self, learner: int, opening: m.Open | m.OpenLoader) -> None:
        """It waits no more for others to open this too: its loop differs from theirs."""
        if isinstance(opening, m.Open):
            self._tables[opening.table].waiting.discard(learner)
        else:
            self._openings.withdraw(("loader", opening.loader), learner)

    # -- servers that were started anew --------------------------------------------------------------------

    def recover(self, restored: Restored | None, learners: Mapping[int, int]) -> None:
        """The shards were lost and are new: all goes back to the checkpoint, or to the start.

        Live learners rejoin; `learners` are those that start anew, where none is left.
        """
        if restored is not None:
            self._restored = restored
        self._epoch = self._restored.epoch
        self.live.update(learners)
        self._stale = set(self.live) - set(learners)
        self._parts.clear()
        self._loads.clear()
        self._room.reset()
        self._cuts = Cuts()
        self._finish_later = self._stopping = self._exact = self.reached = False
        for number, (sync, epoch) in enumerate(self._dials):
            self._port.tell_shards(m.Dial(number, sync, PAST if epoch is None else epoch))
        self._expect(self.live)
        self._tell_standing()
        for number, table in sorted(self._tables.items()):
            table.waiting.clear()
            if table.made:
                if number not in self._restored.tables and table.start is not None:
                    self._port.fill_table(table.handle, table.layout, table.start.values)
                self._make(number, table)
            else:
                table.initialiser = None
        for opened in self._loaders.values():
            self._make_loader(opened)
        self._port.reset_learners()
        for learner, message in self._room.asked.items():
            if learner in self._stale and not isinstance(message, m.Rejoin):
                self._reply(learner, m.Stale())
        self._try_rejoin()

    def _rejoin(self, learner: int, message: m.Rejoin) -> None:
        self._rejoining[learner] = message
        self._try_rejoin()

    def _try_rejoin(self) -> None:
        """All at once: the first fold and the first joint round are for all of them."""
        if not self._stale or self._stale - self._rejoining.keys():
            return
        back, self._rejoining, self._stale = self._rejoining, {}, set()
        ordered = sorted(back, key=lambda learner: self.live[learner])
        desks = {learner: self._port.new_desk(learner) for learner in ordered}
        opened = {
            learner: [
                self._opened(number, self._tables[number], learner) for number in range(back[learner].tables)
            ]
            for learner in ordered
        }
        for loader in self._loaders:
            joining = {learner: self.live[learner] for learner in ordered if back[learner].loaders > loader}
            if joining:
                self._port.tell_shards(m.JoinLoader(loader, joining))
        for learner in ordered:
            self._initial.pop(learner, None)  # it opens further loaders by itself
            for (_, loader), brought in self._openings.leave(learner):
                self._join_loader(loader, self._room.by_rank(brought))
            self._reply(learner, m.Rejoined(desks[learner], opened[learner]))

    # -- optimizer states --------------------------------------------------------------------------------

    def _load(self, learner: int, message: m.LoadState) -> None:
        self._loads[message.table, message.number, learner] = 0
        self._port.tell_shards((learner, message))

    def _await_state(self, learner: int, message: m.AwaitState) -> None:
        self._parts.setdefault((message.table, message.number, learner), {})
        self._try_state((message.table, message.number, learner), asked=True)

    def _try_state(self, key: tuple[int, int, int], *, asked: bool) -> None:
        parts = self._parts.get(key, {})
        if asked:
            self._loads[key] = -1  # marks that the learner waits
        if len(parts) == self._tables[key[0]].layout.shards and self._loads.get(key) == -1:
            del self._parts[key], self._loads[key]
            self._reply(key[2], [parts[shard] for shard in sorted(parts)])

    # -- shards ------------------------------------------------------------------------------------------

    def from_shard(self, message: Any) -> None:
        kind = type(message)
        if kind is m.StatePart:
            key = (message.table, message.number, message.learner)
            self._parts.setdefault(key, {})[message.shard] = message
            self._try_state(key, asked=False)
        elif kind is m.Loaded:
            self._loaded(message)
        elif kind in (m.Cut, m.Saved):
            self._cut(message)
        elif kind is m.Met:
            self._room.met(message)
            self._room.tell()
        elif kind is m.Standstill:
            self._room.standstill(message)
        elif kind is m.Reached:
            self.reached = self._room.ending = True
            self._port.stop_learners()
        else:
            if kind is m.EpochEnd and message.loader == 0:
                self._epoch = message.epoch + 1
            self._port.emit(message)

    def _loaded(self, message: m.Loaded) -> None:
        key = (message.table, message.number, message.learner)
        self._loads[key] += 1
        if self._loads[key] == self._port.shards:
            del self._loads[key]
            self._reply(message.learner, True)

    # -- checkpoints -------------------------------------------------------------------------------------

    def ask_cut(self) -> None:
        self._port.tell_shards(m.AskCut())

    def _cut(self, message: m.Cut | m.Saved) -> None:
        if self._stopping and not self._exact and isinstance(message, m.Cut):
            self._exact = True
            self._port.stop_learners()
        self._cuts.add(message)
        done = self._cuts.complete()
        if done is None:
            return
        if done.problem:
            self._port.abandon(done.cut.number)
            self._port.emit(m.Checkpointed(done.cut.number, "", done.problem))
        elif self._port.commit(done.cut.number, self._manifest(done.cut), done.files):
            for number in done.cut.accounts:
                self._tables[number].start = None
        self._port.tell_shards(m.CutDone())
        if self._finish_later:
            self._finish_later = False
            self._port.tell_shards(m.Finish(cut=not self._exact))

    def _manifest(self, cut: m.Cut) -> dict[str, Any]:
        return manifest(
            cut,
            seed=self._plan.seed,
            sync=str(self._plan.course),
            chosen=[(self._dials[number][0], epoch) for number, epoch in self._chosen.items()],
            learners=self._plan.learners,
            tables={
                number: (self._tables[number].layout, _name(self._tables[number].template))
                for number in cut.accounts
            },
            loaders={number: (self._loaders[number], self._parts_of(number)) for number in cut.standings},
            history=self._port.history(),
        )


def _name(template: OptimizerTemplate | None) -> str:
    assert template is not None
    return f"{template.kind.__module__}.{template.kind.__qualname__}"
