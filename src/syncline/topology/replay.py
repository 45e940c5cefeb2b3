"""Carrying out the log: what every shard does with the leading shard's decisions (M3, M11).

Not responsible for making any: the same log gives the same weights on every shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from syncline.dial import Sync
from syncline.ports import Entry, Kind, Reading, ServerPort
from syncline.table.checkpoints import CheckpointError
from syncline.table.promised import PromisedPart
from syncline.table.shard import Shard, total_norm
from syncline.table.slot import SlotPart
from syncline.table.template import Options
from syncline.topology import messages as m
from syncline.topology.restore import table_file

TAKE, FOLD, RELEASE = map(int, (Kind.TAKE, Kind.FOLD, Kind.RELEASE))
OPTIONS_KEPT = 256  # gradients of one learner that may wait for a fold


class _Told:
    """The group options that came with one learner's last gradients; parsed only when they changed."""

    def __init__(self) -> None:
        self.by_number: dict[int, Options] = {}
        self._serial, self._last = -1, []  # type: int, Options

    def take(self, number: int, serial: int, part: SlotPart | PromisedPart) -> bool:
        """True if they changed."""
        changed = serial != self._serial
        if changed:
            self._serial, self._last = serial, part.slot.read_options()
        self.by_number[number] = self._last
        if len(self.by_number) > OPTIONS_KEPT:
            del self.by_number[next(iter(self.by_number))]
        return changed


