"""The reductions of one table: fills flat buffers, starts them in order, waits for them (A1, A2).

Blocking starts all of them in `step`; layer-wise each as soon as backward has made its gradients. One bucket carries the header
(examples, a wish to stop, what was measured), each bucket a flag per parameter: does anybody have a gradient for it? Not responsible
for what is done with the averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.learn.allreduce_state import plain_groups
from syncline.learn.allreduce_user_hooks import Callbacks
from syncline.learn.session import sparse_gradient
from syncline.ports import Computing, Reduction
from syncline.protocols.allreduce import TURNS, Filling, Pipeline, ahead, behind, plan_buckets, turn
from syncline.roles.allreduce_coordinator import left_out
from syncline.roles.checkpoint_manifest import MeanInFlight

if TYPE_CHECKING:
    from syncline.learn.allreduce_session import AllReduceSession


GRAIN = 64  # elements: vectorised loops give the same bits as over tensors of their own


class Header(NamedTuple):
    """What travels with one iteration's gradients; after the reduction the sums over all learners."""

    examples: float = 0.0
    gradients: float = 0.0  # 1 with examples, 0 without
    stop: float = 0.0
    cut: float = 0.0  # a checkpoint is due
    more: float = 0.0  # there are further batches of this epoch
    waited: float = 0.0  # seconds of the step before
    spent: float = 0.0
    early: float = 0.0  # the next reduction was complete when this one was applied
    turn_0: float = 0.0  # learners by the number of steps that they have taken (protocols/allreduce.py)
    turn_1: float = 0.0
    turn_2: float = 0.0


EXACT = (torch.float32, torch.float64)  # dtypes that can count


class Bucket:
    """One flat buffer and its views."""

    def __init__(
        self, indices: Sequence[int], parameters: Sequence[nn.Parameter], *, header: bool, like: Tensor
    ) -> None:
        self.indices = tuple(indices)
        starts, length = [], 0
        for parameter in parameters:
            starts.append(length)
            length += -(-parameter.numel() // GRAIN) * GRAIN
        tail = len(parameters) + (len(Header._fields) if header else 0)
        self.flat = torch.zeros(length + tail, dtype=like.dtype, device=like.device)
        self.gradients = self.flat[:length]
        self.views = [
            self.flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(starts, parameters, strict=True)
        ]
        self._tail = self.flat[length:]
        self.carries_header = header
        self.present = [True] * len(parameters)  # after the reduction: somebody has a gradient
        self.header = Header()

    @torch.no_grad()
    def put(self, position: int, gradient: Tensor, divisor: float) -> None:
        """A parameter's own gradient, to be part of the mean."""
        view = self.views[position]
        if gradient.is_sparse:
            raise sparse_gradient()
        if divisor != 1.0:
            torch.div(gradient.detach(), divisor, out=view)
        elif gradient is not view:
            view.copy_(gradient)

    def seal(self, flags: list[float], header: Header) -> None:
        """The last before the reduction: flags, the header, zeros where there is no gradient."""
        for view, flag in zip(self.views, flags, strict=True):
            if not flag:
                view.zero_()
        tail = [*flags, *header] if self.carries_header else flags
        self._tail.copy_(torch.tensor(tail, dtype=self.flat.dtype))

    def open(self) -> None:
        """The first after the reduction."""
        tail = self._tail.tolist()
        count = len(self.views)
        self.present = [bool(flag) for flag in tail[:count]]
        if self.carries_header:
            self.header = Header._make(tail[count:])

    def scale(self, factor: float) -> None:
        """After the reduction."""
        if factor != 1.0:
            self.gradients.mul_(factor)


FORWARD = 1 / 3  # of a gradient's time, where a clock is simulated


@dataclass(slots=True)
class Round:
    """One iteration's reduction."""

    buckets: list[Bucket]
    weight: int  # of this learner's gradient in the mean
    divisor: float
    header: Header
    iteration: int
    stamp: int = 0
    reductions: list[Reduction] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)  # that end with this gradient
    loss: tuple[float, int] = (0.0, 0)  # (sum over examples, examples)
    waited: bool = False  # all is there, and scaled
    seen: dict[int, tuple[Tensor, int]] = field(default_factory=dict)  # gradients as started, by index
    options: list[dict[str, Any]] = field(default_factory=list)  # of the groups, where it is applied later
    factor: float | None = None  # from the sum to the mean, where another run has summed it


