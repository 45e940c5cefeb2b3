"""The session of learners that work with servers: what their loop sees (M1, M6, M7).

Opens tables and loaders, counts the examples that belong to the next gradient, and gathers metrics. The same class
runs in every engine; all it asks of the world goes through its port.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from syncline import messages as m
from syncline.dial import Sync
from syncline.errors import LoopError, UsageError
from syncline.learn.loader import Loader, StreamLoader
from syncline.learn.model_factories import pack_random, unpack_random
from syncline.learn.optimizer import SharedOptimizer
from syncline.learn.session import Collate, Session, copy_all
from syncline.messages import to_leader as say
from syncline.messages.to_leader import NO_LOADER
from syncline.ports import LearnerPort, Reset, RunStopped
from syncline.roles.run_plan import Seat
from syncline.roles.waiting_at_coordinator import brought, like
from syncline.table.layout import Layout, Tensors, lay_out
from syncline.table.nested_optimizers import look
from syncline.table.optimizer_template import ELEMENTWISE, SCALE_INVARIANT, OptimizerTemplate, is_torchs
from syncline.topologies import Servers


class ServerSession(Session):
    """One learner's view of a run with servers."""

    shared: type[SharedOptimizer] = SharedOptimizer

    def __init__(self, port: LearnerPort, seat: Seat) -> None:
        super().__init__(port, seat)
        self.examples = 0  # of the gradient that is being made
        self.used: dict[int, int] = {}  # loader -> portions used
        self._fresh: list[int] = []  # loaders used since the last step
        self._rests: list[tuple[SharedOptimizer, int]] = []
        self._rest_loader = -1  # whose data it waits for, where it rests
        self._idle: tuple[int, int] | None = None  # the loader that ended, and its next portion
        self._kept_random = b""
        self._mark: Tensor | None = None
        self.refused: UsageError | None = None  # why it is not where the others are

    def gradient_states(self, *, keep: bool) -> bytes:
        """A gradient is published: what torch draws from here on belongs to the next."""
        self._mark = torch.get_rng_state()
        return self.random_states() if keep else b""

    def random_states(self, *, marked: bool = False) -> bytes:
        """All random generators as they are now, torch's as it was marked, for a checkpoint; no pickle."""
        return pack_random(self.device, self._mark if marked else None)

    def restore_random(self) -> None:
        """Once, before the first batch of a run that goes on."""
        if self._kept_random:
            unpack_random(self._kept_random, self.device)
            self._kept_random = b""

    def insist(self, action: Callable[[], Any]) -> Any:
        """Do something with the servers, again if they were started anew meanwhile."""
        while True:
            try:
                return action()
            except Reset:
                self.rejoin()

    def rejoin(self) -> None:
        """The servers are new ones: read their weights; what was not folded is lost, its batches come again."""
        try:
            back: m.Rejoined = self.port.ask(m.Rejoin(len(self._tables), len(self.loaders)))
            self._rests, self._fresh, self.used = [], [], {}
            self._idle = (self._idle[0], 0) if self._idle is not None else None
            self.examples = 0
            for table, answer in zip(self._tables, back.tables, strict=True):
                table.rejoin(self.port.open(answer), answer.personal)
            for loader in self.loaders:
                loader.rejoin()
        except Reset:
            self.rejoin()

    @property
    def most_steps(self) -> int:
        return max((table.stepper.steps for table in self._tables), default=0)

    @property
    def full(self) -> bool:
        limit = self.plan.limit
        return limit is not None and bool(self._tables) and self._tables[0].version >= limit

    @property
    def ending(self) -> bool:
        return self.full or self.port.stopping()

    def unwind(self) -> RunStopped:
        """Rest as well: what the function does after its loop keeps no other learner waiting."""
        if not self._stops:
            with contextlib.suppress(Reset):
                self.rest(NO_LOADER, 0)
        return super().unwind()

    # -- tables ------------------------------------------------------------------------------------------

    def _in_step(self) -> None:
        """Refused once, it has not what the others have, and they would wait for each other for ever."""
        if self.refused is not None:
            raise LoopError(
                f"learner {self.rank} cannot go on after an error that its code caught, because its loop is not where the "
                f"others' loops are. Let that error end the learner, or return. It was: {self.refused}"
            )

    def _open_table(self, model: nn.Module, inner: torch.optim.Optimizer) -> SharedOptimizer:
        self._in_step()
        held = look(inner)
        held.refuse(inner)
        refuse_weighted(self.sync, inner, *held.optimizers)
        layout, tensors = self._lay_out(model, inner)
        number = len(self._tables)

        def opened() -> SharedOptimizer:
            answer = self._request(m.Open(number, layout))
            if isinstance(answer, m.Initialise):
                note = m.Initialised(number, self._template(inner, layout))
                answer = self._initialise(answer, note, tensors)
            end, personal = self.port.open(answer), answer.personal
            copy_all(tensors.buffers, end.buffers)
            copy_all(tensors.others, end.others)
            if personal is not None:
                copy_all(tensors.buffers, personal.buffers.get(number, tensors.buffers))
                self._kept_random = personal.random
            steps = personal.steps if personal is not None else 0
            return self.shared(self, number, inner, end, tensors, steps, wraps=held.wraps)

        table: SharedOptimizer = self.insist(opened)
        self.watch.shared.append(table)
        return table

    def _initialise(self, answer: m.Initialise, note: m.Initialised, tensors: Tensors) -> m.Opened:
        """A new table's first values are this learner's."""
        end = self.port.open(answer)
        draft = end.draft()
        assert draft is not None
        copy_all(draft.gradients, [parameter.detach() for parameter in tensors.parameters])
        copy_all(draft.buffers, tensors.buffers)
        copy_all(draft.others, tensors.others)
        end.publish(draft, note)
        return self._ask(note)

    def _lay_out(self, model: nn.Module, inner: torch.optim.Optimizer) -> tuple[Layout, Tensors]:
        groups = [group["params"] for group in inner.param_groups]
        shards = shards_for(inner, self.plan.servers)
        return lay_out(model, groups, cuttable=type(inner) in ELEMENTWISE, shards=shards)

    def _template(self, inner: torch.optim.Optimizer, layout: Layout) -> OptimizerTemplate:
        return OptimizerTemplate.of(inner)

    # -- data --------------------------------------------------------------------------------------------

    def _batches(self, batch_size: int | None, joint: int | None) -> int:
        return batch_of_each(batch_size, joint, self.learners, self.sync)

    def _open_loader(self, data: Any, batches: int, policy: str, collate: Collate, ahead: int) -> Loader:
        number, stream = len(self.loaders), isinstance(data, IterableDataset)
        size = 0 if stream else len(data)
        if stream:
            check_whole("batch_size", batches)
        else:
            check_batches(size, batches)
        epochs = self.plan.epochs if number == 0 else None
        opening = m.OpenLoader(number, size, batches, m.STREAM if stream else policy, epochs)
        kind = StreamLoader if stream else Loader

        def opened() -> Loader:
            options = {"policy": policy, "collate": collate, "ahead": ahead}
            return kind(self, number, data, batch_size=batches, parts=self._request(opening), **options)

        loader: Loader = self.insist(opened)
        self.loaders.append(loader)
        return loader

    def _request(self, message: Any) -> Any:
        self.deliver()
        if self._idle is not None:  # others must not wait for a gradient while this learner waits for them
            self.rest(*self._idle)
        elif self._fresh and self.sync.waits:  # nor for what it has not published yet
            self.rest(NO_LOADER, 0)
        answer = self._ask(message)
        if self._fresh and self._rests and self.sync.lockstep:  # the others may have gone on
            self._rest(NO_LOADER, None)
            self.rested()
        return answer

    def _ask(self, message: Any) -> Any:
        """Who is refused something that the others get cannot go on with them."""
        self._in_step()
        try:
            return self.port.ask(message)
        except UsageError as error:
            self.refused = error
            raise

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is communicated before `step` here: accumulation needs no special care."""
        return contextlib.nullcontext()

    # -- metrics -----------------------------------------------------------------------------------------

    def mean(self, value: float | Tensor) -> Any:
        """The mean of a number or tensor over all live learners; every learner must call it."""
        self._in_step()
        held = brought(value)

        def meet() -> Any:
            """It rests until that is over: nobody need wait for its gradient, wherever in its loop it is."""
            self.deliver()
            self.rest(NO_LOADER, 0)
            self.port.post(say.Meet())
            return self.port.ask(m.MeanOf(held))

        try:
            mean: Tensor = self.insist(meet)
        except LoopError as error:
            self.refused = error
            raise
        except UsageError:  # all of the meeting hear it, and may go on
            self._met()
            raise
        self._met()
        return like(mean, value)

    def _met(self) -> None:
        """All of the meeting count again: read what was folded meanwhile."""
        try:
            self.rested()
        except Reset:
            self.rejoin()
        if self._idle is not None and not self.sync.lockstep:
            self.rest(*self._idle)

    def push(self) -> None:
        """What learners that step by themselves have not pushed yet, unless they were refused."""
        for table in self._tables if self.refused is None else ():
            table.stepper.push()

    def deliver(self) -> None:
        """What it has published is there before it waits for others: else they might seem to wait for each other."""
        for table in self._tables:
            table.drive(table.stepper.deliver())

    def close(self) -> None:
        """The learner's function is over: random states are left as of the last gradient."""
        if not self.ending and self.refused is None:
            self.push()
            if sys.exception() is None:
                with contextlib.suppress(Reset):
                    self.deliver()
        if self.plan.saving.cuts and self._tables:
            with contextlib.suppress(Reset):
                states = self.random_states(marked=True)
                self.port.post(say.Farewell(self._tables[0].number, states))
        for table in self._tables:
            table.release()
        self.watch.close()
        if not self.ending and sys.exception() is None:
            self.port.tell(m.Closed())

    # -- between the loaders and the tables --------------------------------------------------------------

    def consumed(self, loader: int, upto: int, count: int) -> None:
        """A batch was handed to the loop: it belongs to the next gradient."""
        self._in_step()
        self._idle = None
        self.used[loader] = upto
        if loader not in self._fresh:
            self._fresh.append(loader)
        self.examples += count

    def take_usage(self) -> tuple[int, int, int]:
        """(examples, loader, portions used) of the gradient that is published now."""
        if self.refused is not None:
            self._in_step()
        count, self.examples = self.examples, 0
        if self._rests:
            self._rests, self._idle = [], None
        if not self._fresh:
            return count or 1, -1, 0
        for loader in self._fresh:
            self.loaders[loader].look_ahead()
        *further, last = self._fresh
        for loader in further:
            self.port.post(say.Used(loader, self.used[loader]), later=True)
        self._fresh = []
        return count or 1, last, self.used[last]

    def ended(self, loader: int, index: int) -> None:
        """A loader's epoch is over, and its batches are in gradients: there may be nothing to compute for long.

        In lockstep a last step after the loop must still meet the others': there only waiting makes it rest.
        """
        if not self._fresh:
            self._idle = (loader, index)
            if not self.sync.lockstep:
                self.rest(loader, index)

    def awaits(self, table: int, number: int) -> None:
        """It does nothing until this ticket is let go, though it had gone on: steps of other tables may wait for it."""
        if len(self._tables) > 1:
            self.port.post(say.Await(table, number))

    def wait_for_data(self, loader: int, index: int) -> None:
        """It can do nothing before it has this portion."""
        self.deliver()
        self.rest(loader, index)

    def rest(self, loader: int, index: int) -> None:
        """Nothing to compute: nobody need wait for this learner, be it under a dial that it does not know yet."""
        if not self._rests or self._rest_loader != loader:
            self._rest(loader, (loader, index))

    def _rest(self, loader: int, place: tuple[int, int] | None) -> None:
        """Nothing to compute before this portion; or there is something again, before it says that it reads."""
        self._rest_loader = loader
        states = self.random_states() if self.plan.saving.cuts else b""
        self._rests = [
            (table, table.stepper.rest(place, states, later=table is not self._tables[-1]))
            for table in self._tables
        ]

    @property
    def resting(self) -> bool:
        return bool(self._rests)

    def rested(self) -> None:
        """There is data again: read what the others have by now."""
        for table, number in self._rests:
            table.rested(number)
        self._rests = []


