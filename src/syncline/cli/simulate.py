"""`syncline simulate`: its options and help; one job on a simulated cluster, with the display and the run folder of any other run.

The hunt is hunt.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from syncline.cli.error_output import told
from syncline.cli.fault_hunt import Hunt, hunt_or_replay
from syncline.cli.options import (
    BatchSize,
    Cluster,
    Debug,
    Dial,
    Epochs,
    JobFile,
    Learners,
    RunDir,
    Seed,
    Sets,
    Steps,
    Timing,
    Where,
)
from syncline.cli.plain_output import account, duration, event_line, print_line, print_rows
from syncline.cli.simulated_engine import SETS, SimulatedEngine, refuse_other_engine
from syncline.cli.train import Wish, load, run_loaded
from syncline.errors import UsageError
from syncline.jobs import Job
from syncline.sim.timing.run_times import Look
from syncline.studies.point_run import time_job

REFRESHES, BAR = 2, 30  # a second; characters

Faults = Annotated[
    str | None,
    typer.Option(
        metavar="random|script", help="Hunt for broken protocols with random faults; or play one case again."
    ),
]
Script = Annotated[
    str | None, typer.Option(metavar="EVENTS", help="What happens: 'kill learner 3 at 40 s; add 2 at 60 s'.")
]
Seeds = Annotated[int | None, typer.Option(metavar="N", help="Of a hunt: so many cases for each dial.")]
Shards = Annotated[int | None, typer.Option(metavar="S", help="Of a hunt's cases; drawn if not given.")]
Jobs = Annotated[int | None, typer.Option(metavar="N", help="Of a hunt: processes; 1 if not given.")]


def simulate(
    job: JobFile = None,
    learners: Learners = None,
    cluster: Cluster = None,
    sync: Dial = None,
    topology: Where = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    steps: Steps = None,
    script: Script = None,
    seed: Seed = None,
    timing: Timing = False,
    run_dir: RunDir = None,
    set_: Sets = None,
    faults: Faults = None,
    seeds: Seeds = None,
    shards: Shards = None,
    jobs: Jobs = None,
    debug: Debug = False,
) -> None:
    """Run a job on a simulated cluster, in virtual time.

    The same sessions, roles and protocols as in a real run, real gradients, in one process; the same bits every time. The run folder is
    that of any other run. Times, rates and staleness are those of the cluster; the end says where learners' time went.

    [bold]syncline simulate --learners 30 --cluster p775[/]                    the built-in job on Rudra's cluster
    [bold]syncline simulate job.toml --cluster p775:stragglers=0.1[/]          with stragglers
    [bold]syncline simulate --script 'kill learner 3 at 1 s; add 2 at 2 s'[/]  with faults
    [bold]syncline simulate --faults random --seeds 1000 --jobs 2[/]           hunt for faults of the protocols

    A hunt plays small random jobs on random clusters, in which learners and shards die, pause and join, and dials change; after every event
    it checks what always holds. The first failure is shortened and printed with the command that plays it again; the exit code is 1 then.
    """
    sets, console = set_ or [], Console()
    with told(debug):
        if faults is not None or seeds is not None:
            _refuse_of_jobs(
                {
                    "a job file": job,
                    "--cluster": cluster,
                    "--topology": topology,
                    "--batch-size": batch_size,
                    "--epochs": epochs,
                    "--steps": steps,
                    "--timing": timing or None,
                    "--run-dir": run_dir,
                }
            )
            hunt = Hunt(
                seeds=seeds,
                seed=seed,
                faults=faults or "random",
                sync=sync,
                learners=learners,
                shards=shards,
                script=script,
                sets=sets,
                jobs=1 if jobs is None else jobs,
            )
            code = hunt_or_replay(hunt, console)
        else:
            _refuse_of_hunts(shards, jobs)
            if timing and run_dir is not None:
                raise UsageError("--timing leaves no run folder: leave --run-dir out")
            flags = {"sync": sync, "topology": topology, "learners": learners, "seed": seed}
            flags |= {"batch_size": batch_size, "epochs": epochs, "steps": steps}
            simulated = SimulatedEngine(cluster=cluster, script=script, timing=timing)
            code = simulate_job(job, simulated, console, flags=flags, sets=sets, run_dir=run_dir)
    raise typer.Exit(code)


def _refuse_of_jobs(given: Mapping[str, object]) -> None:
    if names := [name for name, value in given.items() if value is not None]:
        raise UsageError(
            f"a hunt draws its own jobs, {', '.join(names)} would be ignored: leave it out; "
            "of one case, --seed N --set cluster=equal (epochs, batch_size, steps …) changes what was drawn"
        )


def _refuse_of_hunts(shards: int | None, jobs: int | None) -> None:
    if shards is not None:
        raise UsageError(
            f"--shards {shards} is of a hunt's cases; of a job write --topology servers:{shards}"
        )
    if jobs is not None:
        raise UsageError(
            f"--jobs {jobs} is of a hunt (--faults random --seeds N): one job is simulated in one process"
        )


# -- a job --------------------------------------------------------------------------------------------------


def simulate_job(
    job: Path | None,
    simulated: SimulatedEngine,
    console: Console,
    *,
    flags: Mapping[str, Any],
    sets: list[str],
    run_dir: str | None,
) -> int:
    """Run it to its end; the exit code comes back."""
    refuse_other_engine(sets)
    wish = Wish(
        job=job,
        flags=flags,
        sets=[*SETS, *sets],
        run_dir=run_dir,
        command="simulate",
        again=simulated.words(),
    )
    loaded = simulated.apply(load(wish))
    began = time.monotonic()
    code = _time(loaded, console) if simulated.timing else run_loaded(loaded, wish, console)
    cluster = loaded.engine.arguments.get("cluster", "equal")
    words = f"times are virtual, on {cluster}; the simulation took {duration(time.monotonic() - began)}"
    print_line(console, words)
    return code


class SimulationProgress:
    """How far a timing is: one line on a terminal, elsewhere nothing. A thread looks now and then, the simulator is not slowed."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.monotonic()
        self._look: Look | None = None
        self._live = Live(
            console=console, get_renderable=self.line, refresh_per_second=REFRESHES, transient=True
        )

    def __enter__(self) -> SimulationProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def follow(self, look: Look) -> None:
        self._look = look
        if self._console.is_terminal:
            self._live.start()

    def line(self) -> RenderableType:
        if self._look is None:
            return ""
        so_far, grid = self._look(), Table.grid(padding=(0, 2))
        words = f"{100 * so_far.share:.0f} %  {so_far.updates:,} updates  {duration(so_far.seconds)} virtual"
        bar = ProgressBar(total=1.0, completed=so_far.share, width=BAR)
        grid.add_row("timing", bar, words, f"{duration(time.monotonic() - self._began)} so far")
        return grid


def _time(job: Job, console: Console) -> int:
    """Sizes only: nothing is learnt, and there is no run folder."""
    with SimulationProgress(Console(stderr=True)) as progress:
        timing = time_job(replace(job, run_dir=None), progress.follow)
    staleness = timing.staleness
    machine, share = timing.busiest
    where = f"shards' machine {-1 - machine}" if machine < 0 else f"machine {machine}"
    rows = [
        (
            "time",
            f"{duration(timing.seconds)} for {timing.updates:,} updates of {timing.gradients:,} gradients",
        ),
        ("staleness", f"mean {staleness.mean:.2f}, max {staleness.max}"),
        ("throughput", f"{timing.throughput:,.0f} examples per virtual second"),
        *account(timing.times),
        ("busiest card", f"of {where}, in use {100 * share:.0f} % of the time"),
        ("moved", f"{timing.moved / 1e6:,.1f} MB between machines, {timing.events:,} events"),
    ]
    console.print(
        f"{job.model_name}, {job.sync}, {job.learners} learners × batch {job.batch_size}: sizes only"
    )
    for event in timing.happened:
        print_line(console, event_line({"seconds": event.seconds, "rank": event.rank, "what": event.what}))
    print_rows(console, rows)
    return 0
