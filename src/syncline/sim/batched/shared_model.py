"""What all built-in learners of a run share: the model, the data's order, the schedule, the versions in use.

A learner's own are its random states, its buffers and where it stands (`builtin_learner`). State that a model keeps outside of parameters and
buffers is shared, too: `Sim(handlers=False)` gives every learner its own copy of everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from syncline.engines.run import RunSpec
from syncline.errors import UsageError
from syncline.learn.loader import epoch_order, read_ahead, reader
from syncline.learn.model_factories import made
from syncline.learn.server_session import shards_for
from syncline.learn.session import make_optimizer
from syncline.learn.train_and_evaluate import Schedule, Training, run_training
from syncline.sim.batched.batched_gradients import BatchedGradients
from syncline.sim.batched.lazy_gradients import Computer, EachAlone
from syncline.sim.batched.objective import SimTask
from syncline.sim.batched.vmap_gradients import trial
from syncline.sim.learner import copy_arguments
from syncline.table.gradient_slot import options_text
from syncline.table.layout import Layout, Tensors, lay_out
from syncline.table.optimizer_template import ELEMENTWISE, OptimizerTemplate, group_options

ORDERS_KEPT = 4  # epochs


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How gradients are computed together."""

    graphs: bool = True  # captured as CUDA graphs, on a GPU
    convolutions: str | None = None  # "unfolded" or "grouped"; None: what is fast on the device


class SharedModel:
    """One run's model and data, used by one learner at a time."""

    def __init__(self, spec: RunSpec) -> None:
        self.plan: Training = copy_arguments(spec.task.arguments)[0]
        self.spec = spec
        self.computer: Computer = EachAlone(self)
        self.device = torch.device("cpu")  # of the table and its versions
        self._orders: dict[int, Tensor] = {}
        self._options: dict[int, bytes] = {}  # by epoch

    def compute_together(self, ways: Ways) -> str | None:
        """From now on, on the run's device; or the reason why that is not possible."""
        device = torch.device(self.spec.devices[0])
        convolutions = ways.convolutions or ("unfolded" if device.type == "cuda" else "grouped")
        objective, data, collate = self.plan.objective, self.plan.data, self.plan.collate
        if objective is None:
            return "only gradients of back-propagation are computed together"
        try:
            task = SimTask(self.model, objective, self.layout, data, collate=collate, device=device)
        except UsageError as error:
            return str(error)
        reason, draws = trial(task, self.tensors.parameters, self.size, convolutions=convolutions)
        if reason is None:
            self.computer = BatchedGradients(
                task,
                learners=self.spec.plan.learners,
                draws=draws,
                convolutions=convolutions,
                graphs=ways.graphs,
            )
            self.device = device
        return reason

    @cached_property
    def model(self) -> nn.Module:
        model = made(self.plan.model).train()
        self.plan.way.prepare(model, self.plan.batch_size)
        return model

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
            shards=shards_for(inner, self.spec.plan.servers),
        )

    @property
    def layout(self) -> Layout:
        return self._laid_out[0]

    @property
    def tensors(self) -> Tensors:
        return self._laid_out[1]

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
        return read_ahead(self.plan.data)

    def indices(self, epoch: int, start: int, stop: int, parts: int) -> Tensor:
        """Of these positions of the epoch's order."""
        order = self._orders.get(epoch)
        if order is None:
            order = self._orders[epoch] = epoch_order(
                self.size, seed=self.spec.plan.seed, epoch=epoch, policy=self.plan.policy, parts=parts
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


def make_workshop(spec: RunSpec, ways: Ways | None) -> tuple[SharedModel | None, str | None]:
    """What built-in learners share, where there are any; and why they compute alone, where they should not.

    There are in `train`'s own loop, over data that a ledger hands out, on one device.
    """
    builtin = spec.task.function is run_training and len(set(spec.devices)) == 1
    if not builtin or isinstance(spec.task.arguments[0].data, IterableDataset):
        return None, "only train's own loop, on one device, can do otherwise" if ways is not None else None
    shop = SharedModel(spec)
    reason = shop.compute_together(ways) if ways is not None else None
    if torch.device(spec.devices[0]) != shop.device:  # on a GPU, one at a time: each with a model of its own
        return None, reason
    return shop, reason
