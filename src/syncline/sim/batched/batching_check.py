"""Can a model's gradients be computed together? Found by trying, on a few examples, before the run.

The plain gradient is the reference: what does not agree with it, or cannot be mapped over batches, is computed one at a time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as tree

from syncline.sim.batched.cuda_graphs import repeatable
from syncline.sim.batched.objective import SimTask
from syncline.sim.batched.tensor_rows import Rows, rows_of
from syncline.sim.batched.vmap_gradients import Joined, Stacked
from syncline.sim.random_states import Random

TRIED = 3  # examples of a batch
NEAR = 0.01  # of the gradient's norm: where two values are all but equal, rounding may choose the other


@dataclass(frozen=True)
class VmapProbe:
    """What came out."""

    reason: str | None  # why not
    draws: bool  # the model draws random numbers


def plain(task: SimTask, weights: Sequence[Tensor], indices: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradient (as segments) of one batch by itself: the reference for the ways to compute many."""
    leaves = task.leaves(weights)
    batches = task.examples.stack(indices[None].to(task.device), task.examples.leaves([indices]))
    loss = task.loss(leaves, tree.tree_map(lambda leaf: leaf[0], batches))
    made = task.segments()
    for view, gradient in zip(task.views(made), task.gradients(loss, leaves), strict=True):
        if gradient is not None:
            view.copy_(gradient)
    return loss.detach(), made


def trial(task: SimTask, parameters: Sequence[Tensor], size: int, *, convolutions: str) -> VmapProbe:
    """Try two batches at two versions near these parameters."""
    weights = [_near(task, parameters, factor) for factor in (1.0, 0.99)]
    batches = [torch.arange(size)[:TRIED], torch.arange(size).flip(0)[:TRIED]]
    outside = Random()
    try:
        return _try(task, weights, batches, convolutions)
    finally:
        outside.restore()


def _try(task: SimTask, weights: list[list[Tensor]], batches: list[Tensor], convolutions: str) -> VmapProbe:
    buffers = [buffer.clone() for buffer in task.model.buffers()]
    before = _drawn(task.device)
    with repeatable(task.device):  # without TensorFloat-32, whose rounding alone is beyond what is near
        references = [plain(task, *each)[1] for each in zip(weights, batches, strict=True)]
    draws = _drawn(task.device) != before
    changed = [
        name
        for (name, buffer), kept in zip(task.model.named_buffers(), buffers, strict=True)
        if not torch.equal(buffer, kept)
    ]
    if changed:
        return VmapProbe(f"computing a gradient changes the buffer {changed[0]}", draws)
    try:
        apart = _apart(task, weights, batches, references, convolutions)
    except Exception as error:  # whatever vmap cannot do
        words = str(error).strip().splitlines() or [type(error).__name__]
        return VmapProbe(f"the objective cannot be mapped over batches: {words[0]}", draws)
    if not draws and not apart <= NEAR:
        return VmapProbe(f"computed together, gradients differ by {apart:.1%} of their norm", draws)
    return VmapProbe(None, draws)


def _apart(
    task: SimTask,
    weights: list[list[Tensor]],
    batches: list[Tensor],
    references: list[list[Tensor]],
    convolutions: str,
) -> float:
    """How far from the plain gradients, relative to their norm."""
    losses = torch.zeros(3, dtype=torch.float64, device=task.device)
    versions = rows_of(task, weights)
    joined = Joined(task, losses, versions, graphs=False)
    joined.add(0, [batches[0], batches[0]], [0.5, 0.5], [0, 1])
    stacked = Stacked(task, losses, versions, Rows(task, 2), graphs=False, convolutions=convolutions)
    stacked.fill([0, 1], batches, [0, 1], [0, 1])
    pairs = [(joined.total, references[0]), *((stacked.row(i)[0], references[i]) for i in range(2))]
    worst = 0.0
    for mine, theirs in pairs:
        apart = sum(float((a - b).double().square().sum()) for a, b in zip(mine, theirs, strict=True))
        norm = sum(float(b.double().square().sum()) for b in theirs)
        worst = max(worst, apart**0.5 / norm**0.5 if norm else float(apart > 0))
    return worst


def _near(task: SimTask, parameters: Sequence[Tensor], factor: float) -> list[Tensor]:
    segments = task.segments()
    with torch.no_grad():
        for view, parameter in zip(task.views(segments), parameters, strict=True):
            view.copy_(parameter.detach()).mul_(factor)
    return segments


def _drawn(device: torch.device) -> tuple[object, ...]:
    """The generators' states, to notice that somebody drew."""
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()]  # type: ignore[union-attr,index]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return tuple(states)
