"""Types of the commands' options, with the help that `--help` prints. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# -- of several commands ---------------------------------------------------------------------------------------

JobFile = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml", help="A job file; without one, the built-in job.")
]
Dial = Annotated[str | None, typer.Option(metavar="DIAL", help="The dial; see [bold]syncline presets[/].")]
Where = Annotated[str | None, typer.Option(metavar="WHERE", help="Where gradients are folded: servers:2, …")]
Learners = Annotated[int | None, typer.Option(metavar="λ", help="How many compute gradients.")]
BatchSize = Annotated[int | None, typer.Option(metavar="μ", help="Examples in a learner's batch.")]
Epochs = Annotated[int | None, typer.Option(metavar="N", help="Passes over the data.")]
Steps = Annotated[int | None, typer.Option(metavar="N", help="Updates, instead of epochs.")]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Of the start, the order, the noise (and the jitter).")
]
RunDir = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="The run folder; runs/<date-time>-<name> if not given.")
]
IfExists = Annotated[
    str | None,
    typer.Option(
        metavar="WORD", help="Where the run folder holds a run: resume it, replace it, or take a new name."
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="p775, ethernet-1g, dgx-1, this-machine, this-cluster, p775:cores=2, …"
    ),
]
Timing = Annotated[bool, typer.Option("--timing", help="Sizes only, no gradients: times, no errors.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Anything else of the job: --set optimizer.lr=0.1"),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]

# -- of `simulate` ---------------------------------------------------------------------------------------------

Faults = Annotated[
    str | None,
    typer.Option(
        metavar="random|script", help="Hunt for broken protocols with random faults; or play one case again."
    ),
]
Script = Annotated[
    str | None, typer.Option(metavar="EVENTS", help="What happens: 'kill learner 3 at 40 s; add 2 at 60 s'.")
]
CaseSeeds = Annotated[int | None, typer.Option(metavar="N", help="Of a hunt: so many cases for each dial.")]
Shards = Annotated[int | None, typer.Option(metavar="S", help="Of a hunt's cases; drawn if not given.")]
HuntJobs = Annotated[int | None, typer.Option(metavar="N", help="Of a hunt: processes; 1 if not given.")]

# -- of `tradeoff` ---------------------------------------------------------------------------------------------

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

# -- of `plan` -------------------------------------------------------------------------------------------------

Group = Annotated[
    int | None, typer.Option(metavar="M", help="Processes that hold one model; the best number if not given.")
]
Memory = Annotated[float | None, typer.Option(metavar="BYTES", help="The most that a process may hold.")]
PlanFile = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Save the plan, to be edited and used again.")
]
