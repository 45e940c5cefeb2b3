"""A study on the terminal: how far, what runs, when it ends; elsewhere a line for each run. At the end, what is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from syncline.dial import Course
from syncline.report.run_text import duration, near, print_line
from syncline.studies.grid import Point, StudyRow
from syncline.studies.summary import RankedPoint, best, fastest, frontier, groups, places, wanted

SHOWN = 5  # rows of each table
MOST_RUNNING = 16
OVERHEAD = 32  # examples' worth of work in a gradient beside its examples: small batches cost more
NAMES = {"test_error": "test error", "test_loss": "test loss", "loss": "training loss"}


def cost(point: Point, *, steps: bool = False) -> float:
    """Work of a run against that of others: an epoch, or an update, of this dial."""
    per_gradient = point.batch_size + OVERHEAD
    if steps:
        return Course.of(point.sync).first.quorum(point.learners) * per_gradient
    return per_gradient / point.batch_size


@dataclass(slots=True)
class Running:
    """A run under way."""

    point: Point
    since: float
    part: float = 0.0  # done, of 1
    words: str = "starting"


@dataclass(slots=True)
class Progress:
    """What of a study is done, running and left, and when it will end. Fed by whoever conducts; time is passed in."""

    points: Sequence[Point]  # to be done now
    before: int = 0  # done by an earlier call
    steps: bool = False
    began: float = 0.0
    running: dict[Point, Running] = field(default_factory=dict)
    rows: list[StudyRow] = field(default_factory=list)

    def started(self, point: Point, now: float) -> None:
        self.running[point] = Running(point, now)

    def moved(self, point: Point, part: float, words: str) -> None:
        if (found := self.running.get(point)) is not None:
            found.part, found.words = part, words

    def ended(self, row: StudyRow) -> None:
        self.running.pop(row.point, None)
        self.rows.append(row)

    @property
    def done(self) -> int:
        return self.before + len(self.rows)

    @property
    def total(self) -> int:
        return self.before + len(self.points)

    @property
    def failed(self) -> int:
        return sum(row.failed for row in self.rows)

    def part(self) -> float:
        """Of the work of this call."""
        whole, worked = self._work()
        return worked / whole if whole else 1.0

    def remaining(self, now: float) -> float | None:
        """Seconds to the end at the pace so far; None while there is none."""
        (whole, worked), spent = self._work(), now - self.began
        if worked <= 0 or spent <= 0:
            return None
        return max(0.0, whole - worked) * spent / worked

    def _work(self) -> tuple[float, float]:
        """In all, and of that done."""
        costs = {point: cost(point, steps=self.steps) for point in self.points}
        parts = [(row.point, 1.0) for row in self.rows]
        parts += [(each.point, each.part) for each in self.running.values()]
        return sum(costs.values()), sum(part * costs[point] for point, part in parts)


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
    parts = [f"{left}:"]
    column = wanted([row])
    if column is not None:
        parts.append(f"{NAMES[column]} {value_text(column, getattr(row, column))}")
    parts.append(f"σ {row.mean_staleness or 0:.2f} (max {row.max_staleness or 0})")
    parts.append(f"{row.seconds or 0:,.1f} s, {row.throughput or 0:,.0f} examples/s")
    return "  ".join([*parts, f"took {row.wall_seconds or 0:.1f} s"])


def value_text(column: str | None, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.2f} %" if column == "test_error" else f"{value:.4g}"


# -- the end ---------------------------------------------------------------------------------------------------


def last_words(rows: Sequence[StudyRow], folder: Path, unit: str, console: Console) -> None:
    """The best by error, the fastest, the groups of equal μλ, what failed, and where everything is."""
    column = wanted(rows)
    found = places(rows, column)
    if column is not None and found:
        console.print(_places(f"lowest {NAMES[column]}, time in {unit}", best(found, SHOWN), column))
    if found:
        console.print(_places(f"fastest, time in {unit}", fastest(found, SHOWN), column))
    if column is not None and found:
        title = f"to choose from: no other is both faster and better, time in {unit}"
        console.print(_places(title, frontier(found), column))
        title = f"{NAMES[column]} of about equal μλ, time in {unit}"
        table = _table(title, "μλ", "of", "mean", "lowest", "highest", "fastest of them", "time")
        for group in groups(found):
            quick, values = group.fastest, (group.mean, group.of(min), group.of(max))
            table.add_row(
                f"≈ {group.size}",
                str(len(group.places)),
                *(value_text(column, value) for value in values),
                f"{quick.sync} {quick.name}",
                f"{quick.seconds:,.1f}",
            )
        console.print(table)
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
