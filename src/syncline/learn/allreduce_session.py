"""The session of learners among equals: what their loop sees under all-reduce (A1–A8).

Opens tables and loaders, counts the examples that belong to the next gradient, agrees with the others on checkpoints and the end,
and reports. All it asks of the world goes through its port.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from syncline import messages as m
from syncline.errors import LayoutError, UsageError
from syncline.learn.allreduce_loader import AllReduceLoader, AllReduceSplitLoader, ZeroGradients
from syncline.learn.allreduce_optimizer import AllReduceOptimizer
from syncline.learn.allreduce_reducer import Header
from syncline.learn.allreduce_state import cut_table
from syncline.learn.model_factories import pack_random, unpack_random
from syncline.learn.server_session import check_batches, check_joint
from syncline.learn.session import Collate, Session, copy_all
from syncline.ports import CollectivePort, Progress
from syncline.protocols.allreduce import equal_shares
from syncline.protocols.checkpoint_schedule import JointCheckpointSchedule
from syncline.roles.allreduce_coordinator import (
    Joint,
    PeerClosed,
    PeerCut,
    PeerEpoch,
    PeerTable,
    Unsaved,
    own_losses,
)
from syncline.roles.checkpoint_manifest import FLIGHTS, PipelineState, Restored, flight_tensors
from syncline.roles.run_plan import Seat
from syncline.roles.waiting_at_coordinator import brought, like, mean_of
from syncline.table.checkpoint_content import table_file
from syncline.table.checkpoints import CheckpointError
from syncline.table.layout import Layout, Tensors, lay_out
from syncline.table.nested_optimizers import look
from syncline.table.optimizer_template import ELEMENTWISE
from syncline.topologies import AllReduce


class AllReduceSession(Session):
    """One learner's view of an all-reduce run."""

    table = AllReduceOptimizer

    def __init__(self, port: CollectivePort, seat: Seat, restored: Restored | None = None) -> None:
        super().__init__(port, seat)
        assert isinstance(seat.plan.topology, AllReduce)
        self.topology = seat.plan.topology
        self._restored = restored or Restored(name="the start", seed=self.plan.seed)
        self._cadence = JointCheckpointSchedule(
            every=self.plan.saving.every, seconds=self.plan.saving.seconds, now=port.now()
        )
        self._last_cut: int | None = None  # its version
        self._at_agreement: dict[int, int] = {}  # table -> iterations when all agreed to stop
        self._begun = False  # a loop has asked for a batch
        self.consumed = 0  # examples handed out so far
        self.batches = 0  # handed out so far
        self.repeating = False  # the last batch was a repeated one, without weight
        self.more = True  # there are further batches of this epoch here
        self.more_anywhere = True  # and at any learner, as of the last update
        self.reference = 1  # a batch of so many examples is a whole one
        self.accumulating = False
        self._silence = ZeroGradients()
        self.marks: list[int] = []  # epochs that end with the next gradient
        self.stopped = False  # all have agreed to leave, before their time
        self._since = 0  # the first iteration of this epoch

    def _restore_random(self) -> None:
        kept = self._restored.learners.get(self.rank)
        if kept is not None and kept.random:
            unpack_random(kept.random, self.device)

    @property
    def most_steps(self) -> int:
        return max((table.started for table in self._tables), default=0)

    @property
    def ending(self) -> bool:
        return self.full or self.stopped

    @property
    def full(self) -> bool:
        """All updates that were asked for have been started."""
        limit = self.plan.limit
        return limit is not None and bool(self._tables) and self._tables[0].started >= limit

    @property
    def iterations(self) -> int:
        """Of all its tables, those without examples too."""
        return sum(table.iterations for table in self._tables)

    # -- tables ------------------------------------------------------------------------------------------

    def _open_table(self, model: nn.Module, inner: torch.optim.Optimizer) -> AllReduceOptimizer:
        """This learner's copy of the model and its real optimizer, as one whose `step` averages first."""
        if self.topology.apply != "end" and type(inner) not in ELEMENTWISE:
            raise LayoutError(
                f"{self.topology} applies some parameters before others, which {type(inner).__name__} may not "
                f"survive; use apply=end, or one of {', '.join(kind.__name__ for kind in ELEMENTWISE)}"
            )
        number = len(self._tables)
        layout, tensors = self._lay_out(model, inner)
        layouts = self.port.meet(f"session.optimizer, its call {number + 1}", layout)
        for rank, other in enumerate(layouts):
            if difference := layouts[0].difference(other):
                raise LayoutError(
                    f"learner 0 and learner {rank} opened table {number} with different models: {difference}. Every "
                    "learner must make the same model; its values may differ, its names, order, shapes and groups may not."
                )
        with torch.no_grad():
            for tensor in self._alike(model, layout, tensors):
                self.port.broadcast(tensor.data)
        if self.rank == 0:
            self.port.tell(PeerTable(number, layout))
        table = self.table(self, number, inner, model, layout, tensors)
        self._resume_table(table, tensors.buffers)
        self._silence.add(tensors.parameters)
        self.watch.shared += (table, inner, *look(inner).optimizers)
        return table

    def _lay_out(self, model: nn.Module, inner: torch.optim.Optimizer) -> tuple[Layout, Tensors]:
        return lay_out(model, [group["params"] for group in inner.param_groups], cuttable=False, shards=1)

    def _alike(self, model: nn.Module, layout: Layout, tensors: Tensors) -> Sequence[Tensor]:
        """What every process has the same values of."""
        return (*tensors.parameters, *tensors.buffers, *tensors.others)

    def _resume_table(self, table: AllReduceOptimizer, buffers: list[Tensor]) -> None:
        """Of a run that goes on: the weights, the optimizer's state, this learner's buffers and random states."""
        found, number = self._restored, table.number
        kept = found.tables.get(number)
        if kept is None:
            return
        found.check_layout(number, table.layout)
        found.check_optimizer(number, name_of(table.kind))
        pipeline = found.pipelines.get(number) or PipelineState(started=kept.account.version)
        losses = own_losses(found.counts.losses, self.rank, self.learners) if number == 0 else (0.0, 0)
        table.resume(kept, pipeline, found.counts.examples.get(number, 0), losses)
        own = found.learners.get(self.rank) or next(iter(found.learners.values()), m.Personal())
        if number in own.buffers:
            copy_all(buffers, table.own_buffers(own.buffers[number]))
        self._restore_random()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    # -- data --------------------------------------------------------------------------------------------

    def _batches(self, batch_size: int | None, joint: int | None) -> tuple[int, ...]:
        check_joint(batch_size, joint, self.learners)
        if batch_size is not None:
            return (batch_size,) * self.learners
        assert joint is not None
        return equal_shares(joint, self.learners)

    def _open_loader(
        self, data: Any, batches: tuple[int, ...], policy: str, collate: Collate, ahead: int
    ) -> AllReduceLoader:
        number = len(self.loaders)
        iterable = isinstance(data, IterableDataset)
        size = -1 if iterable else len(data)
        if not iterable:
            check_batches(size, batches[self.rank])
        opened = self.port.meet(f"session.loader, its call {number + 1}", (size, batches, policy))
        if any(other != opened[0] for other in opened):
            raise UsageError(
                f"loader {number}: the learners' (size of the data, batches, policy) differ: {opened}. Every learner must "
                "open the same loaders in the same order."
            )
        if not self.loaders:
            self.reference = max(batches)
        kept = self._restored.loaders.get(number)
        self._restored.check_loader(number, size, policy)
        kind = AllReduceSplitLoader if iterable else AllReduceLoader
        options = {"policy": policy, "collate": collate, "ahead": ahead}
        loader = kind(self, number, data, batches=batches, kept=kept, **options)
        self.loaders.append(loader)
        return loader

    def goes_on(self) -> bool:
        """Write a checkpoint that is due, before the next batch."""
        if not self._begun:
            self._begun = True
            self._restore_random()
        if self.ending:
            self._cut_last()
        elif self._cadence.take(self.port.now()):
            self._cut()
        return super().goes_on()

    def consume(self, loader: int, count: int, *, more: bool) -> None:
        """A batch was handed to the loop: it belongs to the next gradient, without weight if it is a repeated one."""
        self.consumed += count
        self.batches += 1
        self.repeating, self.more = count == 0, more
        self._silence.handed_out(loader, repeated=self.repeating)

    def epoch_left(self) -> None:
        """The loop over a loader is over: what follows is computed on something else."""
        self.repeating = False
        self._silence.end()

    def epoch_begins(self, loader: int, epoch: int) -> None:
        self.more = self.more_anywhere = True
        self._since = self._tables[0].iterations if self._tables else 0
        if loader == 0:
            course = self.plan.course
            self.sync = course.dials[course.at(epoch)][1]

    def epoch_given(self, loader: int, epoch: int) -> None:
        """All batches of an epoch were handed out: the gradient that takes the last of them ends it."""
        if loader == 0 and self._tables:
            if self._tables[0].reducer.pending:
                self.marks.append(epoch)
            else:
                self._tables[0].mark_last(epoch)

    def mean(self, value: float | Tensor) -> Any:
        found = self.port.meet("session.mean", brought(value))
        return like(mean_of(dict(enumerate(found))), value)

    # -- what the tables say -----------------------------------------------------------------------------

    def heard(self, table: AllReduceOptimizer, iteration: int, header: Header) -> None:
        """An update was applied, with what all learners said when its gradients were made."""
        if header.stop > 0 and not self.stopped:
            self.stopped = True
            self._at_agreement = {each.number: each.iterations for each in self._tables}
        if self.plan.saving.cuts and table.number == 0 and header.examples:
            self._cadence.applied(table.version, wished=header.cut > 0)
        if iteration >= self._since:
            self.more_anywhere = header.more > 0

    def lets_finish(self, table: AllReduceOptimizer) -> bool:
        """Agreed in the middle of a batch's steps: each table that lags behind others may take one more."""
        if not self.stopped or self.full:
            return False
        at = self._at_agreement
        return table.iterations == at.get(table.number) and table.iterations < max(at.values())

    def step_over(self, table: AllReduceOptimizer) -> None:
        """What was handed out is in gradients. A loop without loaders has its checkpoints here."""
        for loader in self.loaders:
            loader.settle()
        last = table.number == len(self._tables) - 1
        if not self.loaders and last and not self.ending and self._cadence.take(self.port.now()):
            self._cut()

    def stepped(self, table: AllReduceOptimizer) -> None:
        if table.number == 0:
            said = table.version, table.gradients, table.examples, table.last_loss, table.clock.histogram
            self.port.tell(Progress(self.steps, *said))

    def epoch_applied(self, epoch: int) -> None:
        first = self._tables[0]
        (loss, count), first.losses = first.losses, (0.0, 0)
        copies = {table.number: table.copy() for table in self._tables} if self.plan.snapshots else {}
        self.port.tell(
            PeerEpoch(
                epoch=epoch,
                version=first.version,
                examples=first.examples,
                loss=loss,
                count=count,
                copies=copies,
            )
        )

    @property
    def steps(self) -> int:
        """Of all its tables."""
        return sum(table.started for table in self._tables)

    def states(
        self, buffers: dict[int, tuple[int, dict[str, Tensor]]]
    ) -> dict[int, tuple[int, dict[str, Tensor]]]:
        """Version and tensors by name of each table: this learner's parameters, the given buffers."""
        return {
            table.number: (buffers[table.number][0], {**table.named(), **buffers[table.number][1]})
            for table in self._tables
        }

    # -- checkpoints -------------------------------------------------------------------------------------

    def wishes_cut(self) -> bool:
        return self.plan.saving.cuts and self.rank == 0 and self._cadence.wishes(self.port.now())

    def _cut_last(self) -> None:
        """As it ends, with what is in flight: a run that goes on from there does as this one would have done."""
        if self.plan.saving.cuts and self._tables and self._tables[0].version != self._last_cut:
            self._cut()

    def save_failed(self) -> None:
        """Report a checkpoint of this learner's copy, which all learners have alike: the run has failed.

        There is none in the middle of an update, with averages in flight (delayed:k), and where tables are steps apart.
        """
        tables, trained = (
            self._tables,
            bool(self._tables) and self._tables[0].version > self._restored.version,
        )
        if not trained or tables[0].version == self._last_cut or any(table.delay for table in tables):
            self.port.tell(Unsaved(whole=True))
        elif any(table.torn for table in tables) or len({table.applied for table in tables}) > 1:
            self.port.tell(Unsaved(whole=False))
        else:
            self._cut(failed=True)

    def _cut(self, *, failed: bool = False) -> None:
        """This learner's part of a checkpoint; the first one's holds what all have alike."""
        number = self._last_cut = self._tables[0].version
        self.port.tell(
            PeerCut(
                number=number,
                personal=m.Personal(
                    self.steps,
                    pack_random(self.device),
                    {table.number: table.buffers() for table in self._tables},
                ),
                losses=self._tables[0].losses,
                flights={
                    table.number: table.losses_in_flight() if not failed else [] for table in self._tables
                },
                joint=self._joint(number, failed) if self.rank == 0 or failed else None,
                failed=failed,
            )
        )

    def _joint(self, number: int, failed: bool) -> Joint:
        pipelines = {table.number: table.pipeline(failed=failed) for table in self._tables}
        files = []
        for table in self._tables:
            files.append(table_file(table.number, 0))
            try:
                kept = cut_table(table.inner, table.layout, table.values(), table.states())
                self.port.save(number, files[-1], *kept)
            except CheckpointError as error:  # the run goes on
                self.port.tell(m.Saved(number, files[-1], None, str(error)))
        if flying := flight_tensors(pipelines):
            files.append(FLIGHTS)
            self.port.save(number, FLIGHTS, flying, {})
        return Joint(
            files=files,
            accounts={table.number: table.counted() for table in self._tables},
            examples={table.number: table.examples for table in self._tables},
            optimizers={table.number: name_of(table.kind) for table in self._tables},
            pipelines={table: pipeline.without_tensors() for table, pipeline in pipelines.items()},
            loaders={
                each.number: m.OpenLoader(each.number, each.size, each.batch_size, each.policy, None)
                for each in self.loaders
            },
            standings={
                each.number: each.standing_at_failure() if failed else each.standing()
                for each in self.loaders
            },
        )

    def close(self) -> None:
        """The learner's function is over: everything in flight is applied, and the end reported."""
        self._cut_last()
        for table in self._tables:
            table.flush()
            table.release()
        self._silence.end()
        self.watch.close()
        self.port.tell(
            PeerClosed(
                self.steps,
                self._tables[0].last_loss if self._tables else float("nan"),
                {table.number: table.account() for table in self._tables},
                {table.number: table.copy(final=True) for table in self._tables},
            )
        )


def name_of(kind: type) -> str:
    """As a checkpoint has it."""
    return f"{kind.__module__}.{kind.__qualname__}"
