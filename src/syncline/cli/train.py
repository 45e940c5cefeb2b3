"""A job from its file to its end: overrides, the run folder's name, the display, Ctrl-C, the last words."""

from __future__ import annotations

import re
import shlex
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from syncline.cli.display import panel
from syncline.cli.plain_output import (
    account,
    epoch_line,
    event_line,
    headline,
    how,
    near,
    next_steps,
    print_line,
    summary,
)
from syncline.cli.simulated_engine import SETS
from syncline.engines.local import forkserver
from syncline.errors import SynclineError, Terminated, UsageError
from syncline.jobs import Job, JobError
from syncline.jobs.toml import dumps, override, parse_override
from syncline.report.folder_writer import MODEL
from syncline.report.run_record import RunRecord
from syncline.train import Result, Run, train

JOB = "job.toml"
LOOK = 0.1  # seconds between two looks at the record
REFRESH = 4  # a second, of the live display
QUIET = ("left", "warning")  # events without a line of their own: others say it


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the command line says about a run."""

    job: Path | None
    flags: Mapping[str, Any]  # key of the job -> value, None where not given
    sets: Sequence[str] = ()
    run_dir: str | None = None
    resume: str | None = None
    command: str = "train"
    again: Sequence[tuple[str, str]] = ()  # further options, for commands to try next

    def given(self) -> list[tuple[str, str]]:
        """The options as pairs, without the folder."""
        flags = [
            (f"--{key.replace('_', '-')}", str(value))
            for key, value in self.flags.items()
            if value is not None
        ]
        sets = [("--set", text) for text in self.sets if text not in SETS]
        return [*flags, *self.again, *sets]


def run_job(wish: Wish, console: Console) -> int:
    """Run it to its end; the exit code comes back."""
    return run_loaded(load(wish), wish, console)


def run_loaded(job: Job, wish: Wish, console: Console) -> int:
    """Run a job that is as the wish wants it."""
    if job.engine.name == "local":
        forkserver.start_here()  # before anything makes a thread
    run: Run = train(**job.build(), wait=False)
    assert run.recording is not None
    run.recording.keep(JOB, _as_it_ran(job))
    record = run.recording.record
    try:
        _watch(run, console, goes_on=job.resume is not None)
        result = _result(run)
    except SynclineError:
        print_line(console, f"failed; what was recorded is in {near(record.path)}")
        raise
    _last_words(record, result, wish, console)
    return 128 + run.interrupts.number if result.interrupted else 0


def _result(run: Run) -> Result:
    """Of a run that has ended, by a signal too."""
    try:
        found: Result | None = run.wait()
    except (KeyboardInterrupt, Terminated) as ended:
        found = getattr(ended, "result", None)
        if found is None:  # what went wrong on the way, or the second Ctrl-C
            raise ended.__cause__ or ended from None
    assert found is not None
    return found


# -- the job -------------------------------------------------------------------------------------------------


def load(wish: Wish) -> Job:
    """The job with everything that the command line changes; errors name the option that was written."""
    file = wish.job
    if file is None and wish.resume is not None:
        file = run_folder_of(wish.resume) / JOB
        if not file.is_file():
            raise UsageError(
                f"{wish.resume}: there is no {JOB} to go on with; name the job: syncline train JOB.toml --resume …"
            )
    shown: dict[str, str] = {}  # overrides as jobs see them, as the user wrote them
    overrides = []
    for key, value in wish.flags.items():
        if value is not None:
            text = f"{key}={value}" if not isinstance(value, str) else f"{key}={_quoted(value)}"
            shown[f"--set {text}:"] = f"--{key.replace('_', '-')} {value}:"
            overrides.append(text)
    for given, instead in (("epochs", "steps"), ("steps", "epochs")):
        if wish.flags.get(given) is not None and wish.flags.get(instead) is None:
            overrides.append(f"{instead}=")
    overrides += [*wish.sets, *_folder(wish, file)]
    try:
        return Job.load(file, overrides) if file is not None else Job.builtin(overrides)
    except JobError as error:
        raise JobError([_as_written(problem, shown) for problem in error.problems]) from None


def _as_written(problem: str, shown: Mapping[str, str]) -> str:
    for text, words in shown.items():
        if problem.startswith(text):
            key = words.split()[0].removeprefix("--").replace("-", "_")
            return words + problem.removeprefix(text).replace(f" {key}:", "", 1)
    return problem


def _quoted(value: str) -> str:
    """As a text of TOML, where it would be read as something else."""
    return dumps({"v": value}).partition("=")[2].strip()


def _folder(wish: Wish, file: Path | None) -> list[str]:
    """Overrides for the run folder: the one that was named, the one that goes on, the job's own, or a new one."""
    if wish.resume is not None:
        where = f"run_dir={_quoted(wish.run_dir)}" if wish.run_dir else "run_dir="
        return [f"resume={_quoted(wish.resume)}", where]
    if wish.run_dir is not None:
        return [f"run_dir={_quoted(wish.run_dir)}"]
    if _names_folder(wish, file):
        return []
    return [f"run_dir={_quoted(str(new_folder(file.stem if file else 'digits')))}"]


