"""A job to its end: the display, Ctrl-C, the last words."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path

from rich.console import Console
from rich.table import Table

from syncline.cli.options import JOB, SIMULATED, Wish
from syncline.engines.checkpoint_options import checkpoints_of
from syncline.engines.local import forkserver
from syncline.errors import NothingLeft, SynclineError, Terminated, UsageError
from syncline.jobs import Job
from syncline.jobs.toml import dumps
from syncline.report.folder_writer import MODEL
from syncline.report.progress import ProgressDisplay
from syncline.report.run_record import RunRecord
from syncline.report.run_text import (
    account,
    how,
    near,
    next_steps,
    print_line,
    summary,
)
from syncline.train import Result, Run, train


def run_job(job: Job, wish: Wish, console: Console) -> int:
    """Run it to its end; the exit code comes back."""
    if job.engine.name == "local":
        forkserver.start_here()  # before anything makes a thread
    run = _started(job)
    assert run.recording is not None
    table = {
        key: value for key, value in job.table().items() if key not in ("resume", "if_exists")
    }  # of the run as a whole
    if job.run_dir is None and job.resume is not None:
        table["run_dir"] = str(checkpoints_of(Path(job.resume)).parent)
    run.recording.keep(JOB, dumps(table))
    record = run.recording.record

    def note() -> str:
        return "stopping: learners finish their step" if run.interrupts.number else ""

    progress = ProgressDisplay(record, near(record.path), console=console, note=note, closing=False)
    try:
        with progress.shown():
            result = _result(run)
    except SynclineError:
        print_line(console, f"failed; what was recorded is in {near(record.path)}")
        raise
    _last_words(record, result, wish, console)
    return 128 + run.interrupts.number if result.interrupted else 0


def _started(job: Job) -> Run:
    """Start the run; refuse one that has nothing left to do before it writes to its folder."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", NothingLeft)
            run: Run = train(**job.build(), wait=False, progress=False)
    except NothingLeft as warned:
        raise UsageError(re.sub(r"(epochs|steps)=", r"--\1 ", str(warned))) from None
    return run


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
    options = [each for each in (*wish.flags.items(), *wish.simulator.items()) if each[0] != "if_exists"]
    given = [(f"--{key.replace('_', '-')}", str(value)) for key, value in options if value is not None]
    given += [("--set", text) for text in wish.sets if text not in SIMULATED]
    command = ["syncline", wish.command, *([str(wish.job)] if wish.job else [])]
    console.print("try next", style="bold")
    for line, words in next_steps(record, command, given):
        print_line(console, f"  {line}")
        print_line(console, f"      {words}", "grey50")
