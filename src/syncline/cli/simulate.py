"""`syncline simulate`: its options and help; one job on a simulated cluster, with the display and the run folder of any other run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from syncline.cli.error_output import told
from syncline.cli.fault_hunt import hunt_or_replay
from syncline.cli.options import (
    SIMULATED,
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
    Wish,
    load,
    on_simulator,
    refuse_other_engine,
)
from syncline.cli.plain_output import account, duration, event_line, print_line, print_rows
from syncline.cli.train import run_job
from syncline.errors import UsageError
from syncline.jobs import Job
from syncline.sim.timing.run_times import Follow, Look
from syncline.studies.point_run import time_job
from syncline.terminal import Terminal

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
    sets, console = set_ or [], Terminal()
    with told(debug):
        if faults is None and seeds is None:
            if shards is not None:
                raise UsageError(
                    f"--shards {shards} is of a hunt's cases; of a job write --topology servers:{shards}"
                )
            if jobs is not None:
                raise UsageError(
                    f"--jobs {jobs} is of a hunt (--faults random --seeds N): one job is simulated in one process"
                )
            if timing and run_dir is not None:
                raise UsageError("--timing leaves no run folder: leave --run-dir out")
            flags = {"sync": sync, "topology": topology, "learners": learners, "seed": seed}
            flags |= {"batch_size": batch_size, "epochs": epochs, "steps": steps}
            wish = Wish(
                job=job,
                flags=flags,
                sets=[*SIMULATED, *sets],
                run_dir=run_dir,
                command="simulate",
                simulator={"cluster": cluster, "script": script},
            )
            code = simulate_job(wish, console, timing=timing)
        else:
            code = hunt_or_replay(
                console,
                faults=faults or "random",
                seeds=seeds,
                seed=seed,
                sync=sync,
                sizes={"learners": learners, "shards": shards},
                script=script,
                sets=sets,
                jobs=1 if jobs is None else jobs,
                of_jobs={
                    "a job file": job,
                    "--cluster": cluster,
                    "--topology": topology,
                    "--batch-size": batch_size,
                    "--epochs": epochs,
                    "--steps": steps,
                    "--timing": timing or None,
                    "--run-dir": run_dir,
                },
            )
    raise typer.Exit(code)


def simulate_job(wish: Wish, console: Console, *, timing: bool) -> int:
    """Run it to its end; the exit code comes back."""
    refuse_other_engine(wish.sets)
    job = on_simulator(load(wish), **wish.simulator)
    began = time.monotonic()
    if timing:
        _time(job, console)
    code = 0 if timing else run_job(job, wish, console)
    where, took = job.engine.arguments.get("cluster", "equal"), duration(time.monotonic() - began)
    print_line(console, f"times are virtual, on {where}; the simulation took {took}")
    return code


@contextmanager
def timing_progress(console: Console) -> Iterator[Follow]:
    """How far a timing is: one line on a terminal, elsewhere nothing. A thread looks now and then, the simulator is not slowed."""
    began = time.monotonic()
    with ExitStack() as shown:

        def follow(look: Look) -> None:
            def line() -> Table:
                so_far, grid = look(), Table.grid(padding=(0, 2))
                words = f"{100 * so_far.share:.0f} %  {so_far.updates:,} updates  {duration(so_far.seconds)} virtual"
                bar = ProgressBar(total=1.0, completed=so_far.share, width=BAR)
                grid.add_row("timing", bar, words, f"{duration(time.monotonic() - began)} so far")
                return grid

            if console.is_terminal:
                live = Live(
                    console=console, get_renderable=line, refresh_per_second=REFRESHES, transient=True
                )
                shown.enter_context(live)

        yield follow


def _time(job: Job, console: Console) -> None:
    """Sizes only: nothing is learnt, and there is no run folder."""
    with timing_progress(Terminal(stderr=True)) as follow:
        timing = time_job(replace(job, run_dir=None), follow)
    staleness = timing.staleness
    machine, share = timing.busiest
    where = f"shards' machine {-1 - machine}" if machine < 0 else f"machine {machine}"
    done = f"{timing.updates:,} updates of {timing.gradients:,} gradients"
    rows = [
        ("time", f"{duration(timing.seconds)} for {done}"),
        ("staleness", f"mean {staleness.mean:.2f}, max {staleness.max}"),
        ("throughput", f"{timing.throughput:,.0f} examples per virtual second"),
        *account(timing.times),
        ("busiest card", f"of {where}, in use {100 * share:.0f} % of the time"),
        ("moved", f"{timing.moved / 1e6:,.1f} MB between machines, {timing.events:,} events"),
    ]
    model = job.model.name if job.model is not None else f"net of {len(job.layers)} layers"
    console.print(f"{model}, {job.sync}, {job.learners} learners × batch {job.batch_size}: sizes only")
    for event in timing.happened:
        print_line(console, event_line({"seconds": event.seconds, "rank": event.rank, "what": event.what}))
    print_rows(console, rows)
