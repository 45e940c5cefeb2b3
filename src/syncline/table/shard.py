"""A shard: its part of the weights, the optimizer on it, and the fold (M3, M4, M5).

Gradients are taken in the order of the sequence. In lockstep they are kept where they lie and folded
together, in rank order; otherwise each is added to a running mean when it is taken, which frees its slot. A fold of one gradient runs
the optimizer straight on the slot. Promised gradients are kept as promises until the fold. Not responsible for deciding when to fold.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.dial import Sync
from syncline.table.checkpoints import CheckpointError, group_notes, piece_tensors, wrapped_tensors
from syncline.table.flat_sgd import FlatSGD
from syncline.table.groups import Groups
from syncline.table.joined_step import JoinedStep
from syncline.table.layout import Layout
from syncline.table.promised import Made, Maker, PromisedPart, Taken
from syncline.table.slot import SlotPart
from syncline.table.template import (
    OptimizerTemplate,
    Options,
    PieceState,
    bare_step,
    beside,
    cut_state,
    homeless,
    is_torchs,
    piece_states,
)
from syncline.table.wrapping import look


class Values(Protocol):
    """A shard's part of a gradient."""

    segments: list[Tensor]
    views: list[Tensor]  # one per piece


class Mean:
    """A running mean of gradients, weighted by example count, over flat segments and single pieces.

    A parameter missing in some gradients counts as zero there; missing in all, it has none.
    """

    def __init__(self, segments: list[Tensor], views: list[Tensor]) -> None:
        self.segments, self.views = segments, views
        self.present: tuple[bool, ...] = (False,) * len(views)
        self.total = 0

    def start(self, gradient: Values, present: tuple[bool, ...], count: int, damping: float = 1.0) -> None:
        if self.segments is not gradient.segments:
            for mean, value in zip(self.segments, gradient.segments, strict=True):
                mean.copy_(value)
        if damping != 1.0:
            torch._foreach_mul_(self.segments, damping)
        self.present, self.total = present, count

    def add(self, gradient: Values, present: tuple[bool, ...], count: int, damping: float = 1.0) -> None:
        """`damping` multiplies this gradient; the mean is still by the count of examples."""
        if count == 0:
            return
        if self.total == 0:
            raise AssertionError("a mean starts with its first weighted gradient")
        self.total += count
        weight = count / self.total
        if damping != 1.0:
            self._add_damped(gradient, present, weight, damping)
            return
        if all(present) and all(self.present):
            for mean, value in zip(self.segments, gradient.segments, strict=True):
                mean.lerp_(value, weight)
            return
        for mean, value, had, has in zip(self.views, gradient.views, self.present, present, strict=True):
            if had and has:
                mean.lerp_(value, weight)
            elif had:
                mean.mul_(1.0 - weight)
            elif has:
                torch.mul(value, weight, out=mean)
        self.present = tuple(a or b for a, b in zip(self.present, present, strict=True))

    def _add_damped(self, gradient: Values, present: tuple[bool, ...], weight: float, damping: float) -> None:
        for mean, value, had, has in zip(self.views, gradient.views, self.present, present, strict=True):
            if had and has:
                mean.mul_(1.0 - weight).add_(value, alpha=weight * damping)
            elif had:
                mean.mul_(1.0 - weight)
            elif has:
                torch.mul(value, weight * damping, out=mean)
        self.present = tuple(a or b for a, b in zip(self.present, present, strict=True))