def _names_folder(wish: Wish, file: Path | None) -> bool:
    """The job says where by itself; a file that cannot be read is somebody else's problem."""
    table: dict[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError):
        table = tomllib.loads(file.read_bytes().decode("utf-8-sig")) if file else {}
    for text in wish.sets:
        with suppress(UsageError):
            override(table, *parse_override(text))
    return "run_dir" in table or "resume" in table


def new_folder(name: str) -> Path:
    """runs/<date-time>-<name>, one that is not there."""
    plain = re.sub(r"[^\w.-]+", "-", name) or "run"
    first = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{plain}"
    path, number = first, 2
    while path.exists():
        path, number = first.with_name(f"{first.name}-{number}"), number + 1
    return path


def run_folder_of(resume: str) -> Path:
    """The run folder of a run or of one of its checkpoints."""
    path = Path(resume)
    return next((each.parent for each in (path, *path.parents) if each.name == "checkpoints"), path)


def _as_it_ran(job: Job) -> str:
    """Without `resume`: the file describes the run as a whole."""
    table = {key: value for key, value in job.table().items() if key != "resume"}
    if job.run_dir is None and job.resume is not None:
        table["run_dir"] = str(run_folder_of(job.resume))
    return dumps(table)


# -- watching --------------------------------------------------------------------------------------------------


def _watch(run: Run, console: Console, *, goes_on: bool) -> None:
    """Show the run until it ends."""
    assert run.recording is not None
    record = run.recording.record
    with run.interrupts as heard:
        if console.is_terminal:
            _live(
                run, record, console, lambda: "stopping: learners finish their step" if heard.number else ""
            )
        else:
            _plain(run, record, console, goes_on=goes_on)


def _ended(run: Run) -> bool:
    try:
        run.wait(LOOK)
    except TimeoutError:
        return False
    except (KeyboardInterrupt, Terminated) as ended:
        if getattr(ended, "result", None) is None:
            raise
    return True


def _live(run: Run, record: RunRecord, console: Console, note: Callable[[], str]) -> None:
    with Live(console=console, auto_refresh=False, get_renderable=lambda: panel(record, note=note())) as live:
        shown = 0.0
        while not _ended(run):
            if time.monotonic() - shown > 1 / REFRESH:
                shown = time.monotonic()
                live.refresh()
        live.refresh()


def _plain(run: Run, record: RunRecord, console: Console, *, goes_on: bool) -> None:
    """One line per epoch and event; of a run that goes on, what it has new."""
    print_line(console, f"{near(record.path)}: {headline(record)}")
    printed = {each["epoch"] for each in record.epochs} if goes_on else set()
    events = len(record.events) if goes_on else 0
    ended = False
    while not ended:
        ended = _ended(run)
        for each in list(record.epochs):
            if each["epoch"] not in printed:
                printed.add(each["epoch"])
                print_line(console, epoch_line(record, each))
        fresh = record.events[events:]  # more may come meanwhile, on another thread
        events += len(fresh)
        for each in fresh:
            if each.get("event") not in QUIET:
                print_line(console, event_line(each))


# -- the end ---------------------------------------------------------------------------------------------------


def _last_words(record: RunRecord, result: Result, wish: Wish, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="grey50", no_wrap=True)
    grid.add_column(overflow="fold")
    spent = account(result.simulated.total) if result.simulated is not None else []
    for name, value in [*summary(record), *spent]:
        grid.add_row(f"  {name}", value)
    files = [name for name in ("report.html", MODEL) if (record.path / name).exists()]
    grid.add_row("  run folder", near(record.path) + (f" ({', '.join(files)})" if files else ""))
    print_line(console, how(record), "bold")
    console.print(grid)
    if result.interrupted:
        print_line(console, f"go on with:  syncline train --resume {shlex.quote(near(record.path))}")
        return
    console.print("try next", style="bold")
    command = ["syncline", wish.command, *([str(wish.job)] if wish.job else [])]
    for command_line, words in next_steps(record, command, wish.given()):
        print_line(console, f"  {command_line}")
        print_line(console, f"      {words}", "grey50")
