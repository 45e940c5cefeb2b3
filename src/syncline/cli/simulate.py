"""`syncline simulate`: its options and help. One job on a simulated cluster is simulating_job.py, the hunt simulating.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli.engines import SimulatedEngine
from syncline.cli.error_output import told
from syncline.cli.hunt import Hunt, hunt_or_replay
from syncline.cli.options import (
    BatchSize,
    Cluster,
    Debug,
    Dial,
    Epochs,
    Job,
    Learners,
    RunDir,
    Seed,
    Sets,
    Steps,
    Timing,
    Where,
)
from syncline.cli.simulate_job import simulate_job
from syncline.errors import UsageError

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
    job: Job = None,
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
