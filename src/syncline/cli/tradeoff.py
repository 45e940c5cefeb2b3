"""`syncline tradeoff`: its options and help; a study to its end: what is left to do, the workers, Ctrl-C, pictures, the last words."""

from __future__ import annotations

import os
import signal
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from syncline.cli.error_output import FAILURE, INTERRUPTED, told
from syncline.cli.options import Cluster, Debug, Epochs, JobFile, Sets, Steps, Timing
from syncline.cli.plain_output import counted, near, print_line
from syncline.cli.simulated_engine import SETS, SimulatedEngine, refuse_other_engine
from syncline.cli.study_display import StudyBoard, last_words, row_line
from syncline.cli.train import Wish, load
from syncline.dial import Course
from syncline.engines.checkpoint_options import AUTO
from syncline.errors import RunError, UsageError
from syncline.jobs import Job, Named
from syncline.jobs.toml import parse_override
from syncline.learn.server_session import check_batches
from syncline.protocols.lifecycle import Faults
from syncline.report.event_lines import write_whole
from syncline.studies.grid import Grid, Point, parse_dials, parse_numbers
from syncline.studies.picture import page, picture
from syncline.studies.point_run import work_on_points
from syncline.studies.progress import Progress
from syncline.studies.rows import StudyRow, left
from syncline.studies.rows import asked as row_of
from syncline.studies.store import JOB, LOG, VARIED, StudyStore, read_rows
from syncline.studies.worker_pool import Died, Ended, Moved, News, Pool, Started
from syncline.topologies import parse_topology

PICTURE, PAGE = "tradeoff.svg", "tradeoff.html"

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


# -- a study ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says about a study."""

    wish: Wish
    grid: Grid
    simulated: SimulatedEngine | None  # None: the local engine
    jobs: int | None = None
    out: Path | None = None
    fresh: bool = False

    @property
    def timing(self) -> bool:
        """Sizes only."""
        return self.simulated is not None and self.simulated.timing


def study(asked: Asked, console: Console) -> int:
    """Run what is left of it; the exit code comes back."""
    points, skipped = asked.grid.points()
    job = _job(asked, points)
    folder = asked.out or Path("runs") / f"tradeoff-{asked.wish.job.stem if asked.wish.job else 'digits'}"
    kind = {"timing": True} if asked.timing else {}
    with StudyStore(folder, {**job.table(), **kind}, fresh=asked.fresh) as store:
        for each in skipped:
            print_line(console, f"left out: {each.sync} with {each.learners} learners: {each.reason}")
        todo = left(points, store.rows)
        progress = Progress(todo, before=len(points) - len(todo), steps=job.steps is not None)
        interrupted = _conduct(job, asked, store, progress, console)
        if not interrupted:
            store.finish(points)
    _draw(folder, store.rows)
    mine = set(points)
    last_words([row for row in store.rows if row.point in mine], folder, _unit(store.job), console)
    if interrupted:
        print_line(
            console,
            f"{progress.done} of {progress.total} runs are done; the same command goes on with the rest",
        )
        return INTERRUPTED
    return FAILURE if progress.failed else 0


def redraw(folder: Path, console: Console) -> int:
    """Draw what a study has so far."""
    rows = read_rows(folder)
    if not rows:
        raise UsageError(f"{folder}: no run of this study has ended yet")
    _draw(folder, rows)
    last_words(rows, folder, _unit(_table(folder)), console)
    return 0


# -- before it begins ------------------------------------------------------------------------------------------


def _job(asked: Asked, points: list[Point]) -> Job:
    """The job that all runs share, tried as a whole: what one of them would refuse is refused now."""
    job = replace(load(asked.wish), run_dir=None, resume=None, checkpoint_every=AUTO, clocks=False)
    if asked.simulated is not None:
        job = asked.simulated.apply(job)
    else:
        job = replace(job, engine=Named(name="local"))
    first = points[0]
    job = replace(job, sync=first.sync, learners=first.learners, batch_size=first.batch_size, seed=first.seed)
    made = job.build()
    _refuse_dials(job, asked.grid)
    for size in asked.grid.batch_sizes:
        _refuse_batch(size, made["data"])
    return job


