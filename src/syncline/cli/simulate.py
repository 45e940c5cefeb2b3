"""Run one job on a simulated cluster, with the display and the run folder of any other run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from syncline.cli.options import Wish, load, on_simulator, refuse_other_engine
from syncline.cli.train import run_job
from syncline.jobs import Job
from syncline.report.run_text import account, duration, event_line, print_line, print_rows
from syncline.sim.timing.run_times import Follow, Look
from syncline.studies.point_run import time_job
from syncline.terminal import Terminal

REFRESHES, BAR = 2, 30  # a second; characters


def simulate_job(wish: Wish, console: Console, *, timing: bool) -> int:
    """Run it to its end; the exit code comes back."""
    refuse_other_engine(wish.sets)
    job = on_simulator(load(wish), **wish.simulator)
    began = time.monotonic()
    if timing:
        _time(job, console)
    code = 0 if timing else run_job(job, wish, console)
    where, took = job.engine.arguments.get("cluster", "equal"), duration(time.monotonic() - began)
    print_line(console, f"times are virtual, on {where}; the simulation took {took}")
    return code


@contextmanager
def timing_progress(console: Console) -> Iterator[Follow]:
    """How far a timing is: one line on a terminal, elsewhere nothing. A thread looks now and then, the simulator is not slowed."""
    began = time.monotonic()
    with ExitStack() as shown:

        def follow(look: Look) -> None:
            def line() -> Table:
                so_far, grid = look(), Table.grid(padding=(0, 2))
                words = f"{100 * so_far.share:.0f} %  {so_far.updates:,} updates  {duration(so_far.seconds)} virtual"
                bar = ProgressBar(total=1.0, completed=so_far.share, width=BAR)
                grid.add_row("timing", bar, words, f"{duration(time.monotonic() - began)} so far")
                return grid

            if console.is_terminal:
                live = Live(
                    console=console, get_renderable=line, refresh_per_second=REFRESHES, transient=True
                )
                shown.enter_context(live)

        yield follow


def _time(job: Job, console: Console) -> None:
    """Sizes only: nothing is learnt, and there is no run folder."""
    with timing_progress(Terminal(stderr=True)) as follow:
        timing = time_job(replace(job, run_dir=None), follow)
    staleness = timing.staleness
    machine, share = timing.busiest
    where = f"shards' machine {-1 - machine}" if machine < 0 else f"machine {machine}"
    done = f"{timing.updates:,} updates of {timing.gradients:,} gradients"
    rows = [
        ("time", f"{duration(timing.seconds)} for {done}"),
        ("staleness", f"mean {staleness.mean:.2f}, max {staleness.max}"),
        ("throughput", f"{timing.throughput:,.0f} examples per virtual second"),
        *account(timing.times),
        ("busiest card", f"of {where}, in use {100 * share:.0f} % of the time"),
        ("moved", f"{timing.moved / 1e6:,.1f} MB between machines, {timing.events:,} events"),
    ]
    model = job.model.name if job.model is not None else f"net of {len(job.layers)} layers"
    console.print(f"{model}, {job.sync}, {job.learners} learners × batch {job.batch_size}: sizes only")
    for event in timing.happened:
        print_line(console, event_line({"seconds": event.seconds, "rank": event.rank, "what": event.what}))
    print_rows(console, rows)
