"""One point of a study as a run: the job with the point's dial, learners, batch and seed, and the row that comes of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.engines.local import forkserver
from syncline.engines.run import EpochRecord
from syncline.errors import LearnerError, SynclineError, UsageError
from syncline.jobs import Job
from syncline.learn.gradient_ways import way_of
from syncline.learn.train_and_evaluate import evaluation_of
from syncline.sim.engine import Sim
from syncline.sim.timing.run_times import Follow, Timing
from syncline.studies.grid import Point, StudyRow, asked
from syncline.topologies import Servers, Trees, parse_topology
from syncline.train import Result, train
from syncline.train.groups import Grouped, check_group, simulated
from syncline.version import VERSION

Source = tuple[str, str, str | None]  # a job as text, its name, where it looks for callables
Moved = Callable[[int], None]  # gets the number of epochs that are done


def overrides(point: Point) -> list[str]:
    """What a point changes in a job."""
    return [
        f"sync='{point.sync}'",
        f"learners={point.learners}",
        f"batch_size={point.batch_size}",
        f"seed={point.seed}",
    ]


def work_on_points(job: Job, *, timing: bool) -> Callable[[], Callable[[Point, Moved], StudyRow]]:
    """For worker processes; what they begin with."""
    source = (job.dumps(), job.source.name, job.source.folder)
    return partial(_prepare, source, local=job.engine.name == "local", timing=timing)


def _prepare(source: Source, *, local: bool, timing: bool) -> Callable[[Point, Moved], StudyRow]:
    if local:
        forkserver.start_here()  # before there is another thread
    else:
        torch.set_num_threads(1)
    text, name, folder = source

    def work(point: Point, moved: Moved) -> StudyRow:
        try:
            job = Job.parse(text, overrides(point), name=name, folder=folder)
        except SynclineError as error:
            return asked(point, error=said(error))
        return run_point(job, point, moved, timing=timing)

    return work


def run_point(
    job: Job, point: Point, moved: Moved = lambda epochs: None, *, timing: bool = False
) -> StudyRow:
    """Run a job that is set to the point, or only time it; what goes wrong is in the row."""
    began = time.monotonic()
    try:
        if timing:
            timed = time_job(job)
            epochs = None if job.steps else float(len(timed.history))
            known = {**_counted(timed), "epochs": epochs, "overlap": round(timed.overlap, 6)}
        else:
            known = _trained(job, moved)
    except Exception as error:
        known = {"error": said(error)}
    return asked(point, **known, wall_seconds=round(time.monotonic() - began, 3), **made_by())


def _counted(run: Result | Timing) -> dict[str, Any]:
    """What every run knows of itself."""
    return {
        "seconds": round(run.seconds, 9),
        "updates": run.updates,
        "gradients": run.gradients,
        "dropped": run.dropped,
        "mean_staleness": run.staleness.mean,
        "max_staleness": run.staleness.max,
        "throughput": round(run.throughput, 6),
    }


def _trained(job: Job, moved: Moved) -> dict[str, Any]:
    arguments = job.build()
    done = count(1)  # epochs; they need not be done in order
    arguments["callbacks"] = (*arguments["callbacks"], lambda record: moved(next(done)))
    result = train(**arguments, progress=False)
    metrics = _metrics(result, arguments)
    accuracy, table = metrics.get("accuracy"), result.statistics.tables.get(0)
    try:
        size = len(arguments["data"])
    except TypeError:  # a stream
        size = 0
    return {
        **_counted(result),
        "epochs": round(table.examples / size, 6) if table and size else float(len(result.history)),
        "test_error": None if accuracy is None else round(1 - accuracy, 9),
        "test_accuracy": accuracy,
        "test_loss": metrics.get("loss"),
        "loss": result.history[-1].loss if result.history else None,
        "overlap": round(result.simulated.overlap, 6) if result.simulated is not None else None,
    }


def _metrics(result: Result, arguments: dict[str, Any]) -> dict[str, float]:
    """Of the last version: what the last epoch's test said, or a test now where the run ended between epochs."""
    last: EpochRecord | None = result.history[-1] if result.history else None
    if last is not None and last.version == result.version:
        return last.metrics
    test = evaluation_of(
        result.model,  # type: ignore[arg-type]  # `train` always has one
        arguments["evaluate"],
        way_of(arguments["gradient"], result.model, arguments["loss"], arguments["objective"]),  # type: ignore[arg-type]
        arguments["batch_size"],
        arguments["collate"],
    )
    return test(result.state_dict()) if test is not None else {}


# -- timing only -----------------------------------------------------------------------------------------------


def time_job(job: Job, follow: Follow | None = None) -> Timing:
    """How long a job's run would take on its simulator, by the sizes of its model and data."""
    made = job.build()
    engine, topology = made["engine"], parse_topology(job.topology)
    if not isinstance(engine, Sim):
        raise UsageError(f"timing is the simulator's, this job runs on {job.engine}")
    model = made["model"] if isinstance(made["model"], nn.Module) else made["model"]()
    if job.group > 1:
        way = way_of(made["gradient"], model, made["loss"], made["objective"])
        grouped = Grouped(way.to_cut(model), way, made["data"], made["collate"], job.batch_size, job.learners)
        check_group(job.group, made["plan"], engine, job.topology)
        engine = simulated(engine, job.group, made["plan"], grouped)
    parameters = [each for each in model.parameters() if each.requires_grad]
    count = sum(each.numel() for each in parameters)
    where: dict[str, Any] = {}
    if topology.fixed_members:
        where = {"topology": job.topology, "layers": [each.numel() for each in parameters if each.numel()]}
    elif isinstance(topology, Trees):
        where["topology"] = job.topology
    elif isinstance(topology, Servers) and topology.fixed:
        where["shards"] = topology.shards
    return engine.timing(
        parameters=count,
        itemsize=round(sum(each.numel() * each.element_size() for each in parameters) / count),
        examples=len(made["data"]),
        learners=job.learners,
        batch_size=job.batch_size,
        sync=made["sync"],
        epochs=job.epochs or (None if job.steps else 1),
        steps=job.steps,
        policy=job.policy,
        warmstart=job.warmstart,
        seed=job.seed,
        follow=follow,
        **where,
    )


# -- what went wrong, who made it ------------------------------------------------------------------------------


def said(error: BaseException) -> str:
    """On one line."""
    text = error.traceback if isinstance(error, LearnerError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if isinstance(error, LearnerError):
        return f"learner {error.rank} raised {lines[-1]}"
    words = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return f"{type(error).__name__}: {words}"


@cache
def made_by() -> dict[str, str]:
    """The library's version, and its commit where it runs from a checkout."""
    here, commit = Path(__file__).resolve(), ""
    if (here.parents[3] / ".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                command, cwd=here.parent, capture_output=True, text=True, timeout=10, check=True
            )
            commit = done.stdout.strip()
    return {"commit": commit, "version": VERSION}