class Reducer:
    """One table's buckets, and the round that is being made."""

    def __init__(
        self,
        session: AllReduceSession,
        table: int,
        named: Sequence[tuple[str, nn.Parameter]],
        hooks: Callbacks,
        pipeline: Pipeline,
    ) -> None:
        self._session, self._port, self._hooks, self._pipeline = session, session.port, hooks, pipeline
        self._table, self._names = table, [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        topology = session.topology
        self._order = topology.apply
        self._limit = topology.bucket if topology.layerwise else None
        self._slots = [self._new_buckets() for _ in range(session.plan.delay + 1)]
        self.buckets = first = self._slots[0]
        self._place = {index: (n, at) for n, b in enumerate(first) for at, index in enumerate(b.indices)}
        self._carrier = next(n for n, bucket in enumerate(first) if bucket.carries_header)
        self._filling = Filling([bucket.indices for bucket in first])
        sizes = [bucket.flat.nbytes for bucket in first]
        self._shares = [size / sum(sizes) for size in sizes]  # of backward's time, as good as can be said
        self._computing = 0  # examples of the gradient that backward is making
        self._round: Round | None = None  # that is being made
        # while a backward runs, what torch is to call at its end; torch lets go of it also where that fails
        self._backward: weakref.ref[Callable[[], None]] | None = None
        self._batches = 0  # of the session's that are in gradients
        self._given = 0  # of them, since the last step
        self._used = 0  # the session's examples that this table has had in gradients
        self._fresh = 0  # of them, since the last step
        self._weight = 1  # of the last gradient with examples
        self.waited = self.spent = self.early = 0.0  # what the next header says
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._made, index))
            for index, parameter in enumerate(self._parameters)
            if topology.layerwise and parameter.requires_grad
        ]

    def _new_buckets(self) -> list[Bucket]:
        """In the order in which they are reduced; exactly one carries the header."""
        parameters = self._parameters
        kinds = [f"{parameter.dtype} on {parameter.device}" for parameter in parameters]
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        plan = plan_buckets(sizes, kinds, self._limit)
        carrier = next((n for n, bucket in enumerate(plan) if parameters[bucket[0]].dtype in EXACT), None)
        buckets = []
        for number, indices in enumerate(plan):
            own = [parameters[index] for index in indices]
            buckets.append(Bucket(indices, own, header=number == carrier, like=own[0].data))
        if carrier is None:  # no dtype that can count, or nothing to reduce: the header travels alone
            device = parameters[0].device if parameters else self._session.device
            like = torch.empty(0, dtype=torch.float32, device=device)
            buckets.insert(0, Bucket((), (), header=True, like=like))
        return buckets

    @property
    def pending(self) -> bool:
        """A batch was handed out that is in no gradient yet."""
        return self._session.batches > self._batches or self._round is not None

    def close(self) -> None:
        """A backward without its step: nobody needs it, but it must be over."""
        if self._round is not None:
            for reduction in self._round.reductions:
                reduction.wait()
            self._round = None
        for handle in self._handles:
            handle.remove()

    # -- one round ---------------------------------------------------------------------------------------

    def _open_round(self) -> Round:
        """The gradient of a new iteration is being made; its weight in the mean is known by now.

        Examples since the last step count, the weight of the last gradient where there were no batches: a backward that
        only passes through this table (a generator's, through the discriminator) takes none away from the next.
        """
        session = self._session
        if not session.sync.auto:  # a course of dials may have turned with the epoch
            self._pipeline.depth = session.sync.delay
        self._fresh += session.consumed - self._used
        self._given += session.batches - self._batches
        self._used, self._batches = session.consumed, session.batches
        self._weight = self._fresh or self._weight
        only_repeated = not self._fresh and (self._given > 0 or session.repeating)
        weight = 0 if only_repeated else self._weight
        started = self._pipeline.started
        counted = weight if session.seat == 0 else 0  # a group's seats make one gradient
        header = Header(
            counted,
            float(counted > 0),
            float(session.port.stopping()),
            float(session.wishes_cut()),
            float(session.more),
            self.waited,
            self.spent,
            self.early,
            *turn(started),
        )
        divisor = (
            1.0 if session.learners == 1 else session.learners * session.reference / weight if weight else 0.0
        )
        self.waited = 0.0
        return Round(self._slots[started % len(self._slots)], weight, divisor, header, started)

    def finish(self) -> Round:
        """The step has come: whatever backward has not started is started now, and the next gradient begins."""
        if self._round is None:  # it is not being reduced yet: its computation is done
            self._port.spend(Computing(self._session.consumed - self._used))
        self.refuse_torn()
        if self._round is None:
            self._round = self._open_round()
        for index, (gradient, version) in self._round.seen.items():
            if self._parameters[index].grad is not gradient or gradient._version != version:
                raise UsageError(
                    f"the gradient of '{self._names[index]}' was changed between backward and step, but it is being averaged "
                    "since backward made it; use allreduce:blocking, or apply=end under hardsync, or clip_norm="
                )
        self._start(self._filling.rest())
        finished, self._round = self._round, None
        self._filling.begin()
        self._fresh = self._given = 0
        self._backward = None
        return finished

    def _start(self, numbers: range, *, backward: bool = False) -> None:
        """Start these buckets' reductions; gradients that were not put there yet are."""
        for number in numbers if backward else ():
            self._port.spend(Computing(self._computing, (1 - FORWARD) * self._shares[number]))
        current = self._round
        assert current is not None
        for number in numbers:
            bucket, flags = current.buckets[number], []
            for at, index in enumerate(bucket.indices):
                gradient = self._parameters[index].grad
                present = gradient is not None and current.divisor != 0
                if present and not self._filling.has(index):
                    bucket.put(at, gradient, current.divisor)  # type: ignore[arg-type]
                flags.append(float(present))
            bucket.seal(flags, current.header)
            current.reductions.append(self._port.reduce(bucket.flat))

    # -- layer-wise --------------------------------------------------------------------------------------

    def _made(self, index: int, parameter: Tensor) -> None:
        """Backward has made a parameter's gradient."""
        self._hooks.made(parameter)
        if self._session.accumulating:
            return
        self.refuse_torn()
        if self._failed:
            self._round = self._backward = None  # nothing of it is on its way
        current = self._round
        if current is None or (self._filling.complete and self._backward is None):
            current = self._round = self._again(current)
        if self._backward is None:
            end = self._backward_done
            self._backward = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
        number, at = self._place[index]
        if current.divisor and parameter.grad is not None:
            bucket = current.buckets[number]
            if self.early_bird and parameter.grad is bucket.views[at]:  # the last mean, and added to
                parameter.grad = parameter.grad.clone()
            bucket.put(at, parameter.grad, current.divisor)
            if self.early_bird:
                current.seen[index] = (parameter.grad, parameter.grad._version)
        self._start(self._filling.come(index), backward=True)

    def _again(self, before: Round | None) -> Round:
        """A backward begins: the first of an iteration, or a further one, after which all is reduced once more."""
        self._filling.begin()
        fresh = self._session.consumed - self._used
        if before is None or fresh:
            self._computing = fresh
            self._port.spend(Computing(fresh, FORWARD))
        if before is not None:
            if not before.waited:
                self.read_header(before)
            for reduction in before.reductions:
                reduction.wait()
        return self._open_round()

    @property
    def _failed(self) -> bool:
        """A backward raised, and its end was never noticed."""
        return self._backward is not None and self._backward() is None

    def refuse_torn(self) -> None:
        """What was started in a backward that failed can be neither completed nor taken back."""
        if self._failed and self._round is not None and self._round.reductions:
            raise UsageError(
                f"a backward of learner {self._session.rank} failed when {len(self._round.reductions)} of "
                f"{len(self.buckets)} buckets of its gradient were on their way to the others, who have them now: this step "
                "can neither be tried again nor left out. Use allreduce:blocking where a backward may fail"
            )

    def _backward_done(self) -> None:
        self._backward = None
        self._start(self._filling.rest(), backward=True)
        current = self._round
        assert current is not None
        if not self.early_bird:
            self.complete(current)
            self.give(*current.buckets)
            if len(self._slots) > 1:  # the dial may turn to a delay: what is kept must not be reduced later
                for parameter in self._parameters:
                    parameter.grad = parameter.grad.clone() if parameter.grad is not None else None

    @property
    def early_bird(self) -> bool:
        """Reductions go on after backward: `p.grad` stays the learner's own until `step`."""
        return self._order != "end" or self._pipeline.depth > 0

    def complete(self, current: Round) -> None:
        """Wait for all buckets; afterwards they hold the mean."""
        self.wait(*current.reductions)
        for bucket in current.buckets:
            bucket.open()
        self._hear(current)
        factor = self.factor(current)
        for bucket in current.buckets:
            bucket.scale(factor)
        current.waited = True

    def factor(self, current: Round) -> float:
        """From the sum of shares to the mean by example count."""
        session, examples = self._session, current.header.examples
        if current.factor is not None:
            return current.factor
        if session.learners == 1 or not examples:
            return 1.0
        return session.learners * session.reference / examples

    def give(self, *buckets: Bucket) -> None:
        """Hang the means into `p.grad`."""
        for bucket in buckets:
            for index, view, present in zip(bucket.indices, bucket.views, bucket.present, strict=True):
                self._parameters[index].grad = view if present else None

    def wait(self, *reductions: Reduction) -> None:
        before = self._port.now()
        for reduction in reductions:
            reduction.wait()
        self.waited += self._port.now() - before

    def read_header(self, current: Round) -> None:
        self.wait(current.reductions[self._carrier])
        current.buckets[self._carrier].open()
        self._hear(current)

    # -- checkpoints -------------------------------------------------------------------------------------

    def flight(self, current: Round) -> MeanInFlight:
        """A mean that is on its way, as far as all learners have it alike; gradients by parameter, where there are some."""
        found: dict[int, Tensor] = {}
        for reduction in current.reductions:
            reduction.wait()
        for bucket in current.buckets:
            bucket.open()
            for index, view, present in zip(bucket.indices, bucket.views, bucket.present, strict=True):
                if present:
                    found[index] = view.detach().cpu().clone()
        current.header = current.buckets[self._carrier].header
        return MeanInFlight(
            iteration=current.iteration,
            stamp=current.stamp,
            epochs=list(current.epochs),
            options=plain_groups(current.options),
            header=list(current.header),
            factor=self.factor(current),
            gradients=found,
        )

    def again(self, flight: MeanInFlight, rank: int) -> Round:
        """A round that another run has summed; what was wished with it then is over."""
        header = Header(*flight.header)._replace(stop=0.0, cut=0.0)
        buckets = self._new_buckets()
        for bucket in buckets:
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                if index in flight.gradients:
                    view.copy_(flight.gradients[index])
            bucket.seal([float(index in flight.gradients) for index in bucket.indices], header)
        current = Round(buckets, 0, 0.0, header, flight.iteration, flight.stamp)
        current.reductions = [_Here() for _ in buckets]
        current.epochs, current.options = list(flight.epochs), flight.options
        current.loss, current.factor = flight.losses.get(rank, (0.0, 0)), flight.factor
        return current

    def _hear(self, current: Round) -> None:
        """What all have said; whether they are at the same step."""
        current.header = current.buckets[self._carrier].header
        turns = current.header[-TURNS:]
        if others := ahead(turns, current.iteration):
            raise left_out(self._session.rank, self._table, current.iteration, others)
        if others := behind(turns, current.iteration):
            self._port.meet(f"a step of table {self._table} that {others} of the learners left out", None)


class _Here(Reduction):
    """A sum that is there."""

    def wait(self, *, block: bool = True) -> bool:
        return True
