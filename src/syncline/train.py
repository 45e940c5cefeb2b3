"""`train` and `launch`: the public front doors.

Both check everything that can be checked before a process starts, build a `RunSpec`, and hand it to an engine.
`train`'s learners run `_training`, a loop that any user could have written.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from syncline.dial import Sync, as_sync
from syncline.engines.local.engine import Local
from syncline.engines.run import Callback, Engine, EpochRecord, Event, Handle, Outcome, RunSpec
from syncline.engines.sim.engine import Sim
from syncline.errors import NotYetError, UsageError
from syncline.learn.feed import count_of
from syncline.learn.session import (
    Session,
    check_batches,
    check_policy,
    check_whole,
    make_optimizer,
    refuse_sparse,
)
from syncline.protocols.clocks import Staleness
from syncline.topology.messages import Statistics
from syncline.topology.parse import auto_shards, parse_topology

ENGINES: dict[str, type[Engine]] = {"local": Local, "sim": Sim}
Loss = Callable[[Any, Any], Tensor]
Objective = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run leaves (M10)."""

    version: int
    updates: int
    gradients: int
    dropped: int
    staleness: Staleness
    throughput: float  # examples/s
    seconds: float
    history: list[EpochRecord]
    logs: list[tuple[int, float, dict[str, Any]]]
    events: list[Event]
    returned: list[Any]
    interrupted: bool
    statistics: Statistics
    model: nn.Module | None = None
    _tables: dict[int, tuple[int, dict[str, Tensor]]] = field(default_factory=dict, repr=False)

    def state_dict(self, table: int = 0) -> dict[str, Tensor]:
        """Parameters and buffers of one table at its last version, by name."""
        if table not in self._tables:
            raise UsageError(f"the run has tables {sorted(self._tables)}, not {table}")
        return self._tables[table][1]


class Run:
    """A run in progress, from `wait=False`."""

    def __init__(self, handle: Handle, finish: Callable[[Outcome], Result]) -> None:
        self._handle, self._finish = handle, finish

    def wait(self, timeout: float | None = None) -> Result:
        """The result; raises what went wrong."""
        return self._finish(self._handle.wait(timeout))

    def stop(self) -> None:
        """End soon: learners finish their step."""
        self._handle.stop()

    def add_learners(self, count: int) -> None:
        raise NotYetError("add_learners is understood but not built yet; start the run with all its learners")

    def statistics(self) -> Statistics:
        """Versions, staleness, who waits for whom."""
        return self._handle.statistics()


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    learners: int = 2,
    sync: str | Sync = "hardsync",
    topology: str = "servers",
    engine: str | Engine = "local",
    device: str | Sequence[str] | None = None,
    seed: int = 0,
    threads: int | None = None,
    clip_norm: float | None = None,
    batch_size: int | None = None,
    wait: bool = True,
    **keywords: Any,
) -> Any:
    """Run `function(session, *arguments, **keywords)` in every learner; a `Result`, or a `Run` with wait=False.

    `batch_size` is needed only by dials whose rate depends on it. Everything else a learner needs is passed
    through: models, data and functions defined in a script or notebook travel, tensors are shared.
    """
    if not callable(function):
        raise UsageError(f"launch takes a function of (session, ...), got {type(function).__name__}")
    spec = _spec(
        function=function,
        arguments=arguments,
        keywords=keywords,
        learners=learners,
        sync=sync,
        topology=topology,
        device=device,
        seed=seed,
        threads=threads,
        clip_norm=clip_norm,
        batch_size=batch_size,
    )
    run = Run(_engine(engine).start(spec), partial(_result, model=None))
    return run.wait() if wait else run


