"""The servers topology: shards that fold, one of which leads (M3, M11).

Every shard replays one log of decisions (`Replay`); the leading shard also makes it (`Leader`), by running the pure
protocols on what learners say. Handlers only: an event comes in, effects go out through the port.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from syncline.ports import OUTSIDE, Entry, Kind, Note, Portion, ServerPort
from syncline.protocols.folding import Ticket
from syncline.protocols.ledger import Decision as LedgerDecision
from syncline.protocols.ledger import End, EpochDone, Grant, Ledger
from syncline.protocols.sequence import Decision, Drop, Fold, Full, Sequence, Take
from syncline.protocols.waiting import Release
from syncline.table.shard import Shard, total_norm
from syncline.table.slot import SlotPart
from syncline.table.template import Options
from syncline.topology import messages as m

Usage = list[tuple[int, int]]  # (loader, upto)


class Replay:
    """Carries out the log on this shard's part of every table."""

    def __init__(self, port: ServerPort) -> None:
        self._port = port
        self._shards: dict[int, Shard] = {}
        self._parts: dict[tuple[int, int, int], SlotPart] = {}  # (table, learner, slot)
        self._served: dict[tuple[int, int], int] = {}  # (table, learner) -> version it has
        self._options: dict[tuple[int, int], deque[tuple[int, int, Options]]] = {}
        self._blobs: dict[tuple[int, int, int], m.LoadState] = {}
        self._queue: deque[Entry] = deque()
        self._norms_of: Entry | None = None  # the fold that waits for the other shards' norms
        self.buffers: Callable[[int], list[Tensor] | None] = lambda table: None

    # -- tables and learners -----------------------------------------------------------------------------

    def make_table(self, make: m.MakeTable) -> None:
        if self._port.shard >= make.layout.shards:
            return
        weights, history = self._port.weights(make.table)
        self._shards[make.table] = Shard(
            make.layout,
            self._port.shard,
            make.template,
            weights,
            history=history,
            lockstep=make.sync.lockstep,
            clip_norm=make.clip_norm,
        )

    def shard(self, table: int) -> Shard:
        return self._shards[table]

    def _forget(self, learner: int) -> None:
        self._parts = {key: part for key, part in self._parts.items() if key[1] != learner}
        self._port.forget(learner)

    def keep_blob(self, learner: int, blob: m.LoadState) -> None:
        self._blobs[blob.table, learner, blob.number] = blob

    def options(self, table: int, learner: int, number: int) -> Options:
        return next(options for n, _, options in self._options[table, learner] if n == number)

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
        while self._queue and self._norms_of is None:
            self._do(self._queue.popleft())

    def _do(self, entry: Entry) -> None:
        kind = entry.kind
        if kind == Kind.TAKE:
            self._take(entry)
        elif kind == Kind.FOLD:
            self._fold(entry)
        elif kind == Kind.RELEASE:
            self._release(entry)
        elif kind == Kind.PUT:
            part = self._part(entry)
            self._shards[entry.table].put(entry.rank, part.segments)
            self._port.release(entry.table, entry.learner, entry.number, entry.version)
        elif kind == Kind.STATE:
            self._state(entry)
        elif kind == Kind.LOAD:
            self._load(entry)
        elif kind in (Kind.SNAPSHOT, Kind.FINISH):
            self._snapshot(entry)
        elif kind == Kind.LEAVE:
            self._forget(entry.learner)

    def _part(self, entry: Entry) -> SlotPart:
        key = (entry.table, entry.learner, entry.slot)
        part = self._parts.get(key)
        if part is None:
            slot = self._port.slot(*key)
            part = self._parts[key] = slot.part(self._shards[entry.table].part)
        return part

    def _take(self, entry: Entry) -> None:
        part = self._part(entry)
        held = self._options.get((entry.table, entry.learner))
        if held is None:
            held = self._options[entry.table, entry.learner] = deque(maxlen=64)
        if held and held[-1][1] == entry.serial:
            held.append((entry.number, entry.serial, held[-1][2]))
        else:
            held.append((entry.number, entry.serial, part.slot.read_options()))
        self._shards[entry.table].take(
            part,
            full=bool(entry.full),
            count=entry.count,
            rank=entry.rank,
            iteration=entry.iteration,
            alone=bool(entry.alone),
        )

    def _fold(self, entry: Entry) -> None:
        shard = self._shards[entry.table]
        shard.gather(entry.iteration)
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
        if shard.version != entry.version:
            raise AssertionError(
                f"shard {self._port.shard} made version {shard.version}, the log says {entry.version}"
            )

    def _release(self, entry: Entry) -> None:
        key = (entry.table, entry.learner)
        inbox = self._port.inbox(*key)
        if inbox is not None and self._served.get(key, -1) != entry.version:  # R4: not what it has already
            self._shards[entry.table].read(entry.version, inbox)
            self._served[key] = entry.version
        self._port.release(entry.table, entry.learner, entry.number, entry.version)

    def _state(self, entry: Entry) -> None:
        options, state = self._shards[entry.table].state()
        self._port.report(
            m.StatePart(entry.table, entry.number, entry.learner, self._port.shard, options, state)
        )

    def _load(self, entry: Entry) -> None:
        blob = self._blobs.pop((entry.table, entry.learner, entry.number))
        self._shards[entry.table].load(blob.options, blob.state)
        self._port.release(entry.table, entry.learner, entry.number, entry.version)

    def _snapshot(self, entry: Entry) -> None:
        shard = self._shards[entry.table]
        tag = "final" if entry.kind == Kind.FINISH else f"epoch:{entry.iteration}"
        if entry.kind == Kind.FINISH:
            shard.settle()
        self._port.report(
            m.WeightsPart(
                tag, entry.table, self._port.shard, shard.version, shard.snapshot(), self.buffers(entry.table)
            )
        )