def shards_for(optimizer: torch.optim.Optimizer, servers: Servers, size: int | None = None) -> int:
    """Of a table: all there are where the user named their number, else only as many as are worth it.

    An optimizer that is not torch's may compute something over all its parameters: one shard has them all. One that holds
    others goes to one shard in any case.
    """
    if look(optimizer).wraps:
        return 1
    if servers.fixed:
        return servers.shards
    if not is_torchs(optimizer):
        return 1
    if size is None:
        size = sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
    return max(1, min(servers.shards, size // servers.least))


def refuse_weighted(sync: Sync, *optimizers: torch.optim.Optimizer) -> None:
    """Weights in the mean of a fold mean nothing to an optimizer that divides them out again (M4)."""
    for optimizer in optimizers:
        if sync.weighs and isinstance(optimizer, SCALE_INVARIANT):
            raise UsageError(
                f"{sync} weights each gradient by its staleness, but {type(optimizer).__name__} divides a gradient's "
                "scale out again: use SGD, or rate=share, which changes the learning rate itself"
            )


def check_batches(size: int, batch_size: int) -> None:
    check_whole("batch_size", batch_size)
    if size == 0:
        raise UsageError("the data set is empty")
    if batch_size > size:
        raise UsageError(
            f"batch_size {batch_size} is larger than the data set of {size} examples; use at most {size}"
        )


def check_joint(batch_size: int | None, joint: int | None, learners: int) -> None:
    """Either the batch of each learner or that of all together (A6)."""
    if (batch_size is None) == (joint is None):
        raise UsageError(
            f"give either batch_size= (of each learner) or global_batch_size= (of all together), got "
            f"batch_size={batch_size} and global_batch_size={joint}"
        )
    if joint is not None:
        check_whole("global_batch_size", joint)
        if joint < learners:
            raise UsageError(
                f"global_batch_size={joint} over {learners} learners: each needs at least one example; use fewer learners"
            )


def batch_of_each(batch_size: int | None, joint: int | None, learners: int, sync: Sync) -> int:
    """The batch of each learner with servers, from one of the two."""
    check_joint(batch_size, joint, learners)
    if joint is None:
        assert batch_size is not None
        return batch_size
    if not sync.lockstep or joint % learners:
        raise UsageError(
            f"global_batch_size={joint} over {learners} learners with {sync}: with servers every learner has the same "
            "batch_size, and only in lockstep is an update of all; give batch_size=, or use topology='allreduce'"
        )
    return joint // learners


def check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
