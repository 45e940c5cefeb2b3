"""`syncline simulate --faults`: hunts for faults of the protocols in simulated runs, and plays one case again.

The hunt itself is `testing.hunt`; here are its words.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from syncline.dial import Course
from syncline.errors import UsageError
from syncline.report.run_text import print_line
from syncline.testing.hunt import DIALS, Case, hunt, play, random_case

LINES = 15  # seconds between two lines where there is no terminal
Sizes = Mapping[str, int | None]  # learners and shards of every case; None: drawn


def hunt_or_replay(
    console: Console,
    *,
    faults: str,
    seeds: int | None,
    seed: int | None,
    sync: str | None,
    sizes: Sizes,
    script: str | None,
    sets: Sequence[str],
    jobs: int,
    of_jobs: Mapping[str, object],
) -> int:
    """The exit code: 1 if something is broken. `of_jobs` are options that mean nothing to a hunt."""
    if names := [name for name, value in of_jobs.items() if value is not None]:
        raise UsageError(
            f"a hunt draws its own jobs, {', '.join(names)} would be ignored: leave it out; "
            "of one case, --seed N --set cluster=equal (epochs, batch_size, steps …) changes what was drawn"
        )
    if faults not in ("random", "script"):
        raise UsageError(f"--faults is random or script, got {faults!r}")
    if (faults == "script") != (script is not None):
        raise UsageError("--faults script plays what --script says, and --faults random draws it: give one")
    if (seeds is None) == (seed is None):
        raise UsageError(
            "give --seeds N to hunt, or --seed N to play one case: syncline simulate --faults random --seeds 1000"
        )
    if seed is not None:
        return _replay(console, seed, sync or "hardsync", sizes, script, sets)
    if script is not None or sets:
        raise UsageError("--script and --set are of one case: give --seed N instead of --seeds")
    assert seeds is not None
    if seeds < 1 or jobs < 1:
        raise UsageError(f"--seeds and --jobs must be at least 1, got {seeds} and {jobs}")
    return _hunt(console, seeds, sync, sizes, jobs)


def _replay(
    console: Console, seed: int, sync: str, sizes: Sizes, script: str | None, sets: Sequence[str]
) -> int:
    """With a script: exactly what the options say. Without one: what the seed draws, with the options changed."""
    if script is None:
        case = random_case(seed, sync, **sizes)
    else:
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size}
        case = Case(seed=seed, sync=sync, script=script, **given)
    case = case.changed(list(sets))
    failure = play(case)
    if failure is None:
        print_line(console, f"nothing is broken in seed {case.seed}: {case.sync}, script '{case.script}'")
        return 0
    print_line(console, str(failure), lines=True)
    return 1


def _hunt(console: Console, seeds: int, sync: str | None, sizes: Sizes, jobs: int) -> int:
    """With a bar on a terminal, a line now and then elsewhere."""
    dials: Sequence[str] = DIALS
    if sync is not None and sync != "all":
        Course.of(sync)  # refused before anything is drawn
        dials = (sync,)
    began = last = time.monotonic()
    columns = (TextColumn("hunting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("hunting", total=seeds * len(dials))

        def show(done: int, total: int) -> None:
            nonlocal last
            bar.update(task, completed=done)
            if not console.is_terminal and time.monotonic() - last > LINES:
                last = time.monotonic()
                print_line(console, f"{done} of {total} cases")

        found = hunt(range(seeds), dials, jobs=jobs, progress=show, **sizes)
    if found is None:
        seconds = time.monotonic() - began
        print_line(console, f"nothing is broken: {seeds} seeds × {len(dials)} dials, {seconds:.0f} s")
        return 0
    drawn = ["syncline", "simulate", "--faults", "random", "--seed", str(found.drawn.seed)]
    drawn += ["--sync", found.drawn.sync]
    for name, size in sizes.items():  # what the hunt was given was not drawn
        drawn += [f"--{name}", str(size)] if size is not None else []
    print_line(console, f"broken by seed {found.drawn.seed} under {found.drawn.sync}:")
    print_line(console, str(found.failure), lines=True)
    print_line(console, f"script, shortened: {found.case.script or '(nothing happens)'}")
    print_line(console, "again:")
    print_line(console, f"  {found.case.command()}")
    print_line(console, f"as it was drawn: {shlex.join(drawn)}")
    return 1