class Leader:
    """Makes the log: the pure protocols, fed by what learners and the coordinator say."""

    def __init__(self, port: ServerPort, replay: Replay) -> None:
        self._port, self._replay = port, replay
        self._sequences: dict[int, Sequence] = {}
        self._ledgers: dict[int, Ledger] = {}
        self._evaluated: set[int] = set()  # loaders whose epochs end with a snapshot
        self._ranks: dict[int, int] = {}
        self._granted: dict[tuple[int, int], int] = defaultdict(int)  # (loader, learner) -> portions given
        self._resting: dict[int, int] = {}  # learner -> loader it waits for
        self._usage: dict[int, Usage] = defaultdict(list)
        self._open_usage: dict[tuple[int, int, int], Usage] = {}  # (table, learner, number)
        self._notes: dict[tuple[int, int, int], Note] = {}
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}
        self._steps: dict[int, int] = defaultdict(int)
        self._last_loss: dict[int, float] = {}
        self._losses: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # rank -> [sum, count]
        self._examples: dict[int, int] = defaultdict(int)
        self._warned = False
        self._todo: deque[tuple[int, Any]] = deque()
        self._working = False
        replay.buffers = self._mean_buffers

    # -- the coordinator's events ------------------------------------------------------------------------

    def make_table(self, make: m.MakeTable) -> None:
        self._sequences[make.table] = Sequence(
            make.sync, initial=make.initial, batch_size=make.batch_size, limit=make.limit
        )

    def join_table(self, join: m.JoinTable) -> None:
        self._ranks[join.learner] = join.rank
        self._decided(join.table, self._sequences[join.table].join(join.learner, join.rank, 0))

    def make_loader(self, make: m.MakeLoader) -> None:
        self._ledgers[make.loader] = Ledger(
            size=make.size,
            batch_size=make.batch_size,
            epochs=make.epochs,
            lockstep=make.lockstep,
            partition=make.policy == "partition",
            learners=make.learners,
        )
        if make.snapshot:
            self._evaluated.add(make.loader)

    def join_loader(self, join: m.JoinLoader) -> None:
        ledger = self._ledgers[join.loader]
        for learner, rank in join.learners.items():
            self._ranks[learner] = rank
            self._fed(join.loader, ledger.join(learner, rank))
            self._port.grant(learner, Portion(join.loader, OUTSIDE, ledger.epoch(learner), 0, 0))

    def leave(self, learner: int, *, lost: bool) -> None:
        self._resting.pop(learner, None)
        if lost:
            self._lose_buffers(learner)
        for table, sequence in self._sequences.items():
            self._decided(table, sequence.leave(learner))
        for loader, ledger in self._ledgers.items():
            self._fed(loader, ledger.leave(learner))
        self._log(Entry(Kind.LEAVE, learner=learner))

    def finish(self) -> None:
        for table, sequence in self._sequences.items():
            self._decided(table, sequence.finish())
            self._log(Entry(Kind.FINISH, table, version=sequence.version))

    # -- the learners' notes -----------------------------------------------------------------------------

    def note(self, learner: int, note: Note) -> None:
        kind = note.kind
        if kind == Kind.GRADIENT:
            self._gradient(learner, note)
        elif kind == Kind.ASK:
            self._fed(note.loader, self._ledgers[note.loader].ask(learner, note.upto))
        elif kind == Kind.USED:
            self._usage[learner].append((note.loader, note.upto))
        elif kind == Kind.CLOSE:
            self._close(learner, note)
        elif kind == Kind.REST:
            self._rest(learner, note)
        elif kind in (Kind.PUT, Kind.STATE, Kind.LOAD):
            version = self._sequences[note.table].version
            rank = self._ranks[learner]
            self._log(Entry(kind, note.table, learner, note.number, note.slot, rank=rank, version=version))

    def _gradient(self, learner: int, note: Note) -> None:
        if note.loader >= 0:
            self._usage[learner].append((note.loader, note.upto))
        key = (note.table, learner, note.number)
        self._open_usage[key] = self._usage.pop(learner, [])
        self._notes[key] = note
        self._steps[learner] += 1
        rank = self._ranks[learner]
        ticket = Ticket(learner, rank, note.number, note.stamp, note.step, note.count)
        self._decided(note.table, self._sequences[note.table].gradient(ticket))

    def _close(self, learner: int, note: Note) -> None:
        decisions = self._ledgers[note.loader].close(learner, note.upto)
        self._port.grant(learner, Portion(note.loader, OUTSIDE, 0, self._granted[note.loader, learner], 0, 1))
        self._fed(note.loader, decisions)

    def _rest(self, learner: int, note: Note) -> None:
        sequence = self._sequences[note.table]
        if self._granted[note.loader, learner] > note.upto:  # the portion was on its way already
            self._decided(note.table, sequence.reread(learner, note.number))
        else:
            self._resting[learner] = note.loader
            self._decided(note.table, sequence.rest(learner, note.number))

    # -- decisions to effects ----------------------------------------------------------------------------

    def _log(self, entry: Entry) -> None:
        self._port.append(entry)
        self._replay.replay(entry)

    def _decided(self, table: int, decisions: list[Decision]) -> None:
        self._todo.extend((table, decision) for decision in decisions)
        self._work()

    def _work(self) -> None:
        """Carry out decisions in their order; what one of them brings about comes after all that were there."""
        if self._working:
            return
        self._working = True
        try:
            while self._todo:
                place, decision = self._todo.popleft()
                self._carry_out(place, decision)
        finally:
            self._working = False

    def _carry_out(self, place: int, decision: Decision | LedgerDecision) -> None:
        """`place` is the table, or the loader of a ledger's decision."""
        kind = type(decision)
        if kind is Take:
            self._take(place, decision)
        elif kind is Fold:
            self._fold(place, decision)
        elif kind is Release:
            entry = Entry(Kind.RELEASE, place, decision.learner, decision.number, version=decision.version)
            self._log(entry)
        elif kind is Drop:
            self._settle(place, decision.ticket)
        elif kind is Full:
            self._port.report(m.Reached(decision.version))
        elif kind is Grant:
            portion = Portion(place, decision.index, decision.epoch, decision.start, decision.stop)
            self._grant(portion, decision.learner)
        elif kind is End:
            self._grant(Portion(place, decision.index, decision.epoch, 0, 0, 1), decision.learner)
        elif kind is EpochDone:
            self._epoch_done(place, decision.epoch)

    def _take(self, table: int, take: Take) -> None:
        ticket = take.ticket
        note = self._notes[table, ticket.learner, ticket.number]
        following = self._todo[0][1] if self._todo else None
        alone = isinstance(following, Fold) and following.tickets == (ticket,)
        self._log(
            Entry(
                Kind.TAKE,
                table,
                ticket.learner,
                ticket.number,
                note.slot,
                note.serial,
                note.full,
                ticket.count,
                ticket.rank,
                ticket.iteration,
                alone=alone,
            )
        )
        self._keep_buffers(table, ticket.learner, note.slot)
        for loader, upto in self._open_usage[table, ticket.learner, ticket.number]:
            self._fed(loader, self._ledgers[loader].taken(ticket.learner, upto))

    def _keep_buffers(self, table: int, learner: int, index: int) -> None:
        if self._replay.shard(table).layout.buffers.entries:
            kept = self._buffers.get((table, learner))
            values = self._port.slot(table, learner, index).buffers
            if kept is None:
                self._buffers[table, learner] = [value.clone() for value in values]
            else:
                torch._foreach_copy_(kept, values)

    def _fold(self, table: int, fold: Fold) -> None:
        tickets = fold.tickets
        first = next(ticket for ticket in tickets if ticket.learner == fold.leader)
        if len(tickets) > 1:
            first = max((t for t in tickets if t.learner == fold.leader), key=lambda ticket: ticket.step)
            self._compare_options(table, tickets)
        self._log(
            Entry(
                Kind.FOLD,
                table,
                first.learner,
                first.number,
                iteration=first.iteration,
                version=fold.version,
                factor=fold.factor,
            )
        )
        for ticket in tickets:
            self._account(table, ticket)
            self._settle(table, ticket)

    def _account(self, table: int, ticket: Ticket) -> None:
        self._examples[table] += ticket.count
        loss = self._notes[table, ticket.learner, ticket.number].loss
        if loss == loss:
            self._last_loss[ticket.rank] = loss
            account = self._losses[ticket.rank]
            account[0] += loss * ticket.count
            account[1] += ticket.count

    def _settle(self, table: int, ticket: Ticket) -> None:
        key = (table, ticket.learner, ticket.number)
        del self._notes[key]
        for loader, upto in self._open_usage.pop(key):
            self._fed(loader, self._ledgers[loader].settled(ticket.learner, upto))

    def _compare_options(self, table: int, tickets: Iterable[Ticket]) -> None:
        """Lockstep learners that disagree about options cause one warning (M4)."""
        if self._warned or not self._sequences[table].sync.lockstep:
            return
        options = {t.rank: self._replay.options(table, t.learner, t.number) for t in tickets}
        first = next(iter(options.values()))
        differ = sorted(rank for rank, option in options.items() if option is not first and option != first)
        if differ:
            self._warned = True
            ranks = sorted(options)
            self._port.report(
                m.Warned(
                    f"learners {ranks} disagree about the options of their parameter groups (ranks {differ} differ "
                    f"from rank {ranks[0]}); each update uses those of the learner furthest along. Step the same "
                    "scheduler in every learner."
                )
            )

    # -- the feed ----------------------------------------------------------------------------------------

    def _fed(self, loader: int, decisions: list[LedgerDecision]) -> None:
        self._todo.extend((loader, decision) for decision in decisions)
        self._work()

    def _grant(self, portion: Portion, learner: int) -> None:
        self._granted[portion.loader, learner] = portion.index + 1
        self._port.grant(learner, portion)
        if self._resting.get(learner) == portion.loader:
            del self._resting[learner]
            for table, sequence in self._sequences.items():
                self._decided(table, sequence.resume(learner))

    def _epoch_done(self, loader: int, epoch: int) -> None:
        primary = self._sequences.get(0)
        total, count = (
            (sum(column) for column in zip(*self._losses.values(), strict=True)) if self._losses else (0, 0)
        )
        tables = 0
        if loader in self._evaluated:
            for table, sequence in self._sequences.items():
                self._log(Entry(Kind.SNAPSHOT, table, iteration=epoch, version=sequence.version))
                tables += 1
        self._port.report(
            m.EpochEnd(
                loader,
                epoch,
                primary.version if primary else 0,
                self._examples[0],
                total / count if count else float("nan"),
                {rank: s / n for rank, (s, n) in sorted(self._losses.items()) if n},
                tables,
            )
        )
        self._losses.clear()

    # -- reports -----------------------------------------------------------------------------------------

    def _mean_buffers(self, table: int) -> list[Tensor] | None:
        """Mean of float buffers, maximum of the others, over learners not lost (M6)."""
        kept = [values for (t, _), values in sorted(self._buffers.items()) if t == table]
        if not kept:
            return None
        return [
            torch.stack(column).mean(0) if column[0].is_floating_point() else torch.stack(column).amax(0)
            for column in zip(*kept, strict=True)
        ]

    def _lose_buffers(self, learner: int) -> None:
        """A lost learner's statistics do not count."""
        for key in [key for key in self._buffers if key[1] == learner and len(self._buffers) > 1]:
            del self._buffers[key]

    def statistics(self, number: int) -> m.Statistics:
        ranks = self._ranks
        return m.Statistics(
            number,
            {
                table: m.TableStatistics(
                    sequence.version,
                    sequence.gradients,
                    sequence.dropped,
                    self._examples[table],
                    sequence.clock.account(),
                    {ranks[learner]: version for learner, version in sequence.waiting().items()},
                    sequence.missing(),
                    sequence.pending,
                )
                for table, sequence in self._sequences.items()
            },
            {ranks[learner]: steps for learner, steps in self._steps.items()},
            dict(self._last_loss),
        )


