"""`syncline simulate JOB`: one job on a simulated cluster, with the display and the run folder of any other run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from syncline.cli.engines import SETS, SimulatedEngine, refuse_other_engine
from syncline.cli.plain_output import account, duration, event_line, print_line, print_rows
from syncline.cli.train import Wish, load, run_loaded
from syncline.jobs import Job
from syncline.sim.timing.run_times import Look
from syncline.studies.point_run import time_job

REFRESHES, BAR = 2, 30  # a second; characters


def simulate_job(
    job: Path | None,
    simulated: SimulatedEngine,
    console: Console,
    *,
    flags: Mapping[str, Any],
    sets: list[str],
    run_dir: str | None,
) -> int:
    """Run it to its end; the exit code comes back."""
    refuse_other_engine(sets)
    wish = Wish(
        job=job,
        flags=flags,
        sets=[*SETS, *sets],
        run_dir=run_dir,
        command="simulate",
        again=simulated.words(),
    )
    loaded = simulated.apply(load(wish))
    began = time.monotonic()
    code = _time(loaded, console) if simulated.timing else run_loaded(loaded, wish, console)
    cluster = loaded.engine.arguments.get("cluster", "equal")
    words = f"times are virtual, on {cluster}; the simulation took {duration(time.monotonic() - began)}"
    print_line(console, words)
    return code


class SimulationProgress:
    """How far a timing is: one line on a terminal, elsewhere nothing. A thread looks now and then, the simulator is not slowed."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.monotonic()
        self._look: Look | None = None
        self._live = Live(
            console=console, get_renderable=self.line, refresh_per_second=REFRESHES, transient=True
        )

    def __enter__(self) -> SimulationProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def follow(self, look: Look) -> None:
        self._look = look
        if self._console.is_terminal:
            self._live.start()

    def line(self) -> RenderableType:
        if self._look is None:
            return ""
        so_far, grid = self._look(), Table.grid(padding=(0, 2))
        words = f"{100 * so_far.share:.0f} %  {so_far.updates:,} updates  {duration(so_far.seconds)} virtual"
        bar = ProgressBar(total=1.0, completed=so_far.share, width=BAR)
        grid.add_row("timing", bar, words, f"{duration(time.monotonic() - self._began)} so far")
        return grid


def _time(job: Job, console: Console) -> int:
    """Sizes only: nothing is learnt, and there is no run folder."""
    with SimulationProgress(Console(stderr=True)) as progress:
        timing = time_job(replace(job, run_dir=None), progress.follow)
    staleness = timing.staleness
    machine, share = timing.busiest
    where = f"shards' machine {-1 - machine}" if machine < 0 else f"machine {machine}"
    rows = [
        (
            "time",
            f"{duration(timing.seconds)} for {timing.updates:,} updates of {timing.gradients:,} gradients",
        ),
        ("staleness", f"mean {staleness.mean:.2f}, max {staleness.max}"),
        ("throughput", f"{timing.throughput:,.0f} examples per virtual second"),
        *account(timing.times),
        ("busiest card", f"of {where}, in use {100 * share:.0f} % of the time"),
        ("moved", f"{timing.moved / 1e6:,.1f} MB between machines, {timing.events:,} events"),
    ]
    console.print(
        f"{job.model_name}, {job.sync}, {job.learners} learners × batch {job.batch_size}: sizes only"
    )
    for event in timing.happened:
        print_line(console, event_line({"seconds": event.seconds, "rank": event.rank, "what": event.what}))
    print_rows(console, rows)
    return 0
