"""`train` and `launch`: the public front doors.

Both check everything that can be checked before a process starts, build a `RunSpec`, and hand it to an engine.
`train`'s learners run `learn.training`, a loop that any user could have written.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from syncline.dial import Course, Sync, as_sync
from syncline.engines.local.engine import Local
from syncline.engines.options import PATIENCE, Checkpoints, Faults
from syncline.engines.run import Callback, Engine, EpochRecord, Event, Handle, Outcome, RunSpec
from syncline.engines.sim.account import Simulated
from syncline.engines.sim.engine import Sim
from syncline.engines.torchrun.engine import Torchrun
from syncline.engines.torchrun.place import Place
from syncline.errors import DialError, NotYetError, UsageError
from syncline.learn.session import (
    batch_of_each,
    check_batches,
    check_joint,
    check_policy,
    check_whole,
    make_optimizer,
    refuse_sparse,
    refuse_weighted,
)
from syncline.learn.training import Loss, Objective, Supervised, Training, evaluation_of, run_training
from syncline.protocols.clocks import Staleness
from syncline.report.recording import record_run
from syncline.topology.messages import Statistics
from syncline.topology.parse import AllReduce, Servers, auto_shards, check_all_reduce, parse_topology

DEFAULT_LEARNERS = 2
MOST_DIALS = 64  # in one run
ENGINES: dict[str, type[Engine]] = {"local": Local, "sim": Sim}
Dial = str | Sync | Mapping[int, str | Sync] | Course


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
    simulated: Simulated | None = None  # where the time of a simulated run went
    model: nn.Module | None = None
    _tables: dict[int, tuple[int, dict[str, Tensor]]] = field(default_factory=dict, repr=False)

    def state_dict(self, table: int = 0) -> dict[str, Tensor]:
        """Parameters and buffers of one table at its last version, by name."""
        if table not in self._tables:
            raise UsageError(f"the run has tables {sorted(self._tables)}, not {table}")
        return self._tables[table][1]


class Run:
    """A run in progress, from `wait=False`."""

    def __init__(
        self,
        engine: Engine,
        spec: RunSpec,
        model: nn.Module | None,
        made: torch.optim.Optimizer | None = None,
    ) -> None:
        self._spec, self._model, self._made = spec, model, made
        self._changes = 0
        self.recording = record_run(spec, engine, model)  # None without a run folder
        if self.recording is not None:
            spec = dataclasses.replace(spec, listeners=(*spec.listeners, self.recording.heard))
        self._handle: Handle = engine.start(spec)
        if self.recording is not None:
            self.recording.follow(self._handle)

    def wait(self, timeout: float | None = None) -> Result:
        """The result; raises what went wrong."""
        try:
            outcome = self._handle.wait(timeout)
        except TimeoutError:
            raise
        except BaseException:
            self._recorded()
            raise
        self._recorded()
        before = self._spec.restored.counts.examples.get(0, 0) if self._spec.restored else 0
        return _result(outcome, model=self._model, before=before)

    def _recorded(self) -> None:
        if self.recording is not None:
            self.recording.finish()

    @property
    def done(self) -> bool:
        """The run has ended, well or not."""
        return self._handle.done

    def stop(self) -> None:
        """End soon: learners finish their step."""
        if self.recording is not None:
            self.recording.stopped = True
        self._handle.stop()

    def add_learners(self, count: int = 1) -> None:
        """More learners join the run; they count from the version they first read."""
        check_whole("count", count)
        self._handle.add_learners(count)

    def change(self, sync: str | Sync) -> None:
        """Another dial, from the next version on."""
        dial = as_sync(sync)
        self._changes += 1
        if self._changes + len(self._spec.course.dials) > MOST_DIALS:
            raise DialError(f"a run may have {MOST_DIALS} dials, this one has had them; start another run")
        dial.check(self._spec.learners, self._spec.batch_size)
        if dial.delay > self._spec.delay:
            raise DialError(
                f"{dial} keeps {dial.delay + 1} versions, this run was started to keep {self._spec.delay + 1}: "
                f"start it with a course that holds it, for example '{self._spec.course} until 100 then {dial}'"
            )
        if self._made is not None:
            refuse_weighted(dial, self._made)
        self._handle.change(dial)

    def statistics(self) -> Statistics:
        """Versions, staleness, who waits for whom."""
        return self._handle.statistics()


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    learners: int = DEFAULT_LEARNERS,
    sync: Dial = "hardsync",
    topology: str = "servers",
    engine: str | Engine = "local",
    device: str | Sequence[str] | None = None,
    seed: int = 0,
    threads: int | None = None,
    clip_norm: float | None = None,
    batch_size: int | None = None,
    warmstart: int = 0,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    keep_checkpoints: int = 2,
    on_error: str = "raise",
    replace: bool = False,
    patience: float | None = PATIENCE,
    kill_hung: bool = False,
    wait: bool = True,
    **keywords: Any,
) -> Any:
    """Run `function(session, *arguments, **keywords)` in every learner; a `Result`, or a `Run` with wait=False.

    `batch_size` is needed only by dials whose rate depends on it. Everything else a learner needs is passed
    through: models, data and functions defined in a script or notebook travel, tensors are shared. For faults and
    checkpoints see `train`; a function that is resumed starts from its beginning, `loader.epoch` says where its data stands.
    """
    runner = _engine(engine)
    learners = _learners(runner, learners, topology, wait)
    if not callable(function):
        raise UsageError(f"launch takes a function of (session, ...), got {type(function).__name__}")
    spec = _spec(
        place=_place(runner),
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
        joint_batch=batch_size * learners if batch_size else None,
        warm=warmstart,
        faults=Faults(on_error, replace, patience, kill_hung),
        checkpoints=Checkpoints(run_dir, resume, checkpoint_every, keep_checkpoints),
    )
    run = Run(runner, spec, None)
    return run.wait() if wait else run


def train(
    model: nn.Module | Callable[[], nn.Module],
    data: Dataset[Any],
    *,
    loss: Loss | None = None,
    objective: Objective | None = None,
    optimizer: Callable[..., torch.optim.Optimizer],
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    sync: Dial = "softsync:1",
    topology: str = "servers",
    engine: str | Engine = "local",
    learners: int = DEFAULT_LEARNERS,
    batch_size: int = 32,
    global_batch_size: int | None = None,
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
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoint_every: int | str | None = None,
    keep_checkpoints: int = 2,
    on_error: str = "raise",
    replace: bool = False,
    patience: float | None = PATIENCE,
    kill_hung: bool = False,
    callbacks: Sequence[Callback] = (),
    wait: bool = True,
) -> Any:
    """Train `model` on `data` with several learners; a `Result`, or a `Run` with wait=False.

    Give `loss(output, target)` for (input, target) batches, or `objective(model, batch)` for any other. The run ends after
    `epochs`, or after `steps` updates. `global_batch_size`, of all learners together, takes the place of `batch_size`. `evaluate` is a data set like `data`, or a function of the model; it
    runs beside the learners at each epoch's end, on one version. A callback gets each epoch's record and ends the run by returning True.

    The first `warmstart` updates are one learner's alone. Checkpoints go to `run_dir` every `checkpoint_every` updates (a
    number) or seconds (a text such as "30s") and at the end; `resume` goes on from one. A learner that dies is left out, with
    `replace` another takes its place; an exception ends the run, or only its learner with `on_error="continue"`; a learner
    not heard of for `patience` seconds is named, and ended with `kill_hung`.
    """
    runner = _engine(engine)
    learners = _learners(runner, learners, topology, wait)
    each, joint = _batches(batch_size, global_batch_size, learners, sync, topology)
    built, made = _check_training(
        model, data, loss, objective, optimizer, each, epochs, steps, policy, seed, sync
    )
    if steps is None and epochs is None:
        epochs = 1
    plan = Training(
        model=built,
        data=data,
        objective=objective or Supervised(loss),  # type: ignore[arg-type]
        optimizer=optimizer,
        schedule=schedule,
        batch_size=each,
        global_batch_size=joint,
        epochs=epochs,
        policy=policy,
        collate=collate,
    )
    spec = _spec(
        place=_place(runner),
        function=run_training,
        arguments=(plan,),
        learners=learners,
        sync=sync,
        topology=topology,
        device=device,
        seed=seed,
        threads=threads,
        clip_norm=clip_norm,
        batch_size=each,
        joint_batch=joint or each * learners,
        limit=steps,
        warm=warmstart,
        epochs=epochs,
        evaluate=evaluation_of(built, evaluate, loss, objective, each, collate),
        callbacks=tuple(callbacks),
        faults=Faults(on_error, replace, patience, kill_hung),
        checkpoints=Checkpoints(run_dir, resume, checkpoint_every, keep_checkpoints),
    )
    run = Run(runner, spec, built, made)
    return run.wait() if wait else run


# -- checks and results --------------------------------------------------------------------------------------


def _batches(
    batch_size: int, joint: int | None, learners: int, sync: Dial, topology: str
) -> tuple[int, int | None]:
    """(the largest batch of a learner, the batch of all together where it was given and need not divide)"""
    check_whole("learners", learners)
    if joint is None:
        return batch_size, None
    if isinstance(parse_topology(topology), AllReduce):
        check_joint(None, joint, learners)
        return -(-joint // learners), joint
    return max(batch_of_each(None, joint, learners, dial) for _, dial in Course.of(sync).dials), None


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
    sync: Dial,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Everything that can be refused before a process starts; model and optimizer come back built."""
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
    made = make_optimizer(built, optimizer)
    for _, dial in Course.of(sync).dials:
        refuse_weighted(dial, made)
    return built, made


