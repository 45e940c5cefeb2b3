"""`syncline tradeoff`: its options and help. What it does is in studying.py."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.cli.engines import SETS, SimulatedEngine, refuse_other_engine
from syncline.cli.error_output import told
from syncline.cli.options import Cluster, Debug, Epochs, Job, Sets, Steps, Timing
from syncline.cli.study import Asked, redraw, study
from syncline.cli.train import Wish
from syncline.errors import UsageError
from syncline.jobs.toml import parse_override
from syncline.studies.grid import Grid, parse_dials, parse_numbers
from syncline.studies.store import VARIED

Numbers = Annotated[str, typer.Option(metavar="λ,λ…", help="Numbers of learners.")]
Batches = Annotated[str, typer.Option(metavar="μ,μ…", help="Examples in a learner's batch.")]
Dials = Annotated[str, typer.Option(metavar="DIAL,DIAL…", help="Dials; see [bold]syncline presets[/].")]
Seeds = Annotated[str, typer.Option(metavar="N,N…", help="Each run once with each.")]
Reference = Annotated[
    int | None, typer.Option(metavar="B", help="In lockstep the rate is multiplied by √(λμ/B), as in Rudra.")
]
AtOnce = Annotated[
    int | None, typer.Option(metavar="N", help="Runs at the same time; as many as cores if not given.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Of the study; runs/tradeoff-<job> if not given.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Only draw what a study has so far.")]


def tradeoff(
    job: Job = None,
    learners: Numbers = "1,2,4,10,18,30",
    batch_size: Batches = "4,8,16,32,64,128",
    sync: Dials = "hardsync,softsync:1,async",
    seeds: Seeds = "0",
    cluster: Cluster = None,
    epochs: Epochs = None,
    steps: Steps = None,
    reference_batch: Reference = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="sim (virtual time), or local.")] = "sim",
    timing: Timing = False,
    jobs: AtOnce = None,
    out: Out = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew where the folder holds rows.")] = False,
    plot: Plot = None,
    set_: Sets = None,
    debug: Debug = False,
) -> None:
    """Error against time over dials, learners and batch sizes: the (σ, μ, λ) curves.

    Every combination is one simulated run with real gradients. Rows go to FOLDER/tradeoff.csv as runs end; the same command again goes on
    where it stopped. At the end there is a picture, a page, and a table of what is best.

    [bold]syncline tradeoff --epochs 5[/]                                        the built-in job, Rudra's grid
    [bold]syncline tradeoff job.toml --learners 1,30 --batch-size 4,128[/]       the corners of it
    [bold]syncline tradeoff --plot runs/tradeoff-digits[/]                       draw again
    """
    with told(debug):
        if plot is not None:
            raise typer.Exit(redraw(plot, _console()))
        _refuse_varied(set_ or [])
        if engine == "sim":
            refuse_other_engine(set_ or [])
        sets = [*(SETS if engine == "sim" else ()), *(set_ or [])]
        asked = Asked(
            wish=Wish(job=job, flags={"epochs": epochs, "steps": steps}, sets=sets),
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
        code = study(asked, _console())
    raise typer.Exit(code)


def _refuse_varied(sets: Iterable[str]) -> None:
    """What the lists set in every run must not be set beside them."""
    for text in sets:
        path: tuple[str, ...] = ("",)
        with suppress(UsageError):  # what is no override is refused with the job
            path, _ = parse_override(text)
        if path[0] in VARIED:
            option = "--seeds" if path[0] == "seed" else f"--{path[0].replace('_', '-')}"
            raise UsageError(f"--set {text}: {option} sets this in every run of a study; say it there")


def _console() -> Console:
    """In a file or a pipe there is room for the tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=120)


def _whole(option: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{option} {value}: expected a whole number of at least 1")
    return value


def _simulated(engine: str, cluster: str | None, timing: bool) -> SimulatedEngine | None:
    if engine == "sim":
        return SimulatedEngine(cluster=cluster, timing=timing)
    if engine != "local":
        raise UsageError(f"--engine {engine}: expected sim or local")
    if cluster is not None or timing:
        raise UsageError("--cluster and --timing are the simulator's; leave them out with --engine local")
    return None
