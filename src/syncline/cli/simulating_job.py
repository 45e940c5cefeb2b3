"""`syncline simulate JOB`: one job on a simulated cluster, with the display and the run folder of any other run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from syncline.cli.engines import SETS, Simulated, refuse_other_engine
from syncline.cli.training import Wish, load, run_loaded
from syncline.cli.words import account, duration, event_line
from syncline.jobs import Job
from syncline.tradeoff.point import time_job


def simulate_job(
    job: Path | None,
    simulated: Simulated,
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
    console.print(words, soft_wrap=True, markup=False, highlight=False)
    return code


def _time(job: Job, console: Console) -> int:
    """Sizes only: nothing is learnt, and there is no run folder."""
    timing = time_job(replace(job, run_dir=None))
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
        f"{job.model.name}, {job.sync}, {job.learners} learners × batch {job.batch_size}: sizes only"
    )
    for event in timing.happened:
        line = event_line({"seconds": event.seconds, "rank": event.rank, "what": event.what})
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for name, value in rows:
        console.print(f"  {name:<16}{value}", soft_wrap=True, markup=False, highlight=False)
    return 0
