"""Run a study to its end: the points that are left, the workers, Ctrl-C, the pictures, the summary."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from syncline.cli.error_output import FAILURE, INTERRUPTED
from syncline.cli.options import SIMULATED, Wish, load, on_simulator, refuse_other_engine
from syncline.cli.study_display import Progress, last_words, panel, row_line
from syncline.dial import Course
from syncline.engines.checkpoint_options import AUTO
from syncline.errors import RunError, UsageError
from syncline.jobs import Job, JobError, Named
from syncline.jobs.job import read_table, read_text
from syncline.jobs.toml import parse_override
from syncline.learn.server_session import check_batches
from syncline.protocols.lifecycle import Faults
from syncline.report.event_lines import write_whole
from syncline.report.run_text import counted, near, print_line
from syncline.studies.grid import Grid, Point, StudyRow, parse_dials, parse_numbers
from syncline.studies.grid import asked as row_of
from syncline.studies.picture import page, picture
from syncline.studies.point_run import work_on_points
from syncline.studies.store import JOB, LOG, VARIED, StudyStore, left, read_rows
from syncline.studies.worker_pool import News, Pool
from syncline.topologies import parse_topology

PICTURE, PAGE = "tradeoff.svg", "tradeoff.html"


def study_as_asked(
    wish: Wish,
    *,
    lists: Mapping[str, str],
    reference_batch: int | None,
    engine: str,
    cluster: str | None,
    timing: bool,
    jobs: int | None,
    out: Path | None,
    fresh: bool,
    console: Console,
) -> int:
    """Check the options of `syncline tradeoff` and run the study; `lists` are the texts of the varied options."""
    _refuse_varied(wish.sets)
    if engine == "sim":
        refuse_other_engine(wish.sets)
        wish = replace(wish, sets=[*SIMULATED, *wish.sets])
    elif engine != "local":
        raise UsageError(f"--engine {engine}: expected sim or local")
    elif cluster is not None or timing:
        raise UsageError("--cluster and --timing are the simulator's; leave them out with --engine local")
    grid = Grid(
        syncs=parse_dials(lists["sync"], _whole("--reference-batch", reference_batch)),
        learners=parse_numbers("--learners", lists["learners"]),
        batch_sizes=parse_numbers("--batch-size", lists["batch_size"]),
        seeds=parse_numbers("--seeds", lists["seeds"], least=0),
    )
    at_once = _whole("--jobs", jobs) or (len(os.sched_getaffinity(0)) if engine == "sim" else 1)
    loaded = load(wish)
    shared = replace(loaded, run_dir=None, resume=None, checkpoint_every=AUTO, clocks=False)
    local = replace(shared, engine=Named(name="local"))
    shared = on_simulator(shared, cluster) if engine == "sim" else local
    folder = out or Path("runs") / f"tradeoff-{wish.job.stem if wish.job else 'digits'}"
    return study(shared, grid, folder, at_once, console, timing=timing, fresh=fresh)


def draw_again(folder: Path, console: Console) -> None:
    """Draw the pictures of the rows that a study has so far."""
    rows = read_rows(folder)
    if not rows:
        raise UsageError(f"{folder}: no run of this study has ended yet")
    _show(folder, rows, rows, console)


def _refuse_varied(sets: Sequence[str]) -> None:
    """What the lists set in every run must not be set beside them."""
    for text in sets:
        path: tuple[str, ...] = ("",)
        with suppress(UsageError):  # what is no override is refused with the job
            path, _ = parse_override(text)
        if path[0] in VARIED:
            option = "--seeds" if path[0] == "seed" else f"--{path[0].replace('_', '-')}"
            raise UsageError(f"--set {text}: {option} sets this in every run of a study; say it there")


def _whole(option: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{option} {value}: expected a whole number of at least 1")
    return value


# -- a study ------------------------------------------------------------------------------------------------


def study(
    job: Job, grid: Grid, folder: Path, at_once: int, console: Console, *, timing: bool, fresh: bool
) -> int:
    """Run what is left of it; the exit code comes back."""
    points, skipped = grid.points()
    job = _tried(job, grid, points[0])
    kind = {"timing": True} if timing else {}
    with StudyStore(folder, {**job.table(), **kind}, fresh=fresh) as store:
        for sync, learners, reason in skipped:
            print_line(console, f"left out: {sync} with {learners} learners: {reason}")
        todo = left(points, store.rows)
        progress = Progress(todo, before=len(points) - len(todo), steps=job.steps is not None)
        workers = min(at_once, len(todo))
        print_line(console, _headline(store, progress, workers))
        interrupted = bool(todo) and _conduct(job, store, progress, workers, console, timing=timing)
        if not interrupted:
            store.finish(points)
    mine = set(points)
    _show(folder, store.rows, [row for row in store.rows if row.point in mine], console)
    if interrupted:
        done = f"{progress.done} of {progress.total} runs are done"
        print_line(console, f"{done}; the same command goes on with the rest")
        return INTERRUPTED
    return FAILURE if progress.failed else 0


def _tried(job: Job, grid: Grid, first: Point) -> Job:
    """The job that all runs share, as a whole: what one of them would refuse is refused now."""
    job = replace(job, sync=first.sync, learners=first.learners, batch_size=first.batch_size, seed=first.seed)
    data = job.build()["data"]
    place, faults = parse_topology(job.topology), Faults(on_error=job.on_error, replace=job.replace)
    for sync in grid.syncs:
        try:
            place.check(Course.of(sync), faults, clip_norm=job.clip_norm, warm=job.warmstart)
        except UsageError as error:
            raise UsageError(f"--sync {sync}: {error}") from None
    try:
        count = len(data)
    except TypeError:  # a stream
        return job
    for size in grid.batch_sizes:
        try:
            check_batches(count, size)
        except UsageError as error:
            raise UsageError(f"--batch-size {size}: {error}") from None
    return job


# -- while it runs ---------------------------------------------------------------------------------------------


def _headline(store: StudyStore, progress: Progress, workers: int) -> str:
    what = "no run is left"
    if progress.points:
        what = f"{counted(len(progress.points), 'run')} with {counted(workers, 'worker')}"
    if progress.before:
        what += f", {progress.before} {'was' if progress.before == 1 else 'were'} done before"
    return f"{near(store.folder)}: {_title(store.job)}: {what}"


def _conduct(
    job: Job, store: StudyStore, progress: Progress, workers: int, console: Console, *, timing: bool
) -> bool:
    """True where Ctrl-C ended it; what has ended by then is kept."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        """Ctrl-C never comes between a row and its file; a second one does not wait."""
        came.append(number)
        signal.signal(signal.SIGINT, before)

    log = store.folder / LOG
    progress.began = time.monotonic()
    board = Live(
        console=console,
        get_renderable=lambda: panel(progress, time.monotonic()),
        auto_refresh=False,
        transient=True,
    )
    before = signal.signal(signal.SIGINT, note)
    try:
        with Pool(work_on_points(job, timing=timing), workers, log) as pool, board:
            for news in pool.run(progress.points):
                for each in news:
                    _heard(each, job.epochs, store, progress, console)
                board.refresh()
                if came:
                    return True
    finally:
        signal.signal(signal.SIGINT, before)
        with suppress(OSError):
            if log.stat().st_size == 0:
                log.unlink()
    return False


def _heard(news: News, epochs: int | None, store: StudyStore, progress: Progress, console: Console) -> None:
    if news.kind == "started":
        progress.started(news.piece, time.monotonic())
    elif news.kind == "moved":
        words = f"epoch {news.said}/{epochs}" if epochs else f"epoch {news.said}"
        progress.moved(news.piece, news.said / epochs if epochs else 0.0, words)
    else:
        row = news.said
        if news.kind == "died":
            row = row_of(news.piece, error=f"{news.said}; {store.folder / LOG} may say why")
        store.add(row)
        progress.ended(row)
        print_line(console, row_line(row, progress))


# -- the end ---------------------------------------------------------------------------------------------------


def _show(folder: Path, rows: Sequence[StudyRow], asked: Sequence[StudyRow], console: Console) -> None:
    """Pictures of all rows; in words those that were asked for."""
    table: dict[str, Any] = {}
    with suppress(JobError):
        table, _ = read_table(read_text(folder / JOB), JOB)
    title, unit = _title(table), "seconds" if _name(table, "engine") == "local" else "virtual seconds"
    try:
        write_whole(folder / PICTURE, picture(rows, title=title, unit=unit))
        write_whole(folder / PAGE, page(rows, title=title, unit=unit))
    except OSError as error:
        raise RunError(f"cannot draw in {folder}: {error.strerror}") from error
    last_words(asked, folder, unit, console)


def _title(table: Mapping[str, Any]) -> str:
    """`mlp on digits, 5 epochs each, simulated on p775`."""
    parts = [f"{_name(table, 'model')} on {_name(table, 'data')}"]
    for key, word in (("epochs", "epoch"), ("steps", "update")):
        parts += [f"{counted(table[key], word)} each"] if key in table else []
    if _name(table, "engine") == "sim":
        cluster = table["engine"].get("cluster")
        how = "timed" if table.get("timing") else "simulated"
        parts.append(f"{how} on {cluster}" if cluster else how)
    return ", ".join(parts)


def _name(table: Mapping[str, Any], key: str) -> str:
    found = table.get(key)
    return str(found.get("name", "?")) if isinstance(found, dict) else "?"
