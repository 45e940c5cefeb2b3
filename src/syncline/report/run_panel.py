"""A run as a panel: how far, how good, how stale, and one line per learner. Live, or once for `show`. Several side by side."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from syncline.errors import RunError, UsageError
from syncline.report import svg_plots as svg
from syncline.report.event_lines import write_whole
from syncline.report.html_page import measure
from syncline.report.run_record import GONE, Line, RunRecord, learners_of
from syncline.report.run_text import duration, event_line, headline, last_and_best, lasted
from syncline.terminal import visible

MOST_BARS, BAR = 6, 24  # rows and widest bar of the histogram
MOST_LEARNERS, MOST_EVENTS = 16, 4
COLOURS = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red", "gone": "red"}


def panel(record: RunRecord, *, note: str = "") -> Panel:
    """Render a run as one panel, with a `note` below it."""
    state = record.state
    middle = Columns([_learners(record), _staleness(record)], padding=(0, 4))  # or below each other
    parts: list[RenderableType] = [_progress(record), _numbers(record), Text(""), middle]
    if events := _events(record):
        parts += [Text(""), *events]
    if note:
        parts += [Text(""), Text(note, style="yellow")]
    return Panel(
        Group(*parts),
        title=Text.assemble((record.name, "bold"), " · ", headline(record)),
        subtitle=Text(
            "ended without a word" if state == "gone" else state, style=COLOURS.get(state, "white")
        ),
        title_align="left",
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="grey50",
        padding=(0, 1),
    )


def _progress(record: RunRecord) -> Table:
    done = record.progress
    epochs = record.options.get("epochs" if record.word == "epoch" else "steps")
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1)
    for _ in range(4):
        grid.add_column(justify="right", no_wrap=True)
    pulsing = done is None and record.state == "running"
    bar = ProgressBar(total=1.0, completed=done or 0.0, pulse=pulsing, animation_time=time.monotonic())
    grid.add_row(
        bar,
        f"{100 * done:.0f} %" if done is not None else "",
        f"{record.word} {min(len(record.epochs) + 1, epochs) if epochs else len(record.epochs) + 1}"
        + (f"/{epochs}" if epochs else ""),
        lasted(record),
        _remaining(record),
    )
    return grid


def _remaining(record: RunRecord) -> str:
    """Estimate the time that remains from the rate since the first sample, which leaves out the start of the processes."""
    if record.state != "running":
        return ""
    if record.goal is None or len(record.samples) < 3:
        return "ETA –"
    key, end = record.goal
    rate, left = record.rate(key, window=10.0), end - (record.last.get(key) or 0)
    return f"ETA {duration(max(0.0, left) / rate)}" if rate else "ETA –"


def _numbers(record: RunRecord) -> Text:
    text = Text()
    losses = [each["loss"] for each in learners_of(record.last) if each["loss"] is not None]
    epochs = record.metric("loss")
    shown = epochs[-1][2] if epochs else sum(losses) / len(losses) if losses else None
    pairs = [("loss", f"{shown:.4f}" if shown is not None else "–")]
    names = list(reversed(record.metrics))
    pairs += [(name, last_and_best(record, name, short=name != names[0])) for name in names]
    pairs.append(("version", f"{record.last.get('version') or 0:,}"))
    if record.state == "running":
        pairs.append(("updates/s", f"{record.rate('version'):,.0f}"))
        pairs.append(("examples/s", f"{record.rate('examples'):,.0f}"))
    else:
        pairs.append(("examples/s", f"{record.throughput:,.0f}"))
    for name, value in pairs:
        text.append(visible(f"{name} "), style="grey50")
        text.append(f"{value}   ", style="bold")
    return text


def _staleness(record: RunRecord) -> RenderableType:
    found, staleness = record.histogram, record.staleness
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="grey50")
    grid.add_column()
    grid.add_column(justify="right")
    total, top = sum(found.values()), max(found.values(), default=1)
    last = max(found, default=0)
    first = min(found, default=0) if last - min(found, default=0) >= MOST_BARS else 0
    rows = [(str(sigma), found.get(sigma, 0)) for sigma in range(first, min(last, first + MOST_BARS - 1) + 1)]
    if last > first + MOST_BARS - 1:
        rest = sum(count for sigma, count in found.items() if sigma >= first + MOST_BARS - 1)
        rows[-1] = (f"{first + MOST_BARS - 1}+", rest)
        top = max(top, rest)
    for label, count in rows if total else []:
        width = round(BAR * 8 * count / top)
        bar = "█" * (width // 8) + ("▏▎▍▌▋▊▉"[width % 8 - 1] if width % 8 else "")
        grid.add_row(label, Text(bar or " ", style="cyan"), f"{100 * count / total:.0f} %")
    mean = f"mean {staleness.get('mean') or 0:.2f}, max {staleness.get('max') or 0}" if total else "–"
    return Group(Text.assemble(("staleness σ  ", "grey50"), (mean, "bold")), grid)


def _learners(record: RunRecord) -> RenderableType:
    rows = learners_of(record.last)
    rates = record.learner_rates(window=5.0 if record.state == "running" else float("inf"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="grey50")
    for name in ("learner", "rate", "lag", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    lags = record.lags
    for each in rows[:MOST_LEARNERS]:
        words, style = _doing(each, record.last.get("missing"))
        alive = style != "red"
        table.add_row(
            str(each["rank"]),
            f"{rates.get(each['rank'], 0.0):.1f}/s" if alive else "–",
            str(lags[each["rank"]]) if alive else "–",
            f"{each['loss']:.4f}" if each["loss"] is not None else "–",
            Text(words, style=style),
        )
    if len(rows) > MOST_LEARNERS:
        states = Counter(_doing(each, [])[0].split(" version")[0] for each in rows[MOST_LEARNERS:])
        more = ", ".join(f"{count} {words}" for words, count in states.items())
        return Group(table, Text(f"and {len(rows) - MOST_LEARNERS} more: {more}", style="grey50"))
    return table


def _doing(learner: Line, missing: object) -> tuple[str, str]:
    """Return what a learner does, in words and colour; in lockstep, name the learners that it waits for."""
    state = str(learner.get("state") or "?")
    if state in GONE:
        return state, "red"
    if state.startswith("waits for version") and isinstance(missing, list):
        others = [rank for rank in missing if rank != learner["rank"]]
        if others:
            return f"waits for learner {', '.join(map(str, others[:6]))}", "yellow"
    return state, "yellow" if state.startswith(
        ("waits", "has no")
    ) else "green" if state == "computing" else "white"


def _events(record: RunRecord) -> list[RenderableType]:
    shown = [each for each in record.events if each.get("event") not in ("left", "warning")][-MOST_EVENTS:]
    text = Text("\n", overflow="ellipsis", no_wrap=True).join(
        Text(event_line(each), style="red" if each in record.faults else "grey50") for each in shown
    )
    warnings = [Text(event_line(each), style="yellow") for each in record.warnings[-MOST_EVENTS:]]
    return [text, *warnings] if shown else [*warnings]


# -- several runs -----------------------------------------------------------------------------------------------


def comparison(records: Sequence[RunRecord]) -> Table:
    """Compare runs, one column each; the best value of a row is marked."""
    table = Table(header_style="bold", title="", show_edge=False)
    table.add_column("")
    for record in records:
        table.add_column(record.name, overflow="fold")
    columns = [_facts(record) for record in records]
    for name in columns[0]:
        if name != "simulating took" or any(column[name] != "–" for column in columns):
            table.add_row(name, *(column[name] for column in columns))
    for name in dict.fromkeys(name for record in records for name in reversed(record.metrics)):
        last = {n: points[-1][2] for n, each in enumerate(records) if (points := each.metric(name))}
        pick = max if name.endswith("accuracy") else min
        finite = [number for number in last if math.isfinite(last[number])]
        best = pick(finite, key=lambda number: last[number], default=None) if len(last) > 1 else None
        cells = [last_and_best(record, name) for record in records]
        table.add_row(name, *(Text(c, style="green" if n == best else "") for n, c in enumerate(cells)))
    return table


def _facts(record: RunRecord) -> dict[str, str]:
    options, took, losses = record.options, record.took, record.metric("loss")
    engine = str(options.get("engine"))
    return {
        "state": record.state,
        "dial": str(options.get("sync")),
        "learners × batch": f"{options.get('learners')} × {options.get('batch_size')}",
        "engine": f"{engine}, {options['cluster']}" if options.get("cluster") else engine,
        "epochs": str(len(record.epochs)),
        "updates": f"{record.last.get('version') or 0:,}",
        "mean staleness": f"{record.staleness.get('mean') or 0:.2f}",
        "largest staleness": str(record.staleness.get("max") or 0),
        "gradients dropped": f"{record.last.get('dropped') or 0:,}",
        "examples/s": f"{record.throughput:,.0f}",
        "time": lasted(record),
        "simulating took": duration(took) if took is not None else "–",
        "faults": str(len(record.faults)),
        "training loss": measure("loss", losses[-1][2]) if losses else "–",
    }


def write_plot(records: Sequence[RunRecord], path: Path) -> None:
    """Draw loss and test metrics of all runs over epochs and over time, as SVG."""
    if path.suffix.lower() != ".svg":
        raise UsageError(f"plots are SVG, which every browser shows: write --plot {path.with_suffix('.svg')}")
    seconds = "virtual seconds" if any(record.virtual for record in records) else "seconds"
    if len({record.virtual for record in records}) > 1:
        seconds = "seconds, of simulated runs virtual"
    plots = []
    for name in dict.fromkeys(["loss", *(name for record in records for name in record.metrics)]):
        title = "Training loss" if name == "loss" else name.capitalize()
        for which, over, x in ((0, "epochs", "epochs"), (1, "time", seconds)):
            series = []
            for each in records:
                points = sorted((point[which], point[2]) for point in each.metric(name))
                series.append((f"{each.name} ({each.options.get('sync')})", points))
            plots.append(svg.lines(f"{title} over {over}", series, x=x, y=name.removeprefix("test ")))
    try:
        write_whole(path, svg.side_by_side(plots))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