class Shard:
    """One shard of one table."""

    def __init__(
        self,
        layout: Layout,
        index: int,
        template: OptimizerTemplate,
        weights: Sequence[Tensor],
        *,
        history: Sequence[Sequence[Tensor]] = (),
        sync: Sync,
        clip_norm: float | None = None,
        version: int = 0,
    ) -> None:
        self.layout, self.part = layout, layout.parts[index]
        self.version = version
        self._weights = self.part.segments(weights)
        self.history = [self.part.segments(segments) for segments in history]
        views = self.part.views(self._weights, layout.parameters.entries)
        self.optimizer, self.parameters = template.build(self.part, layout, views)
        self._step = bare_step(self.optimizer)
        self._joined = self._joined_steps()
        self.clip_norm = clip_norm
        self._taken: list[tuple[SlotPart, tuple[bool, ...], int, int, int]] = []
        self._promised: list[Taken] = []
        self._maker: Maker | None = None
        self._all = (True,) * len(self.part.pieces)
        self._mean: Mean | None = None
        self._grad_views: list[Tensor] | None = None
        self._flat: FlatSGD | None = None
        self._flat_gradient: list[Tensor] | None = None  # what the next step goes by, where that is one piece
        self._views_later: list[Tensor] | None = None
        self._whole: list[Tensor] | None = None  # segments of a gradient that lacks nothing
        self._one: Taken | None = None  # the only gradient of the next step, which may wait
        self._put: dict[int, list[Tensor]] = {}
        self._wraps = template.whole is not None
        inner = look(self.optimizer).optimizers if self._wraps else ()
        self._groups = Groups(self.optimizer, template.options, inner)
        self._own_step = not is_torchs(self.optimizer)
        self._options: Options = template.options
        self._factor = 1.0
        self._copies: dict[str, Tensor] = {}  # of the last cut
        self.change(sync)

    @property
    def weights(self) -> list[Tensor]:
        self._settle()
        return self._weights

    def _settle(self) -> None:
        """Steps that wait are made first."""
        if self._maker is not None:
            self._maker.settle()

    def change(self, sync: Sync) -> None:
        """Another dial; nothing that was taken waits for its fold."""
        self._settle()
        assert not self._taken and not self._promised and (self._mean is None or self._mean.total == 0)
        self._lockstep = sync.lockstep
        self._kept = self.history if sync.delay else []
        self._steps_wait = (
            not self._lockstep
            and not self._kept
            and self.clip_norm is None
            and self.layout.shards == 1
            and FlatSGD.fits(self.optimizer, self._weights)
        )
        if self._kept:  # older ones are still read by who was released before
            _copy(self._kept[self.version % len(self._kept)], self._weights)

    # -- taking and folding ------------------------------------------------------------------------------

    def take(
        self,
        gradient: SlotPart | PromisedPart,
        *,
        full: bool,
        count: int,
        rank: int,
        iteration: int,
        alone: bool,
        damping: float = 1.0,
    ) -> bool:
        """Into the sequence. `alone`: the next fold is of this gradient only. True if it is added to a mean."""
        kept = self._lockstep or (alone and damping == 1.0)
        if isinstance(gradient, PromisedPart):
            self._maker = gradient.maker
            self._promised.append(gradient.take(count, damping, rank, iteration))
            return not kept
        present = self._all if full else gradient.present()
        if kept:
            self._taken.append((gradient, present, count, rank, iteration))
            return False
        mean = self._running_mean()
        if mean.total == 0:
            mean.start(gradient, present, count, damping)
        else:
            mean.add(gradient, present, count, damping)
        return True

    def _running_mean(self) -> Mean:
        if self._mean is None:
            segments = [torch.zeros_like(segment) for segment in self._weights]
            self._mean = Mean(segments, self.part.views(segments, self.layout.parameters.entries))
        return self._mean

    def gather(self, iteration: int) -> int:
        """Set every parameter's gradient to the mean of what the fold takes; how many were added up only now."""
        self._apply_puts()
        if self._waits():
            self._one = self._promised.pop()
            return 0
        before = len(self._taken) + len(self._promised)
        if self._promised:
            views, present, flat = self._gather_promised(iteration)
            self._flat_gradient = flat if all(present) else None
        elif self._taken:
            views, present, self._whole = self._gather_taken(iteration)
        else:
            mean = self._running_mean()
            views, present, mean.total, self._whole = mean.views, mean.present, 0, mean.segments
        if self._whole is not None and not all(present):
            self._whole = None
        added = before - len(self._taken) - len(self._promised) if self._lockstep else 1
        if self._flat_gradient is not None and self.clip_norm is None and self.layout.shards == 1:
            self._views_later = views  # only the plain step looks at each parameter's gradient
        else:
            self._set_gradients(views, present)
        return added if added > 1 else 0

    def _waits(self) -> bool:
        """The next step is of one promise, and nobody need look at its gradient."""
        promised = self._promised
        if not self._steps_wait or len(promised) != 1 or self._maker is None:
            return False
        return self._maker.waits and promised[0].damping == 1.0

    def _set_gradients(self, views: list[Tensor], present: tuple[bool, ...]) -> None:
        if views is self._grad_views and all(present) and not self._own_step:  # which may have cleared them
            return
        for parameter, view, has in zip(self.parameters, views, present, strict=True):
            parameter.grad = view if has else None
        self._grad_views = views if all(present) else None

    def _gather_taken(self, iteration: int) -> tuple[list[Tensor], tuple[bool, ...], list[Tensor]]:
        if self._lockstep:
            chosen = sorted((t for t in self._taken if t[4] == iteration), key=lambda taken: taken[3])
            self._taken = [t for t in self._taken if t[4] != iteration]
        else:
            chosen, self._taken = self._taken, []
        weighted = [taken for taken in chosen if taken[2] > 0] or chosen[:1]
        first, present, count, _, _ = weighted[0]
        if len(weighted) == 1:
            return first.views, present, first.segments
        mean = Mean(first.segments, first.views)  # in place: the slot is the shard's until it is released
        mean.start(first, present, count)
        for gradient, present, count, _, _ in weighted[1:]:
            mean.add(gradient, present, count)
        return mean.views, mean.present, mean.segments

    def _gather_promised(self, iteration: int) -> Made:
        chosen = self._promised
        if self._lockstep:
            chosen = sorted((t for t in chosen if t.iteration == iteration), key=lambda taken: taken.rank)
        self._promised = [t for t in self._promised if self._lockstep and t.iteration != iteration]
        return self._make([t for t in chosen if t.examples > 0] or chosen[:1])

    def _make(self, taken: Sequence[Taken]) -> Made:
        assert self._maker is not None
        return self._maker.fold(self.part, taken)

    def norms(self) -> Tensor:
        """Norm of every piece's gradient (0 where there is none)."""
        present = [p.grad for p in self.parameters if p.grad is not None]
        found = iter(torch._foreach_norm(present, 2.0)) if present else iter(())
        norms = [next(found).item() if p.grad is not None else 0.0 for p in self.parameters]
        return torch.tensor(norms, dtype=torch.float64)

    def clip(self, total: Tensor) -> None:
        """Scale as `clip_grad_norm_` does, by the norm over all shards."""
        assert self.clip_norm is not None
        coefficient = torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(coefficient.to(parameter.grad.dtype))

    def clip_alone(self) -> None:
        assert self.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)

    def apply(self, options: Options, factor: float) -> None:
        """Run the optimizer on the gathered gradient: the next version."""
        if options is not self._options or factor != self._factor:
            self._options, self._factor = options, factor
            self._groups.follow(options, factor)
            if self._flat is not None:
                self._flat.changed()
        if self._one is None or not self._step_later(self._one):
            self._step_now()
        self.version += 1
        if self._kept:
            _copy(self._kept[self.version % len(self._kept)], self._weights)

    def _step_later(self, taken: Taken) -> bool:
        """The step waits until somebody needs what it makes; if it cannot, its gradient is gathered now."""
        assert self._maker is not None
        self._one = None
        steps = self._flat_steps()
        plan = steps.plan(self.parameters)
        if plan is not None and self._maker.step_later(taken.promise, steps, plan, self.version + 1):
            return True
        views, present, flat = self._make([taken])
        self._flat_gradient = flat if all(present) else None
        self._set_gradients(views, present)
        return False

    def _step_now(self) -> None:
        self._settle()
        if self._flat_gradient is None or not self._step_flat(self._flat_gradient):
            if self._views_later is not None:
                self._set_gradients(self._views_later, self._all)
            self._step_whole()
        self._flat_gradient = self._views_later = self._whole = None

    def _step_whole(self) -> None:
        if self._joined is not None:
            if self._whole is not None and self._joined.step(self._whole):
                return
            self._joined.give_back(whole=True)
        self._step()

    def _joined_steps(self) -> JoinedStep | None:
        return JoinedStep.where_it_fits(self.optimizer, self.part, self.parameters, self._weights)

    def _look(self, *, change: bool = False) -> None:
        """Before anybody reads the optimizer's state, or changes it."""
        if self._joined is not None:
            self._joined.give_back(whole=change)

    def _step_flat(self, gradient: list[Tensor]) -> bool:
        if not FlatSGD.fits(self.optimizer, self._weights):
            return False
        return self._flat_steps().step(self.parameters, gradient)

    def _flat_steps(self) -> FlatSGD:
        self._look(change=True)
        if self._flat is None:
            self._flat = FlatSGD(self.optimizer, self.part, self._weights)
        return self._flat

    # -- reading and writing -----------------------------------------------------------------------------

    def read(self, version: int, into: Sequence[Tensor]) -> None:
        """Copy the shard's part of one version."""
        source = self._kept[version % len(self._kept)] if self._kept else self.weights
        _copy(self.part.segments(into), source)

    def put(self, rank: int, values: Sequence[Tensor]) -> None:
        """Values that replace the weights with the next fold; the lowest rank's win (M6)."""
        self._put[rank] = [value.clone() for value in values]

    def _apply_puts(self) -> None:
        if self._put:
            _copy(self.weights, self._put[min(self._put)])
            self._put.clear()

    def settle(self) -> None:
        """The end of the run: what was put without a later fold counts too."""
        self._apply_puts()

    def snapshot(self) -> list[Tensor]:
        return [segment.clone().cpu() for segment in self.weights]

    def cut(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Weights and optimizer state as they are now, by name; the copies are good until the next cut."""
        self._settle()
        self._look()
        live, notes = self._to_keep()
        for name, tensor in live.items():
            kept = self._copies.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                self._copies[name] = tensor.clone().cpu()
            else:
                kept.copy_(tensor)
        return {name: self._copies[name] for name in live}, notes

    def _to_keep(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """The same, not copied."""
        views = [parameter.detach() for parameter in self.parameters]
        groups = group_notes(self._groups.own())
        if self._wraps:
            with self._groups.unscaled():
                return wrapped_tensors(self.part, views, self.optimizer, self._by_entry(), groups)
        if other := homeless(self.optimizer):
            raise CheckpointError(
                f"optimizer state under {other!r} belongs to no parameter, and cannot be kept"
            )
        states = {
            (piece.entry, piece.start, piece.stop): dict(state)
            for piece, parameter in zip(self.part.pieces, self.parameters, strict=True)
            if (state := self.optimizer.state.get(parameter))
        }
        live, notes = piece_tensors(self.part, views, states)
        return live, notes | groups

    def _by_entry(self) -> list[Tensor]:
        found = {piece.entry: each for piece, each in zip(self.part.pieces, self.parameters, strict=True)}
        return [found[entry] for entry in sorted(found)]

    def state(self) -> tuple[Options, PieceState]:
        self._settle()
        self._look()
        return self._groups.values(), piece_states(self.optimizer, self.part, self.parameters)

    def own_options(self) -> Options:
        """Of the groups, what the optimizer itself has changed."""
        return self._groups.own()

    def whole_state(self) -> dict[str, Any] | None:
        """What an optimizer that holds others, or has state of no parameter, says of itself; None of all others."""
        if not self._wraps and (homeless(self.optimizer) is None or self.layout.shards > 1):
            return None
        with self._groups.unscaled():
            return copy.deepcopy(self.optimizer.state_dict())

    def load_whole(self, state: dict[str, Any]) -> None:
        """The inverse."""
        with self._groups.unscaled():
            self.optimizer.load_state_dict(copy.deepcopy(state))

    def load(self, options: Options, state: dict[int, dict[str, Any]]) -> None:
        """Replace the optimizer's state (entries as `template.split` gives them)."""
        self._settle()
        self._look(change=True)
        self._groups.load(options)
        if self._flat is not None:
            self._flat.changed()
        self.optimizer.state.clear()
        for piece, parameter in zip(self.part.pieces, self.parameters, strict=True):
            if piece.entry in state:
                cut = cut_state(state[piece.entry], piece, self.layout)
                self.optimizer.state[parameter] = beside(parameter, cut)


def total_norm(layout: Layout, norms: Sequence[Tensor]) -> Tensor:
    """Norm over all shards from the norms of their pieces; cut entries are put together first."""
    by_entry: dict[int, list[Tensor]] = {}
    for part, values in zip(layout.parts, norms, strict=True):
        for piece, value in zip(part.pieces, values, strict=True):
            by_entry.setdefault(piece.entry, []).append(value)
    entries = [torch.linalg.vector_norm(torch.stack(values)) for _, values in sorted(by_entry.items())]
    return torch.linalg.vector_norm(torch.stack(entries))


def _copy(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for a, b in zip(into, source, strict=True):
        a.copy_(b)