def _refuse_dials(job: Job, grid: Grid) -> None:
    """What does not go over the topology would fail in every run."""
    place, faults = parse_topology(job.topology), Faults(on_error=job.on_error, replace=job.replace)
    for sync in grid.syncs:
        try:
            place.check(Course.of(sync), faults, clip_norm=job.clip_norm, warm=job.warmstart)
        except UsageError as error:
            raise UsageError(f"--sync {sync}: {error}") from None


def _refuse_batch(size: int, data: Any) -> None:
    try:
        count = len(data)
    except TypeError:  # a stream
        return
    try:
        check_batches(count, size)
    except UsageError as error:
        raise UsageError(f"--batch-size {size}: {error}") from None


# -- while it runs ---------------------------------------------------------------------------------------------


def _conduct(job: Job, asked: Asked, store: StudyStore, progress: Progress, console: Console) -> bool:
    """True where Ctrl-C ended it; what has ended by then is kept."""
    wanted = asked.jobs or (len(os.sched_getaffinity(0)) if asked.simulated is not None else 1)
    workers = min(wanted, len(progress.points))
    print_line(console, _headline(store, progress, workers))
    if not progress.points:
        return False
    board, work = StudyBoard(progress, console), work_on_points(job, timing=asked.timing)
    try:
        with _Interrupt() as interrupt, Pool(work, workers, store.folder / LOG) as pool, board:
            for news in pool.run(progress.points):
                for each in news:
                    _heard(each, job, store, progress, board)
                board.show()
                if interrupt.came:
                    return True
    finally:
        _forget_empty(store.folder / LOG)
    return False


class _Interrupt:
    """Notes Ctrl-C, so that it never comes between a row and its file; a second one does not wait."""

    came = False

    def __enter__(self) -> _Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.signal(signal.SIGINT, self._before)

    def __exit__(self, *raised: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def _forget_empty(path: Path) -> None:
    with suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()


def _headline(store: StudyStore, progress: Progress, workers: int) -> str:
    what = f"{counted(len(progress.points), 'run')} with {counted(workers, 'worker')}"
    before = (
        f", {progress.before} {'was' if progress.before == 1 else 'were'} done before"
        if progress.before
        else ""
    )
    return (
        f"{near(store.folder)}: {_title(store.job)}: {what if progress.points else 'no run is left'}{before}"
    )


def _heard(news: News, job: Job, store: StudyStore, progress: Progress, board: StudyBoard) -> None:
    if isinstance(news, Started):
        progress.started(news.piece, board.now())
    elif isinstance(news, Moved):
        total, epochs = f"/{job.epochs}" if job.epochs else "", news.said
        progress.moved(news.piece, epochs / job.epochs if job.epochs else 0.0, f"epoch {epochs}{total}")
    else:
        row = news.answer if isinstance(news, Ended) else _died(news, store)
        store.add(row)
        progress.ended(row)
        board.line(row_line(row, progress))


def _died(news: Died, store: StudyStore) -> StudyRow:
    return row_of(news.piece, error=f"{news.how}; {store.folder / LOG} may say why")


# -- pictures --------------------------------------------------------------------------------------------------


def _draw(folder: Path, rows: list[StudyRow]) -> None:
    table = _table(folder)
    title, unit = _title(table), _unit(table)
    try:
        write_whole(folder / PICTURE, picture(rows, title=title, unit=unit))
        write_whole(folder / PAGE, page(rows, title=title, unit=unit))
    except OSError as error:
        raise RunError(f"cannot draw in {folder}: {error.strerror}") from error


def _table(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / JOB).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _title(table: dict[str, Any]) -> str:
    """`mlp on digits, 5 epochs each, simulated on p775`."""
    parts = [f"{_name(table, 'model')} on {_name(table, 'data')}"]
    parts += [
        f"{counted(table[key], word)} each"
        for key, word in (("epochs", "epoch"), ("steps", "update"))
        if key in table
    ]
    if _name(table, "engine") == "sim":
        cluster = table["engine"].get("cluster")
        how = "timed" if table.get("timing") else "simulated"
        parts.append(f"{how} on {cluster}" if cluster else how)
    return ", ".join(parts)


def _name(table: dict[str, Any], key: str) -> str:
    found = table.get(key)
    return str(found.get("name", "?")) if isinstance(found, dict) else "?"


def _unit(table: dict[str, Any]) -> str:
    return "seconds" if _name(table, "engine") == "local" else "virtual seconds"
