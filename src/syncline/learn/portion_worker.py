"""A learner of a batch method: the loss and gradient sums of portions at a point (D7).

The model is in `eval` mode: dropout is off, and running statistics stay as they are. Parameters are read once for
each evaluation. Not responsible for which portions, nor for where sums lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from syncline.batch.commands import BatchMethod
from syncline.batch.portions import Batch, Samples
from syncline.learn.batch_to_device import to_device
from syncline.learn.gradient_ways import Objective, check_loss
from syncline.learn.loader import epoch_order, reader
from syncline.learn.model_factories import CPU, Model, copied, made
from syncline.table.layout import Layout, lay_out


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What a batch method's learners need, and what it is."""

    model: Model
    data: Dataset[Any]
    objective: Objective
    collate: Callable[[list[Any]], Any] | None
    samples: Samples
    seed: int
    layout: Layout
    method: BatchMethod
    deterministic: bool
    fixed: dict[str, Tensor]  # buffers and frozen parameters by name, as they are throughout

    def sent(self) -> BatchPlan:
        """Without what learners do not need: a schedule or a method need not travel."""
        samples = Samples(self.samples.size, self.samples.portion)
        return BatchPlan(**{**vars(self), "samples": samples, "method": None, "fixed": {}})


def trained(model: nn.Module) -> list[nn.Parameter]:
    """What moves: all parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch_layout(model: nn.Module, shards: int) -> Layout:
    return lay_out(model, [trained(model)], cuttable=True, shards=shards)[0]


class PortionWorker:
    """One model whose parameters are set to a point, and whose gradients go into a sum; `ahead`: what comes next is read by a thread."""

    def __init__(
        self, plan: BatchPlan, device: torch.device = CPU, *, ahead: bool = True, own: bool = True
    ) -> None:
        model = made(plan.model, device)
        model = (model if own else copied(model)).to(device)
        model.eval()
        self._plan, self._read = plan, reader(plan.data, plan.collate)
        self._device, self._model, self._flat = device, model, plan.layout.parameters
        self._point = self._flat.new(device)
        self._parameters = trained(model)
        for parameter, view in zip(self._parameters, self._flat.views(self._point), strict=True):
            parameter.data = view
        self._gradient = self._flat.new(device) if device.type != "cpu" else None
        self._drawn: dict[int, Tensor] = {}  # the last sample, by its iteration
        wanted = ahead and not isinstance(plan.data, TensorDataset)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="syncline-reader") if wanted else None
        self._coming: tuple[tuple[Batch, int], Future[tuple[int, Any]]] | None = None

    def move(self, x: Sequence[Tensor]) -> None:
        """To this point."""
        for own, given in zip(self._point, x, strict=True):
            own.copy_(given)

    def begin(self, total: Sequence[Tensor]) -> None:
        """Gradients go here from now on; what is there is overwritten."""
        own = self._gradient if self._gradient is not None else total
        for segment in own:
            segment.zero_()
        for parameter, view in zip(self._parameters, self._flat.views(own), strict=True):
            parameter.grad = view

    def add(self, batch: Batch, portion: int, then: tuple[Batch, int] | None = None) -> tuple[float, int]:
        """One portion's gradient, while `then` is read; the sum of its losses over examples, and their number, come back."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == (batch, portion):
            examples, read = coming[1].result()
        else:
            if coming is not None:
                coming[1].cancel()
            examples, read = self._get(batch, portion)
        if then is not None and self._thread is not None:
            self._coming = then, self._thread.submit(self._get, *then)
        value = self._plan.objective(self._model, to_device(read, self._device))
        check_loss(value)
        (value * examples).backward()
        return value.item() * examples, examples

    def _get(self, batch: Batch, portion: int) -> tuple[int, Any]:
        """How many examples a portion has, and them; of a sample in the order of the data set: neighbours are read together."""
        plan = self._plan
        size = plan.samples.portion
        low, high = portion * size, min((portion + 1) * size, batch.examples)
        if batch.drawn is None:
            return high - low, self._read(torch.arange(low, high))
        order = self._drawn.get(batch.drawn)
        if order is None:
            chosen = epoch_order(plan.samples.size, seed=plan.seed, epoch=batch.drawn)[: batch.examples]
            order = chosen.sort().values
            self._drawn = {batch.drawn: order}
        return high - low, self._read(order[low:high])

    def end(self, total: Sequence[Tensor]) -> None:
        """The sum is complete."""
        if self._gradient is not None:
            for target, source in zip(total, self._gradient, strict=True):
                target.copy_(source)
        for parameter in self._parameters:
            parameter.grad = None  # the memory is another's now
