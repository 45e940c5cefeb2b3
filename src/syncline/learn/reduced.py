"""The optimizer that users step under all-reduce: averages the gradients of all learners, then runs the real one (A1–A3).

Blocking reduces inside `step`; layer-wise while backward runs, bucket by bucket; delayed applies each average k steps later.
All learners take the same steps in the same order, so their copies stay equal to the last bit.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.learn.buckets import Bucket, Header, make_buckets
from syncline.learn.callbacks import Callbacks
from syncline.ports import Reduction, RunStopped
from syncline.protocols.buckets import Filling
from syncline.protocols.clocks import StalenessClock
from syncline.protocols.pipeline import Pipeline, Vote
from syncline.table.layout import Layout, Tensors
from syncline.topology.keeper import Account, Copy, Deeper

if TYPE_CHECKING:
    from syncline.learn.peers import PeerSession


@dataclass(slots=True)
class Round:
    """One iteration's reduction."""

    buckets: list[Bucket]
    weight: int  # of this learner's gradient in the mean
    divisor: float
    header: Header
    stamp: int = 0
    iteration: int = 0
    reductions: list[Reduction] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)  # that end with this gradient
    loss: tuple[float, int] = (0.0, 0)  # (sum over examples, examples)
    waited: bool = False  # all is there, and scaled
    seen: dict[int, tuple[Tensor, int]] = field(
        default_factory=dict
    )  # gradients as they were started, by index
    options: list[dict[str, Any]] = field(default_factory=list)  # of the groups, where it is applied later