class ServerRole:
    """One shard process's handler."""

    def __init__(self, port: ServerPort) -> None:
        self._port = port
        self._replay = Replay(port)
        self._leader = Leader(port, self._replay) if port.shard == 0 else None

    def note(self, learner: int, note: Note) -> None:
        """A learner's note (leading shard only)."""
        assert self._leader is not None
        self._leader.note(learner, note)

    def entry(self, entry: Entry) -> None:
        """A decision of the leading shard."""
        self._replay.replay(entry)

    def handle(self, event: Any) -> None:
        """An event from the coordinator or another shard."""
        kind = type(event)
        if kind is m.MakeTable:
            self._replay.make_table(event)
            if self._leader:
                self._leader.make_table(event)
        elif kind is m.Norms:
            self._replay.norms(event)
        elif kind is tuple:  # (learner, LoadState)
            learner, blob = event
            self._replay.keep_blob(learner, blob)
            self._port.report(m.Loaded(blob.table, blob.number, learner))
        elif self._leader is not None:
            self._lead(event)

    def statistics(self) -> m.Statistics:
        """The account so far (leading shard only)."""
        assert self._leader is not None
        return self._leader.statistics(0)

    def _lead(self, event: Any) -> None:
        assert self._leader is not None
        kind = type(event)
        if kind is m.JoinTable:
            self._leader.join_table(event)
        elif kind is m.MakeLoader:
            self._leader.make_loader(event)
        elif kind is m.JoinLoader:
            self._leader.join_loader(event)
        elif kind is m.Leave:
            self._leader.leave(event.learner, lost=event.lost)
        elif kind is m.AskStatistics:
            self._port.report(self._leader.statistics(event.number))
        elif kind is m.Finish:
            self._leader.finish()
            self._port.report(m.Finished(self._leader.statistics(-1)))