class Replay:
    """Carries out the log on this shard's part of every table."""

    def __init__(self, port: ServerPort) -> None:
        self._port = port
        self._shards: dict[int, Shard] = {}
        self._parts: dict[tuple[int, int, int], SlotPart | PromisedPart] = {}  # (table, learner, slot)
        self._served: dict[tuple[int, int], int] = {}  # (table, learner) -> version it has
        self._options: dict[tuple[int, int], _Told] = {}
        self._blobs: dict[tuple[int, int, int], m.LoadState] = {}
        self._queue: deque[Entry] = deque()
        self._norms_of: Entry | None = None  # the fold that waits for the other shards' norms
        self.dials: dict[int, Sync] = {}
        self._dial: dict[int, int] = {}  # table -> number of the dial in force
        self.options_changed = False  # since somebody last looked
        self.buffers: Callable[[int], list[Tensor] | None] = lambda table: None
        self.watch: Callable[[Entry], None] | None = None  # told of every entry that was carried out

    # -- tables and learners -----------------------------------------------------------------------------

    def make_table(self, make: m.MakeTable) -> None:
        if self._port.shard >= make.layout.shards:
            return
        self._shards[make.table] = Shard(
            make.layout,
            self._port.shard,
            make.template,
            self._port.memory(make.table),
            sync=self.dials[make.dial],
            clip_norm=make.clip_norm,
            version=make.account.version,
        )
        self._dial[make.table] = make.dial

    def shard(self, table: int) -> Shard:
        return self._shards[table]

    def _forget(self, learner: int) -> None:
        self._parts = {key: part for key, part in self._parts.items() if key[1] != learner}
        self._port.forget(learner)

    def keep_blob(self, learner: int, blob: m.LoadState) -> None:
        self._blobs[blob.table, learner, blob.number] = blob

    def options(self, table: int, learner: int, number: int) -> Options:
        return self._options[table, learner].by_number[number]

    # -- the log -----------------------------------------------------------------------------------------

    def replay(self, entry: Entry) -> None:
        if entry.table not in self._shards and entry.kind != Kind.LEAVE:
            return
        if self._norms_of is not None:
            self._queue.append(entry)
        else:
            self._do(entry)

    def norms(self, event: m.Norms) -> None:
        """All shards' norms of the fold are in: clip, apply, go on."""
        entry, self._norms_of = self._norms_of, None
        assert entry is not None
        assert (entry.table, entry.version) == (event.table, event.version)
        shard = self._shards[entry.table]
        shard.clip(total_norm(shard.layout, event.norms))
        self._apply(entry, shard)
        if self.watch is not None:
            self.watch(entry)
        while self._queue and self._norms_of is None:
            self._do(self._queue.popleft())

    def _do(self, entry: Entry) -> None:
        kind = entry.kind
        if kind == TAKE:
            self._take(entry)
        elif kind == FOLD:
            self._fold(entry)
        elif kind == RELEASE:
            self._release(entry)
        elif kind == Kind.PUT:
            part = self._part(entry)
            assert isinstance(part, SlotPart)
            self._shards[entry.table].put(entry.rank, part.segments)
            self._let_go(entry)
        elif kind == Kind.STATE:
            self._state(entry)
        elif kind == Kind.LOAD:
            self._load(entry)
        elif kind in (Kind.SNAPSHOT, Kind.FINISH):
            self._snapshot(entry)
        elif kind == Kind.CUT:
            self._cut(entry)
        elif kind == Kind.CHANGE:
            self._dial[entry.table] = entry.iteration
            self._shards[entry.table].change(self.dials[entry.iteration])
        elif kind == Kind.LEAVE:
            self._forget(entry.learner)
        if self.watch is not None and self._norms_of is None:
            self.watch(entry)

    def _cut(self, entry: Entry) -> None:
        name = table_file(entry.table, self._port.shard)
        try:
            tensors, notes = self._shards[entry.table].cut()
        except CheckpointError as error:  # optimizer state that is neither tensor nor plain
            self._port.report(m.Saved(entry.number, name, None, str(error)))
        else:
            self._port.save(entry.number, name, tensors, notes)

    def _part(self, entry: Entry) -> SlotPart | PromisedPart:
        key = (entry.table, entry.learner, entry.slot)
        part = self._parts.get(key)
        if part is None:
            slot = self._port.slot(*key)
            part = self._parts[key] = slot.part(self._shards[entry.table].part)
        return part

    def _take(self, entry: Entry) -> None:
        part = self._part(entry)
        told = self._options.get((entry.table, entry.learner))
        if told is None:
            told = self._options[entry.table, entry.learner] = _Told()
        if told.take(entry.number, entry.serial, part):
            self.options_changed = True
        added = self._shards[entry.table].take(
            part,
            full=bool(entry.full),
            count=entry.examples,
            rank=entry.rank,
            iteration=entry.iteration,
            alone=bool(entry.alone),
            damping=entry.factor,
        )
        if added:
            self._port.spend(TAKE, entry.table)

    def _fold(self, entry: Entry) -> None:
        shard = self._shards[entry.table]
        if added := shard.gather(entry.iteration):
            self._port.spend(TAKE, entry.table, added)
        if shard.clip_norm is None:
            self._apply(entry, shard)
        elif shard.layout.shards == 1:
            shard.clip_alone()
            self._apply(entry, shard)
        else:
            self._norms_of = entry
            self._port.share_norms(entry.table, entry.version, shard.norms())

    def _apply(self, entry: Entry, shard: Shard) -> None:
        shard.apply(self.options(entry.table, entry.learner, entry.number), entry.factor)
        self._port.spend(FOLD, entry.table)
        if shard.version != entry.version:
            raise AssertionError(
                f"shard {self._port.shard} made version {shard.version}, the log says {entry.version}"
            )

    def _release(self, entry: Entry) -> None:
        key = (entry.table, entry.learner)
        if not entry.full:
            self._port.release(*key, entry.number, None)
            return
        copies = entry.full == 1 and not self.dials[self._dial[entry.table]].lockstep
        if copies and self._served.get(key, -1) != entry.version:  # R4: not what it has already
            inbox = self._port.inbox(*key, entry.version)
            if inbox is not None:
                self._shards[entry.table].read(entry.version, inbox)
            self._served[key] = entry.version
        self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        """The learner of this ticket goes on; in a release, `alone` asks for its random states."""
        reading = Reading(entry.version, self._dial[entry.table], entry.alone)
        self._port.release(entry.table, entry.learner, entry.number, reading)

    def _state(self, entry: Entry) -> None:
        shard = self._shards[entry.table]
        options, state = shard.state()
        whole = shard.whole_state()
        self._port.report(
            m.StatePart(entry.table, entry.number, entry.learner, self._port.shard, options, state, whole)
        )

    def _load(self, entry: Entry) -> None:
        blob = self._blobs.pop((entry.table, entry.learner, entry.number))
        self._shards[entry.table].load(blob.options, blob.state, blob.whole)
        self._let_go(entry)

    def _snapshot(self, entry: Entry) -> None:
        shard = self._shards[entry.table]
        tag = "final" if entry.kind == Kind.FINISH else f"epoch:{entry.iteration}"
        if entry.kind == Kind.FINISH:
            shard.settle()
        self._port.report(
            m.WeightsPart(
                tag,
                entry.table,
                self._port.shard,
                shard.version,
                shard.snapshot(),
                self.buffers(entry.table),
                shard.own_options(),
            )
        )
