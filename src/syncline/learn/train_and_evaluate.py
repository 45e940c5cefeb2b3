"""What `train` runs in every learner, a loop that any user could have written; how it evaluates, and when it is good enough (S1, S8)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.learn.batch_to_device import to_device
from syncline.learn.gradient_ways import Backprop, Objective, Supervised, Way, check_scalar
from syncline.learn.model_factories import CPU, Model, copied, made
from syncline.learn.session import Session
from syncline.parallel.module import partition


@dataclass(frozen=True, kw_only=True)
class Training:
    """What `train`'s learners need."""

    model: Model
    data: Dataset[Any]
    objective: Objective | None = None  # of back-propagation
    gradient: Way | None = None  # any other way
    optimizer: Callable[..., torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None
    batch_size: int
    global_batch_size: int | None = None  # in place of it
    epochs: int | None
    policy: str
    collate: Callable[[list[Any]], Any] | None
    on_device: bool = False  # all data lie on the learner's GPU
    check: bool = False  # a partitioned model against the whole one

    @property
    def way(self) -> Way:
        """To a gradient."""
        return self.gradient or Backprop(self.objective)  # type: ignore[arg-type]


def run_training(session: Session, plan: Training) -> None:
    """One learner of `train`."""
    model, way = made(plan.model, session.device).to(session.device), plan.way
    way.prepare(model, plan.batch_size)
    model.train()
    if session.seats > 1:
        model = partition(way.to_cut(model), check=plan.check, as_one=session.draws_as_one)
    optimizer = session.optimizer(model, plan.optimizer)
    loader = session.loader(
        all_on(session.device, plan.data) if plan.on_device else plan.data,
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
            session.loss = way(model, batch).detach()
            optimizer.step()


def all_on(device: torch.device, data: Any) -> TensorDataset:
    """A data set of tensors, kept there."""
    wanted, (free, _) = sum(tensor.nbytes for tensor in data.tensors), torch.cuda.mem_get_info(device)
    if wanted > free:
        raise UsageError(
            f"data_device={str(device)!r}: the data take {wanted / 2**30:,.2f} GiB, the card has {free / 2**30:,.2f} GiB left; "
            "leave data_device= out, and batches are copied ahead of their use"
        )
    return TensorDataset(*(tensor.to(device) for tensor in data.tensors))


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
        known = min(epoch, len(self._marks) - 1)
        if known != self._epoch:
            state, rates = self._marks[known]
            self._scheduler.load_state_dict(state)
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = copy.deepcopy(rate)
        for _ in range(len(self._marks), epoch + 1):
            with warnings.catch_warnings():  # it minds being stepped before the optimizer, as a joiner does
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step", category=UserWarning)
                self._scheduler.step()
            self._marks.append(self._mark())
        self._epoch = epoch


def counted(collate: Callable[[list[Any]], Any] | None, items: list[Any]) -> tuple[int, Any]:
    """Of how many examples a batch is, and it: itself it may be anything."""
    return len(items), (collate or default_collate)(items)


class Evaluation:
    """Tests a model on a data set, in one pass: mean loss and, for class scores, accuracy; or calls the user's function."""

    def __init__(
        self,
        model: Model,
        data: Any,
        way: Way,
        batch_size: int,
        collate: Callable[[list[Any]], Any] | None,
        device: torch.device = CPU,
    ) -> None:
        self._model, self._data, self._way = model, data, way
        self._batch_size, self._collate, self._device = batch_size, collate, device
        self._made: nn.Module | None = None

    def on(self, device: torch.device) -> Evaluation:
        """The same on another device."""
        model = copied(self._model) if isinstance(self._model, nn.Module) else self._model
        return Evaluation(model, self._data, self._way, self._batch_size, self._collate, device)

    def __call__(self, state: dict[str, Tensor]) -> dict[str, float]:
        if self._made is None:  # in the process that evaluates
            self._made = made(self._model).to(self._device)
        model = self._made
        model.load_state_dict(state, strict=False)
        model.eval()
        if callable(self._data) and not isinstance(self._data, Dataset):
            return check_metrics(self._data(model))
        return self._test(model)

    def _test(self, model: nn.Module) -> dict[str, float]:
        """Mean loss; how many are right too, where every output is scores of classes."""
        total, right, count, way = 0.0, 0.0, 0, self._way
        objective = way.objective if isinstance(way, Backprop) else None
        scores = isinstance(objective, Supervised)
        batches = DataLoader(
            self._data,
            batch_size=self._batch_size,
            collate_fn=partial(counted, self._collate),
            generator=torch.Generator(),  # under torchrun a learner's thread draws from the default one at the same time
        )
        with torch.no_grad():
            for examples, read in batches:
                batch = to_device(read, self._device)
                if isinstance(objective, Supervised):
                    value, output, targets = objective.parts(model, batch)
                    found = _right(output, targets)
                    scores = scores and found is not None
                    right += found or 0.0
                else:
                    value = way.test(model, batch)
                check_scalar(value)
                total += float(value) * examples
                count += examples
        if count == 0:
            raise UsageError("evaluate: the data set gave no example")
        return {"loss": total / count, **({"accuracy": right / count} if scores else {})}


def _right(output: Any, targets: Any) -> float | None:
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    if output.dim() != targets.dim() + 1 or output.shape[:1] + output.shape[2:] != targets.shape:
        return None
    return float((output.argmax(1) == targets).sum()) / max(1, targets[0].numel())


def check_metrics(found: Any) -> dict[str, float]:
    """What the user's function returned, as numbers."""
    if not isinstance(found, Mapping):
        got = "None" if found is None else type(found).__name__
        raise UsageError(
            f'evaluate must return its metrics as a dictionary, such as {{"accuracy": 0.9}}, got {got}'
        )
    numbers = {}
    for name, value in found.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise UsageError(f"evaluate must return numbers, got {what} for {name!r}") from error
    return numbers


def evaluation_of(
    model: Model, data: Any, way: Way, batch_size: int, collate: Callable[[list[Any]], Any] | None
) -> Evaluation | None:
    if data is None:
        return None
    if isinstance(data, Dataset):
        way.check_evaluation()
    host = copied(model).cpu() if isinstance(model, nn.Module) else model
    return Evaluation(host, data, way, max(256, batch_size), collate)


NORM = "gradient_norm"
RULES = {
    "loss": "a finite number",
    "plateau": "a whole number of epochs, at least 1",
    NORM: "a finite number above 0",
    "metric": "the name of a metric",
}
EXAMPLES = 4096  # of which the gradient's norm is taken


class Stop:
    """Whether an epoch's record is the last: `loss` at most, `plateau` epochs without a better one, `gradient_norm` at most.

    `metric` is what plateau looks at: "test loss" where there is an evaluation, else "loss", or a metric by name; accuracy is
    better when higher.
    """

    def __init__(self, rules: Mapping[str, Any]) -> None:
        self.rules = rules
        self._best, self._since = math.inf, 0

    def __call__(self, record: Any) -> bool:
        rules, metrics = self.rules, record.metrics
        below = "loss" in rules and record.loss <= rules["loss"]
        if below or (NORM in rules and metrics.get(NORM, math.inf) <= rules[NORM]):
            return True
        if "plateau" not in rules or record.skipped:
            return False
        metric = rules.get("metric")
        if metric is not None and metric not in metrics:
            there = ", ".join(metrics) or "none"
            raise UsageError(f"stop: no metric is called {metric!r}; there are: {there}")
        value = float(metrics.get("loss", record.loss) if metric is None else metrics[metric])
        value = -value if metric == "accuracy" else value
        better = value < self._best
        self._best, self._since = min(value, self._best), 0 if better else self._since + 1
        return self._since >= rules["plateau"]


def read_stop(given: Any, data: Any = None) -> Stop | None:
    """A table of RULES, or None; of a run on these data. Raises UsageError."""
    if given is None:
        return None
    if not isinstance(given, Mapping) or not set(given) - {"metric"}:
        raise UsageError(
            f"stop takes a table with loss, plateau or {NORM}, as {{'plateau': 5}}, got {given!r}"
        )
    for name, value in given.items():
        if name not in RULES:
            raise UsageError(
                f"stop: unknown rule {name!r}{nearest(str(name), RULES)}; there are: {', '.join(RULES)}"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        fits = {
            "loss": number,
            "plateau": number and isinstance(value, int) and value >= 1,
            NORM: number and value > 0,
            "metric": isinstance(value, str) and bool(value),
        }
        if not fits[name]:
            raise UsageError(f"stop: {name} must be {RULES[name]}, got {value!r}")
    if NORM in given and isinstance(data, IterableDataset):
        raise UsageError(
            f"stop: {NORM} needs data with a length, of which it takes examples; streams have none"
        )
    return Stop(dict(given))


class GradientNorm:
    """An evaluation that also tells the norm of the mean gradient over examples of the training data, evenly spread."""

    def __init__(self, inner: Evaluation | None, plan: Training, device: torch.device = CPU) -> None:
        self._inner, self._plan, self._device = inner, plan, device
        self._made: nn.Module | None = None

    def on(self, device: torch.device) -> GradientNorm:
        """The same on another device."""
        inner = self._inner.on(device) if self._inner is not None else None
        return GradientNorm(inner, self._plan, device)

    def __call__(self, state: dict[str, Tensor]) -> dict[str, float]:
        metrics = self._inner(state) if self._inner is not None else {}
        if self._made is None:  # in the process that evaluates
            self._made = copied(made(self._plan.model)).to(self._device)
            self._plan.way.prepare(self._made, self._plan.batch_size)
        self._made.load_state_dict(state, strict=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return {**metrics, NORM: self._norm(copied(self._made))}

    def _norm(self, model: nn.Module) -> float:
        plan = self._plan
        size = len(plan.data)  # type: ignore[arg-type]
        chosen = Subset(plan.data, range(0, size, -(-size // EXAMPLES)))
        totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
        batches = DataLoader(chosen, batch_size=plan.batch_size, collate_fn=partial(counted, plan.collate))
        for examples, batch in batches:
            model.zero_grad()
            plan.way(model, to_device(batch, self._device))
            for total, parameter in zip(totals, model.parameters(), strict=True):
                if parameter.grad is not None:
                    total.add_(parameter.grad, alpha=examples / len(chosen))
        return math.sqrt(sum(float(total.square().sum()) for total in totals))


def with_norm(
    inner: Evaluation | None, stop: Stop | None, plan: Training
) -> Evaluation | GradientNorm | None:
    """The evaluation, with the norm where a run stops at one."""
    return inner if stop is None or NORM not in stop.rules else GradientNorm(inner, plan)
