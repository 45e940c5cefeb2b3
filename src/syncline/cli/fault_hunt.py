"""`syncline simulate --faults`: hunts for faults of the protocols in simulated runs, and plays one case again.

The hunt itself is `testing.hunt`; here are its words.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from syncline.cli.plain_output import print_line
from syncline.dial import Course
from syncline.errors import UsageError
from syncline.testing.hunt import DIALS, Case, Found, hunt, play, random_case

LINES = 15  # seconds between two lines where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Hunt:
    """What the command line says about a hunt, or about one case of it."""

    seeds: int | None = None
    seed: int | None = None
    faults: str = "random"
    sync: str | None = None
    learners: int | None = None
    shards: int | None = None
    script: str | None = None
    sets: Sequence[str] = ()
    jobs: int = 1


def hunt_or_replay(wish: Hunt, console: Console) -> int:
    """The exit code: 1 if something is broken."""
    if wish.faults not in ("random", "script"):
        raise UsageError(f"--faults is random or script, got {wish.faults!r}")
    if (wish.faults == "script") != (wish.script is not None):
        raise UsageError("--faults script plays what --script says, and --faults random draws it: give one")
    if (wish.seeds is None) == (wish.seed is None):
        raise UsageError(
            "give --seeds N to hunt, or --seed N to play one case: syncline simulate --faults random --seeds 1000"
        )
    if wish.seeds is not None:
        return _hunt(wish, console)
    return _replay(wish, console)


# -- one case ------------------------------------------------------------------------------------------------


def case_of(wish: Hunt) -> Case:
    """With a script: exactly what the options say. Without one: what the seed draws, with the options changed."""
    assert wish.seed is not None
    sync = wish.sync or "hardsync"
    if wish.script is None:
        drawn = random_case(wish.seed, sync, learners=wish.learners, shards=wish.shards)
        return drawn.changed(list(wish.sets))
    case = Case(seed=wish.seed, sync=sync, script=wish.script, learners=wish.learners or Case().learners)
    return replace(case, shards=wish.shards or 1).changed(list(wish.sets))


def _replay(wish: Hunt, console: Console) -> int:
    case = case_of(wish)
    failure = play(case)
    if failure is None:
        print_line(console, f"nothing is broken in seed {case.seed}: {case.sync}, script '{case.script}'")
        return 0
    print_line(console, str(failure))
    return 1


# -- the hunt --------------------------------------------------------------------------------------------------


def _dials(text: str | None) -> tuple[str, ...]:
    if text is None or text == "all":
        return DIALS
    Course.of(text)
    return (text,)


def _hunt(wish: Hunt, console: Console) -> int:
    if wish.script is not None or wish.sets:
        raise UsageError("--script and --set are of one case: give --seed N instead of --seeds")
    assert wish.seeds is not None
    if wish.seeds < 1 or wish.jobs < 1:
        raise UsageError(f"--seeds and --jobs must be at least 1, got {wish.seeds} and {wish.jobs}")
    dials, began = _dials(wish.sync), time.monotonic()
    with _Shown(console, wish.seeds * len(dials)) as shown:
        found = hunt(
            range(wish.seeds),
            dials,
            learners=wish.learners,
            shards=wish.shards,
            jobs=wish.jobs,
            progress=shown.update,
        )
    seconds = time.monotonic() - began
    if found is None:
        print_line(console, f"nothing is broken: {wish.seeds} seeds × {len(dials)} dials, {seconds:.0f} s")
        return 0
    _tell_found(console, found, wish)
    return 1


class _Shown:
    """Progress: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._last = console, time.monotonic()
        columns = (TextColumn("hunting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("hunting", total=total)

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last > LINES:
            self._last = now
            print_line(self._console, f"{done} of {total} cases")


def _tell_found(console: Console, found: Found, wish: Hunt) -> None:
    print_line(console, f"broken by seed {found.drawn.seed} under {found.drawn.sync}:")
    print_line(console, str(found.failure))
    print_line(console, f"script, shortened: {found.case.script or '(nothing happens)'}")
    print_line(console, "again:")
    print_line(console, f"  {found.case.command()}")
    print_line(console, f"as it was drawn: {_drawn(found, wish)}")


def _drawn(found: Found, wish: Hunt) -> str:
    """The command that draws the case again: what the hunt was given was not drawn."""
    words = ["syncline", "simulate", "--faults", "random", "--seed", str(found.drawn.seed), "--sync"]
    words += [found.drawn.sync]
    for option, value in (("--learners", wish.learners), ("--shards", wish.shards)):
        words += [option, str(value)] if value is not None else []
    return shlex.join(words)
