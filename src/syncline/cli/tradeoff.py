"""`syncline tradeoff`: its options and help. What it does is in studying.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli.engines import SETS, Simulated
from syncline.cli.messages import told
from syncline.cli.studying import Asked, redraw, study
from syncline.cli.training import Wish
from syncline.errors import UsageError
from syncline.tradeoff.grid import Grid, parse_dials, parse_numbers


def tradeoff(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.toml", help="A job file; without one, the built-in job.")
    ] = None,
    learners: Annotated[str, typer.Option(metavar="λ,λ…", help="Numbers of learners.")] = "1,2,4,10,18,30",
    batch_size: Annotated[
        str, typer.Option(metavar="μ,μ…", help="Examples in a learner's batch.")
    ] = "4,8,16,32,64,128",
    sync: Annotated[
        str, typer.Option(metavar="DIAL,DIAL…", help="Dials; see [bold]syncline presets[/].")
    ] = "hardsync,softsync:1,async",
    seeds: Annotated[str, typer.Option(metavar="N,N…", help="Each run once with each.")] = "0",
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of the simulator: p775, ethernet-1g, dgx-1, p775:stragglers=0.1, …"
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the data, each run.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Updates of each run, instead.")] = None,
    reference_batch: Annotated[
        int | None,
        typer.Option(metavar="B", help="In lockstep the rate is multiplied by √(λμ/B), as in Rudra."),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="sim (virtual time), or local.")] = "sim",
    timing: Annotated[
        bool, typer.Option("--timing", help="Sizes only, no gradients: times, no errors.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Runs at the same time; as many as cores if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of the study; runs/tradeoff-<job> if not given.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew where the folder holds rows.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Only draw what a study has so far.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Anything else of the job: --set optimizer.lr=0.1"),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Error against time over dials, learners and batch sizes: the (σ, μ, λ) curves.

    Every combination is one simulated run with real gradients. Rows go to FOLDER/tradeoff.csv as runs end; the same command again goes on
    where it stopped. At the end there is a picture, a page, and a table of what is best.

    [bold]syncline tradeoff --epochs 5[/]                                        the built-in job, Rudra's grid
    [bold]syncline tradeoff job.toml --learners 1,30 --batch-size 4,128[/]       the corners of it
    [bold]syncline tradeoff --plot runs/tradeoff-digits[/]                       draw again
    """
    with told(debug):
        console = _console()
        if plot is not None:
            code = redraw(plot, console)
        else:
            asked = Asked(
                wish=Wish(
                    job=job,
                    flags={"epochs": epochs, "steps": steps},
                    sets=[*(SETS if engine == "sim" else ()), *(set_ or [])],
                ),
                grid=Grid(
                    syncs=parse_dials(sync, _whole("--reference-batch", reference_batch)),
                    learners=parse_numbers("--learners", learners),
                    batch_sizes=parse_numbers("--batch-size", batch_size),
                    seeds=parse_numbers("--seeds", seeds, least=0),
                ),
                simulated=_simulated(engine, cluster, timing),
                jobs=_whole("--jobs", jobs),
                out=out,
                fresh=fresh,
            )
            code = study(asked, console)
    raise typer.Exit(code)


def _console() -> Console:
    """In a file or a pipe there is room for the tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=120)


def _whole(option: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{option} {value}: expected a whole number of at least 1")
    return value


def _simulated(engine: str, cluster: str | None, timing: bool) -> Simulated | None:
    if engine == "sim":
        return Simulated(cluster=cluster, timing=timing)
    if engine != "local":
        raise UsageError(f"--engine {engine}: expected sim or local")
    if cluster is not None or timing:
        raise UsageError("--cluster and --timing are the simulator's; leave them out with --engine local")
    return None
