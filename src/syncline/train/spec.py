"""What every run needs before it starts: its engine and devices, a course of dials and a topology that fit, a `RunSpec`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from syncline.dial import Course, Sync
from syncline.engines.local.engine import Local
from syncline.engines.options import Checkpoints, Faults
from syncline.engines.run import Engine, RunSpec
from syncline.engines.sim.engine import Sim
from syncline.engines.torchrun.engine import Torchrun
from syncline.engines.torchrun.place import Place
from syncline.errors import DialError, NotYetError, UsageError
from syncline.learn.session import check_whole
from syncline.topology.parse import AllReduce, Servers, auto_shards, check_all_reduce, parse_topology

DEFAULT_LEARNERS = 2
ENGINES: dict[str, type[Engine]] = {"local": Local, "sim": Sim}
Dial = str | Sync | Mapping[int, str | Sync] | Course


def run_spec(
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
    check_clip_norm(rest["clip_norm"])
    check_patience(faults.patience)
    for name, path in (("run_dir", checkpoints.run_dir), ("resume", checkpoints.resume)):
        check_path(name, path)
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
            clocks=checkpoints.clocks,
        )
    elif any(dial.auto for _, dial in course.dials):
        raise DialError(
            f"{course}: the delay adapts over all-reduce only; give delayed:k, or topology='allreduce'"
        )
    servers = found if isinstance(found, Servers) else Servers(1, True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shards = servers.shards if servers.fixed else auto_shards(learners, cores, lockstep=course.first.lockstep)
    devices = devices_of(device, learners * rest["group"])
    if place is not None:
        devices = (devices_of(device, place.local)[place.local_rank],)
        checkpoints = dataclasses.replace(checkpoints, rank=place.rank)
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
        **checkpoints.fields(rest["seed"], servers=allreduce is None),
    )


def check_clip_norm(given: Any) -> None:
    if given is not None and not (_is_number(given) and given > 0):
        raise UsageError(f"clip_norm must be a number > 0, got {given!r}; leave it out not to clip")


def check_patience(given: Any) -> None:
    if given is not None and not (_is_number(given) and given > 0):
        raise UsageError(f"patience is a number of seconds > 0, or None, got {given!r}")


def check_path(name: str, given: Any) -> None:
    if given is not None and not (isinstance(given, (str, os.PathLike)) and os.fspath(given)):
        raise UsageError(f"{name} must be the path of a folder, got {given!r}")


def _is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


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


def engine_of(engine: Any) -> Engine:
    if isinstance(engine, Engine):
        return engine
    if engine == "ray":
        raise NotYetError('engine="ray" is understood but not built yet; working now: local, sim')
    if engine == "local" and (place := Place.here()) is not None:
        if place.rank == 0:
            _say_torchrun(place.learners)
        return Torchrun(place)
    if not isinstance(engine, str) or engine not in ENGINES:
        made = f"; {engine.__name__} is a class, give {engine.__name__}()" if isinstance(engine, type) else ""
        raise UsageError(
            f"unknown engine {engine!r}: use one of {', '.join(ENGINES)}, or sl.Sim(cluster) for a cluster{made}"
        )
    return ENGINES[engine]()


@cache
def _say_torchrun(learners: int) -> None:
    """Once: the same script, started by itself, starts learners of its own."""
    words = f"the {learners} processes that torchrun started are the learners; engine=sl.Local() would start others"
    print(f"syncline: {words}", file=sys.stderr, flush=True)


def place_of(engine: Engine) -> Place | None:
    """Of this process, where torchrun has started it."""
    return engine.place if isinstance(engine, Torchrun) else None


def learners_of(engine: Engine, learners: int, topology: str, wait: bool) -> int:
    place = place_of(engine)
    if place is None:
        return learners
    return place.check(topology=topology, learners=learners, default=DEFAULT_LEARNERS, wait=wait)
