"""The servers topology: shards that fold, one of which leads (M3, M11).

`ServerRole` is one shard process's handler: an event comes in, effects go out through the port. Every shard carries out one log of
decisions (`LogApplier`): the same log gives the same weights. The leading shard also makes it (roles/leader.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.dial import Sync
from syncline.messages import log
from syncline.ports import FIRST_VALUES, Reading, ServerPort, Serving
from syncline.roles.leader import Leader
from syncline.table.accumulator import PromisedPart
from syncline.table.checkpoint_content import table_file
from syncline.table.checkpoints import FIRST, CheckpointError
from syncline.table.gradient_slot import SlotPart
from syncline.table.optimizer_template import Options
from syncline.table.shard import Shard, total_norm
from syncline.table.store import fill

FoldKey = tuple[int, int]  # table and iteration


class LogApplier:
    """Carries out the log on this shard's part of every table."""

    def __init__(self, port: ServerPort) -> None:
        self._port = port
        self.shards: dict[int, Shard] = {}
        self._makes: dict[int, m.MakeTable] = {}
        self._others: dict[int, Sequence[Tensor]] = {}  # by table: of the model, changed by no update
        self._parts: dict[tuple[int, int, Any], SlotPart | PromisedPart] = {}  # (table, learner, slot)
        # The last group options of each learner, parsed when their count changes: by table and learner.
        self._last_options: dict[tuple[int, int], tuple[int, Options]] = {}
        # Ranks and options of the gradients that each coming fold includes, by learner and number.
        self._taken: dict[FoldKey, dict[tuple[int, int], tuple[int, Options]]] = defaultdict(dict)
        self.blobs: dict[tuple[int, int, int], m.LoadState] = {}
        self._queue: deque[log.Entry] = deque()
        # Of those, the gradients that are folded in their slots: a slot is released with its fold.
        self._in_slots: dict[FoldKey, list[log.Take]] = defaultdict(list)
        self._norms_of: log.Fold | None = None  # the fold that waits for the other shards' norms
        self.dials: dict[int, Sync] = {}
        self._dial: dict[int, int] = {}  # table -> number of the dial in force
        self._to_compare: set[FoldKey] = set()  # folds with options that a learner has changed
        self._options_differ = False  # of learners in lockstep: reported once
        self.buffers: Callable[[int], list[Tensor] | None] = lambda table: None
        self.watch: Callable[[log.Entry], None] | None = None  # told of every entry that was carried out
        self._doing: dict[type, Callable[[Any], None]] = {
            log.Take: self._take,
            log.Fold: self._fold,
            log.Release: self._release,
            log.Free: lambda entry: port.release(entry.table, entry.learner, entry.number, None),
            log.PutValues: self._put,
            log.GiveState: self._state,
            log.LoadState: self._load,
            log.Snapshot: lambda entry: self._tell(entry.table, f"epoch:{entry.epoch}"),
            log.Finish: self._finish,
            log.Change: self._change,
            log.Cut: self._cut,
            log.Leave: self._leave,
        }

    # -- tables and learners -----------------------------------------------------------------------------

    def make_table(self, make: m.MakeTable) -> None:
        if self._port.shard >= make.layout.shards:
            return
        memory = self._port.memory(make.table)
        content, template = make.content, make.template
        if content is not None:
            fill(memory.places[0], make.layout, self._port.shard, content.values)
            template = content.of(template)
        self.shards[make.table] = Shard(
            make.layout,
            self._port.shard,
            template,
            memory,
            sync=self.dials[make.dial],
            clip_norm=make.clip_norm,
            version=make.account.version,
        )
        self._dial[make.table], self._others[make.table] = make.dial, memory.others
        self._makes[make.table] = make

    def begin(self, join: m.JoinTable) -> None:
        """What this learner has published are a table's first values, unless it goes on from a file."""
        table, shard = join.table, self.shards.get(join.table)
        if shard is None:
            return
        if self._makes[table].content is None:
            slot = self._port.receive(table, join.learner, FIRST_VALUES)
            shard.begin(slot.part(shard.part).segments)
        self._port.release(table, join.learner, FIRST_VALUES, None)
        if self._makes[table].first:
            self._port.save(FIRST, table_file(table, self._port.shard), shard.first(), {})

    @property
    def settled(self) -> bool:
        """All that was logged is carried out: what left in it is not needed any more."""
        return self._norms_of is None

    def _leave(self, leave: log.Leave) -> None:
        self._parts = {key: part for key, part in self._parts.items() if key[1] != leave.learner}
        self._last_options = {
            key: last for key, last in self._last_options.items() if key[1] != leave.learner
        }

    def options(self, table: int, iteration: int, learner: int, number: int) -> Options:
        """Return the group options of a gradient that was taken and is not folded yet."""
        return self._taken[self._fold_key(table, iteration)][learner, number][1]

    def _fold_key(self, table: int, iteration: int) -> FoldKey:
        """Name the fold that includes a gradient: of its iteration in lockstep, else the table's next."""
        return table, iteration if self.dials[self._dial[table]].lockstep else 0

    # -- the log -----------------------------------------------------------------------------------------

    def replay(self, entry: log.Entry) -> None:
        if not isinstance(entry, log.Leave) and entry.table not in self.shards:
            return
        if self._norms_of is not None:
            self._queue.append(entry)
            return
        self._doing[type(entry)](entry)
        if self.watch is not None and self._norms_of is None:
            self.watch(entry)

    def norms(self, event: m.Norms) -> None:
        """All shards' norms of the fold are in: clip, apply, go on."""
        entry, self._norms_of = self._norms_of, None
        assert entry is not None
        assert (entry.table, entry.version) == (event.table, event.version)
        shard = self.shards[entry.table]
        shard.clip(total_norm(shard.layout, event.norms))
        self._apply(entry, shard)
        if self.watch is not None:
            self.watch(entry)
        while self._queue and self._norms_of is None:
            self.replay(self._queue.popleft())

    def _cut(self, entry: log.Cut) -> None:
        name = table_file(entry.table, self._port.shard)
        try:
            tensors, notes = self.shards[entry.table].cut()
        except CheckpointError as error:  # optimizer state that is neither tensor nor plain
            self._port.tell(m.Saved(entry.checkpoint, name, None, str(error)))
        else:
            self._port.save(entry.checkpoint, name, tensors, notes)

    def _part(self, entry: log.Take | log.PutValues) -> SlotPart | PromisedPart:
        slot = self._port.receive(entry.table, entry.learner, entry.number)
        key = (entry.table, entry.learner, slot)
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = slot.part(self.shards[entry.table].part)
        return part

    def _take(self, entry: log.Take) -> None:
        part = self._part(entry)
        fold = self._fold_key(entry.table, entry.iteration)
        last = self._last_options.get((entry.table, entry.learner))
        if last is None or last[0] != entry.options:
            last = entry.options, part.slot.read_options()
            self._last_options[entry.table, entry.learner] = last
            self._to_compare.add(fold)
        self._taken[fold][entry.learner, entry.number] = entry.rank, last[1]
        added = self.shards[entry.table].take(
            part,
            full=entry.full,
            count=entry.examples,
            rank=entry.rank,
            iteration=entry.iteration,
            alone=entry.alone,
            damping=entry.weight,
        )
        if added:
            self._port.spend(Serving(log.Take, entry.table))
        if added or isinstance(part, PromisedPart):
            self._port.release(entry.table, entry.learner, entry.number, None)
        else:
            self._in_slots[fold].append(entry)

    def _fold(self, entry: log.Fold) -> None:
        shard = self.shards[entry.table]
        if self._to_compare:
            self._compare_options(entry)
        if added := shard.gather(entry.iteration):
            self._port.spend(Serving(log.Take, entry.table, added))
        if shard.clip_norm is None or shard.layout.shards == 1:
            self._apply(entry, shard)
        else:
            self._norms_of = entry
            self._port.share(entry.table, entry.version, shard.norms())

    def _apply(self, entry: log.Fold, shard: Shard) -> None:
        fold = self._fold_key(entry.table, entry.iteration)
        taken = self._taken.pop(fold)
        shard.apply(taken[entry.learner, entry.number][1], entry.factor)
        self._port.spend(Serving(log.Fold, entry.table))
        for take in self._in_slots.pop(fold, ()):
            self._port.release(take.table, take.learner, take.number, None)
        if shard.version != entry.version:
            raise AssertionError(
                f"shard {self._port.shard} made version {shard.version}, the log says {entry.version}"
            )

    def _compare_options(self, entry: log.Fold) -> None:
        """Warn once when learners in lockstep disagree about their group options (M4).

        A tree's nodes have chosen among their learners' options already.
        """
        fold = self._fold_key(entry.table, entry.iteration)
        lockstep, over_tree = self.dials[self._dial[entry.table]].lockstep, self._makes[entry.table].tree
        changed = fold in self._to_compare
        self._to_compare.discard(fold)
        if not changed or self._port.shard != 0 or self._options_differ or not lockstep or over_tree:
            return
        options = dict(self._taken[fold].values())
        ranks = sorted(options)
        if differ := [rank for rank in ranks if options[rank] != options[ranks[0]]]:
            self._options_differ = True
            text = (
                f"learners {ranks} disagree about the options of their parameter groups (ranks {differ} differ "
                f"from rank {ranks[0]}); each update uses those of the learner furthest along. Step the same "
                "scheduler in every learner."
            )
            self._port.tell(m.Warned(text, "options"))

    def _release(self, entry: log.Release | log.PutValues | log.LoadState) -> None:
        """The learner of this ticket goes on."""
        keep, delivered = (entry.keep, entry.deliver) if isinstance(entry, log.Release) else (False, False)
        reading = Reading(entry.version, self._dial[entry.table], keep, delivered)
        self._port.release(entry.table, entry.learner, entry.number, reading)

    def _put(self, entry: log.PutValues) -> None:
        part = self._part(entry)
        assert isinstance(part, SlotPart)
        self.shards[entry.table].put(entry.rank, part.segments)
        self._port.release(entry.table, entry.learner, entry.number, None)
        self._release(entry)

    def _change(self, entry: log.Change) -> None:
        self._dial[entry.table] = entry.dial
        self.shards[entry.table].change(self.dials[entry.dial])

    def _state(self, entry: log.GiveState) -> None:
        shard = self.shards[entry.table]
        found = (*shard.state(), shard.whole_state())
        self._port.tell(m.StatePart(entry.table, entry.number, entry.learner, self._port.shard, *found))

    def _load(self, entry: log.LoadState) -> None:
        blob = self.blobs.pop((entry.table, entry.learner, entry.number))
        self.shards[entry.table].load(blob.options, blob.state, blob.whole)
        self._release(entry)

    def _finish(self, entry: log.Finish) -> None:
        self.shards[entry.table].settle()
        self._tell(entry.table, "final")

    def _tell(self, table: int, tag: str) -> None:
        """The weights as they are."""
        shard, index = self.shards[table], self._port.shard
        values, buffers, own = shard.snapshot(), self.buffers(table), shard.own_options()
        final = tag == "final" and index == 0
        others = [each.clone() for each in self._others[table]] if final else None
        self._port.tell(m.WeightsPart(tag, table, index, shard.version, values, buffers, own, others))


class ServerRole:
    """One shard process's handler."""

    def __init__(self, port: ServerPort, replay: LogApplier | None = None) -> None:
        self._port = port
        self.replay = replay or LogApplier(port)
        self.entry = self.replay.replay  # a decision of the leading shard
        if port.shard == 0:
            self.leader = Leader(port, self.replay)
            self.note = self.leader.note  # what a learner says

    def handle(self, event: Any) -> None:
        """An event from the coordinator or another shard."""
        kind = type(event)
        if kind is m.Dial:
            self.replay.dials[event.number] = event.sync
        elif kind is m.MakeTable:
            self.replay.make_table(event)
        elif kind is m.JoinTable and event.first:
            self.replay.begin(event)
        elif kind is m.Norms:
            self.replay.norms(event)
        elif kind is tuple:  # (learner, LoadState)
            learner, blob = event
            self.replay.blobs[blob.table, learner, blob.number] = blob
            self._port.tell(m.Loaded(blob.table, blob.number, learner, self._port.shard))
        if self._port.shard == 0:
            self.leader.hear(event)
