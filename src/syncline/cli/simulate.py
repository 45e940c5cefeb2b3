"""`syncline simulate`: its options and help. One job on a simulated cluster is simulating_job.py, the hunt simulating.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli.engines import Simulated
from syncline.cli.messages import told
from syncline.cli.simulating import Hunt, hunt_or_replay
from syncline.cli.simulating_job import simulate_job
from syncline.errors import UsageError


def simulate(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.toml", help="A job file; without one, the built-in job.")
    ] = None,
    learners: Annotated[int | None, typer.Option(metavar="λ", help="How many compute gradients.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="p775, ethernet-1g, dgx-1, this-machine, p775:stragglers=0.1, …"),
    ] = None,
    sync: Annotated[
        str | None, typer.Option(metavar="DIAL", help="The dial; see [bold]syncline presets[/].")
    ] = None,
    topology: Annotated[str | None, typer.Option(metavar="WHERE", help="Where gradients are folded.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="μ", help="Examples in a learner's batch.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Updates, instead of epochs.")] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="EVENTS", help="What happens: 'kill learner 3 at 40 s; add 2 at 60 s'."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Of the start, the order, the noise and the jitter.")
    ] = None,
    timing: Annotated[
        bool, typer.Option("--timing", help="Sizes only, no gradients: times, no errors.")
    ] = False,
    run_dir: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The run folder; runs/<date-time>-<name> if not given."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Anything else of the job: --set optimizer.lr=0.1"),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="random|script",
            help="Hunt for broken protocols with random faults; or play one case again.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", help="Of a hunt: so many cases for each dial.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(metavar="S", help="Of a hunt's cases; drawn if not given.")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Of a hunt: processes.")] = 1,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
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
    if faults is not None or seeds is not None:
        wish = Hunt(
            seeds=seeds,
            seed=seed,
            faults=faults or "random",
            sync=sync,
            learners=learners,
            shards=shards,
            script=script,
            sets=set_ or [],
            jobs=jobs,
        )
        with told(debug):
            code = hunt_or_replay(wish, Console())
        raise typer.Exit(code)
    flags = {
        "sync": sync,
        "topology": topology,
        "learners": learners,
        "batch_size": batch_size,
        "epochs": epochs,
        "steps": steps,
        "seed": seed,
    }
    with told(debug):
        if shards is not None:
            raise UsageError(
                f"--shards {shards} is of a hunt's cases; of a job write --topology servers:{shards}"
            )
        simulated = Simulated(cluster=cluster, script=script, timing=timing)
        code = simulate_job(job, simulated, Console(), flags=flags, sets=set_ or [], run_dir=run_dir)
    raise typer.Exit(code)
