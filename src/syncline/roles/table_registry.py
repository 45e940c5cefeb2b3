"""Tables and loaders that learners open: layouts are compared, the lowest rank initialises, all begin together (M6, M7).

The coordinator's part: shards hear of what is made and who joins it, learners get their answers. Not responsible for
learners that wait for each other elsewhere (`waiting_at_coordinator`), nor for what a checkpoint holds (`checkpoint_manifest`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from syncline import messages as m
from syncline.errors import LayoutError, UsageError
from syncline.ports import CoordinatorPort
from syncline.protocols.sequence import Account
from syncline.roles.checkpoint_manifest import Restored
from syncline.roles.run_plan import RunPlan
from syncline.roles.waiting_at_coordinator import WaitingLearners
from syncline.table.checkpoint_content import Source, table_file
from syncline.table.layout import Layout
from syncline.table.optimizer_template import OptimizerTemplate
from syncline.topologies import Trees


@dataclass(slots=True)
class Table:
    """One that somebody has opened."""

    layout: Layout
    template: OptimizerTemplate | None = None  # once it is made
    firsts: set[str] = field(default_factory=set)  # files of its first values, which a lost shard may need
    initialiser: int | None = None

    @property
    def made(self) -> bool:
        return self.template is not None

    def start(self, number: int) -> Source | None:
        """Where its first values are, while no checkpoint has it."""
        return Source(None, number, self.layout.shards) if len(self.firsts) == self.layout.shards else None

    @property
    def optimizer(self) -> str:
        assert self.template is not None
        return _name(self.template)


class TableRegistry:
    """All tables and loaders of a run; `dial` is the number of the dial to begin with."""

    def __init__(
        self,
        port: CoordinatorPort,
        plan: RunPlan,
        live: Mapping[int, int],
        room: WaitingLearners,
        dial: Callable[[], int],
    ) -> None:
        self._port, self._plan, self._room, self._dial = port, plan, room, dial
        self._live = live  # learner -> rank
        self.tables: dict[int, Table] = {}
        self.loaders: dict[int, m.OpenLoader] = {}

    def expect(self, learners: Mapping[int, int], restored: Restored) -> None:
        """These begin together, there; in a warm start one alone. To be said before anything else."""
        self._restored = restored
        self.initial = dict(learners)  # the first fold and the first epoch wait for these
        if learners and restored.version < self._plan.warm:
            first = min(learners, key=lambda learner: learners[learner])
            self.initial = {first: learners[first]}

    def leave(self, learner: int) -> None:
        """Nobody waits for it to begin together: it is gone, or opens further loaders by itself."""
        if self.initial.pop(learner, None) is not None:
            self._begin_together()

    def hand_over(self, learner: int) -> None:
        """It is gone: if it was to initialise a table, another does."""
        for number, table in self.tables.items():
            if table.initialiser == learner and not table.made:
                table.initialiser = None
            self._choose_initialiser(number, table)

    def make_again(self) -> None:
        """The shards are new ones: tell them of all there is."""
        for number, table in sorted(self.tables.items()):
            if number not in self._restored.tables and table.start(number) is None:
                table.template = None  # nobody has read it yet
            if table.made:
                self._make(number, table)
            else:
                table.initialiser = None
        for opened in self.loaders.values():
            self._make_loader(opened)

    def join_again(self, back: Mapping[int, m.Rejoin]) -> dict[int, list[m.Opened]]:
        """These had opened so many tables and loaders; their answers."""
        opened = {
            learner: [self._opened(number, self.tables[number], learner) for number in range(rejoin.tables)]
            for learner, rejoin in back.items()
        }
        for loader in self.loaders:
            joining = {learner: self._live[learner] for learner in back if back[learner].loaders > loader}
            if joining:
                self._port.tell_shards(m.JoinLoader(loader, joining))
        return opened

    # -- tables ------------------------------------------------------------------------------------------

    def open(self, learner: int, message: m.Open) -> None:
        table = self.tables.setdefault(message.table, Table(message.layout))
        if difference := table.layout.difference(message.layout):
            rank = self._live[learner]
            raise LayoutError(
                f"table {message.table}: learner {rank} built another layout than the learners before it, {difference}. "
                "Every learner must create the same model and optimizer in the same order; "
                "seeds may differ, shapes and groups may not."
            )
        self._restored.check_layout(message.table, message.layout)
        if table.made:
            self._room.reply(learner, self._opened(message.table, table, learner))
        else:
            self._choose_initialiser(message.table, table)

    def _choose_initialiser(self, number: int, table: Table) -> None:
        """The lowest live rank's parameters initialise the table (M6)."""
        if table.made or table.initialiser is not None or not self._live:
            return
        lowest = min(self._live, key=lambda learner: self._live[learner])
        asked = self._room.asked.get(lowest)
        if isinstance(asked, m.Open) and asked.table == number:
            table.initialiser = lowest
            self._room.reply(lowest, m.Initialise(number, table.layout))

    def initialised(self, learner: int, message: m.Initialised) -> None:
        table = self.tables[message.table]
        if message.table in self._restored.tables:
            self._restored.check_optimizer(message.table, _name(message.template))
        table.template = message.template
        self._make(message.table, table)
        asked = self._room.asked.items()
        others = [each for each, what in asked if isinstance(what, m.Open) and what.table == message.table]
        for each in (learner, *self._room.by_rank(others)):  # who has the first values before all others
            self._room.reply(each, self._opened(message.table, table, each, first=each == learner))

    def _make(self, number: int, table: Table) -> None:
        """Tell the shards of a table: its first values, or those of the checkpoint."""
        plan, kept = self._plan, self._restored.tables.get(number)
        assert table.template is not None
        source = kept.source if kept else table.start(number)
        self._port.tell_shards(
            m.MakeTable(
                table=number,
                layout=table.layout,
                template=table.template,
                dial=self._dial(),
                initial=dict(self.initial),
                learners=plan.learners,
                warm=plan.warm if number == 0 else 0,
                batch_size=plan.batch_size,
                limit=plan.limit if number == 0 else None,
                clip_norm=plan.clip_norm,
                source=source,
                first=plan.saving.cuts and source is None,
                account=kept.account if kept else Account(),
                tree=isinstance(plan.topology, Trees),
            )
        )

    def first(self, saved: m.Saved) -> None:
        """A shard's part of a table's first weights is on the disk: it begins there again if it is lost before a checkpoint."""
        for number, table in self.tables.items():
            files = [table_file(number, shard) for shard in range(table.layout.shards)]
            if saved.written and saved.name in files:
                table.firsts.add(saved.name)

    def in_checkpoint(self, tables: Iterable[int]) -> None:
        """First values of these are not needed any more."""
        for number in tables:
            self.tables[number].firsts.clear()

    @property
    def waits_for_checkpoint(self) -> bool:
        """Tables of the checkpoint that the run goes on from are not open yet, and will be read there."""
        return any(
            number not in self.tables or not self.tables[number].made for number in self._restored.tables
        )

    def _opened(self, number: int, table: Table, learner: int, *, first: bool = False) -> m.Opened:
        rank = self._live[learner]
        personal = self._restored.learners.get(rank)
        buffers = personal.buffers.get(number) if personal else None
        self._port.tell_shards(m.JoinTable(number, learner, rank, buffers, first))
        return m.Opened(number, table.layout, personal)

    # -- loaders -----------------------------------------------------------------------------------------

    def open_loader(self, learner: int, message: m.OpenLoader) -> None:
        first = self.loaders.get(message.loader, message)
        if first != message:
            raise UsageError(
                f"learner {self._live[learner]} opened loader {message.loader} with {message}, another learner with {first}. "
                "Every learner must open the same loaders in the same order."
            )
        if message.loader not in self.loaders:
            self._make_loader(message)
            self.loaders[message.loader] = message
        if learner in self.initial:
            self._begin_together()
        else:
            self._join_loader(message.loader, [learner])

    def _begin_together(self) -> None:
        """All of them wait for the same loader: they begin with its first epoch, and a joint round is cut for all."""
        if not self.initial or len(self._room.asked) < len(self.initial):  # quick to see
            return
        first, *others = [self._room.asked.get(learner) for learner in self.initial]
        if isinstance(first, m.OpenLoader) and all(asked == first for asked in others):
            self._join_loader(first.loader, self._room.by_rank(self.initial))

    def _make_loader(self, opened: m.OpenLoader) -> None:
        kept = self._restored.loaders.get(opened.loader)
        self._restored.check_loader(opened.loader, opened.size, opened.policy)
        self._port.tell_shards(
            m.MakeLoader(
                opened=opened,
                dial=self._dial(),
                parts=self.parts_of(opened.loader),
                snapshot=self._plan.snapshots and opened.loader == 0,
                standing=kept.standing if kept else None,
            )
        )

    def parts_of(self, loader: int) -> int:
        kept = self._restored.loaders.get(loader)
        return kept.parts if kept else self._plan.learners

    def _join_loader(self, loader: int, learners: list[int]) -> None:
        self._port.tell_shards(m.JoinLoader(loader, {learner: self._live[learner] for learner in learners}))
        for learner in learners:
            self._room.reply(learner, self.parts_of(loader))


def _name(template: OptimizerTemplate) -> str:
    return f"{template.kind.__module__}.{template.kind.__qualname__}"
