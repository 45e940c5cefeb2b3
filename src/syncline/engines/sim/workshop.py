"""What all built-in learners of a run share: the model, the data's order, the schedule, the versions in use.

A learner's own are its random states, its buffers and where it stands (`builtin`). State that a model keeps outside of parameters and
buffers is shared, too: `Sim(handlers=False)` gives every learner its own copy of everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from syncline.engines.run import RunSpec
from syncline.engines.sim.learner import copy_arguments
from syncline.engines.sim.promises import Computer, EachAlone, Versions
from syncline.learn.feed import AHEAD, epoch_order, reader
from syncline.learn.session import make_optimizer, shards_for
from syncline.learn.training import Schedule, Training, run_training
from syncline.table.layout import Layout, Tensors, lay_out
from syncline.table.slot import options_text
from syncline.table.template import ELEMENTWISE, OptimizerTemplate, group_options

ORDERS_KEPT = 4  # epochs


def can_handle(spec: RunSpec) -> bool:
    """`train`'s own loop, over data that a ledger hands out."""
    if spec.function is not run_training:
        return False
    plan: Training = spec.arguments[0]
    return not isinstance(plan.data, IterableDataset) and set(spec.devices) == {"cpu"}


class Workshop:
    """One run's model and data, used by one learner at a time."""

    def __init__(self, spec: RunSpec, computer: Callable[[Workshop], Computer] = EachAlone) -> None:
        (self.plan,), _ = copy_arguments((spec.arguments, {}))  # type: tuple[Training], Any
        self.spec = spec
        self.computer = computer(self)
        self._orders: dict[int, Tensor] = {}

    @cached_property
    def model(self) -> nn.Module:
        return self.plan.model.train()

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's: its options travel, its steps run on the shards."""
        return make_optimizer(self.model, self.plan.optimizer)

    @cached_property
    def template(self) -> OptimizerTemplate:
        return OptimizerTemplate.of(self.optimizer)

    @cached_property
    def _laid_out(self) -> tuple[Layout, Tensors]:
        inner = self.optimizer
        return lay_out(
            self.model,
            [group["params"] for group in inner.param_groups],
            cuttable=type(inner) in ELEMENTWISE,
            shards=shards_for(inner, self.spec.shards, fixed=self.spec.fixed_shards),
        )

    @property
    def layout(self) -> Layout:
        return self._laid_out[0]

    @cached_property
    def tensors(self) -> Tensors:
        return self._laid_out[1]

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        return self._laid_out[1].parameters

    @cached_property
    def buffers(self) -> list[Tensor]:
        return self._laid_out[1].buffers

    @cached_property
    def versions(self) -> Versions:
        return Versions(self.layout)

    # -- the data ----------------------------------------------------------------------------------------

    @cached_property
    def read(self) -> Callable[[Tensor], Any]:
        """Indices to a batch."""
        return reader(self.plan.data, self.plan.collate)

    @property
    def size(self) -> int:
        return len(self.plan.data)  # type: ignore[arg-type]

    @property
    def ahead(self) -> int:
        """Portions that a loader would read before they are needed."""
        return 0 if isinstance(self.plan.data, TensorDataset) else AHEAD

    def indices(self, epoch: int, start: int, stop: int, parts: int) -> Tensor:
        """Of these positions of the epoch's order."""
        order = self._orders.get(epoch)
        if order is None:
            order = self._orders[epoch] = epoch_order(
                self.size, seed=self.spec.seed, epoch=epoch, policy=self.plan.policy, parts=parts
            )
            while len(self._orders) > ORDERS_KEPT:
                del self._orders[min(self._orders)]
        return order[start:stop]

    # -- the schedule ------------------------------------------------------------------------------------

    @cached_property
    def _schedule(self) -> Schedule:
        make = self.plan.schedule
        return Schedule(make(self.optimizer) if make else None, self.optimizer)

    def options(self, epoch: int) -> bytes:
        """Of the parameter groups in that epoch, as they travel."""
        if epoch not in self._options:
            self._schedule.go_to(epoch)
            self._options[epoch] = options_text(group_options(self.optimizer))
        return self._options[epoch]

    @cached_property
    def _options(self) -> dict[int, bytes]:
        return {}
