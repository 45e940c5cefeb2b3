"""What every run needs before it starts: its engine and devices, a course of dials and a topology that fit, a `RunSpec`."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from syncline.dial import Course, Sync
from syncline.engines.checkpoint_options import Checkpoints
from syncline.engines.local.engine import Local
from syncline.engines.process_titles import name_of_run
from syncline.engines.ray.engine import Ray
from syncline.engines.run import Callback, Engine, Evaluate, RunSpec, Task
from syncline.engines.torchrun.engine import Torchrun
from syncline.engines.torchrun.rank_and_store import TorchrunPlace
from syncline.errors import NothingLeft, NotYetError, UsageError
from syncline.learn.server_session import check_whole
from syncline.protocols.lifecycle import Faults
from syncline.roles.checkpoint_manifest import Restored, restored
from syncline.roles.run_plan import RunPlan
from syncline.sim.engine import Sim
from syncline.table.checkpoints import Checkpoint
from syncline.topologies import SHARD_BYTES, Servers, Topology, Trees, parse_topology
from syncline.train.groups import check_card

DEFAULT_LEARNERS = 2
ENGINES: dict[str, type[Engine]] = {"local": Local, "ray": Ray, "sim": Sim}
Dial = str | Sync | Mapping[int, str | Sync] | Course


def run_spec(
    engine: Engine,
    task: Task,
    plan: RunPlan,
    given: Mapping[str, Any],
    *,
    group: int = 1,
    cut: Any = None,
    model: nn.Module | None = None,
    evaluate: Evaluate | None = None,
    callbacks: tuple[Callback, ...] = (),
    read: Callable[[Checkpoint], Restored] = restored,
) -> RunSpec:
    """The whole, checked: of what `train` or `launch` was `given`, devices, faults and checkpoints; with these their folder is locked."""
    if given["threads"] is not None:
        check_whole("threads", given["threads"])
    for name in ("run_dir", "resume"):
        path = given[name]
        if path is not None and not (isinstance(path, (str, os.PathLike)) and os.fspath(path)):
            raise UsageError(f"{name} must be the path of a folder, got {path!r}")
    faults = Faults(**{name: given[name] for name in ("on_error", "replace", "patience", "kill_hung")})
    run_dir, resume, every = given["run_dir"], given["resume"], given["checkpoint_every"]
    keep, clocks, virtual = given["keep_checkpoints"], given["clocks"], engine.virtual
    checkpoints = Checkpoints(
        run_dir,
        resume,
        every,
        keep,
        clocks=clocks,
        virtual=virtual,
        if_exists=given["if_exists"],
        read=read,
    )
    check_plan(plan, engine, faults, group, clocks=clocks)
    device, place = given["device"], place_of(engine)
    if place is not None:
        devices: tuple[str, ...] = (devices_of(device, place.local)[place.local_rank],)
        checkpoints = dataclasses.replace(checkpoints, rank=place.rank)
    elif engine.deals_devices and device == "cuda":
        devices = ("cuda",)
    else:
        devices = devices_of(device, plan.learners * group)
    card = card_of(given["table_device"], devices, engine, plan, group)
    if card is not None:  # the card folds, and processes that take turns on it only wait for each other
        plan = dataclasses.replace(plan, topology=plan.topology.sized(1, 1, lockstep=True))
        if model is not None:
            check_card(card, devices, plan, model)
    if engine.deals_devices and isinstance(plan.topology, Servers):
        # small parts would cross links one by one
        plan = dataclasses.replace(plan, topology=dataclasses.replace(plan.topology, least=SHARD_BYTES))
    checkpoints = checkpoints.settled()
    saving, storage = checkpoints.opened(plan)
    try:
        if not checkpoints.rank:
            warn_of_nothing_left(plan, storage.restored)
    except NothingLeft:  # raised by a filter, before anything starts
        if storage.lock is not None:
            storage.lock.release()
        raise
    return RunSpec(
        task=task,
        plan=dataclasses.replace(plan, saving=saving, snapshots=evaluate is not None),
        devices=devices,
        card=card,
        group=group,
        cut=cut,
        threads=given["threads"],
        faults=faults,
        storage=storage,
        evaluate=evaluate,
        callbacks=callbacks,
        name=name_of_run(checkpoints.folder),
    )


def warn_of_nothing_left(plan: RunPlan, found: Restored | None) -> None:
    """Warn where the checkpoint is at the run's end already: its totals are easily taken for what is to come."""
    if found is None:
        return
    iterations = "iterations" if found.batch is not None else "updates"
    for name, word, total, done in (
        ("epochs", "epochs", plan.epochs, found.epoch),
        ("steps", iterations, plan.limit, found.version),
    ):
        if total is not None and done >= total:
            words = (
                f"nothing is left to do: {found.name} has made {done} {word}, and {name}={total} is the total, not how many "
                f"more; give {name}={done + total} to make {total} more"
            )
            warnings.warn(words, NothingLeft, stacklevel=4)


