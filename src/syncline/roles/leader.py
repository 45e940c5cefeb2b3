"""Making the log: the leading shard runs the pure protocols on what learners and the coordinator say.

Decisions of the sequences and ledgers become log entries, portions and reports, in their order. Nothing is decided here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from syncline import messages as m
from syncline.messages import log
from syncline.messages import to_leader as say
from syncline.ports import Portion, ServerPort
from syncline.protocols.checkpoint_schedule import CheckpointSchedule
from syncline.protocols.epoch_positions import End, EpochDone, Grant
from syncline.protocols.folding import Ticket
from syncline.protocols.meetings import Met, Uncross
from syncline.protocols.sequence import Change, Drop, Fold, Full, Sequence, Take
from syncline.protocols.waiting import Release
from syncline.roles.barrier import Barrier
from syncline.roles.checkpoint_manifest import LEARNERS
from syncline.roles.counters import Counters, LearnerStates, VectorClocks
from syncline.roles.data_dispatcher import DataDispatcher
from syncline.roles.tree_root import TreeRoot
from syncline.table.checkpoint_content import table_file

if TYPE_CHECKING:
    from syncline.roles.server import LogApplier

Usage = list[tuple[int, int]]  # (loader, upto)
NOTHING: Usage = []


class Leader:
    """Makes the log: the pure protocols, fed by what learners and the coordinator say."""

    def __init__(self, port: ServerPort, replay: LogApplier) -> None:
        self._port, self._replay = port, replay
        self.sequences: dict[int, Sequence] = {}
        self._ranks: dict[int, int] = {}
        self._todo: deque[tuple[int, Any]] = deque()  # decisions, each of a table or loader
        self._later: deque[tuple[Any, ...]] = deque()  # functions, each with its arguments
        self._working = self._cut_due = False
        self._cut_next = False  # as soon as the one before is written
        self.dispatcher = DataDispatcher(port, self._ranks, self._decided)
        self._barrier = Barrier(port, self._ranks, self.dispatcher, self.sequences, self._decided)
        self.counters, self._states = Counters(), LearnerStates()
        self._usage: dict[int, Usage] = defaultdict(list)
        self._open: dict[tuple[int, int, int], tuple[say.Gradient, Usage]] = {}  # by table, learner, number
        self._shards_of: dict[int, int] = {}
        self._buffered: set[int] = set()  # tables with buffers
        self._schedule: CheckpointSchedule | None = None
        self._clocks: VectorClocks | None = None  # where vector clocks are wanted
        self._course: dict[int, int] = {}  # epoch -> number of the dial that begins with it
        self._passed = 0  # epochs of the first loader, in order: dials begin when all before them are done
        self._late: dict[int, list[m.JoinTable]] = defaultdict(list)  # who waits for the warm start's end
        self._finished = False
        self._root: TreeRoot | None = None  # over a tree
        # told of every decision before it is carried out
        self.watch: Callable[[int, Any], None] | None = None
        replay.buffers = self._states.joint
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            say.Gradient: self._gradient,
            say.Sum: self._sum,
            say.AskBatch: self.dispatcher.ask,
            say.Used: lambda learner, used: self._usage[learner].append((used.loader, used.upto)),
            say.CloseLoader: self.dispatcher.close,
            say.StreamEnded: self.dispatcher.ended,
            say.Blocked: self._blocked,
            say.Rest: self._rest,
            say.Reread: self._reread,
            say.Meet: lambda learner, _: self._barrier.come(learner),
            say.Farewell: lambda learner, farewell: self._keep_states(learner, farewell.states),
            say.Fetch: self._fetch,
            say.Await: self._await,
            say.Put: self._put,
            say.AskState: lambda learner, ask: self._log(log.GiveState(ask.table, learner, ask.number)),
            say.Load: self._load,
        }
        self._events: dict[type, Callable[[Any], None]] = {
            m.Dial: self._dial,
            m.Resume: self.resume,
            m.MakeTable: self.make_table,
            m.JoinTable: self.join_table,
            m.MakeLoader: self._make_loader,
            m.JoinLoader: self._join_loader,
            m.Leave: self.leave,
            m.NodesMoved: lambda _: None,
            m.Opening: self._barrier.opening,
            m.Standstill: self._barrier.standstill,
            m.AskCut: self._ask_cut,
            m.CutDone: self._cut_done,
            m.AskStatistics: lambda event: port.tell(self.statistics(event.number)),
            m.Finish: self._finish,
        }
        # of a table, or of a loader
        self._effects: dict[type, Callable[[int, Any], None]] = {
            Take: self._take,
            Fold: self._fold,
            Release: self._release,
            Drop: self._drop,
            Full: lambda _, full: port.tell(m.Reached(full.version)),
            Change: self._turn,
            Grant: self._grant,
            End: self._grant,
            EpochDone: self._epoch_done,
            Met: self._met,
            Uncross: lambda _, it: self._decided(it.table, self.sequences[it.table].go_on_without()),
        }

    # -- the coordinator's events ------------------------------------------------------------------------

    def hear(self, event: Any) -> None:
        """What concerns every shard alike is nothing to do here."""
        if (handler := self._events.get(type(event))) is not None:
            handler(event)
            if self._root is not None:
                self._root.recount(anew=isinstance(event, m.NodesMoved))

    def _dial(self, event: m.Dial) -> None:
        """A dial for later, or for all tables from now on."""
        if event.epoch is not None:
            self._course[event.epoch] = event.number
        elif not self._finished:  # else nobody is left to follow it
            self._change(event.number)

    def resume(self, event: m.Resume) -> None:
        """Where a run goes on; and how often checkpoints are cut."""
        self._schedule = CheckpointSchedule(event.every) if event.cuts else None
        self._clocks = VectorClocks(self._port.tell) if event.clocks else None
        self.counters.resume(event.counts)
        self._barrier.resume(event)

    def make_table(self, make: m.MakeTable) -> None:
        self.sequences[make.table] = Sequence(
            self._replay.dials[make.dial],
            initial=make.initial,
            batch_size=make.batch_size,
            limit=make.limit,
            learners=make.learners,
            warm=make.warm,
            sums=make.tree,
            account=make.account,
        )
        if make.tree:
            self._root = self._root or TreeRoot(self._port, self._ranks, self._log)
            self._root.add(make.table, self.sequences[make.table])
        self._shards_of[make.table] = make.layout.shards
        if make.layout.buffers.entries:
            self._buffered.add(make.table)
        for learner in self._barrier.cold:
            self._decided(make.table, self.sequences[make.table].excuse(learner))

    def join_table(self, join: m.JoinTable) -> None:
        self._ranks[join.learner] = join.rank
        if join.table and self.sequences[0].cold(join.learner):  # it reads this one after the first
            self._late[join.learner].append(join)
            return
        if join.buffers is not None:
            self._states.buffers[join.table, join.learner] = join.buffers
        sequence = self.sequences[join.table]
        self._decided(join.table, sequence.join(join.learner, join.rank, 0))
        cold = sequence.cold(join.learner)
        self._barrier.join(join.learner, cold=cold)
        if cold:  # it comes to the other tables later, too
            for table, other in self.sequences.items():
                self._decided(table, other.excuse(join.learner))

    def _make_loader(self, make: m.MakeLoader) -> None:
        self.dispatcher.make_loader(make, lockstep=self._replay.dials[make.dial].lockstep)
        if make.opened.loader == 0:
            self._passed = self.dispatcher.done(0)

    def _join_loader(self, join: m.JoinLoader) -> None:
        for learner, rank in join.learners.items():
            self._ranks[learner] = rank
            cold = 0 in self.sequences and self.sequences[0].cold(learner)
            self.dispatcher.join(join.loader, learner, later=cold)

    def leave(self, event: m.Leave) -> None:
        learner = event.learner
        back, pending = self.dispatcher.going(learner)
        if event.lost:
            self._port.tell(m.Left(learner, event.rank, back, pending))
            self._states.lose(learner)
        for table, sequence in self.sequences.items():
            self._decided(table, sequence.leave(learner))
        self._late.pop(learner, None)
        self.dispatcher.leave(learner, lost=event.lost)
        self._barrier.leave(learner, closed=event.closed)
        leaves = log.Leave(learner)
        self._port.append(leaves)
        self._replay.replay(leaves)

    def _finish(self, event: m.Finish) -> None:
        self._finished = True
        for table, sequence in self.sequences.items():
            self._decided(table, sequence.finish())
        for table, sequence in self.sequences.items():  # what was put without a later fold counts
            self._log(log.Finish(table, sequence.version))
        if event.cut and self._schedule is not None and self.sequences and self._schedule.begin():
            self._cut()
        self._port.tell(m.Finished(self.statistics(-1)))

    # -- what learners say -------------------------------------------------------------------------------

    def note(self, learner: int, message: say.ToLeader) -> None:
        """`learner`: who says it; of a sum the node."""
        self._handlers[type(message)](learner, message)
        if self._root is not None:
            self._root.recount()

    def _sum(self, node: int, sum_: say.Sum) -> None:
        assert self._root is not None
        tickets = self._root.arrive(node, sum_)
        if tickets is None:
            return
        if sum_.table in self._buffered:
            for (learner, _), buffers in zip(sum_.gradients, sum_.buffers, strict=True):
                self._states.keep(sum_.table, learner, buffers)
        self._published(sum_.table, sum_.gradients, tickets)

    def _gradient(self, learner: int, gradient: say.Gradient) -> None:
        ticket = Ticket(
            learner,
            self._ranks[learner],
            gradient.number,
            gradient.stamp,
            gradient.step,
            gradient.examples,
            silent=gradient.silent,
        )
        self._published(gradient.table, ((learner, gradient),), (ticket,))

    def _published(
        self, table: int, gradients: Iterable[tuple[int, say.Gradient]], tickets: Iterable[Ticket]
    ) -> None:
        sequence = self.sequences[table]
        for learner, gradient in gradients:  # what each brings beside its values
            if gradient.loader >= 0:
                self._usage[learner].append((gradient.loader, gradient.upto))
            self._open[table, learner, gradient.number] = (gradient, self._usage.pop(learner, NOTHING))
            self.counters.steps[self._ranks[learner]] += 1
            if gradient.states:
                self._keep_states(learner, gradient.states)
            if self._barrier.meetings.here:
                self._barrier.stepped(learner, lockstep=sequence.sync.lockstep)
        self._decided(table, sequence.gradient(*tickets))
        if (len(self.sequences) > 1 or self._barrier.openings) and self._barrier.tangled:
            self._barrier.untangle()

    def _blocked(self, learner: int, blocked: say.Blocked) -> None:
        self.dispatcher.block(learner, blocked)
        self._barrier.untangle()

    def _rest(self, learner: int, rest: say.Rest) -> None:
        self._keep_states(learner, rest.states)
        sequence = self.sequences[rest.table]
        if self.dispatcher.rest(rest.loader, learner, rest.index):
            self._decided(rest.table, sequence.rest(learner, rest.number))
        else:  # the portion was on its way already
            self._decided(rest.table, sequence.reread(learner, rest.number))

    def _reread(self, learner: int, reread: say.Reread) -> None:
        self._keep_states(learner, reread.states)
        self.dispatcher.met([learner])
        self._decided(reread.table, self.sequences[reread.table].reread(learner, reread.number))

    def _fetch(self, learner: int, fetch: say.Fetch) -> None:
        sequence = self.sequences[fetch.table]
        if not fetch.deliver:
            has = fetch.has if fetch.has >= 0 else None
            self._decided(fetch.table, sequence.fetch(learner, fetch.number, has))
        elif learner in sequence.members.live:
            keep = self._schedule is not None and self._schedule.armed
            self._log(log.Release(fetch.table, learner, fetch.number, sequence.version, keep, True))

    def _await(self, learner: int, waits: say.Await) -> None:
        self.sequences[waits.table].awaits(learner, waits.number)
        self._barrier.untangle()

    def _put(self, learner: int, put: say.Put) -> None:
        version = self.sequences[put.table].version
        self._log(log.PutValues(put.table, learner, put.number, self._ranks[learner], version))

    def _load(self, learner: int, load: say.Load) -> None:
        version = self.sequences[load.table].version
        self._log(log.LoadState(load.table, learner, load.number, version))

    def _keep_states(self, learner: int, states: bytes) -> None:
        if states:
            self._states.random[self._ranks[learner]] = states

    # -- decisions to effects ----------------------------------------------------------------------------

    def _decided(self, place: int, decisions: Iterable[Any]) -> None:
        """Decisions of a table, or of a loader, are carried out in their order; what one brings about comes after all that were there.

        Accounts and the feed come last: first of all, learners that wait are released. A checkpoint that is due is cut before
        another version can follow.
        """
        todo, later = self._todo, self._later
        for decision in decisions:
            todo.append((place, decision))
        if self._working:
            return
        self._working = True
        try:
            while todo or later:
                if todo and not (self._cut_due and isinstance(todo[0][1], Take | Fold)):
                    place, decision = todo.popleft()
                    if self.watch is not None:
                        self.watch(place, decision)
                    self._effects[type(decision)](place, decision)
                elif later:
                    action, *arguments = later.popleft()
                    action(*arguments)
                else:
                    self._cut()
            if self._cut_due:
                self._cut()
        finally:
            self._working = False

    def _log(self, entry: log.OfTable) -> None:
        if self._shards_of[entry.table] > 1:  # else the others need not wake
            self._port.append(entry)
        self._replay.replay(entry)

    def _release(self, table: int, release: Release) -> None:
        if self._barrier.cold and table == 0 and self._barrier.warmed(release.learner):
            for join in self._late.pop(release.learner, ()):
                self.join_table(join)
            self.dispatcher.welcome_late(release.learner)
        if release.read:
            keep = self._schedule is not None and self._schedule.armed
            self._log(log.Release(table, release.learner, release.number, release.version, keep, False))

    def _take(self, table: int, take: Take) -> None:
        ticket = take.ticket
        learner, number = ticket.learner, ticket.number
        gradient, usage = self._open[table, learner, number]
        if self._root is not None:
            self._root.take(table, ticket)
        else:
            if table in self._buffered:  # before it is taken, which may free the draft
                self._states.keep(table, learner, self._port.receive(table, learner, number).buffers)
            following = self._todo[0][1] if self._todo else None
            alone = isinstance(following, Fold) and following.tickets == (ticket,)
            self._log(
                log.Take(
                    table,
                    learner,
                    number,
                    gradient.options,
                    gradient.full,
                    ticket.count,
                    ticket.rank,
                    ticket.iteration,
                    alone,
                    ticket.weight,
                )
            )
        if usage:
            self._later.append((self.dispatcher.taken, learner, usage))

    def _fold(self, table: int, fold: Fold) -> None:
        tickets = fold.tickets
        first = fold.leader
        learner, number = self.named(table, first) if self._root else (first.learner, first.number)
        self._log(log.Fold(table, learner, number, first.iteration, fold.version, fold.factor))
        if self._clocks is not None and table == 0:
            self._clocks.fold(fold.version, tickets)
        for ticket in tickets:
            self._later.append((self._account, table, ticket))
        if self._schedule is not None and table == max(self.sequences):
            self._cut_due = self._schedule.folded(fold.version)

    def named(self, table: int, ticket: Ticket) -> tuple[int, int]:
        """A gradient as the shards know it: over a tree it lies in a node's sum."""
        learner, number = ticket.learner, ticket.number
        return self._root.named(table, learner, number) if self._root else (learner, number)

    def _account(self, table: int, ticket: Ticket) -> None:
        """A folded gradient: examples and loss are counted, its batches are done."""
        gradient, usage = self._open.pop((table, ticket.learner, ticket.number))
        epochs = self.dispatcher.settled(ticket.learner, usage)
        self.counters.folded(table, ticket.rank, ticket.count, gradient.loss, epochs)
        if self._root is not None:
            self._root.done(table, ticket)

    def _drop(self, table: int, drop: Drop) -> None:
        self._log(log.Free(table, *self.named(table, drop.ticket)))
        self._later.append((self._dropped, table, drop.ticket))

    def _dropped(self, table: int, ticket: Ticket) -> None:
        """Near a run's set end it may be dropped before others of its learner are folded."""
        learner, opened = ticket.learner, self._open
        _, usage = opened.pop((table, learner, ticket.number))
        before = [opened[table, learner, each][1] for each in self.sequences[table].unfolded(learner)]
        self.dispatcher.dropped(learner, usage, before)
        if self._root is not None:
            self._root.done(table, ticket)

    # -- the feed ----------------------------------------------------------------------------------------

    def _grant(self, loader: int, grant: Grant | End) -> None:
        if isinstance(grant, Grant):
            portion = Portion(loader, grant.index, grant.epoch, grant.start, grant.stop)
        else:
            portion = Portion(loader, grant.index, grant.epoch, 0, 0, 1)
        if self.dispatcher.grant(portion, grant.learner):
            for table, sequence in self.sequences.items():
                self._decided(table, sequence.resume(grant.learner))

    def _epoch_done(self, loader: int, decision: EpochDone) -> None:
        """One may be done before an earlier one."""
        epoch, done = decision.epoch, self.dispatcher.done(loader)
        mean, losses = self.counters.epoch(epoch) if loader == 0 else (float("nan"), {})
        primary = self.sequences.get(0)
        tables = 0
        if loader in self.dispatcher.evaluated:
            for table in self.sequences:
                self._log(log.Snapshot(table, epoch))
                tables += 1
        version, examples = primary.version if primary else 0, self.counters.examples[0]
        self._port.tell(m.EpochEnd(loader, epoch, version, examples, mean, losses, tables, done))
        if loader == 0:
            passed, self._passed = self._passed, done
            for begin in range(passed + 1, done + 1):
                if begin in self._course:
                    self._change(self._course.pop(begin))

    def _change(self, number: int) -> None:
        """Another dial for all tables; the loaders turn with the first of them."""
        sync = self._replay.dials[number]
        for table, sequence in self.sequences.items():
            self._decided(table, sequence.change(sync, number))

    def _turn(self, table: int, change: Change) -> None:
        self._log(log.Change(table, change.dial))
        if table == 0:
            self.dispatcher.change(lockstep=self._replay.dials[change.dial].lockstep)

    # -- meetings ----------------------------------------------------------------------------------------

    def _met(self, _: int, decision: Met) -> None:
        """All of them count again before one can publish: lockstep rounds stay whole."""
        self.dispatcher.met(decision.learners)
        for table, sequence in self.sequences.items():
            self._decided(table, sequence.met(decision.learners))
        self._barrier.over(decision)

    # -- checkpoints -------------------------------------------------------------------------------------

    def _ask_cut(self, event: m.AskCut) -> None:
        if self._schedule is None:
            return
        if not event.now:
            self._schedule.ask()
        elif self.sequences and self._schedule.begin():
            self._cut(failed=True)
        else:
            self._cut_next = True

    def _cut_done(self, _: m.CutDone) -> None:
        if self._schedule is not None:
            self._schedule.written()
            if self._cut_next:
                self._cut_next = False
                self._ask_cut(m.AskCut(now=True))

    def _cut(self, *, failed: bool = False) -> None:
        """A checkpoint of everything as it is now; the gradients that are in it are accounted for."""
        self._cut_due = False
        self.counters.read()
        if self._clocks is not None:
            self._clocks.tell()
        number = self.sequences[0].version
        files = []
        for table in self.sequences:
            self._log(log.Cut(table, number))
            files += [table_file(table, shard) for shard in range(self._shards_of[table])]
        self._port.save(number, LEARNERS, self._states.tensors(self._ranks), {})
        self._port.tell(
            m.Cut(
                number,
                [*files, LEARNERS],
                {table: sequence.account() for table, sequence in self.sequences.items()},
                self.dispatcher.standings(),
                self.counters.counts(),
                failed,
            )
        )

    # -- reports -----------------------------------------------------------------------------------------

    def statistics(self, number: int) -> m.Statistics:
        self.counters.read()
        if self._clocks is not None:
            self._clocks.tell()
        ranks = self._ranks
        return m.Statistics(
            number,
            {
                table: m.TableStatistics(
                    sequence.version,
                    sequence.gradients,
                    sequence.dropped,
                    self.counters.examples[table],
                    sequence.clock.account(),
                    {ranks[learner]: version for learner, version in sequence.waiting().items()},
                    sequence.missing(),
                    sequence.pending,
                )
                for table, sequence in self.sequences.items()
            },
            dict(self.counters.steps),
            dict(self.counters.last),
        )
