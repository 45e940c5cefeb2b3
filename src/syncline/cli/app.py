"""The commands, their options and their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from syncline.cli.display import comparison, panel, write_plot
from syncline.cli.error_output import told, warn_shortly, write_all_letters
from syncline.cli.options import (
    BatchSize,
    Debug,
    Epochs,
    Learners,
    RunDir,
    Seed,
    Sets,
    Steps,
    Where,
    Wish,
    load,
)
from syncline.cli.plain_output import duration, event_line, how, print_line, print_rows, summary
from syncline.cli.plan import plan
from syncline.cli.simulate import simulate
from syncline.cli.tradeoff import tradeoff
from syncline.cli.train import run_job
from syncline.dial import LATER, PRESETS
from syncline.errors import UsageError
from syncline.jobs import Job
from syncline.nn.net import Net, load_net
from syncline.report.clock_file import clock_lines
from syncline.report.net_graph import net_graph
from syncline.report.run_record import EVENTS, read_run
from syncline.terminal import Terminal, visible
from syncline.version import VERSION

SAVED = ".safetensors"
NETS = (".toml", SAVED)

app = typer.Typer(
    name="syncline",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train PyTorch models on many workers, [bold]with synchrony as a dial[/]: lockstep, softly synchronised, or free.

    Begin with [bold]syncline train[/]: it trains a small network on handwritten digits with four learners, and shows how stale
    their gradients are. Then turn the dial: [bold]syncline train --sync hardsync[/].
    """,
    epilog="A job is a TOML file, docs/howto/job_file.md; what a run leaves is in docs/exact/run_folder.md.",
)


def main() -> None:
    """The entry point of `syncline` and `python -m syncline`."""
    warn_shortly()
    write_all_letters()
    app(prog_name="syncline")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"syncline {VERSION}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def train(
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB.toml", help="A job file; without one, the built-in job: digits, softsync."
        ),
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(
            metavar="DIAL", help="The dial: hardsync, softsync:2, async, … See [bold]syncline presets[/]."
        ),
    ] = None,
    topology: Where = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="local (processes), ray (a cluster) or sim (virtual time)."),
    ] = None,
    learners: Learners = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    steps: Steps = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, or several: cuda:0,cuda:1.")
    ] = None,
    seed: Seed = None,
    run_dir: RunDir = None,
    clocks: Annotated[
        bool, typer.Option("--clocks", help="Keep the vector clock of every update in the run folder.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Go on with a run from its last checkpoint; its own job if none is given."
        ),
    ] = None,
    set_: Sets = None,
    debug: Debug = False,
) -> None:
    """Train a model, and watch it.

    On a terminal you see progress, staleness and one line per learner; elsewhere one line per epoch and event. All of it is kept in the
    run folder, with the model and a report to open in a browser. [bold]Ctrl-C[/] ends the run with what was trained, and says how to go on.

    [bold]syncline train[/]                                    the built-in job
    [bold]syncline train --sync async --learners 8[/]          turn the dial
    [bold]syncline train job.toml --set optimizer.lr=0.1[/]    an own job, changed
    [bold]syncline train --resume runs/…[/]                    go on
    """
    flags = {
        "sync": sync,
        "topology": topology,
        "engine": engine,
        "learners": learners,
        "batch_size": batch_size,
        "epochs": epochs,
        "steps": steps,
        "device": device.split(",") if device and "," in device else device,
        "seed": seed,
    }
    with told(debug):
        sets = [*(set_ or []), *(["clocks=true"] if clocks else [])]
        wish = Wish(job=job, flags=flags, sets=sets, run_dir=run_dir, resume=resume)
        code = run_job(load(wish), wish, Terminal())
    raise typer.Exit(code)


@app.command()
def presets() -> None:
    """Explain the dial: every preset, what an update takes, who waits, which paper it is from."""
    console = Terminal()
    table = Table(header_style="bold", show_edge=False, pad_edge=False, box=box.SIMPLE_HEAD)
    table.add_column("preset", no_wrap=True)
    table.add_column("what happens; what an update takes; the rate factor")
    table.add_column("from")
    for preset in PRESETS:
        takes = f"\ntakes {preset.quorum}; rate × {preset.rate}"
        words = Text.assemble(preset.meaning, (takes, "grey50"))
        table.add_row(Text(preset.syntax, style="bold"), words, preset.paper)
    console.print(table)
    console.print(
        "\nλ learners with batches of μ examples. From lockstep to free: hardsync, delayed:k, backup:b, softsync:1, softsync:n, ssp:s, "
        "async, downpour. The rate factor multiplies the learning rate of each update.\n"
        "A dial may change on the way: [bold]--sync 'hardsync until 1 then softsync:1'[/]. Over a tree of servers, "
        "[bold]--topology tree:F[/], all but backup:b and rate=staleness; with [bold],broadcast[/] versions flow "
        "down unasked. "
        "In the place of a dial, [bold]sandblaster[/] trains by a batch method (L-BFGS, conjugate gradients): docs/howto/batch_methods.md.\n"
        f"Understood, not built yet: {', '.join(LATER)}.",
        highlight=False,
        markup=True,
    )


@app.command()
def show(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="A run folder, the newest in runs/ if none; or the model of a JOB.toml or of a net's .safetensors.",
        ),
    ] = None,
    clocks: Annotated[
        bool, typer.Option("--clocks", help="Only its vector clocks: one line per update, rank:stamp each.")
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Draw the net of a job or of a saved net as NAME.svg.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Print a run, finished or running: how far, how good, how stale, who did what. Of a job or a saved net, its layers."""
    with told(debug):
        if run is not None and run.suffix in NETS and not run.is_dir():
            _show_net(run, graph=graph)
            return
        if graph:
            raise UsageError("--graph draws the net of a job file or of a .safetensors file; name one")
        folder = run if run is not None else _newest()
        if clocks:
            for line in clock_lines(folder):
                print(line)
            return
        record, console = read_run(folder), Terminal()
        console.print(panel(record))
        print_line(console, how(record), "bold")
        took = [("simulating took", duration(record.took))] if record.took is not None else []
        print_rows(console, [*summary(record), *took])
        for event in record.faults:
            print_line(console, f"  fault at {event_line(event)}")


def _show_net(file: Path, *, graph: bool) -> None:
    """Print the model; the graph goes beside where one is, under the file's name."""
    model = load_net(file) if file.suffix == SAVED else Job.load(file).build()["model"]
    net = isinstance(model, Net)
    if graph and not net:
        raise UsageError(f"{file} names its model; --graph draws nets that are written as layers")
    count = sum(parameter.numel() for parameter in model.parameters())
    words = str(model) if net else f"{model}\n{count:,} parameters"
    print(visible(words, lines=True))
    if graph:
        picture = Path(f"{file.stem}.svg")
        picture.write_text(net_graph(model.table()), encoding="utf-8")
        print(visible(f"graph: {picture}"))


def _newest() -> Path:
    found = sorted(Path("runs").glob(f"*/{EVENTS}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError("there is no run in runs/; name a run folder, or make one: syncline train")
    return found[-1].parent


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Run folders, finished or running.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw loss and test metrics of all runs.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Put several runs side by side, with a plot if wanted."""
    with told(debug):
        records = [read_run(run) for run in runs]
        Terminal().print(comparison(records))
        if plot is not None:
            write_plot(records, plot)
            print(visible(f"plot: {plot}"))


app.command()(simulate)
app.command()(tradeoff)
app.command()(plan)
