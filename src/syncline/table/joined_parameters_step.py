"""A step of torch's own optimizers over neighbouring parameters at once: the same bits in far fewer operations.

Small parameters of one group that lie side by side are stepped as one flat tensor. The optimizer's own state is given back
whenever somebody looks at it. Not responsible for gradients that lack a parameter, for fused steps (their last elements
round otherwise) nor for 16-bit numbers (likewise): those are stepped plainly.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline.table.layout import Part, Piece
from syncline.table.optimizer_template import ELEMENTWISE, bare_step

# elements of a run: it stays in a core's cache between the operations of a step; a GPU takes all at once
MOST = 1 << 16
WORTH = 0.75  # runs to parameters, at most
DTYPES = (torch.float32, torch.float64)
COUNTS = ("step", "mu_product")  # one number for a parameter; all else in a state is shaped like it


@dataclass(frozen=True)
class _Run:
    """Neighbouring pieces of one group, and the flat tensor over all of them."""

    group: int
    segment: int
    start: int
    stop: int
    pieces: list[tuple[nn.Parameter, Piece]]
    flat: nn.Parameter

    def cut(self, value: Tensor, parameter: Tensor, piece: Piece) -> Tensor:
        """A piece's part of something that is shaped like the run."""
        first = piece.position - self.start
        return value[first : first + piece.stop - piece.start].view_as(parameter)


class JoinedStep:
    """Steps `optimizer`, whose parameters are views of `weights`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        part: Part,
        parameters: Sequence[nn.Parameter],
        weights: Sequence[Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._runs = _runs(optimizer, part, parameters, weights)
        self._joined = copy.copy(optimizer)
        self._joined.state = defaultdict(dict)
        self._joined.param_groups = [
            {**group, "params": [run.flat for run in self._runs if run.group == number]}
            for number, group in enumerate(optimizer.param_groups)
        ]
        self._step = bare_step(self._joined)
        self._foreach = any(segment.is_cuda for segment in weights)  # as torch chooses where nobody does
        self._fits: bool | None = None  # with the options as they are; None: they may be others
        self._holds = False  # the state lies here
        self._gradients: Sequence[Tensor] | None = None

    @classmethod
    def where_it_fits(
        cls,
        optimizer: torch.optim.Optimizer,
        part: Part,
        parameters: Sequence[nn.Parameter],
        weights: Sequence[Tensor],
    ) -> JoinedStep | None:
        """Only where the bits are the same, and where it gains something."""
        plain = all(segment.dtype in DTYPES for segment in weights)
        if type(optimizer) not in ELEMENTWISE or not plain or _fused(optimizer):
            return None
        joined = cls(optimizer, part, parameters, weights)
        return joined if len(joined._runs) <= WORTH * len(parameters) else None

    def step(self, gradients: Sequence[Tensor]) -> bool:
        """One step with the gradient's segments; False where only the plain step will do, and nothing was done."""
        if self._fits is None:
            self._fits = not _fused(self._optimizer) and not _has_tensors(self._optimizer)
            for mine, theirs in zip(self._joined.param_groups, self._optimizer.param_groups, strict=True):
                mine.update((key, value) for key, value in theirs.items() if key != "params")
                if "foreach" in mine and mine["foreach"] is None and not mine.get("differentiable"):
                    mine["foreach"] = self._foreach  # torch's choice, made once
        if not self._fits or (not self._holds and not self._take_over()):
            return False
        if gradients is not self._gradients:
            for run in self._runs:
                run.flat.grad = gradients[run.segment][run.start : run.stop]
            self._gradients = gradients
        self._step()
        return True

    def changed(self) -> None:
        """The optimizer's options are others."""
        self._fits = None

    def rebind(self, weights: Sequence[Tensor]) -> None:
        """The same values lie there from now on."""
        for run in self._runs:
            run.flat.data = weights[run.segment][run.start : run.stop]

    def give_back(self, *, whole: bool = False) -> None:
        """Let the optimizer's own state be as if it had stepped itself; `whole`: and take it over again next time."""
        if not self._holds:
            return
        self._holds = not whole
        for run in self._runs:
            state = self._joined.state[run.flat]
            for parameter, piece in run.pieces:
                own = {}
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        shaped = value.shape == run.flat.shape
                        value = run.cut(value, parameter, piece) if shaped else value.clone()
                    own[key] = value
                if state:
                    self._optimizer.state[parameter] = own

    def _take_over(self) -> bool:
        """The state of each run, from those of its parameters; False where they do not go together."""
        found = [
            _join(run, [self._optimizer.state.get(parameter) or {} for parameter, _ in run.pieces])
            for run in self._runs
        ]
        if any(state is None for state in found):
            return False
        self._joined.state.clear()
        self._joined.state.update(
            (run.flat, state) for run, state in zip(self._runs, found, strict=True) if state
        )
        self._holds = True
        return True


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _has_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Torch chooses another loop for options that are tensors."""
    options = (value for group in optimizer.param_groups for key, value in group.items() if key != "params")
    return any(
        isinstance(each, Tensor)
        for value in options
        for each in (value if isinstance(value, tuple) else (value,))
    )


def _runs(
    optimizer: torch.optim.Optimizer,
    part: Part,
    parameters: Sequence[nn.Parameter],
    weights: Sequence[Tensor],
) -> list[_Run]:
    most = sys.maxsize if any(segment.is_cuda for segment in weights) else MOST
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    chunks: list[tuple[tuple[int, int], list[tuple[nn.Parameter, Piece]]]] = []
    for parameter, piece in zip(parameters, part.pieces, strict=True):
        key = group_of[id(parameter)], piece.segment
        last = chunks[-1] if chunks else None
        if last is not None and last[0] == key and piece.end - last[1][0][1].position <= most:
            last[1].append((parameter, piece))
        else:
            chunks.append((key, [(parameter, piece)]))
    runs = []
    for (group, segment), pieces in chunks:
        start, stop = pieces[0][1].position, pieces[-1][1].end
        flat = nn.Parameter(weights[segment][start:stop].detach())
        runs.append(_Run(group, segment, start, stop, pieces, flat))
    return runs


def _join(run: _Run, states: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """One state for a run: what is shaped like a parameter side by side, all else must be the same in all."""
    first = states[0]
    if any(state.keys() != first.keys() for state in states):
        return None
    joined: dict[str, Any] = {}
    for key, value in first.items():
        values = [state[key] for state in states]
        if isinstance(value, Tensor) and key not in COUNTS:  # by name: parameters may be single numbers too
            if any(v.shape != p.shape for v, (p, _) in zip(values, run.pieces, strict=True)):
                return None
            joined[key] = torch.zeros_like(run.flat, dtype=value.dtype, requires_grad=False)
            for each, (parameter, piece) in zip(values, run.pieces, strict=True):
                run.cut(joined[key], parameter, piece).copy_(each)
        elif all(type(each) is type(value) and each == value for each in values):
            joined[key] = value.clone() if isinstance(value, Tensor) else value
        else:
            return None
    return joined
