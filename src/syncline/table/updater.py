"""What updates: the optimizer over a shard's pieces, a real one, with the gradient that a fold gives it (M4, M5).

It steps where the store says; its state can be read, loaded and kept. Not responsible for what the
gradient is made of, nor for versions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.table.accumulator import Gathered
from syncline.table.checkpoints import CheckpointError, group_notes, piece_tensors, wrapped_tensors
from syncline.table.flat_sgd import FlatSGD
from syncline.table.joined_parameters_step import JoinedStep
from syncline.table.layout import Layout, Part
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
)
from syncline.table.parameter_groups import Groups


class Updater:
    """Of one shard; `weights` are the segments that it steps."""

    def __init__(
        self,
        layout: Layout,
        part: Part,
        template: OptimizerTemplate,
        weights: Sequence[Tensor],
        clip_norm: float | None,
    ) -> None:
        self._layout, self._part, self._weights = layout, part, weights
        views = part.views(weights, layout.parameters.entries)
        self.optimizer, self.parameters = template.build(part, layout, views)
        self.clip_norm = clip_norm
        self.fits_flat = FlatSGD.fits(self.optimizer, weights)
        self._places = {id(weights): views}
        self._step = bare_step(self.optimizer)
        self._joined = JoinedStep.where_it_fits(self.optimizer, part, self.parameters, weights)
        self._flat: FlatSGD | None = None
        self._alone = clip_norm is None and layout.shards == 1  # nobody else looks at a gradient
        self._gathered: Gathered | None = None
        self._set: list[Tensor] | None = None  # views that every parameter's gradient is
        self._wraps = template.whole is not None
        inner = look(self.optimizer).optimizers if self._wraps else ()
        self._groups = Groups(self.optimizer, template.options, inner)
        self._own_step = not is_torchs(self.optimizer)
        self._options: Options = template.options
        self._factor = 1.0
        self._copies: dict[str, Tensor] = {}  # of the last cut

    @property
    def movable(self) -> bool:
        """It holds no weights but as its parameters: what others wrote may do so."""
        return not self._wraps and not self._own_step

    def rebind(self, weights: Sequence[Tensor]) -> None:
        """Step these from now on; they hold the same values. The same lists again for the same memory."""
        views = self._places.get(id(weights))
        if views is None:
            views = self._part.views(weights, self._layout.parameters.entries)
            self._places[id(weights)] = views
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self._weights = weights
        if self._joined is not None:
            self._joined.rebind(weights)
        if self._flat is not None:
            self._flat.rebind(weights)

    # -- the step ----------------------------------------------------------------------------------------

    def gather(self, gathered: Gathered) -> None:
        """The next step goes by this gradient."""
        self._gathered = gathered
        if not (gathered.flat and gathered.whole is not None and self._alone):
            self._set_gradients(gathered)  # else only the plain step looks at each parameter's

    def _set_gradients(self, gathered: Gathered) -> None:
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

    def clip_alone(self) -> None:
        assert self.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)

    def follow(self, options: Options, factor: float) -> None:
        """The next step is with these."""
        if options is not self._options or factor != self._factor:
            self._options, self._factor = options, factor
            self._groups.follow(options, factor)
            self._changed()

    def _changed(self) -> None:
        """The groups' options are others."""
        for steps in (self._flat, self._joined):
            if steps is not None:
                steps.changed()

    def step(self) -> None:
        """With the gradient that was gathered."""
        gathered, self._gathered = self._gathered, None
        assert gathered is not None
        whole = gathered.whole
        if gathered.flat and whole is not None:
            if self.fits_flat and self.flat().step(self.parameters, whole):
                return
            self._set_gradients(gathered)
        if self._joined is not None:
            if not gathered.flat and whole is not None and self._joined.step(whole):
                return
            self._joined.give_back(whole=True)
        self._step()

    def flat(self) -> FlatSGD:
        """Steps over all segments at once, where `fits_flat`."""
        self._look(change=True)
        if self._flat is None:
            self._flat = FlatSGD(self.optimizer, self._part, self._weights)
        return self._flat

    # -- its state ---------------------------------------------------------------------------------------

    def _look(self, *, change: bool = False) -> None:
        """Before anybody reads the optimizer's state, or changes it."""
        if self._joined is not None:
            self._joined.give_back(whole=change)

    def cut(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Weights and optimizer state as they are now, by name; the copies are good until the next cut."""
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
                return wrapped_tensors(self._part, views, self.optimizer, self._by_entry(), groups)
        if other := homeless(self.optimizer):
            raise CheckpointError(
                f"optimizer state under {other!r} belongs to no parameter, and cannot be kept"
            )
        states = {
            (piece.entry, piece.start, piece.stop): dict(state)
            for piece, parameter in zip(self._part.pieces, self.parameters, strict=True)
            if (state := self.optimizer.state.get(parameter))
        }
        live, notes = piece_tensors(self._part, views, states)
        return live, notes | groups

    def _by_entry(self) -> list[Tensor]:
        found = {piece.entry: each for piece, each in zip(self._part.pieces, self.parameters, strict=True)}
        return [found[entry] for entry in sorted(found)]

    def state(self) -> tuple[Options, PieceState]:
        self._look()
        return self._groups.values(), piece_states(self.optimizer, self._part, self.parameters)

    def own_options(self) -> Options:
        """Of the groups, what the optimizer itself has changed."""
        return self._groups.own()

    def whole_state(self) -> dict[str, Any] | None:
        """What an optimizer that holds others, or has state of no parameter, says of itself; None of all others."""
        if not self._wraps and (homeless(self.optimizer) is None or self._layout.shards > 1):
            return None
        with self._groups.unscaled():
            return copy.deepcopy(self.optimizer.state_dict())

    def load_whole(self, state: dict[str, Any]) -> None:
        """The inverse."""
        with self._groups.unscaled():
            self.optimizer.load_state_dict(copy.deepcopy(state))

    def load(self, options: Options, state: dict[int, dict[str, Any]]) -> None:
        """Replace the optimizer's state (entries as `template.split` gives them)."""
        self._look(change=True)
        self._groups.load(options)
        self._changed()
        self.optimizer.state.clear()
        for piece, parameter in zip(self._part.pieces, self.parameters, strict=True):
            if piece.entry in state:
                cut = cut_state(state[piece.entry], piece, self._layout)
                self.optimizer.state[parameter] = beside(parameter, cut)
