"""Looks on at a simulated run: feeds the accounts, checks after every event, and says what is broken, when, and who does what.

`WatchedRole` is a shard that is looked at. Not responsible for what always holds: `table_accounts`, `loader_accounts` and `values` are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from syncline import messages as m
from syncline.engines.checkpoint_writer import with_content
from syncline.errors import InvariantError
from syncline.messages import to_leader as say
from syncline.messages.log import Entry, Leave
from syncline.ports import ServerPort
from syncline.protocols.epoch_positions import End, EpochDone, Grant
from syncline.protocols.meetings import Met, Uncross
from syncline.protocols.sequence import Change, Drop, Fold, Take
from syncline.protocols.staleness import Staleness
from syncline.protocols.waiting import Release
from syncline.roles.server import ServerRole
from syncline.sim.invariants.loader_accounts import Broken, FeedAccount, StreamAccount
from syncline.sim.invariants.table_accounts import Gradient, TableAccount
from syncline.sim.invariants.values import Values

if TYPE_CHECKING:
    from syncline.sim.simulation import Simulation


class Watch:
    """All accounts of one simulated run."""

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.events = 0
        self.most: int | None = None  # a run of more events never ends
        self._begin()

    def _begin(self) -> None:
        self._tables: dict[int, TableAccount] = {}
        self._values: dict[int, Values] = {}
        self._feeds: dict[int, FeedAccount | StreamAccount] = {}
        self._examples: dict[int, int] = defaultdict(int)  # in updates, by table
        self._used: dict[int, list[tuple[int, int]]] = {}  # learner -> (loader, upto) of the next gradient
        self._resting: dict[int, int] = {}  # learner -> loader it waits for
        self._gone: set[int] = set()
        self._touched: set[int] = set()  # tables that something happened to
        self._moved = False  # positions came back
        self._cut_short = False  # stopped, or by a set number of updates: epochs need not be whole

    # -- errors ------------------------------------------------------------------------------------------

    @contextmanager
    def _checking(self) -> Iterator[None]:
        try:
            yield
        except Broken as broken:
            error = self.error(str(broken))
            self._world.fail(error)  # before anything unwinds
            raise error from None

    def error(self, what: str) -> InvariantError:
        """With the moment, and the state of the parties."""
        states = [table.words() for _, table in sorted(self._tables.items())]
        states += [f"loader {each}: {feed.done} epochs done" for each, feed in sorted(self._feeds.items())]
        states.append(f"who waits for what: {self._world.waiting()}")
        moment = f"event {self.events} at {self._world.clock.now:.6g} s"
        return InvariantError(f"{moment}: {what}.\n  " + "\n  ".join(states))

    # -- what learners do --------------------------------------------------------------------------------

    def posted(self, learner: int, message: say.ToLeader) -> None:
        """On its way to the leading shard, from a learner that belongs to the present servers."""
        if isinstance(message, say.Used):
            self._used.setdefault(learner, []).append((message.loader, message.upto))
        elif isinstance(message, say.Gradient):
            with self._checking():
                self._published(learner, message)

    def _published(self, learner: int, made: say.Gradient) -> None:
        used = self._used.pop(learner, [])
        if made.loader >= 0:
            used.append((made.loader, made.upto))
        usage = [(loader, span) for loader, upto in used for span in self._feeds[loader].used(learner, upto)]
        table, lane = self._tables[made.table], self._world.lanes[made.table, learner]
        slot = lane.slots[lane.numbers.index(made.number)]
        table.published(learner, made.number, Gradient(made.stamp, made.step, usage, slot.read_options()))
        table.bounded(len(lane.slots), promised=self._world.workshop is not None)
        present = [True] * len(slot.gradients) if made.full else [bool(has) for has in slot.mask.tolist()]
        self._values[made.table].published(learner, made.number, slot.gradients, present)

    def read(self, learner: int, table: int, version: int, weights: list[Tensor]) -> None:
        """A learner takes over a version."""
        with self._checking():
            self._values[table].read(learner, version, weights)
            self._tables[table].read(learner, version)

    # -- what the leading shard is told ------------------------------------------------------------------

    def noted(self, learner: int, message: say.ToLeader) -> None:
        """Before the leading shard handles it."""
        with self._checking():
            if isinstance(message, say.Rest | say.Reread) and learner not in self._gone:
                self._rest(learner, message)
            elif isinstance(message, say.CloseLoader | say.StreamEnded):
                self._moved = True
                self._feeds[message.loader].closed(learner, message.upto)

    def _rest(self, learner: int, said: say.Rest | say.Reread) -> None:
        self._touched.add(said.table)
        feed = self._feeds.get(said.loader) if isinstance(said, say.Rest) else None
        given = (
            feed.given.get(learner, 0) if feed is not None else 0
        )  # none: it waits for others, not for data
        if isinstance(said, say.Reread) or given > said.index:
            self._resting.pop(learner, None)
            self._tables[said.table].roused(learner)
        else:
            self._resting[learner] = said.loader
            self._tables[said.table].rests(learner, said.number)

    def told(self, event: Any) -> None:
        """Before the leading shard handles what the coordinator says."""
        with self._checking():
            if isinstance(event, m.Resume):
                self._examples.update(event.counts.examples)
            elif isinstance(event, m.MakeTable):
                self._make_table(event)
            elif isinstance(event, m.MakeLoader):
                opened, standing = event.opened, event.standing
                self._feeds[opened.loader] = (
                    StreamAccount(opened.epochs, standing)
                    if opened.policy == m.STREAM
                    else FeedAccount(opened.size, opened.epochs, standing)
                )
            elif isinstance(event, m.JoinTable):
                self._tables[event.table].joins(event.learner)
            elif isinstance(event, m.Leave):
                self._left(event.learner)
            elif isinstance(event, m.Finish):
                for table in self._tables.values():
                    table.finishing = True

    def _make_table(self, make: m.MakeTable) -> None:
        self._tables[make.table] = TableAccount(make, self._world.dials[make.dial])
        first = [segment.clone() for segment in self._world.tables[make.table].weights]
        template, content = make.template, with_content(make, self._world.folder).content
        if content is not None:
            template = content.of(template)
            for entry, view in enumerate(make.layout.parameters.views(first)):
                view.copy_(content.values[entry])
        self._values[make.table] = Values(
            make.layout,
            template,
            first,
            make.account.version,
            make.clip_norm is not None,
            self._world.spec.plan.kept,
        )
        self._cut_short |= make.limit is not None

    def _left(self, learner: int) -> None:
        self._gone.add(learner)
        self._moved = True
        self._resting.pop(learner, None)
        for number, table in self._tables.items():
            self._touched.add(number)
            for gradient in table.left(learner):
                for loader, span in gradient.usage:
                    self._feeds[loader].back([span], "lost with a gradient")
        for feed in self._feeds.values():
            feed.left(learner)

    def _settled(self, gradient: Gradient, what: str) -> None:
        for loader, span in gradient.usage:
            self._feeds[loader].settled([span], what)

    # -- what it decides, and what all shards do ---------------------------------------------------------

    def decided(self, place: int, decision: Any) -> None:
        with self._checking():
            if isinstance(decision, Grant | End | EpochDone):
                self._fed(place, decision)
            elif isinstance(decision, Met):  # who was in a meeting is there again
                for learner in decision.learners:
                    self._resting.pop(learner, None)
                self._roused(*decision.learners)
            elif isinstance(decision, Uncross):
                self._touched.add(decision.table)
                self._tables[decision.table].uncross()
            else:
                self._touched.add(place)
                table = self._tables[place]
                if isinstance(decision, Take):
                    table.taken(decision.ticket)
                elif isinstance(decision, Drop):
                    gradient = table.drop(decision)
                    self._values[place].forget(decision.ticket.learner, decision.ticket.number)
                    self._settled(gradient, "dropped")
                elif isinstance(decision, Fold):
                    self._fold(place, table, decision)
                elif isinstance(decision, Release):
                    table.release(decision)
                elif isinstance(decision, Change):
                    table.change(self._world.dials[decision.dial])

    def _fold(self, number: int, table: TableAccount, fold: Fold) -> None:
        gradients = table.fold(fold)
        options = gradients[fold.tickets.index(fold.leader)].options
        self._values[number].folded(fold, [gradient.weight for gradient in gradients], options)
        for ticket, gradient in zip(fold.tickets, gradients, strict=True):
            self._settled(gradient, f"in version {fold.version}")
            counted = [span for each, span in gradient.usage if isinstance(self._feeds[each], FeedAccount)]
            held = sum(stop - start for _, start, stop in counted)
            if counted and len(counted) == len(gradient.usage) and held != ticket.count:
                raise Broken(f"a gradient of {ticket.count} examples is folded, its batches hold {held}")
            self._examples[number] += ticket.count

    def _fed(self, loader: int, decision: Grant | End | EpochDone) -> None:
        feed = self._feeds[loader]
        if isinstance(decision, EpochDone):
            feed.epoch_done(decision.epoch, decision.skipped)
            return
        if isinstance(decision, Grant):
            feed.granted(decision.learner, decision.index, (decision.epoch, decision.start, decision.stop))
        else:
            feed.ended(decision.learner, decision.index)
        if self._resting.get(decision.learner) == loader:
            del self._resting[decision.learner]
            self._roused(decision.learner)

    def _roused(self, *learners: int) -> None:
        self._touched.update(self._tables)
        for table in self._tables.values():
            table.roused(*learners)

    def carried_out(self, shard: int, entry: Entry) -> None:
        if not isinstance(entry, Leave):
            with self._checking():
                role = self._world.servers[shard].role
                self._values[entry.table].carried_out(shard, entry, role.replay.shards[entry.table])

    # -- the run -----------------------------------------------------------------------------------------

    def after(self) -> None:
        """An event is over."""
        self.events += 1
        if self.most is not None and self.events > self.most:
            raise self.error(f"the run goes on after {self.most} events")
        if self._touched:
            with self._checking():
                for number in self._touched:
                    self._tables[number].due()
                for feed in self._feeds.values():
                    feed.due()
            self._touched.clear()
        if not self._moved:
            return
        self._moved = False
        with self._checking():  # the ledgers know of all that is not settled
            for loader, standing in self._world.servers[0].role.leader.dispatcher.standings().items():
                self._feeds[loader].compare(standing)

    def went_back(self) -> None:
        """The servers are new ones: the accounts begin with what these are told."""
        self._begin()
        self._cut_short = self._world.stopping

    def stopped(self) -> None:
        """Epochs need not be whole."""
        self._cut_short = True

    def over(self) -> None:
        """The run has ended well: is everything accounted for?"""
        with self._checking():
            for table in self._tables.values():
                table.over()
            for values in self._values.values():
                values.over()
            if not self._cut_short:
                for feed in self._feeds.values():
                    feed.complete()
            # what the run says of itself is what was counted here
            for number, table in self._tables.items():
                said = self._world.recorder.outcome.statistics.tables[number]
                theirs = (said.version, said.gradients, said.dropped, said.pending, said.examples)
                mine = (table.version, table.folded, table.dropped, 0, self._examples[number])
                if theirs != mine:
                    raise Broken(
                        f"table {number}: the run says version, gradients, dropped, pending, examples {theirs}, "
                        f"counted were {mine}"
                    )
                self._check_staleness(number, said.staleness, table.staleness)

    def _check_staleness(self, number: int, said: Staleness, counted: Counter[int]) -> None:
        count, total = counted.total(), sum(sigma * times for sigma, times in counted.items())
        mine = (count, total / count if count else 0.0, max(counted, default=0), dict(counted))
        theirs = (said.gradients, said.mean, said.max, said.histogram)
        if mine != theirs:
            raise Broken(
                f"table {number}: the run says of staleness gradients, mean, max, histogram {theirs}, counted were {mine}"
            )


class WatchedRole(ServerRole):
    """A shard that is looked at."""

    def __init__(self, port: ServerPort, watch: Watch) -> None:
        super().__init__(port)
        self._look = watch
        self.replay.watch = lambda entry: watch.carried_out(port.shard, entry)
        if port.shard == 0:
            self.leader.watch = watch.decided
            self.note = self._noted

    def _noted(self, learner: int, message: say.ToLeader) -> None:
        self._look.noted(learner, message)
        self.leader.note(learner, message)

    def handle(self, event: Any) -> None:
        if self._port.shard == 0:
            self._look.told(event)
        super().handle(event)