def _spec(
    *,
    place: Place | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    learners: int,
    sync: Dial,
    topology: str,
    device: str | Sequence[str] | None,
    batch_size: int | None,
    faults: Faults,
    checkpoints: Checkpoints,
    **rest: Any,
) -> RunSpec:
    check_whole("learners", learners)
    if isinstance(rest["warm"], bool) or not isinstance(rest["warm"], int) or rest["warm"] < 0:
        raise UsageError(f"warmstart is a number of updates, at least 0, got {rest['warm']!r}")
    if rest["threads"] is not None:
        check_whole("threads", rest["threads"])
    if rest["clip_norm"] is not None and not rest["clip_norm"] > 0:
        raise UsageError(
            f"clip_norm must be a number > 0, got {rest['clip_norm']!r}; leave it out not to clip"
        )
    course = Course.of(sync)
    for _, dial in course.dials:
        dial.check(learners, batch_size)
    found = parse_topology(topology)
    allreduce = found if isinstance(found, AllReduce) else None
    if allreduce is not None:
        check_all_reduce(
            allreduce,
            course,
            clip_norm=rest["clip_norm"],
            warm=rest["warm"],
            on_error=faults.on_error,
            replace=faults.replace,
        )
        checkpoints.refuse_all_reduce()
    elif any(dial.auto for _, dial in course.dials):
        raise DialError(
            f"{course}: the delay adapts over all-reduce only; give delayed:k, or topology='allreduce'"
        )
    servers = found if isinstance(found, Servers) else Servers(1, True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shards = servers.shards if servers.fixed else auto_shards(learners, cores, lockstep=course.first.lockstep)
    devices = _devices(device, learners)
    if place is not None:
        devices = (_devices(device, place.local)[place.local_rank],)
        checkpoints = checkpoints if place.rank == 0 else dataclasses.replace(checkpoints, run_dir=None)
    return RunSpec(
        function=function,
        arguments=arguments,
        learners=learners,
        course=course,
        shards=shards,
        fixed_shards=servers.fixed,
        allreduce=allreduce,
        devices=devices,
        batch_size=batch_size,
        **rest,
        **faults.fields(),
        **checkpoints.fields(rest["seed"]),
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
    if engine == "local" and (place := Place.here()) is not None:
        return Torchrun(place)
    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}: use one of {', '.join(ENGINES)}")
    return ENGINES[engine]()


def _place(engine: Engine) -> Place | None:
    """Of this process, where torchrun has started it."""
    return engine.place if isinstance(engine, Torchrun) else None


def _learners(engine: Engine, learners: int, topology: str, wait: bool) -> int:
    place = _place(engine)
    if place is None:
        return learners
    return place.check(topology=topology, learners=learners, default=DEFAULT_LEARNERS, wait=wait)


def _result(outcome: Outcome, *, model: nn.Module | None, before: int) -> Result:
    table = outcome.statistics.tables.get(0)
    if model is not None and 0 in outcome.tables:
        model = copy.deepcopy(model).cpu()
        model.load_state_dict(outcome.tables[0][1], strict=False)
    seconds = outcome.seconds - outcome.began
    return Result(
        version=table.version if table else 0,
        updates=table.version if table else 0,
        gradients=table.gradients if table else 0,
        dropped=table.dropped if table else 0,
        staleness=outcome.staleness,
        throughput=(table.examples - before) / seconds if table and seconds else 0.0,
        seconds=outcome.seconds,
        history=outcome.history,
        logs=outcome.logs,
        events=outcome.events,
        returned=[outcome.returned.get(rank) for rank in range(_ranks(outcome))],
        interrupted=outcome.interrupted,
        statistics=outcome.statistics,
        simulated=outcome.simulated,
        model=model,
        _tables=outcome.tables,
    )


def _ranks(outcome: Outcome) -> int:
    lost = [event.rank for event in outcome.events if event.rank is not None]
    return max([*outcome.returned, *lost], default=-1) + 1