def train(
    model: nn.Module | Callable[[], nn.Module],
    data: Dataset[Any],
    *,
    loss: Loss | None = None,
    objective: Objective | None = None,
    optimizer: Callable[..., torch.optim.Optimizer],
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    sync: str | Sync = "softsync:1",
    topology: str = "servers",
    engine: str | Engine = "local",
    learners: int = 2,
    batch_size: int = 32,
    epochs: int | None = None,
    steps: int | None = None,
    evaluate: Dataset[Any] | Callable[[nn.Module], dict[str, float]] | None = None,
    clip_norm: float | None = None,
    warmstart: int = 0,
    device: str | Sequence[str] | None = None,
    seed: int = 0,
    policy: str = "ledger",
    collate: Callable[[list[Any]], Any] | None = None,
    threads: int | None = None,
    run_dir: str | None = None,
    resume: str | None = None,
    callbacks: Sequence[Callback] = (),
    wait: bool = True,
) -> Any:
    """Train `model` on `data` with several learners; a `Result`, or a `Run` with wait=False.

    Give `loss(output, target)` for (input, target) batches, or `objective(model, batch)` for any other. The run ends after
    `epochs`, or after `steps` updates. `evaluate` is a data set like `data`, or a function of the model; it
    runs beside the learners at each epoch's end, on one version. A callback gets each epoch's record and ends the run by returning True.
    """
    for name, value in (("warmstart", warmstart), ("run_dir", run_dir), ("resume", resume)):
        if value:
            raise NotYetError(f"{name}= is understood but not built yet; leave it out")
    built = _check_training(model, data, loss, objective, optimizer, batch_size, epochs, steps, policy, seed)
    if steps is None and epochs is None:
        epochs = 1
    plan = Training(
        model=built,
        data=data,
        objective=objective or _Supervised(loss),  # type: ignore[arg-type]
        optimizer=optimizer,
        schedule=schedule,
        batch_size=batch_size,
        epochs=epochs,
        policy=policy,
        collate=collate,
    )
    spec = _spec(
        function=_training,
        arguments=(plan,),
        learners=learners,
        sync=sync,
        topology=topology,
        device=device,
        seed=seed,
        threads=threads,
        clip_norm=clip_norm,
        batch_size=batch_size,
        limit=steps,
        epochs=epochs,
        evaluate=_evaluator(built, evaluate, loss, objective, batch_size, collate),
        callbacks=tuple(callbacks),
    )
    run = Run(_engine(engine).start(spec), partial(_result, model=built))
    return run.wait() if wait else run


