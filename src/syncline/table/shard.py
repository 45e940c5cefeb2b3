"""A shard: its part of one table. It adds gradients up, steps a real optimizer over its pieces, stores versions (M3, M4, M5, M13).

Not responsible for deciding when to fold, nor for who reads; what a mean is, `accumulator` knows, where versions lie, `store`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.dial import Sync
from syncline.table.accumulator import Accumulator, Made, Taken
from syncline.table.checkpoints import CheckpointError, group_notes, piece_tensors, wrapped_tensors
from syncline.table.flat_sgd import FlatSGD
from syncline.table.joined_parameters_step import JoinedStep
from syncline.table.layout import Layout
from syncline.table.nested_optimizers import look
from syncline.table.optimizer_template import (
    OptimizerTemplate,
    Options,
    PieceState,
    bare_step,
    beside,
    cut_state,
    homeless,
    is_torchs,
    piece_states,
    to_host,
)
from syncline.table.parameter_groups import Groups
from syncline.table.store import Store, VersionMemory, copy_segments


class Shard:
    """One shard of one table; the memory's first place holds the version that it begins with."""

    def __init__(
        self,
        layout: Layout,
        index: int,
        template: OptimizerTemplate,
        memory: VersionMemory,
        *,
        sync: Sync,
        clip_norm: float | None = None,
        version: int = 0,
    ) -> None:
        self.layout, self.part, self.clip_norm = layout, layout.parts[index], clip_norm
        weights = memory.places[0]
        views = self.part.views(weights, layout.parameters.entries)
        self.optimizer, self.parameters = template.build(self.part, layout, views)
        self._views = {id(weights): views}  # by the place that they are of
        self._wraps, self._own_step = template.whole is not None, not is_torchs(self.optimizer)
        # where it holds no weights but as its parameters, what others wrote may do so
        self._store = Store(memory, version, movable=not self._wraps and not self._own_step)
        self._accumulator = Accumulator(layout, self.part, weights)
        self.take = self._accumulator.take
        self._step = bare_step(self.optimizer)
        self._joined = JoinedStep.where_it_fits(self.optimizer, self.part, self.parameters, weights)
        self._fits_flat = FlatSGD.fits(self.optimizer, weights)
        self._flat: FlatSGD | None = None
        inner = look(self.optimizer).optimizers if self._wraps else ()
        self._groups = Groups(self.optimizer, template.options, inner)
        self._options, self._factor = template.options, 1.0
        self._gathered: Made | None = None  # what the next step goes by
        self._set: list[Tensor] | None = None  # views that every parameter's gradient is
        self._one: Taken | None = None  # the only gradient of the next step, which may wait
        self._put: dict[int, list[Tensor]] = {}
        self._copies: dict[str, Tensor] = {}  # of the last cut
        self.change(sync)

    @property
    def version(self) -> int:
        return self._store.version

    @property
    def weights(self) -> list[Tensor]:
        """Of the newest version."""
        self._settle()
        return self._store.segments

    def _settle(self) -> None:
        """Steps that wait are made first."""
        if (maker := self._accumulator.maker) is not None:
            maker.settle()

    def change(self, sync: Sync) -> None:
        """Another dial; nothing that was taken waits for its fold."""
        self._settle()
        self._accumulator.change(lockstep=sync.lockstep)
        self._store.keep(sync.delay > 0)
        self._alone = self.clip_norm is None and self.layout.shards == 1  # nobody else looks at a gradient
        self._steps_wait = not sync.lockstep and not sync.delay and self._alone and self._fits_flat

    # -- folding -----------------------------------------------------------------------------------------

    def gather(self, iteration: int) -> int:
        """The mean of what the fold takes is the gradient of the next step; how many were added up only now."""
        maker = self._accumulator.maker
        if self._steps_wait and maker is not None and maker.waits:
            self._one = self._accumulator.alone()
            if self._one is not None:
                return 0
        gathered = self._gathered = self._accumulator.gather(iteration)
        if not self._alone:
            self._set_gradients(gathered)
        if self.clip_norm is not None and self.layout.shards == 1:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        return gathered.added

    def _set_gradients(self, gathered: Made) -> None:
        """Only clipping and the plain step look at each parameter's."""
        views, present = gathered.views, gathered.present
        full = all(present)
        if views is self._set and full and not self._own_step:  # which may have cleared them
            return
        for parameter, view, has in zip(self.parameters, views, present, strict=True):
            parameter.grad = view if has else None
        self._set = views if full else None

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

    def apply(self, options: Options, factor: float) -> None:
        """Run the optimizer on the gathered gradient: the next version."""
        if options is not self._options or factor != self._factor:
            self._options, self._factor = options, factor
            self._groups.follow(options, factor)
            self._options_changed()
        one, self._one = self._one, None
        if one is None or self._put or not self._step_later(one):
            if one is not None:
                self._gathered = self._accumulator.made([one])
            self._step_now()
        self._store.complete()

    def _options_changed(self) -> None:
        for steps in (self._flat, self._joined):
            if steps is not None:
                steps.changed()

    def _step_later(self, taken: Taken) -> bool:
        """The step waits until somebody needs what it makes."""
        maker = self._accumulator.maker
        assert maker is not None
        steps = self._flat_steps()
        plan = steps.plan(self.parameters)
        return plan is not None and maker.step_later(taken.gradient, steps, plan, self.version + 1)

    def _step_now(self) -> None:
        self._settle()
        before = self._store.segments
        self._store.prepare()
        weights = self._store.segments
        if weights is not before:
            self._rebind(weights)
        if self._put:
            copy_segments(weights, self._put[min(self._put)])
            self._put.clear()
        gathered, self._gathered = self._gathered, None
        assert gathered is not None
        whole = gathered.whole
        if gathered.flat:
            stepped = (
                self._fits_flat and whole is not None and self._flat_steps().step(self.parameters, whole)
            )
        else:
            stepped = self._joined is not None and whole is not None and self._joined.step(whole)
        if stepped:
            return
        if self._joined is not None:
            self._joined.give_back(whole=True)
        if self._alone:  # else they are set
            self._set_gradients(gathered)
        self._step()

    def _rebind(self, weights: list[Tensor]) -> None:
        """Step these from now on; they hold the same values. The same lists again for the same memory."""
        views = self._views.get(id(weights))
        if views is None:
            views = self._views[id(weights)] = self.part.views(weights, self.layout.parameters.entries)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        for steps in (self._flat, self._joined):
            if steps is not None:
                steps.rebind(weights)

    def _flat_steps(self) -> FlatSGD:
        """Steps over all segments at once, where they fit."""
        if self._joined is not None:
            self._joined.give_back(whole=True)
        if self._flat is None:
            self._flat = FlatSGD(self.optimizer, self.part, self._store.segments)
        return self._flat

    # -- reading and writing -----------------------------------------------------------------------------

    def read(self, version: int, into: Sequence[Tensor]) -> None:
        """Copy the shard's part of one version, into segments of the whole table."""
        self._settle()
        copy_segments(self.part.segments(into), self._store.of(version))

    def put(self, rank: int, values: Sequence[Tensor]) -> None:
        """Values that replace the weights with the next fold; the lowest rank's win (M6)."""
        self._put[rank] = [value.clone() for value in values]

    def settle(self) -> None:
        """The end of the run: what was put without a later fold counts too."""
        self._settle()
        if self._put:
            self._store.fill(self._put[min(self._put)])
            self._put.clear()

    def snapshot(self) -> list[Tensor]:
        return [segment.clone().cpu() for segment in self.weights]

    def begin(self, values: Sequence[Tensor]) -> None:
        """The values to begin with."""
        self._store.fill(values)

    def first(self) -> dict[str, Tensor]:
        """The weights to begin with, by name; not copied."""
        pieces = self.part.views(self.weights, self.layout.parameters.entries)
        return piece_tensors(self.part, pieces, {})[0]

    # -- the optimizer's state ---------------------------------------------------------------------------

    def _look(self, *, change: bool = False) -> None:
        """Before anybody reads the optimizer's state, or changes it."""
        self._settle()
        if self._joined is not None:
            self._joined.give_back(whole=change)

    def cut(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Weights and optimizer state as they are now, by name; the copies are good until the next cut."""
        self._look()
        part, parameters = self.part, self.parameters
        views = [parameter.detach() for parameter in parameters]
        groups = group_notes(self._groups.own())
        if self._wraps:
            with self._groups.unscaled():
                live, notes = wrapped_tensors(part, views, self.optimizer, parameters, groups)
        elif other := homeless(self.optimizer):
            raise CheckpointError(
                f"optimizer state under {other!r} belongs to no parameter, and cannot be kept"
            )
        else:
            live, notes = piece_tensors(part, views, piece_states(self.optimizer, part, parameters))
            notes |= groups
        for name, tensor in live.items():
            kept = self._copies.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                self._copies[name] = tensor.clone().cpu()
            else:
                kept.copy_(tensor)
        return {name: self._copies[name] for name in live}, notes

    def state(self) -> tuple[Options, PieceState]:
        self._look()
        live = piece_states(self.optimizer, self.part, self.parameters)
        copied = {
            piece: {key: to_host(value) for key, value in state.items()} for piece, state in live.items()
        }
        return self._groups.values(), copied

    def own_options(self) -> Options:
        """Of the groups, what the optimizer itself has changed."""
        return self._groups.own()

    def whole_state(self) -> dict[str, Any] | None:
        """What an optimizer that holds others, or has state of no parameter, says of itself; None of all others."""
        if not self._wraps and (homeless(self.optimizer) is None or self.layout.shards > 1):
            return None
        with self._groups.unscaled():
            return copy.deepcopy(self.optimizer.state_dict())

    def load(
        self, options: Options, state: dict[int, dict[str, Any]], whole: dict[str, Any] | None = None
    ) -> None:
        """Replace the optimizer's state (entries as `split` gives them); `whole` as `whole_state` gives it, in place of the others."""
        self._look(change=True)
        if whole is not None:
            with self._groups.unscaled():
                self.optimizer.load_state_dict(copy.deepcopy(whole))
            return
        self._groups.load(options)
        self._options_changed()
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