class ReducedOptimizer(torch.optim.Optimizer):
    """One table's copy in a learner among equals; made by `session.optimizer`."""

    def __init__(
        self,
        session: PeerSession,
        number: int,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        layout: Layout,
        tensors: Tensors,
    ) -> None:
        self.inner, self.kind, self.layout = inner, type(inner), layout
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.state = inner.state
        self.number, self.version = number, 0
        self._session, self._port = session, session.port
        self._parameters, self._buffers = tensors.parameters, tensors.buffers
        topology, config = session.config.topology, session.config
        self._layerwise, self._order = topology.layerwise, topology.apply
        limit = topology.bucket if topology.layerwise else None
        depth = session.sync.delay
        self._slots = [make_buckets(self._parameters, limit) for _ in range(config.most_delay + 1)]
        first = self._slots[0]
        self._place = {index: (n, at) for n, b in enumerate(first) for at, index in enumerate(b.indices)}
        self._carrier = next(n for n, bucket in enumerate(first) if bucket.carries_header)
        self._filling = Filling([bucket.indices for bucket in first])
        self._pipeline = Pipeline(1 if session.sync.auto else depth)
        self._vote = Vote(limit=depth, learners=session.learners) if session.sync.auto else None
        self._flying: dict[int, Round] = {}
        self._round: Round | None = None
        self._queued = False  # backward's end will be noticed
        self._clock = StalenessClock()
        self._examples = self._gradients = self._void = 0
        self._loss_sum, self._loss_count = 0.0, 0
        self.last_loss = float("nan")
        self._batches = 0  # of the session's that are in gradients
        self._used = 0  # the session's examples that this table has had in gradients
        self._weight = 1  # of the last gradient
        self._waited = self._spent = self._early = 0.0
        self._last = session.port.now()
        names = {
            id(p): entry.name for entry, p in zip(layout.parameters.entries, self._parameters, strict=True)
        }
        named = [(names[id(p)], p) for p in self._parameters]
        self.hooks = Callbacks(model, named, hooked=self._layerwise)
        self._by_bucket = self._groups_by_bucket() if self._order != "end" else []
        self._handles = self._hook() if self._layerwise else []

    def __repr__(self) -> str:
        return f"ReducedOptimizer(table {self.number}, {self.kind.__name__}, {len(self._slots[0])} buckets)"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_filling" in self.__dict__:
            raise UsageError(
                "parameter groups cannot be added to a table that is open; give them to the optimizer's factory"
            )
        super().add_param_group(param_group)

    @property
    def started(self) -> int:
        """Iterations whose reduction was started, those without any examples apart."""
        return self._pipeline.started - self._void

    @property
    def iterations(self) -> int:
        return self._pipeline.started

    @property
    def pending(self) -> bool:
        """A batch was handed out that is in no gradient yet."""
        return self._session.batches > self._batches or self._round is not None

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
        session = self._session
        if session.ending:
            raise RunStopped
        if self._round is None:
            session.port.spend(session.consumed - self._used)
        self._note_loss(loss)
        self._refuse_edits()
        self._finish_round()
        self._start_iteration()
        while (due := self._pipeline.due()) is not None:
            self._apply(self._flying.pop(due))
        self._measure()
        session.stepped(self)
        return loss

    def flush(self) -> None:
        """Apply what is in flight under delayed:k; every learner must call it."""
        while (due := self._pipeline.flush()) is not None:
            self._apply(self._flying.pop(due))
            self._session.stepped(self)
        if self._round is not None:  # a backward without its step: nobody waits for it, but it must be over
            for reduction in self._round.reductions:
                reduction.wait()
            self._round = None

    def _note_loss(self, loss: Any) -> None:
        value = loss.item() if isinstance(loss, Tensor) else loss
        self.last_loss = float(self._session.loss if value is None else value)
        self._session.loss = float("nan")

    def _refuse_edits(self) -> None:
        """What is being averaged since backward cannot be changed any more."""
        seen = self._round.seen if self._round is not None else {}
        for index, (gradient, version) in seen.items():
            if self._parameters[index].grad is not gradient or gradient._version != version:
                name = self.layout.parameters.entries[index].name
                raise UsageError(
                    f"the gradient of '{name}' was changed between backward and step, but it is being averaged since "
                    "backward made it; use allreduce:blocking, or apply=end under hardsync, or clip_norm="
                )

    def _start_iteration(self) -> None:
        current, self._round = self._round, None
        assert current is not None
        self._filling.begin()
        examples = current.weight
        if examples and self.last_loss == self.last_loss:
            current.loss = (self.last_loss * examples, examples)
        if self.number == 0:
            current.epochs = self._session.take_marks()
        if self._session.config.most_delay:
            current.options = [_options(group) for group in self.param_groups]
        current.iteration = self._pipeline.start()
        self._flying[current.iteration] = current

    def _measure(self) -> None:
        now = self._port.now()
        self._spent = now - self._last
        self._last = now

    # -- one round ---------------------------------------------------------------------------------------

    def _open_round(self, before: int = 0) -> Round:
        """The gradient of a new iteration is being made; its weight in the mean is known by now."""
        session = self._session
        self._turn()
        fresh, self._used = session.consumed - self._used, session.consumed
        self._batches = session.batches
        if fresh or session.repeating:
            self._weight = before + fresh
        weight = self._weight
        header = Header(
            examples=weight,
            gradients=float(weight > 0),
            stop=float(session.port.stopping()),
            more=float(session.more),
            waited=self._waited,
            spent=self._spent,
            early=self._early,
        )
        divisor = (
            1.0 if session.learners == 1 else session.learners * session.reference / weight if weight else 0.0
        )
        self._waited = 0.0
        slot = self._slots[self._pipeline.started % len(self._slots)]
        return Round(slot, weight, divisor, header, stamp=self.version)

    def _turn(self) -> None:
        """A course of dials may have turned with the epoch."""
        sync = self._session.sync
        if self._vote is None:
            self._pipeline.depth = sync.delay

    def _finish_round(self) -> None:
        """Whatever backward has not started is started now."""
        if self._round is None:
            self._round = self._open_round()
        self._start(self._filling.rest())

    def _start(self, numbers: range) -> None:
        """Start these buckets' reductions; gradients that were not put there yet are."""
        current = self._round
        assert current is not None
        for number in numbers:
            bucket = current.buckets[number]
            flags = [self._present(bucket, at, index) for at, index in enumerate(bucket.indices)]
            bucket.seal(flags, current.header)
            current.reductions.append(self._port.reduce(bucket.flat))

    def _present(self, bucket: Bucket, at: int, index: int) -> float:
        """A flag; the gradient is in its place afterwards."""
        current = self._round
        assert current is not None
        gradient = self._parameters[index].grad
        if gradient is None or not current.divisor:
            return 0.0
        if not self._filling.has(index):
            bucket.put(at, gradient, current.divisor)
        return 1.0

    # -- layer-wise --------------------------------------------------------------------------------------

    def _hook(self) -> list[Any]:
        return [
            parameter.register_post_accumulate_grad_hook(self._hook_of(index))
            for index, parameter in enumerate(self._parameters)
            if parameter.requires_grad
        ]

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        def made(parameter: Tensor) -> None:
            self.hooks.made(parameter)
            if not self._session.accumulating:
                self._made(index, parameter)

        return made

    def _made(self, index: int, parameter: Tensor) -> None:
        """Backward has made a parameter's gradient."""
        current = self._round
        if current is None or (self._filling.complete and not self._queued):
            current = self._round = self._again(current)
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)  # type: ignore[attr-defined]
        number, at = self._place[index]
        if current.divisor and parameter.grad is not None:
            current.buckets[number].put(at, parameter.grad, current.divisor)
            if self._early_bird:
                current.seen[index] = (parameter.grad, parameter.grad._version)
        self._start(self._filling.come(index))

    def _again(self, before: Round | None) -> Round:
        """A backward begins: the first of an iteration, or a further one, after which all is reduced once more."""
        self._filling.begin()
        if before is None:
            self._port.spend(self._session.consumed - self._used)
            return self._open_round()
        for reduction in before.reductions:
            reduction.wait()
        return self._open_round(self._weight)

    def _backward_done(self) -> None:
        self._queued = False
        self._start(self._filling.rest())
        current = self._round
        assert current is not None
        if not self._early_bird:
            self._complete(current)
            self._give(current)

    @property
    def _early_bird(self) -> bool:
        """Reductions go on after backward: `p.grad` stays the learner's own until `step`."""
        return self._order != "end" or self._pipeline.depth > 0

    # -- applying ----------------------------------------------------------------------------------------

    def _complete(self, current: Round) -> None:
        """Wait for all buckets; afterwards they hold the mean."""
        before = self._port.now()
        for reduction in current.reductions:
            reduction.wait()
        self._waited += self._port.now() - before
        for bucket in current.buckets:
            bucket.open()
        current.header = current.buckets[self._carrier].header
        factor = self._factor(current.header)
        for bucket in current.buckets:
            bucket.scale(factor)
        current.waited = True

    def _factor(self, header: Header) -> float:
        """From the sum of shares to the mean by example count."""
        session = self._session
        if session.learners == 1 or not header.examples:
            return 1.0
        return session.learners * session.reference / header.examples

    def _give(self, current: Round) -> None:
        """Hang the means into `p.grad`."""
        for bucket in current.buckets:
            for index, view, present in zip(bucket.indices, bucket.views, bucket.present, strict=True):
                self._parameters[index].grad = view if present else None

    def _apply(self, current: Round) -> None:
        if self._order != "end":
            self._apply_parts(current)
            return
        given = current.waited  # backward has done it, and the loop may have changed it since
        if not given:
            self._complete(current)
        if current.header.examples:
            delayed = bool(current.options)
            own = [parameter.grad for parameter in self._parameters] if delayed else []
            if not given:
                self._give(current)
            self._run(current)
            for parameter, gradient in zip(self._parameters, own, strict=False):
                parameter.grad = gradient
        self._applied(current)

    def _run(self, current: Round) -> None:
        """The real optimizer, on all parameters."""
        clip = self._session.config.clip_norm
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, clip)
        self.hooks.averaged(self)
        self.hooks.applying(self._parameters)
        with self._rates(current):
            self.inner.step()

    @contextlib.contextmanager
    def _rates(self, current: Round) -> Iterator[None]:
        """The options as they were with the gradient (M4), the rate times the dial's factor."""
        factor = self._session.factor
        if factor == 1.0 and not current.options:
            yield
            return
        kept = [_options(group) for group in self.param_groups]
        for group, option in zip(self.param_groups, current.options or kept, strict=True):
            group.update(option)
            group["lr"] = option["lr"] * factor
        try:
            yield
        finally:
            for group, option in zip(self.param_groups, kept, strict=True):
                group.update(option)

    def _applied(self, current: Round) -> None:
        """Count, and hear what the others said."""
        header = current.header
        if header.examples:
            self._clock.fold(self.version, [current.stamp] * int(header.gradients))
            self.version += 1
            self._gradients += int(header.gradients)
            self._examples += int(header.examples)
        else:
            self._void += 1
        self._loss_sum += current.loss[0]
        self._loss_count += current.loss[1]
        oldest = self._pipeline.oldest()
        self._early = float(
            oldest is not None and all(each.done() for each in self._flying[oldest].reductions)
        )
        self._session.heard(current.iteration, header)
        if self._vote is not None:
            self._adapt(header)
        for epoch in current.epochs:
            self._session.epoch_applied(epoch)

    def _adapt(self, header: Header) -> None:
        assert self._vote is not None
        before = self._vote.depth
        depth = self._vote.add(header.waited, header.spent, int(header.early))
        if depth is not None:
            self._pipeline.depth = depth
            if self._session.rank == 0:
                self._port.tell(Deeper(self.number, self.version, before, depth, self._vote.share))

    # -- applying in parts -------------------------------------------------------------------------------

    def _groups_by_bucket(self) -> list[list[list[nn.Parameter]]]:
        """bucket -> group -> its parameters in that bucket"""
        group_of = {i: number for number, group in enumerate(self.layout.groups) for i in group}
        found = []
        for bucket in self._slots[0]:
            groups: list[list[nn.Parameter]] = [[] for _ in self.param_groups]
            for index in sorted(bucket.indices):
                groups[group_of[index]].append(self._parameters[index])
            found.append(groups)
        return found

    def _apply_parts(self, current: Round) -> None:
        """Bucket by bucket: from the last layer to the first, or as they arrive."""
        self.hooks.averaged(self)
        self._wait_for(current, self._carrier)
        current.buckets[self._carrier].open()
        current.header = current.buckets[self._carrier].header
        for number in self._handed_out(current):
            self._wait_for(current, number)
            self._apply_bucket(current, number)
        self._applied(current)

    def _handed_out(self, current: Round) -> Iterator[int]:
        left = list(range(len(current.buckets)))
        while left:
            ready = left if self._order == "reverse" else [n for n in left if current.reductions[n].done()]
            number = (ready or left)[0]
            left.remove(number)
            yield number

    def _wait_for(self, current: Round, number: int) -> None:
        before = self._port.now()
        current.reductions[number].wait()
        self._waited += self._port.now() - before

    def _apply_bucket(self, current: Round, number: int) -> None:
        """The real optimizer on one bucket's parameters."""
        bucket = current.buckets[number]
        bucket.open()
        bucket.scale(self._factor(current.header))
        for index, view, present in zip(bucket.indices, bucket.views, bucket.present, strict=True):
            self._parameters[index].grad = view if present else None
        if not current.header.examples:
            return
        self.hooks.applying([self._parameters[index] for index in bucket.indices])
        whole = [group["params"] for group in self.param_groups]
        for group, part in zip(self.param_groups, self._by_bucket[number], strict=True):
            group["params"] = part
        try:
            with self._rates(current):
                self.inner.step()
        finally:
            for group, parameters in zip(self.param_groups, whole, strict=True):
                group["params"] = parameters

    # -- states and reports ------------------------------------------------------------------------------

    def holds(self, parameters: set[int]) -> bool:
        return any(id(parameter) in parameters for parameter in self._parameters)

    @torch.no_grad()
    def put(self) -> None:
        """Learner 0's present values become everybody's."""
        for parameter in self._parameters:
            self._port.broadcast(parameter.data)

    def state_dict(self) -> dict[str, Any]:
        """The real optimizer's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Every learner must load the same."""
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def take_losses(self) -> tuple[float, int]:
        """Since the last call."""
        taken = self._loss_sum, self._loss_count
        self._loss_sum, self._loss_count = 0.0, 0
        return taken

    def account(self) -> Account:
        staleness = self._clock.account()
        return Account(self.version, self._gradients, self._examples, staleness, self._checksum())

    @property
    def counts(self) -> tuple[int, int]:
        """(gradients, examples) so far"""
        return self._gradients, self._examples

    @property
    def histogram(self) -> dict[int, int]:
        return self._clock.histogram

    def _checksum(self) -> int:
        checksum = 0
        for parameter in self._parameters:
            values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            checksum = zlib.crc32(memoryview(values.numpy()), checksum)  # type: ignore[arg-type]
        return checksum

    @torch.no_grad()
    def copy(self) -> Copy:
        """This learner's copy as it is; the parameters from learner 0 only."""
        segments = None
        if self._session.rank == 0:
            flat = self.layout.parameters
            segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
            for view, parameter in zip(flat.views(segments), self._parameters, strict=True):
                view.copy_(parameter)
        return Copy(self.version, segments, [buffer.detach().cpu().clone() for buffer in self._buffers])

    def release_hooks(self) -> None:
        """Nothing is held after the learner's function."""
        for handle in self._handles:
            handle.remove()
        self.hooks.remove()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
