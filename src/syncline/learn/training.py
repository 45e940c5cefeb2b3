"""What `train` runs in every learner, a loop that any user could have written; and how it evaluates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from syncline.errors import UsageError
from syncline.learn.batches import count_of, to_device
from syncline.learn.surface import Session

Loss = Callable[[Any, Any], Tensor]
Objective = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What `train`'s learners need."""

    model: nn.Module
    data: Dataset[Any]
    objective: Objective
    optimizer: Callable[..., torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None
    batch_size: int
    global_batch_size: int | None = None  # in place of it
    epochs: int | None
    policy: str
    collate: Callable[[list[Any]], Any] | None


class Supervised:
    """A loss of (output, target) as an objective of (model, batch)."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            parts = f" of {len(batch)}" if isinstance(batch, (list, tuple, dict)) else ""
            raise UsageError(
                f"loss= takes batches of (input, target), the data gives a {type(batch).__name__}{parts}; "
                "use objective=(model, batch) -> scalar"
            )
        inputs, targets = batch
        return self._loss(model(inputs), targets)


def run_training(session: Session, plan: Training) -> None:
    """One learner of `train`."""
    model = plan.model.to(session.device)
    model.train()
    optimizer = session.optimizer(model, plan.optimizer)
    loader = session.loader(
        plan.data,
        batch_size=plan.batch_size if plan.global_batch_size is None else None,
        global_batch_size=plan.global_batch_size,
        policy=plan.policy,
        collate=plan.collate,
    )
    schedule = Schedule(plan.schedule(optimizer) if plan.schedule else None, optimizer)
    while not session.ending and (plan.epochs is None or loader.epoch < plan.epochs):
        schedule.go_to(loader.epoch)
        for batch in loader:
            schedule.go_to(loader.epoch)
            optimizer.zero_grad()
            value = plan.objective(model, batch)
            check_scalar(value)
            value.backward()
            session.loss = value.item()
            optimizer.step()


class Schedule:
    """An LR scheduler that is where the epoch is, for learners that join late or go back to a checkpoint."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer
        self._epoch = 0
        self._marks = [self._mark()] if scheduler is not None else []

    def _mark(self) -> tuple[dict[str, Any], list[Any]]:
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return copy.deepcopy(self._scheduler.state_dict()), copy.deepcopy(rates)

    def go_to(self, epoch: int) -> None:
        if self._scheduler is None or epoch == self._epoch:
            return
        if epoch < len(self._marks):
            state, rates = self._marks[epoch]
            self._scheduler.load_state_dict(state)
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = copy.deepcopy(rate)
        for _ in range(len(self._marks), epoch + 1):
            with warnings.catch_warnings():  # it minds being stepped before the optimizer, as a joiner does
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step", category=UserWarning)
                self._scheduler.step()
            self._marks.append(self._mark())
        self._epoch = epoch


def check_scalar(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise UsageError(f"the loss must be a scalar tensor, got {what}; reduce it, for example with .mean()")


@dataclass
class Evaluation:
    """Tests a model on a data set: mean loss and, for class scores, accuracy."""

    model: nn.Module
    data: Any
    objective: Objective
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    classes: bool
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - never changed

    def on(self, device: torch.device) -> Evaluation:
        """The same on another device."""
        return replace(self, model=copy.deepcopy(self.model).to(device), device=device)

    def __call__(self, state: dict[str, Tensor]) -> dict[str, float]:
        self.model.load_state_dict(state, strict=False)
        self.model.eval()
        if not isinstance(self.data, Dataset):
            return dict(self.data(self.model))
        total = right = count = 0.0
        with torch.no_grad():
            for read in DataLoader(self.data, batch_size=self.batch_size, collate_fn=self.collate):
                batch = to_device(read, self.device)
                examples = count_of(batch)
                total += float(self.objective(self.model, batch)) * examples
                count += examples
                right += self._right(batch)
        metrics = {"loss": total / count}
        return {**metrics, "accuracy": right / count} if self.classes else metrics

    def _right(self, batch: Any) -> float:
        if not self.classes:
            return 0.0
        inputs, targets = batch
        output = self.model(inputs)
        if not (output.dim() == targets.dim() + 1 and not targets.is_floating_point()):
            self.classes = False
            return 0.0
        return float((output.argmax(1) == targets).sum()) / max(1, targets[0].numel())


def evaluation_of(
    model: nn.Module,
    data: Any,
    loss: Loss | None,
    objective: Objective | None,
    batch_size: int,
    collate: Callable[[list[Any]], Any] | None,
) -> Evaluation | None:
    if data is None:
        return None
    if not isinstance(data, Dataset) and not callable(data):
        raise UsageError(f"evaluate must be a data set or a function of the model, got {type(data).__name__}")
    chosen = objective or Supervised(loss)  # type: ignore[arg-type]
    host = copy.deepcopy(model).cpu()
    return Evaluation(host, data, chosen, max(256, batch_size), collate, objective is None)
