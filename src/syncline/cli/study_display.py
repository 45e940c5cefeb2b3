"""A study on the terminal: how far, what runs, when it ends; elsewhere a line for each run. At the end, what is best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from syncline.cli.plain_output import duration, near, print_line
from syncline.studies.progress import Progress
from syncline.studies.rows import StudyRow
from syncline.studies.summary import RankedPoint, best, fastest, frontier, groups, places, wanted

SHOWN = 5  # rows of each table
MOST_RUNNING = 16
NAMES = {"test_error": "test error", "test_loss": "test loss", "loss": "training loss"}


class StudyBoard:
    """Shows a progress: live on a terminal, else only the lines that it is given."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console,
            get_renderable=lambda: panel(progress, self.now()),
            auto_refresh=False,
            transient=True,
        )
        progress.began = self.now()

    def now(self) -> float:
        return time.monotonic()

    def __enter__(self) -> StudyBoard:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def show(self) -> None:
        if self._console.is_terminal:
            self._live.refresh()

    def line(self, text: str) -> None:
        print_line(self._console, text)


def panel(progress: Progress, now: float) -> RenderableType:
    """A bar, and a line for each run under way."""
    remaining = progress.remaining(now)
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1)
    for _ in range(4):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_row(
        ProgressBar(total=1.0, completed=progress.part()),
        f"{progress.done}/{progress.total} runs",
        Text(f"{progress.failed} failed", style="red") if progress.failed else "",
        duration(now - progress.began),
        f"ETA {duration(remaining)}" if remaining is not None else "ETA –",
    )
    rows = Table.grid(padding=(0, 3))
    for each in list(progress.running.values())[:MOST_RUNNING]:
        words = (each.point.sync, f"λ {each.point.learners}", f"μ {each.point.batch_size}")
        rows.add_row("  runs", *words, f"seed {each.point.seed}", each.words, duration(now - each.since))
    return Group(grid, rows)


def row_line(row: StudyRow, progress: Progress) -> str:
    """One line of plain output."""
    left = f"{progress.done}/{progress.total}  {row.point}"
    if row.failed:
        return f"{left}: failed: {row.error}"
    parts = [
        _shown("test_error", row.test_error),
        _shown("test_loss", row.test_loss),
        _shown("loss", row.loss),
    ]
    said = next((words for words in parts if words), "")
    sigma = f"σ {row.mean_staleness or 0:.2f} (max {row.max_staleness or 0})"
    times = f"{row.seconds or 0:,.1f} s, {row.throughput or 0:,.0f} examples/s"
    return "  ".join(
        part for part in (f"{left}:", said, sigma, times, f"took {row.wall_seconds or 0:.1f} s") if part
    )


def _shown(column: str, value: float | None) -> str:
    return f"{NAMES[column]} {value_text(column, value)}" if value is not None else ""


def value_text(column: str | None, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.2f} %" if column == "test_error" else f"{value:.4g}"


# -- the end ---------------------------------------------------------------------------------------------------


def last_words(rows: Sequence[StudyRow], folder: Path, unit: str, console: Console) -> None:
    """The best by error, the fastest, the groups of equal μλ, what failed, and where everything is."""
    column = wanted(rows)
    found = places(rows, column)
    if found and column is not None:
        console.print(_places(f"lowest {NAMES[column]}, time in {unit}", best(found, SHOWN), column))
    if found:
        console.print(_places(f"fastest, time in {unit}", fastest(found, SHOWN), column))
    if found and column is not None:
        title = f"to choose from: no other is both faster and better, time in {unit}"
        console.print(_places(title, frontier(found), column))
        console.print(_groups(f"{NAMES[column]} of about equal μλ, time in {unit}", found, column))
    for row in rows:
        if row.failed:
            print_line(console, f"failed: {row.point}: {row.error}", "red")
    print_line(console, f"{near(folder)}: tradeoff.csv, tradeoff.svg, tradeoff.html")


def _table(title: str, *names: str) -> Table:
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False
    )
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _places(title: str, found: Sequence[RankedPoint], column: str | None) -> Table:
    spread = column is not None and any(each.runs > 1 for each in found)
    names = [NAMES[column]] if column is not None else []
    names += ["over seeds"] if spread else []
    table = _table(title, "dial", "(σ, μ, λ)", "μλ", *names, "time", "updates", "examples/s")
    for each in found:
        values = [value_text(column, each.value)] if column is not None else []
        values += [f"{value_text(column, each.low)} – {value_text(column, each.high)}"] if spread else []
        numbers = (f"{each.seconds:,.1f}", f"{each.updates:,}", f"{each.throughput:,.0f}")
        table.add_row(each.sync, each.name, str(each.mu_lambda), *values, *numbers)
    return table


def _groups(title: str, found: Sequence[RankedPoint], column: str) -> Table:
    table = _table(title, "μλ", "of", "mean", "lowest", "highest", "fastest of them", "time")
    for group in groups(found):
        quick = group.fastest
        table.add_row(
            f"≈ {group.size}",
            str(len(group.places)),
            *(value_text(column, value) for value in (group.mean, group.of(min), group.of(max))),
            f"{quick.sync} {quick.name}",
            f"{quick.seconds:,.1f}",
        )
    return table
