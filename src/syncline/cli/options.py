"""The job that a command line asks for: its options, the run folder, the simulator in place of the job's engine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from syncline.cluster import Cluster as Machines
from syncline.engines.checkpoint_options import EVENTS, checkpoints_of
from syncline.engines.event_script import parse_script
from syncline.errors import UsageError
from syncline.jobs import Job, JobError, Named
from syncline.jobs.job import read_table, read_text
from syncline.jobs.toml import dumps, override, parse_override

JOB = "job.toml"
# Before the user's own, so that --set engine.batched=true finds the simulator.
SIMULATED = ("engine.name=sim",)
CLUSTER = "p775"  # where neither the job nor the command names one: its times grow with the batch

# -- the job -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the command line says about a run."""

    job: Path | None
    flags: Mapping[str, Any]  # key of the job -> value, None where not given
    sets: Sequence[str] = ()
    run_dir: str | None = None
    resume: str | None = None
    command: str = "train"
    simulator: Mapping[str, str | None] = field(default_factory=dict)  # its options: cluster, script


def load(wish: Wish) -> Job:
    """The job with everything that the command line changes; errors name the option that was written."""
    file = wish.job
    if wish.resume is not None:
        _check_run(wish.resume)
    if file is None and wish.resume is not None:
        file = checkpoints_of(Path(wish.resume)).with_name(JOB)
        if not file.is_file():
            again = f"syncline train JOB.toml --resume {shlex.quote(wish.resume)}"
            raise UsageError(
                f"{wish.resume}: there is no {JOB} in it, as of a run that Python started; continue there with "
                f"resume={wish.resume!r}, or name a job file: {again}"
            )
    shown: dict[str, tuple[str, Any]] = {}  # overrides as jobs see them, with what the user gave
    for key, value in wish.flags.items():
        if value is not None:
            text = f"{key}={_quoted(value) if isinstance(value, str) else value}"
            shown[text] = key, value
    overrides = list(shown)
    for given, instead in (("epochs", "steps"), ("steps", "epochs")):
        if wish.flags.get(given) is not None and wish.flags.get(instead) is None:
            overrides.append(f"{instead}=")
    overrides += [*wish.sets, *_folder(wish, file)]
    try:
        return Job.load(file, overrides) if file is not None else Job.builtin(overrides)
    except JobError as error:
        raise JobError([_as_written(problem, shown) for problem in error.problems]) from None


def _check_run(resume: str) -> None:
    """Refuse a folder that is not there, or that holds no run."""
    path = Path(resume)
    instead = "name the folder of a run, or leave --resume out to start one"
    if not path.exists():
        raise UsageError(f"--resume {resume}: no such folder; {instead}")
    checkpoints = checkpoints_of(path)
    if not (checkpoints.is_dir() or (checkpoints.parent / EVENTS).is_file()):
        raise UsageError(f"--resume {resume}: no run is in this folder, it has no checkpoints; {instead}")


def _as_written(problem: str, shown: Mapping[str, tuple[str, Any]]) -> str:
    for text, (key, value) in shown.items():
        if problem.startswith(f"--set {text}:"):
            words = problem.removeprefix(f"--set {text}:").replace(f" {key}:", "", 1)
            return f"--{key.replace('_', '-')} {value}:{words}"
    return problem


def _quoted(value: str) -> str:
    """As a text of TOML, where it would be read as something else."""
    return dumps({"v": value}).partition("=")[2].strip()


def _folder(wish: Wish, file: Path | None) -> list[str]:
    """Overrides for the run folder: the one that was named, the one that goes on, the job's own, or a new one."""
    if wish.resume is not None:
        where = f"run_dir={_quoted(wish.run_dir)}" if wish.run_dir else "run_dir="
        return [f"resume={_quoted(wish.resume)}", where, "if_exists="]
    if wish.run_dir is not None:
        return [f"run_dir={_quoted(wish.run_dir)}"]
    table: dict[str, Any] = {}
    with suppress(JobError):  # a file that cannot be read is refused with the job
        table = read_table(read_text(file), str(file))[0] if file else {}
    for text in wish.sets:
        with suppress(UsageError):
            override(table, *parse_override(text))
    if "run_dir" in table or "resume" in table:
        return []
    plain = re.sub(r"[^\w.-]+", "-", file.stem if file else "digits") or "run"
    first = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{plain}"
    path, number = first, 2
    while path.exists():
        path, number = first.with_name(f"{first.name}-{number}"), number + 1
    return [f"run_dir={_quoted(str(path))}"]


# -- on the simulator ------------------------------------------------------------------------------------------


def on_simulator(job: Job, cluster: str | None = None, script: str | None = None) -> Job:
    """The job on the simulator; what its own [engine] says about one stays where the command says nothing.

    Shards that the job does not count are one: their number must not depend on the machine that simulates.
    """
    arguments: dict[str, Any] = dict(job.engine.arguments) if job.engine.name == "sim" else {}
    for name, value, check in (("cluster", cluster, Machines.parse), ("script", script, parse_script)):
        if value is not None:
            try:
                check(value)
            except UsageError as error:  # refused here, the option is named
                raise UsageError(f"--{name} {value}: {error}") from None
            arguments[name] = value
    if not {"cluster", "compute", "transfer", "latency"} & arguments.keys():
        arguments["cluster"] = CLUSTER
    topology = "servers:1" if job.topology == "servers" else job.topology
    return replace(job, engine=Named(name="sim", arguments=arguments), topology=topology)


def refuse_other_engine(sets: Iterable[str]) -> None:
    """The job's own engine gives way to the simulator; what the same command line says must not."""
    for text in sets:
        table: dict[str, Any] = {}
        with suppress(UsageError):  # what is no override is refused with the job
            override(table, *parse_override(text))
        engine = table.get("engine", "sim")
        name = engine.get("name", "sim") if isinstance(engine, dict) else engine
        if name != "sim":
            raise UsageError(
                f"--set {text}: this command simulates; real processes are with syncline train, or tradeoff --engine local"
            )
