"""The commands, their options and their help.

`--version`, `--help` and `presets` answer without importing torch, which takes seconds: each command imports what it runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from syncline.cli.arguments import (
    AtOnce,
    Batches,
    BatchSize,
    CaseSeeds,
    Cluster,
    Debug,
    Dial,
    Dials,
    Epochs,
    Faults,
    Group,
    HuntJobs,
    IfExists,
    JobFile,
    Learners,
    Memory,
    Numbers,
    Out,
    PlanFile,
    Plot,
    Reference,
    RunDir,
    Script,
    Seed,
    Seeds,
    Sets,
    Shards,
    Steps,
    Timing,
    Where,
)
from syncline.cli.error_output import told, warn_shortly, write_all_letters
from syncline.dial import LATER, PRESETS
from syncline.errors import UsageError
from syncline.terminal import Terminal, visible

if TYPE_CHECKING:
    from syncline.report.run_record import RunRecord

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
        from syncline.version import VERSION

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
    if_exists: IfExists = None,
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
        "if_exists": if_exists,
    }
    with told(debug):
        from syncline.cli.options import Wish, load
        from syncline.cli.train import run_job

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
        from syncline.report.clock_file import clock_lines
        from syncline.report.run_panel import panel
        from syncline.report.run_text import duration, event_line, how, print_line, print_rows, summary

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
        record, console = _read(folder), Terminal()
        console.print(panel(record))
        print_line(console, how(record), "bold")
        took = [("simulating took", duration(record.took))] if record.took is not None else []
        print_rows(console, [*summary(record), *took])
        for event in record.faults:
            print_line(console, f"  fault at {event_line(event)}")


def _show_net(file: Path, *, graph: bool) -> None:
    """Print the model; the graph goes beside where one is, under the file's name."""
    from syncline.jobs import Job
    from syncline.nn.net import Net, load_net
    from syncline.report.net_graph import net_graph

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


def _read(folder: Path) -> RunRecord:
    """Read a run, and report on stderr what is damaged in its folder."""
    from syncline.report.run_record import EVENTS, read_run

    record = read_run(folder)
    if damage := record.damage:
        count = (
            f"{len(damage)} damaged lines are left out, the first is" if len(damage) > 1 else "left out is"
        )
        text = f"{record.path / EVENTS}: {count} {damage[0]}; what is shown lacks them"
        typer.echo(visible(text), err=True)
    return record


def _newest() -> Path:
    from syncline.report.run_record import EVENTS

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
        from syncline.report.run_panel import comparison, write_plot

        records = [_read(run) for run in runs]
        Terminal().print(comparison(records))
        if plot is not None:
            write_plot(records, plot)
            print(visible(f"plot: {plot}"))


@app.command()
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
    seeds: CaseSeeds = None,
    shards: Shards = None,
    jobs: HuntJobs = None,
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
        from syncline.cli.fault_hunt import hunt_or_replay
        from syncline.cli.options import SIMULATED, Wish
        from syncline.cli.simulate import simulate_job

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


@app.command()
def tradeoff(
    job: JobFile = None,
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
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Terminal(width=120)  # in a file or a pipe there is room for the tables
    with told(debug):
        from syncline.cli.options import Wish
        from syncline.cli.tradeoff import draw_again, study_as_asked

        if plot is not None:
            draw_again(plot, console)
            raise typer.Exit()
        code = study_as_asked(
            Wish(job=job, flags={"epochs": epochs, "steps": steps}, sets=set_ or []),
            lists={"sync": sync, "learners": learners, "batch_size": batch_size, "seeds": seeds},
            reference_batch=reference_batch,
            engine=engine,
            cluster=cluster,
            timing=timing,
            jobs=jobs,
            out=out,
            fresh=fresh,
            console=console,
        )
    raise typer.Exit(code)


@app.command()
def plan(
    job: JobFile = None,
    learners: Learners = None,
    batch_size: BatchSize = None,
    group: Group = None,
    cluster: Cluster = None,
    memory: Memory = None,
    out: PlanFile = None,
    set_: Sets = None,
    debug: Debug = False,
) -> None:
    """Find the cheapest way to cut a job's model over groups of processes, layer by layer.

    λ is the number of processes here, each with its batch of μ examples; they make groups of M that hold one model together. Without a
    cluster the floats are counted that move in one step; with one, seconds of computation and communication are added up.

    [bold]syncline plan job.toml --learners 8[/]                                 the best group and its plan
    [bold]syncline plan job.toml --learners 8 --group 4 --cluster ethernet-1g[/]   in seconds, on a cluster
    """
    with told(debug):
        from syncline.cli.options import Wish
        from syncline.cli.plan import print_plan

        flags = {"learners": learners, "batch_size": batch_size}
        wish = Wish(job=job, flags=flags, sets=set_ or [])
        print_plan(wish, group=group, cluster=cluster, memory=memory, out=out)
