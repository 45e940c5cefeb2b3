"""A run in words: the lines of plain output, the summary at its end, what to try next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from syncline.engines.simulated_times import LearnerTimes
from syncline.report.html_page import measure
from syncline.report.run_record import Line, RunRecord
from syncline.terminal import visible


def print_line(console: Console, text: str, style: str | None = None, *, lines: bool = False) -> None:
    """Print one line, or several with `lines`, uncut at any width, because it may be copied."""
    shown = Text(visible(text, lines=lines))
    console.print(shown, style=style, soft_wrap=True, highlight=False)


def print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    for name, value in rows:
        print_line(console, f"  {name:<15} {value}")


def near(path: Path) -> str:
    """Return a path relative to the current folder if it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def counted(number: int, word: str) -> str:
    """Return a number with its noun: 1 epoch, 2 epochs."""
    return f"{number} {word}{'s' if number != 1 else ''}"


def headline(record: RunRecord) -> str:
    """Name the model, the dial, the learners and the length of a run."""
    options = record.options
    model = str(options.get("model") or options.get("function") or "?")
    if options.get("parameters"):
        model += f" ({options['parameters']:,} parameters)"
    batch = f" × batch {options['batch_size']}" if options.get("batch_size") else ""
    parts = [model, str(options.get("sync")), f"{options.get('learners')} learners{batch}"]
    parts += [
        counted(options[key], word)
        for key, word in (("epochs", "epoch"), ("steps", "update" if record.word == "epoch" else record.word))
        if options.get(key)
    ]
    if record.virtual:
        parts.append(f"simulated on {options['cluster']}" if options.get("cluster") else "simulated")
    return " · ".join(parts)


def epoch_line(record: RunRecord, epoch: Line) -> str:
    """Return the line of plain output for an epoch."""
    key = "epochs" if record.word == "epoch" else "steps"
    total = f"/{record.options[key]}" if record.options.get(key) else ""
    parts = [f"{record.word} {epoch['epoch'] + 1}{total}"]
    parts += [f"version {epoch.get('version')}"] if record.word == "epoch" else []
    parts.append(f"loss {epoch['loss']:.4f}")
    parts += [f"test {name} {measure(name, value)}" for name, value in epoch["metrics"].items()]
    parts += [f"{name} {value:.3g}" for name, value in epoch["notes"].items()]
    if record.word == "epoch" and (mean := record.staleness.get("mean")) is not None:
        parts.append(f"staleness {mean:.2f}")
    return "  ".join([*parts, f"{epoch['seconds']:.1f} s"])


def event_line(event: Line) -> str:
    """Return one visible line for an event: its time, its learner and what happened."""
    who = f"learner {event['rank']}: " if event.get("rank") is not None else ""
    lines = str(event.get("what") or event.get("event") or "").strip().splitlines() or [""]
    what = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}"
    return visible(f"{event['seconds']:.1f} s  {who}{what}")


def duration(seconds: float) -> str:
    """Format seconds as 1.4 s, 2:05 or 1:02:05."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def lasted(record: RunRecord) -> str:
    """Return how long a run took, in virtual seconds if it was simulated."""
    return f"{duration(record.seconds)} virtual" if record.virtual else duration(record.seconds)


def last_and_best(record: RunRecord, name: str, *, short: bool = False) -> str:
    """Return a test metric's last value, and its best where that differs."""
    points = record.metric(name)
    if not points:
        return "–"
    pick = max if name.endswith("accuracy") else min
    finite = [point for point in points if math.isfinite(point[2])]
    best = pick(finite, key=lambda point: point[2], default=points[-1])
    shown = measure(name, points[-1][2])
    if short or best == points[-1] or best[2] == points[-1][2]:
        return shown
    return f"{shown} (best {measure(name, best[2])} after {record.word} {best[0]:.0f})"


def summary(record: RunRecord) -> list[tuple[str, str]]:
    """Return the summary of a run as rows of name and value."""
    last, staleness = record.last, record.staleness
    rows = [(name, last_and_best(record, name)) for name in reversed(record.metrics)]
    if points := record.metric("loss"):
        rows.append(("training loss", f"{points[-1][2]:.4g}"))
    gradients, dropped = last.get("gradients") or 0, last.get("dropped") or 0
    folded = f"mean {staleness.get('mean') or 0:.2f}, max {staleness.get('max') or 0}, over {gradients:,} gradients"
    rows.append(("staleness", f"{folded}, {dropped:,} dropped" if dropped else folded))
    unit = "examples per virtual second" if record.virtual else "examples/s"
    rows.append(("throughput", f"{record.throughput:,.0f} {unit}, {last.get('version') or 0:,} updates"))
    if record.faults:
        rows.append(("faults", f"{len(record.faults)}: {event_line(record.faults[-1])}"))
    return rows


def account(total: LearnerTimes) -> list[tuple[str, str]]:
    """Return the shares of simulated learners' virtual time as rows of name and value."""
    whole = total.compute + total.communication + total.waiting or 1.0
    parts = (("computing", total.compute), ("communication", total.communication), ("waiting", total.waiting))
    spent = ", ".join(f"{100 * seconds / whole:.1f} % {name}" for name, seconds in parts)
    return [
        ("learners' time", spent),
        ("overlap", f"{100 * total.overlap:.1f} % (of computing and visible communication)"),
    ]


def how(record: RunRecord) -> str:
    """Say in a line how a run stands or ended, after how many epochs and seconds."""
    by_updates = record.word == "epoch" and record.options.get("steps")
    ended = (record.last.get("version") or 0, "update") if by_updates else (len(record.epochs), record.word)
    done = f"{counted(*ended)} in {lasted(record)}"
    if record.state == "failed":
        return f"failed after {done}: {(record.end or {}).get('error', '')}"
    return f"ended without a word after {done}" if record.state == "gone" else f"{record.state}: {done}"


def next_steps(
    record: RunRecord, command: Sequence[str], given: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Return commands to try next, each with what it does."""
    sync, learners = str(record.options.get("sync")), int(record.options.get("learners") or 2)
    among_equals = str(record.options.get("topology")).startswith("allreduce")
    free = [("--topology", "servers")] if among_equals else []
    others = [
        ("hardsync", [], "the same in lockstep: no staleness, everybody waits"),
        ("softsync:1", free, "the same softly synchronised: nobody waits for another"),
        ("async", [*free, ("--learners", str(learners * 2))], "free, and twice the learners: more staleness"),
    ]
    steps = []
    for dial, changes, words in others:
        if not sync.startswith(dial.partition(":")[0]) and record.word == "epoch":
            options = [("--sync", dial), *changes]
            options += [pair for pair in given if pair[0] not in dict(options)]
            steps.append((shlex.join([*command, *(word for pair in options for word in pair)]), words))
    return [
        *steps[:2],
        (f"syncline compare {near(record.path)} RUN", "side by side with another run"),
        ("syncline presets", "the whole dial"),
    ]