def check_plan(plan: RunPlan, engine: Engine, faults: Faults, group: int, *, clocks: bool) -> None:
    """Dials and topology that go together, and with the rest. Trees need servers, and who starts them."""
    if isinstance(plan.warm, bool) or not isinstance(plan.warm, int) or plan.warm < 0:
        raise UsageError(f"warmstart is a number of updates, at least 0, got {plan.warm!r}")
    norm: Any = plan.clip_norm
    if norm is not None and not (isinstance(norm, int | float) and not isinstance(norm, bool) and norm > 0):
        raise UsageError(f"clip_norm must be a number > 0, got {norm!r}; leave it out not to clip")
    for _, dial in plan.course.dials:
        dial.check(plan.learners, plan.batch_size)
    plan.topology.check(plan.course, faults, clip_norm=plan.clip_norm, warm=plan.warm, clocks=clocks)
    if isinstance(plan.topology, Trees) and not isinstance(engine, Sim | Local | Ray):
        raise NotYetError(
            f"topology '{plan.topology}' is not built yet on this engine; use engine='local', 'ray' or 'sim'"
        )
    if isinstance(plan.topology, Trees) and plan.topology.broadcast and group > 1:
        raise NotYetError(
            f"topology '{plan.topology}' is not built yet with group={group}, whose seats must read one version; leave "
            "broadcast out"
        )


def topology_of(text: str, learners: int, course: Course) -> Topology:
    """With as many shards as this machine has cores for, where the user names no number."""
    return parse_topology(text).sized(learners, cores_here(), lockstep=course.first.lockstep)


def cores_here() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_of(device: Any, learners: int) -> tuple[str, ...]:
    """One device per learner; "cuda" deals the GPUs out in turn."""
    if device is None:
        return ("cpu",) * learners
    several = list(device) if isinstance(device, (list, tuple)) else [device]
    if not several or not all(isinstance(each, (str, torch.device)) for each in several):
        raise UsageError(f'device must be a text such as "cuda", or one for each learner, got {device!r}')
    names = [str(each) for each in several]
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


def card_of(
    table_device: Any, devices: Sequence[str], engine: Engine, plan: RunPlan, group: int
) -> str | None:
    """Tables lie with their learners, where those are on GPUs, unless something else is said."""
    tree = isinstance(plan.topology, Trees)
    if engine.deals_devices and table_device not in (None, "cpu"):
        raise UsageError(
            f"table_device={table_device!r}: on a cluster tables lie in the memory of the caller's node; leave it out"
        )
    if (group > 1 or tree) and table_device not in (None, "cpu"):
        who = "seats share a table" if group > 1 else "leaves add gradients"
        raise UsageError(f"table_device={table_device!r}: {who} in the host's memory; leave it out")
    if (engine.deals_devices and devices == ("cuda",)) or group > 1 or tree or table_device == "cpu":
        return None
    on_gpus = all(torch.device(name).type == "cuda" for name in devices)
    if table_device is None:
        return devices[0] if on_gpus else None
    names = sorted(set(devices))
    if not on_gpus or table_device not in names:
        raise UsageError(
            f"table_device={table_device!r}, but the learners are on {', '.join(names)}; it is 'cpu' or one of their GPUs"
        )
    return str(table_device)


def engine_of(engine: Any) -> Engine:
    if isinstance(engine, Engine):
        return engine
    if engine == "local" and (place := TorchrunPlace.here()) is not None:
        return Torchrun(place)
    if not isinstance(engine, str) or engine not in ENGINES:
        made = f"; {engine.__name__} is a class, give {engine.__name__}()" if isinstance(engine, type) else ""
        raise UsageError(
            f"unknown engine {engine!r}: use one of {', '.join(ENGINES)}, or sl.Sim(cluster) for a simulated cluster{made}"
        )
    return ENGINES[engine]()


@cache
def _say_once(words: str) -> None:
    print(f"syncline: {words}", file=sys.stderr, flush=True)


def place_of(engine: Engine) -> TorchrunPlace | None:
    """Of this process, where torchrun has started it."""
    return engine.place if isinstance(engine, Torchrun) else None


def learners_of(engine: Engine, learners: int, topology: str, wait: bool, group: int) -> int:
    place = place_of(engine)
    if place is None:
        return learners
    learners = place.check(
        topology=topology, learners=learners, default=DEFAULT_LEARNERS, wait=wait, group=group
    )
    if place.rank == 0:  # the same script, started by itself, starts learners of its own
        what = "the learners" if group == 1 else "the seats of one learner"
        words = f"the {place.learners} processes that torchrun started are {what}"
        _say_once(f"{words}; engine=sl.Local() would start others")
    return learners
