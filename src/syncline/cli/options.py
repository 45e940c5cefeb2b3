"""Options that several commands have, with their help. What only one command has stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
