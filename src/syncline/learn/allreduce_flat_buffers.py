"""Flat buffers for reductions: gradients of several parameters side by side, what travels with them, and back (A1, A2).

One bucket carries the header (examples, a wish to stop, what was measured), each bucket a flag per parameter: does anybody have
a gradient for it? Not responsible for when a reduction starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from syncline.errors import LayoutError
from syncline.protocols.allreduce import plan_buckets

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

    @property
    def turns(self) -> tuple[float, ...]:
        return self.turn_0, self.turn_1, self.turn_2


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
            raise LayoutError(
                "a parameter has a sparse gradient, which does not travel; make its layer with sparse=False"
            )
        if gradient is view:
            if divisor != 1.0:
                view.div_(divisor)
        elif divisor == 1.0:
            view.copy_(gradient)
        else:
            torch.div(gradient.detach(), divisor, out=view)

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


def make_buckets(parameters: Sequence[nn.Parameter], limit: int | None, device: torch.device) -> list[Bucket]:
    """Buckets over these parameters, in the order in which they are reduced; exactly one carries the header."""
    kinds = [f"{parameter.dtype} on {parameter.device}" for parameter in parameters]
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    plan = plan_buckets(sizes, kinds, limit)
    carrier = next((n for n, bucket in enumerate(plan) if parameters[bucket[0]].dtype in EXACT), None)
    buckets = [
        Bucket(
            indices,
            [parameters[index] for index in indices],
            header=number == carrier,
            like=parameters[indices[0]].data,
        )
        for number, indices in enumerate(plan)
    ]
    if carrier is None:  # no dtype that can count, or nothing to reduce: the header travels alone
        device = parameters[0].device if parameters else device
        like = torch.empty(0, dtype=torch.float32, device=device)
        buckets.insert(0, Bucket((), (), header=True, like=like))
    return buckets
