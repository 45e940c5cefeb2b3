"""The optimizer that users step under all-reduce: averages the gradients of all learners, then runs the real one (A1–A3).

Blocking reduces inside `step`; layer-wise while backward runs, bucket by bucket; delayed applies each average k steps later.
All learners take the same steps in the same order, so their copies stay equal to the last bit.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.learn.allreduce_reducer import Reducer, Round
from syncline.learn.allreduce_state import GroupChanges, as_in, load_table, plain_groups
from syncline.learn.allreduce_user_hooks import Application, Applications, Callbacks
from syncline.learn.session import UNSAID, TableOptimizer
from syncline.protocols.allreduce import Pipeline, Vote
from syncline.protocols.sequence import Account
from syncline.protocols.staleness import StalenessClock
from syncline.roles.allreduce_coordinator import Copy, Deeper, PeerAccount
from syncline.roles.checkpoint_manifest import PipelineState, TableState
from syncline.table.layout import Layout, Tensors, as_state_dict
from syncline.table.nested_optimizers import look
from syncline.table.optimizer_template import ELEMENTWISE, bare_step

if TYPE_CHECKING:
    from syncline.learn.allreduce_session import AllReduceSession


class AllReduceOptimizer(TableOptimizer):
    """One table's copy in a learner among equals; made by `session.optimizer`."""

    def __init__(
        self,
        session: AllReduceSession,
        number: int,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        layout: Layout,
        tensors: Tensors,
    ) -> None:
        super().__init__(number, inner, tensors)
        self._others = tensors.others
        self.inner, self.layout, self.state = inner, layout, inner.state
        self._bare_step = bare_step(inner)
        self.version = 0
        self._session, self._port = session, session.port
        topology, sync = session.topology, session.sync
        self._order = topology.apply
        self._pipeline = Pipeline(1 if sync.auto else sync.delay)
        self._vote = Vote(limit=sync.delay, learners=session.learners) if sync.auto else None
        self._flying: dict[int, Round] = {}
        self.clock = StalenessClock()
        self.examples = self.gradients = self._void = 0
        self.torn = False  # in the middle of an update
        self.losses = 0.0, 0  # since the last epoch ended: (sum over examples, examples)
        self.last_loss = float("nan")
        self._last = session.port.now()
        names = [entry.name for entry in layout.parameters.entries]
        named = list(zip(names, self.parameters, strict=True))
        self.hooks = Callbacks(model, named, hooked=topology.layerwise)
        self._shared = self._to_reduce(model)
        reduced = [named[index] for index in self._shared]
        self.reducer = Reducer(session, number, reduced, self.hooks, self._pipeline)
        self._by_bucket = self._groups_by_bucket()
        self._wishes = GroupChanges(self, look(inner).optimizers)

    def _to_reduce(self, model: nn.Module) -> list[int]:
        """Parameters whose gradients all processes make together, by index."""
        return list(range(len(self.parameters)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(table {self.number}, {self.kind.__name__}, {len(self.reducer.buckets)} buckets)"

    @property
    def started(self) -> int:
        """Iterations whose reduction was started, those without any examples apart."""
        return self._pipeline.started - self._void

    @property
    def iterations(self) -> int:
        return self._pipeline.started

    @property
    def applied(self) -> int:
        """Return how many iterations the parameters contain."""
        return self.version + self._void

    def mark_last(self, epoch: int) -> None:
        """The last gradient has ended this epoch."""
        newest = max(self._flying, default=None)
        if newest is None:
            self._session.epoch_applied(epoch)
        else:
            self._flying[newest].epochs.append(epoch)

    @property
    def delay(self) -> int:
        """k, as it is now."""
        return self._pipeline.depth

    # -- the step ----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Average this gradient over all learners, and apply what is due."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin_step(loss)
        while (due := self._pipeline.due()) is not None:
            self._apply(self._flying.pop(due))
        self._end_step()
        if self.number == 0 and self._session.full:
            self.flush()  # some in flight may have no examples: then there is more to do
        self._session.step_over(self)
        self.torn = False
        return loss

    def _begin_step(self, loss: Any) -> None:
        session = self._session
        if session.ending and not session.lets_finish(self):
            raise session.unwind()
        said, session.loss = session.loss if loss is None else loss, UNSAID
        self.last_loss = said.item() if isinstance(said, Tensor) else float(said)
        if said is not UNSAID and not math.isfinite(self.last_loss):
            session.watch.not_finite(self.last_loss, self.started, session.epoch)
        current = self.reducer.finish()
        current.stamp, examples = self.version, current.weight
        if examples and not math.isnan(self.last_loss):
            current.loss = (self.last_loss * examples, examples)
        if self.number == 0:
            current.epochs, session.marks = session.marks, []
        if session.plan.delay:
            current.options = self._wishes.now()
        self._pipeline.start()
        self._flying[current.iteration] = current

    def _end_step(self) -> None:
        now = self._port.now()
        self.reducer.spent, self._last = now - self._last, now
        self._session.stepped(self)

    def flush(self) -> None:
        """Apply what is in flight under delayed:k; every learner must call it."""
        while (due := self._pipeline.flush()) is not None:
            self._apply(self._flying.pop(due))
            self._session.stepped(self)

    # -- applying ----------------------------------------------------------------------------------------

    def _apply(self, current: Round) -> None:
        if self._order != "end":  # bucket by bucket: from the last layer to the first, or as they arrive
            self.hooks.averaged(self)
            self.reducer.read_header(current)
            left = list(range(len(current.buckets)))
            while left:
                ready = left
                if self._order == "arrival":
                    ready = [n for n in left if current.reductions[n].wait(block=False)] or left
                left.remove(number := ready[0])
                self._apply_bucket(current, number)
            self._applied(current)
            return
        given = current.waited  # backward has done it, and the loop may have changed it since
        if not given:
            self.reducer.complete(current)
        if current.header.examples:
            own = [parameter.grad for parameter in self.parameters] if current.options else []
            if not given:
                self.reducer.give(*current.buckets)
            if self._session.plan.clip_norm is not None:
                self._clip(self._session.plan.clip_norm)
            self.hooks.averaged(self)
            self.hooks.applying(self.parameters)
            self.torn = True
            with self._rates(current):
                self._step_inner()
            for parameter, gradient in zip(self.parameters, own, strict=False):
                parameter.grad = gradient
        self._applied(current)

    def _clip(self, limit: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, limit)

    def _step_inner(self) -> None:
        """Step the user's optimizer without global hooks: they run once, around the session's optimizer."""
        inner = self.inner
        hooked = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        (inner.step if hooked or "step" in vars(inner) else self._bare_step)()

    def _rates(self, current: Round) -> contextlib.AbstractContextManager[None]:
        """The options as they were with the gradient (M4), the rate times the dial's factor.

        What the optimizer itself changes in its groups (counts, estimates) is state, and stays.
        """
        plan = self._session.plan
        factor = self._session.sync.factor(1, plan.joint_batch)
        if factor == 1.0 and not current.options and not plan.saving.cuts:
            return contextlib.nullcontext()
        return self._wishes.as_of(current.options, factor)

    def _applied(self, current: Round) -> None:
        """Count, and hear what the others said."""
        header, session = current.header, self._session
        if header.examples:
            self.clock.fold(self.version, [current.stamp] * int(header.gradients))
            self.version += 1
            self.gradients += int(header.gradients)
            self.examples += int(header.examples)
        else:
            self._void += 1
        self.losses = self.losses[0] + current.loss[0], self.losses[1] + current.loss[1]
        oldest = self._pipeline.oldest()
        self.reducer.early = float(
            oldest is not None and all(each.wait(block=False) for each in self._flying[oldest].reductions)
        )
        session.heard(self, current.iteration, header)
        if (vote := self._vote) is not None:
            before, depth = vote.depth, vote.add(header.waited, header.spent, int(header.early))
            if depth is not None:
                self._pipeline.depth = depth
                if session.rank == 0:
                    self._port.tell(Deeper(self.number, self.version, before, depth, vote.share))
        for epoch in current.epochs:
            session.epoch_applied(epoch)

    # -- applying in parts -------------------------------------------------------------------------------

    def _groups_by_bucket(self) -> list[list[list[nn.Parameter]]]:
        """bucket -> group -> its parameters in that bucket"""
        group_of = {i: number for number, group in enumerate(self.layout.groups) for i in group}
        found = []
        for bucket in self.reducer.buckets:
            groups: list[list[nn.Parameter]] = [[] for _ in self.param_groups]
            for index in sorted(bucket.indices):
                groups[group_of[index]].append(self.parameters[index])
            found.append(groups)
        return found

    @contextlib.contextmanager
    def applications(self) -> Iterator[Applications]:
        """In place of `step`: a queue that hands out this step's applications in any order (A8)."""
        if self._pipeline.depth or self.kind not in ELEMENTWISE:
            raise UsageError(
                f"applications in any order need hardsync and an optimizer that works on each parameter by itself; this is "
                f"{self._session.sync} with {self.kind.__name__}: use step()"
            )
        self._begin_step(None)
        due = self._pipeline.due()
        assert due is not None
        current = self._flying.pop(due)
        if self._order == "end" and not current.waited:
            self.reducer.complete(current)
            self.reducer.give(*current.buckets)
        elif self._order != "end":
            self.reducer.read_header(current)
        if self._session.plan.clip_norm is not None:
            self._clip(self._session.plan.clip_norm)
        self.hooks.averaged(self)
        parts, entries = [], self.layout.parameters.entries
        for number, bucket in enumerate(current.buckets):
            names = tuple(entries[index].name for index in bucket.indices)
            parameters = tuple(self.parameters[index] for index in bucket.indices)
            ready = partial(current.reductions[number].wait, block=False)
            parts.append(Application(names, parameters, ready, partial(self._apply_bucket, current, number)))
        yield Applications(parts)
        for part in parts:
            part.apply()
        self._applied(current)
        self._end_step()
        self._session.step_over(self)
        self.torn = False

    def _apply_bucket(self, current: Round, number: int) -> None:
        """The real optimizer on one bucket's parameters."""
        bucket = current.buckets[number]
        if not current.waited:
            self.reducer.wait(current.reductions[number])
            bucket.open()
            bucket.scale(self.reducer.factor(current))
            self.reducer.give(bucket)
        if not current.header.examples:
            return
        self.hooks.applying([self.parameters[index] for index in bucket.indices])
        whole = [group["params"] for group in self.param_groups]
        for group, part in zip(self.param_groups, self._by_bucket[number], strict=True):
            group["params"] = part
        self.torn = True
        try:
            with self._rates(current):
                self._step_inner()
        finally:
            for group, parameters in zip(self.param_groups, whole, strict=True):
                group["params"] = parameters

    # -- states and reports ------------------------------------------------------------------------------

    @torch.no_grad()
    def put(self) -> None:
        """Learner 0's present values become everybody's."""
        for index in self._shared:
            self._port.broadcast(self.parameters[index].data)

    def state_dict(self) -> dict[str, Any]:
        """The real optimizer's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Every learner must load the same."""
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._wishes = GroupChanges(self, look(self.inner).optimizers)

    def account(self) -> PeerAccount:
        checksum = 0
        for index in self._shared:
            values = self.parameters[index].detach().cpu().contiguous().view(-1).view(torch.uint8)
            checksum = zlib.crc32(memoryview(values.numpy()), checksum)  # type: ignore[arg-type]
        return PeerAccount(self.version, self.gradients, self.examples, self.clock.account(), checksum)

    @torch.no_grad()
    def copy(self, *, final: bool = False) -> Copy:
        """Return a copy of the table; learner 0 adds the parameters and, at the end, what is not trained."""
        segments = others = None
        if self._session.rank == 0:
            flat = self.layout.parameters
            segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
            for view, value in zip(flat.views(segments), self.values(), strict=True):
                view.copy_(value)
            others = self.others() if final else None
        return Copy(self.version, segments, self.buffers(), others)

    def buffers(self) -> list[Tensor]:
        """Return copies of the buffers."""
        return [buffer.detach().cpu().clone() for buffer in self._buffers]

    def others(self) -> list[Tensor]:
        """Return copies of the model's tensors that no update changes."""
        return [other.detach().cpu().clone() for other in self._others]

    # -- of a whole model, where this process has a part of it -------------------------------------------

    def values(self) -> list[Tensor]:
        """Of the parameters."""
        return [parameter.detach() for parameter in self.parameters]

    def states(self) -> dict[int, dict[str, Any]]:
        """Of the optimizer, by parameter."""
        found = enumerate(self.parameters)
        return {index: state for index, parameter in found if (state := self.inner.state.get(parameter))}

    def own(self, index: int, value: Any) -> Any:
        """What this process has of a parameter's value, or of a state of it."""
        return value

    def own_buffers(self, buffers: list[Tensor]) -> list[Tensor]:
        return buffers

    # -- checkpoints -------------------------------------------------------------------------------------

    def losses_in_flight(self) -> list[tuple[float, int]]:
        return [self._flying[iteration].loss for iteration in sorted(self._flying)]

    def pipeline(self, *, failed: bool = False) -> PipelineState:
        """How far it is, and what is in flight; of a run that has `failed`, without the step under way."""
        return PipelineState(
            started=self.applied if failed else self._pipeline.started,
            void=self._void,
            depth=self._pipeline.depth,
            groups=plain_groups(self._wishes.own()),
            flights=[self.reducer.flight(self._flying[n]) for n in sorted(self._flying) if not failed],
        )

    def counted(self) -> Account:
        return Account(version=self.version, gradients=self.gradients, histogram=dict(self.clock.histogram))

    def resume(
        self, kept: TableState, pipeline: PipelineState, examples: int, losses: tuple[float, int]
    ) -> None:
        """Go on where a run before was."""
        account = kept.account
        self.version, self.gradients, self.examples = account.version, account.gradients, examples
        self.losses = losses
        self.clock.histogram.update(account.histogram or {})
        load_table(self.inner, self.parameters, kept, self.own)
        for group, values in zip(self.param_groups, pipeline.groups, strict=False):
            group.update(as_in(group, values))
        made = {key for values in pipeline.groups for key in values}
        self._wishes = GroupChanges(self, look(self.inner).optimizers, made)
        self._void = pipeline.void
        self._pipeline.resume(pipeline.started, [flight.iteration for flight in pipeline.flights])
        if self._vote is not None and pipeline.depth:
            self._vote.depth = self._pipeline.depth = min(pipeline.depth, self._vote.limit)
        for flight in pipeline.flights:
            options = zip(self.param_groups, flight.options, strict=False)
            again = self.reducer.again(flight, self._session.rank)
            again.options = [as_in(group, option) for group, option in options]
            self._flying[flight.iteration] = again

    def named(self) -> dict[str, Any]:
        """Return copies as the model's state_dict has them, without its buffers."""
        layout, values = self.layout, [value.cpu().clone() for value in self.values()]
        return as_state_dict(layout, (layout.parameters, values), (layout.others, self.others()))

    def release(self) -> None:
        """Nothing is held after the learner's function."""
        self.reducer.close()
        self.hooks.remove()
