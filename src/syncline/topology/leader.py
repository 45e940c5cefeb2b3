"""Making the log: the leading shard runs the pure protocols on what learners and the coordinator say.

Decisions of the sequences and ledgers become log entries, portions and reports, in their order. Nothing is decided here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, SupportsFloat, cast

import torch
from torch import Tensor

from syncline.ports import DROPPED, KEEP, OUTSIDE, SILENT, STATES, Entry, Kind, Note, Portion, ServerPort
from syncline.protocols.cadence import Cadence
from syncline.protocols.folding import Ticket
from syncline.protocols.ledger import Decision as LedgerDecision
from syncline.protocols.ledger import End, EpochDone, Grant, Ledger, Standing
from syncline.protocols.sequence import Change, Decision, Drop, Fold, Full, Sequence, Take
from syncline.protocols.waiting import Release
from syncline.topology import messages as m
from syncline.topology.replay import Replay
from syncline.topology.restore import LEARNERS, learner_tensors, table_file

Usage = list[tuple[int, int]]  # (loader, upto)
NOTHING: Usage = []
GRADIENT, ASK, TAKE, FOLD, RELEASE, LEAVE = map(
    int, (Kind.GRADIENT, Kind.ASK, Kind.TAKE, Kind.FOLD, Kind.RELEASE, Kind.LEAVE)
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
        self._open: dict[tuple[int, int, int], tuple[Note, Usage]] = {}  # by table, learner, number
        self._shards_of: dict[int, int] = {}
        self._spread: set[int] = set()  # tables on several shards: the others need not wake for the rest
        self._buffered: set[int] = set()  # tables with buffers
        self._gone: set[int] = set()
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}
        self._steps: dict[int, int] = defaultdict(int)
        self._last_loss: dict[int, float] = {}
        self._losses: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # rank -> [sum, count]
        self._unread: list[tuple[int, SupportsFloat, int]] = []  # (rank, loss, examples)
        self._examples: dict[int, int] = defaultdict(int)
        self._warned = False
        self._cadence: Cadence | None = None
        self._cut_due = False
        self._late: dict[int, list[int]] = defaultdict(list)  # loaders that wait for the warm start's end
        self._random: dict[int, bytes] = {}  # states by rank
        self._steps_before: dict[int, int] = {}  # by rank, of a run that goes on
        self._course: dict[int, int] = {}  # epoch -> number of the dial that begins with it
        self._todo: deque[tuple[int, Any]] = deque()
        self._later: deque[tuple[Callable[[int, Ticket], None], int, Ticket]] = deque()
        self._working = False
        self.watch: Callable[[int, Any], None] | None = (
            None  # told of every decision before it is carried out
        )
        replay.buffers = self._mean_buffers

    # -- the coordinator's events ------------------------------------------------------------------------

    def dial(self, event: m.Dial) -> None:
        """A dial for later, or for all tables from now on."""
        if event.epoch is None:
            self._change(event.number)
        else:
            self._course[event.epoch] = event.number

    def resume(self, event: m.Resume) -> None:
        """Where a run goes on; and how often checkpoints are cut."""
        self._cadence = Cadence(event.every) if event.cuts else None
        self._examples.update(event.counts.examples)
        self._losses.update({rank: list(pair) for rank, pair in event.counts.losses.items()})
        self._steps_before = dict(event.counts.steps)

    def make_table(self, make: m.MakeTable) -> None:
        self._sequences[make.table] = Sequence(
            self._replay.dials[make.dial],
            initial=make.initial,
            batch_size=make.batch_size,
            limit=make.limit,
            learners=make.learners,
            warm=make.warm,
            account=make.account,
        )
        self._shards_of[make.table] = make.layout.shards
        if make.layout.shards > 1:
            self._spread.add(make.table)
        if make.layout.buffers.entries:
            self._buffered.add(make.table)

    def join_table(self, join: m.JoinTable) -> None:
        self._ranks[join.learner] = join.rank
        if join.buffers is not None:
            self._buffers[join.table, join.learner] = join.buffers
        self._decided(join.table, self._sequences[join.table].join(join.learner, join.rank, 0))

    def make_loader(self, make: m.MakeLoader) -> None:
        self._ledgers[make.loader] = Ledger(
            size=make.size,
            batch_size=make.batch_size,
            epochs=make.epochs,
            lockstep=self._replay.dials[make.dial].lockstep,
            partition=make.policy == "partition",
            learners=make.parts,
            standing=make.standing,
        )
        if make.snapshot:
            self._evaluated.add(make.loader)

    def join_loader(self, join: m.JoinLoader) -> None:
        for learner, rank in join.learners.items():
            self._ranks[learner] = rank
            if 0 in self._sequences and self._sequences[0].cold(learner):
                self._late[learner].append(join.loader)  # nobody counts on it before it is there
            else:
                self._welcome(join.loader, learner)

    def _welcome(self, loader: int, learner: int) -> None:
        ledger = self._ledgers[loader]
        first = self._ledgers.get(0) if loader else None
        cycle = first.epoch(learner) if first is not None and learner in first else 0
        self._fed(loader, ledger.join(learner, self._ranks[learner], cycle))
        self._port.grant(learner, Portion(loader, OUTSIDE, ledger.epoch(learner), 0, 0))

    def leave(self, learner: int, rank: int, *, lost: bool) -> None:
        self._resting.pop(learner, None)
        self._late.pop(learner, None)
        self._gone.add(learner)
        held = [ledger.holds(learner) for ledger in self._ledgers.values()]
        if lost:
            self._port.report(m.Left(learner, rank, sum(a for a, _ in held), sum(b for _, b in held)))
        if lost:
            self._lose_buffers(learner)
        for table, sequence in self._sequences.items():
            self._decided(table, sequence.leave(learner))
        for loader, ledger in self._ledgers.items():
            self._fed(loader, ledger.leave(learner))
        self._untangle()
        self._log(Entry(Kind.LEAVE, learner=learner))

    def finish(self, *, cut: bool) -> None:
        for table, sequence in self._sequences.items():
            self._decided(table, sequence.finish())
        if cut and self._cadence is not None and self._sequences and self._cadence.begin():
            self._cut()
        for table, sequence in self._sequences.items():
            self._log(Entry(Kind.FINISH, table, version=sequence.version))

    # -- the learners' notes -----------------------------------------------------------------------------

    def note(self, learner: int, note: Note) -> None:
        kind = note.kind
        if kind == GRADIENT:
            self._gradient(learner, note)
        elif kind == ASK:
            self._fed(note.loader, self._ledgers[note.loader].ask(learner, note.upto))
        elif kind == Kind.USED:
            self._usage[learner].append((note.loader, note.upto))
        elif kind == Kind.CLOSE:
            self._close(learner, note)
        elif kind == Kind.REST:
            self._rest(learner, note)
        elif kind == Kind.BLOCKED:
            self._fed(note.loader, self._ledgers[note.loader].block(learner, note.upto))
            self._untangle()
        elif kind == Kind.FAREWELL:
            self._keep_states(learner, note)
        elif kind == Kind.FETCH:
            self._decided(note.table, self._sequences[note.table].fetch(learner, note.number))
        elif kind in (Kind.PUT, Kind.STATE, Kind.LOAD):
            version = self._sequences[note.table].version
            rank = self._ranks[learner]
            self._log(Entry(kind, note.table, learner, note.number, note.slot, rank=rank, version=version))

    def _gradient(self, learner: int, note: Note) -> None:
        if note.loader >= 0:
            self._usage[learner].append((note.loader, note.upto))
        self._open[note.table, learner, note.number] = (note, self._usage.pop(learner, NOTHING))
        self._steps[learner] += 1
        rank = self._ranks[learner]
        ticket = Ticket(learner, rank, note.number, note.stamp, note.step, note.examples)
        if note.flags:
            ticket.silent = bool(note.flags & SILENT)
            self._keep_states(learner, note)
        self._decided(note.table, self._sequences[note.table].gradient(ticket))

    def _keep_states(self, learner: int, note: Note) -> None:
        if note.flags & STATES:
            states = self._port.slot(note.table, learner, note.slot).read_states()
            self._random[self._ranks[learner]] = states

    def _close(self, learner: int, note: Note) -> None:
        decisions = self._ledgers[note.loader].close(learner, note.upto)
        self._port.grant(learner, Portion(note.loader, OUTSIDE, 0, self._granted[note.loader, learner], 0, 1))
        self._fed(note.loader, decisions)

    def _rest(self, learner: int, note: Note) -> None:
        self._keep_states(learner, note)
        sequence = self._sequences[note.table]
        if self._granted[note.loader, learner] > note.upto:  # the portion was on its way already
            self._resting.pop(learner, None)
            self._decided(note.table, sequence.reread(learner, note.number))
        else:
            self._resting[learner] = note.loader
            self._decided(note.table, sequence.rest(learner, note.number))

    # -- decisions to effects ----------------------------------------------------------------------------

    def _log(self, entry: Entry) -> None:
        if entry.table in self._spread or entry.kind == LEAVE:
            self._port.append(entry)
        self._replay.replay(entry)

    def _decided(self, table: int, decisions: list[Decision]) -> None:
        self._todo.extend((table, decision) for decision in decisions)
        self._work()

    def _work(self) -> None:
        """Carry out decisions in their order; what one of them brings about comes after all that were there.

        Accounts and the feed come last: first of all, learners that wait are released.
        """
        if self._working:
            return
        self._working = True
        try:
            while self._todo or self._later:
                if self._todo and not (self._cut_due and isinstance(self._todo[0][1], Take | Fold)):
                    place, decision = self._todo.popleft()
                    self._carry_out(place, decision)
                elif self._later:
                    action, table, ticket = self._later.popleft()
                    action(table, ticket)
                else:  # the version that is to be cut must not be followed by another first
                    self._cut()
            if self._cut_due:
                self._cut()
        finally:
            self._working = False

    def _carry_out(self, place: int, decision: Decision | LedgerDecision) -> None:
        """`place` is the table, or the loader of a ledger's decision."""
        if self.watch is not None:
            self.watch(place, decision)
        if isinstance(decision, Take):
            self._take(place, decision)
        elif isinstance(decision, Fold):
            self._fold(place, decision)
        elif isinstance(decision, Release):
            self._release(place, decision)
        elif isinstance(decision, Grant):
            portion = Portion(place, decision.index, decision.epoch, decision.start, decision.stop)
            self._grant(portion, decision.learner)
        elif isinstance(decision, Drop):
            self._later.append((self._settle, place, decision.ticket))
        elif isinstance(decision, Full):
            self._port.report(m.Reached(decision.version))
        elif isinstance(decision, End):
            self._grant(Portion(place, decision.index, decision.epoch, 0, 0, 1), decision.learner)
        elif isinstance(decision, EpochDone):
            self._epoch_done(place, decision.epoch)
        elif isinstance(decision, Change):
            self._log(Entry(Kind.CHANGE, place, iteration=decision.dial))

    def _release(self, table: int, release: Release) -> None:
        if self._late and table == 0:
            for loader in self._late.pop(release.learner, ()):
                self._welcome(loader, release.learner)
        self._log(
            Entry(
                RELEASE,
                table,
                release.learner,
                release.number,
                full=2 if release.same else release.read,
                version=release.version,
                alone=self._flags(release),
            )
        )

    def _flags(self, release: Release) -> int:
        armed = self._cadence is not None and self._cadence.armed
        return (KEEP if armed else 0) | (DROPPED if release.dropped else 0)

    def _take(self, table: int, take: Take) -> None:
        ticket = take.ticket
        note, usage = self._open[table, ticket.learner, ticket.number]
        following = self._todo[0][1] if self._todo else None
        alone = isinstance(following, Fold) and following.tickets == (ticket,)
        self._log(
            Entry(
                TAKE,
                table,
                ticket.learner,
                ticket.number,
                note.slot,
                note.serial,
                note.full,
                ticket.count,
                ticket.rank,
                ticket.iteration,
                0,
                alone,
                ticket.weight,
            )
        )
        if table in self._buffered:
            self._keep_buffers(table, ticket.learner, note.slot)
        if usage:
            self._later.append((self._taken, table, ticket))

    def _taken(self, table: int, ticket: Ticket) -> None:
        if ticket.learner in self._gone:
            return
        for loader, upto in self._open[table, ticket.learner, ticket.number][1]:
            self._fed(loader, self._ledgers[loader].taken(ticket.learner, upto))

    def _keep_buffers(self, table: int, learner: int, index: int) -> None:
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
            if self._replay.options_changed:
                self._replay.options_changed = False
                self._compare_options(table, tickets)
        self._log(
            Entry(
                FOLD,
                table,
                first.learner,
                first.number,
                iteration=first.iteration,
                version=fold.version,
                factor=fold.factor,
            )
        )
        for ticket in tickets:
            self._later.append((self._account, table, ticket))
        if self._cadence is not None and table == max(self._sequences):
            self._cut_due = self._cadence.folded(fold.version)

    def _account(self, table: int, ticket: Ticket) -> None:
        """A folded gradient: examples and loss are counted, its batches are done."""
        self._examples[table] += ticket.count
        loss = cast(SupportsFloat, self._open[table, ticket.learner, ticket.number][0].loss)
        if isinstance(loss, float):
            self._count_loss(ticket.rank, loss, ticket.count)
        else:
            self._unread.append((ticket.rank, loss, ticket.count))
        self._settle(table, ticket)

    def _count_loss(self, rank: int, loss: float, count: int) -> None:
        if loss == loss:
            self._last_loss[rank] = loss
            account = self._losses[rank]
            account[0] += loss * count
            account[1] += count

    def _read_losses(self) -> None:
        """Losses whose values came later than their gradients' notes, all at once."""
        unread, self._unread = self._unread, []
        for rank, loss, count in unread:
            self._count_loss(rank, float(loss), count)

    def _settle(self, table: int, ticket: Ticket) -> None:
        _, usage = self._open.pop((table, ticket.learner, ticket.number))
        for loader, upto in usage:
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
        self._granted[portion.loader, learner] = portion.number + 1
        self._port.grant(learner, portion)
        if self._resting.get(learner) == portion.loader:
            del self._resting[learner]
            for table, sequence in self._sequences.items():
                self._decided(table, sequence.resume(learner))

    def _untangle(self) -> None:
        """Nobody waits for ever: where all wait at barriers, but of different loaders, the last loader's gives way.

        Learners get out of step when one joins, or goes back to a checkpoint, in the middle of loops over several loaders.
        """
        if len(self._ledgers) < 2:
            return
        stuck = {loader: ledger.stuck() for loader, ledger in self._ledgers.items()}
        live = self._ranks.keys() - self._gone
        if live and not live - set().union(*stuck.values()):
            last = max(loader for loader, learners in stuck.items() if learners)
            self._fed(last, self._ledgers[last].part_ways())

    def _epoch_done(self, loader: int, epoch: int) -> None:
        self._read_losses()
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
        if loader == 0 and epoch + 1 in self._course:
            self._change(self._course.pop(epoch + 1))

    def _change(self, number: int) -> None:
        """Another dial for all tables and loaders."""
        sync = self._replay.dials[number]
        for table, sequence in self._sequences.items():
            self._decided(table, sequence.change(sync, number))
        for loader, ledger in self._ledgers.items():
            self._fed(loader, ledger.change(lockstep=sync.lockstep))

    # -- checkpoints -------------------------------------------------------------------------------------

    def ask_cut(self) -> None:
        if self._cadence is not None:
            self._cadence.ask()

    def cut_done(self) -> None:
        if self._cadence is not None:
            self._cadence.written()

    def _cut(self) -> None:
        """A checkpoint of everything as it is now; the gradients that are in it are accounted for."""
        self._cut_due = False
        self._read_losses()
        number = self._sequences[0].version
        files = []
        for table, sequence in self._sequences.items():
            self._log(Entry(Kind.CUT, table, number=number, version=sequence.version))
            files += [table_file(table, shard) for shard in range(self._shards_of[table])]
        buffers = {
            (table, self._ranks[learner]): [value.clone() for value in values]
            for (table, learner), values in self._buffers.items()
        }
        self._port.save(number, LEARNERS, learner_tensors(self._random, buffers), {})
        self._port.report(
            m.Cut(
                number,
                [*files, LEARNERS],
                {table: sequence.account() for table, sequence in self._sequences.items()},
                self.standings(),
                m.Counts(
                    dict(self._examples),
                    {r: list(p) for r, p in self._losses.items()},
                    self._steps_of_ranks(),
                ),
            )
        )

    def _steps_of_ranks(self) -> dict[int, int]:
        """Those before a checkpoint included."""
        steps = dict(self._steps_before)
        for learner, count in self._steps.items():
            rank = self._ranks[learner]
            steps[rank] = steps.get(rank, 0) + count
        return steps

    def standings(self) -> dict[int, Standing]:
        return {loader: ledger.standing() for loader, ledger in self._ledgers.items()}

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

    def last_staleness(self, table: int) -> float:
        """Mean over the gradients of the last update."""
        return self._sequences[table].clock.last_update

    def statistics(self, number: int) -> m.Statistics:
        self._read_losses()
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
            self._steps_of_ranks(),
            dict(self._last_loss),
        )