@dataclass(frozen=True, kw_only=True)
class Training:
    """What `train`'s learners need."""

    model: nn.Module
    data: Dataset[Any]
    objective: Objective
    optimizer: Callable[..., torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None
    batch_size: int
    epochs: int | None
    policy: str
    collate: Callable[[list[Any]], Any] | None


class _Supervised:
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


def _training(session: Session, plan: Training) -> None:
    """One learner of `train`."""
    model = plan.model.to(session.device)
    model.train()
    optimizer = session.optimizer(model, plan.optimizer)
    scheduler = plan.schedule(optimizer) if plan.schedule else None
    loader = session.loader(plan.data, batch_size=plan.batch_size, policy=plan.policy, collate=plan.collate)
    for _ in range(loader.epoch):  # a late learner takes part in what is left
        if scheduler is not None:
            scheduler.step()
    while not session.ending and (plan.epochs is None or loader.epoch < plan.epochs):
        for batch in loader:
            optimizer.zero_grad()
            value = plan.objective(model, batch)
            _check_scalar(value)
            value.backward()
            session.loss = value.item()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()


def _check_scalar(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise UsageError(f"the loss must be a scalar tensor, got {what}; reduce it, for example with .mean()")


# -- evaluation ----------------------------------------------------------------------------------------------


@dataclass
class Evaluation:
    """Tests a model on a data set: mean loss and, for class scores, accuracy."""

    model: nn.Module
    data: Any
    objective: Objective
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    classes: bool

    def __call__(self, state: dict[str, Tensor]) -> dict[str, float]:
        self.model.load_state_dict(state, strict=False)
        self.model.eval()
        if not isinstance(self.data, Dataset):
            return dict(self.data(self.model))
        total = right = count = 0.0
        with torch.no_grad():
            for batch in DataLoader(self.data, batch_size=self.batch_size, collate_fn=self.collate):
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


def _evaluator(
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
    chosen = objective or _Supervised(loss)  # type: ignore[arg-type]
    host = copy.deepcopy(model).cpu()
    return Evaluation(host, data, chosen, max(256, batch_size), collate, objective is None)


# -- checks and results --------------------------------------------------------------------------------------


def _check_training(
    model: Any,
    data: Any,
    loss: Any,
    objective: Any,
    optimizer: Any,
    batch_size: int,
    epochs: int | None,
    steps: int | None,
    policy: str,
    seed: int,
) -> nn.Module:
    """Everything that can be refused before a process starts; the model comes back built."""
    if (loss is None) == (objective is None):
        raise UsageError("give either loss=(output, target) -> scalar or objective=(model, batch) -> scalar")
    if epochs is not None and steps is not None:
        raise UsageError(f"give either epochs= or steps=, got epochs={epochs} and steps={steps}")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            check_whole(name, value)
    if not isinstance(data, Dataset) and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UsageError(
            f"data must be a torch Dataset, got {type(data).__name__}; wrap tensors in TensorDataset"
        )
    if isinstance(data, IterableDataset):
        check_whole("batch_size", batch_size)
    else:
        check_batches(len(data), batch_size)
    if not callable(model):
        raise UsageError(
            f"model must be an nn.Module or a callable that makes one, got {type(model).__name__}"
        )
    with torch.random.fork_rng(
        devices=[]
    ):  # a made model is the one that a plain script makes with this seed
        torch.manual_seed(seed)
        built = model if isinstance(model, nn.Module) else model()
    if not isinstance(built, nn.Module):
        raise UsageError(
            f"model must be an nn.Module or a callable that makes one, got {type(built).__name__}"
        )
    check_policy(policy)
    refuse_sparse(built)
    make_optimizer(built, optimizer)
    return built


def _spec(
    *,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    learners: int,
    sync: str | Sync,
    topology: str,
    device: str | Sequence[str] | None,
    batch_size: int | None,
    **rest: Any,
) -> RunSpec:
    check_whole("learners", learners)
    if rest["threads"] is not None:
        check_whole("threads", rest["threads"])
    if rest["clip_norm"] is not None and not rest["clip_norm"] > 0:
        raise UsageError(
            f"clip_norm must be a number > 0, got {rest['clip_norm']!r}; leave it out not to clip"
        )
    dial = as_sync(sync)
    dial.check(learners, batch_size)
    dial.ready()
    servers = parse_topology(topology)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shards = servers.shards if servers.fixed else auto_shards(learners, cores, lockstep=dial.lockstep)
    devices = _devices(device, learners)
    return RunSpec(
        function=function,
        arguments=arguments,
        learners=learners,
        sync=dial,
        shards=shards,
        fixed_shards=servers.fixed,
        devices=devices,
        batch_size=batch_size,
        **rest,
    )


def _devices(device: str | Sequence[str] | None, learners: int) -> tuple[str, ...]:
    """One device per learner; "cuda" deals the GPUs out in turn."""
    if device is None:
        return ("cpu",) * learners
    names = [device] if isinstance(device, str) else list(device)
    if names == ["cuda"]:
        count = torch.cuda.device_count()
        if count == 0:
            raise UsageError('device="cuda" but torch sees no GPU here; leave device= out to train on CPUs')
        names = [f"cuda:{index}" for index in range(count)]
    for name in names:
        try:
            found = torch.device(name)
        except RuntimeError as error:
            raise UsageError(f"device {name!r} is none that torch knows") from error
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"device {name!r}, but torch sees {torch.cuda.device_count()} GPUs here")
    return tuple(names[rank % len(names)] for rank in range(learners))


def _engine(engine: str | Engine) -> Engine:
    if isinstance(engine, Engine):
        return engine
    if engine == "ray":
        raise NotYetError('engine="ray" is understood but not built yet; working now: local, sim')
    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}: use one of {', '.join(ENGINES)}")
    return ENGINES[engine]()


def _result(outcome: Outcome, *, model: nn.Module | None) -> Result:
    table = outcome.statistics.tables.get(0)
    if model is not None and 0 in outcome.tables:
        model = copy.deepcopy(model).cpu()
        model.load_state_dict(outcome.tables[0][1], strict=False)
    return Result(
        version=table.version if table else 0,
        updates=table.version if table else 0,
        gradients=table.gradients if table else 0,
        dropped=table.dropped if table else 0,
        staleness=outcome.staleness,
        throughput=table.examples / outcome.seconds if table and outcome.seconds else 0.0,
        seconds=outcome.seconds,
        history=outcome.history,
        logs=outcome.logs,
        events=outcome.events,
        returned=[outcome.returned.get(rank) for rank in range(_ranks(outcome))],
        interrupted=outcome.interrupted,
        statistics=outcome.statistics,
        model=model,
        _tables=outcome.tables,
    )


def _ranks(outcome: Outcome) -> int:
    lost = [event.rank for event in outcome.events if event.rank is not None]
    return max([*outcome.returned, *lost], default=-1) + 1
