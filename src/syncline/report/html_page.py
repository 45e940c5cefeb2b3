"""report.html: a run on one page that needs nothing else, no network and no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from typing import Any

from syncline.report import svg_plots as svg
from syncline.report.run_record import GONE, Line, RunRecord, learners_of
from syncline.terminal import visible

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2937;max-width:1100px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .6rem}p{margin:.2rem 0}.faint{color:#6b7280}
.numbers{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.numbers div{border:1px solid #e5e7eb;border-radius:8px;padding:.5rem .9rem}
.numbers b{display:block;font-size:1.25rem}.numbers span{color:#6b7280;font-size:.85rem}
.plots{display:flex;flex-wrap:wrap;gap:.5rem}.plots svg{max-width:100%;height:auto}
table{border-collapse:collapse}td,th{padding:.25rem .8rem .25rem 0;text-align:left;border-bottom:1px solid #e5e7eb;
vertical-align:top}td.n,th.n{text-align:right}code{background:#f3f4f6;padding:.1rem .3rem;border-radius:4px}
"""


NOTES = {  # what a batch method says of its iterations
    "step": "Step lengths",
    "evaluations": "Function evaluations",
    "gradient": "Largest entry of the gradient",
}


def page(record: RunRecord) -> str:
    """The whole page; it is well-formed XML too."""
    body = [
        f"<h1>{escape(record.name)}</h1>",
        f"<p class='faint'>{escape(_subtitle(record))}</p>",
        _numbers(record),
        f"<div class='plots'>{''.join(plots(record))}</div>",
        f"<h2>{record.word.capitalize()}s</h2>",
        _epochs(record),
        "<h2>Learners</h2>",
        _learners(record),
        "<h2>Faults and other events</h2>",
        _events(record),
        "<h2>Options</h2>",
        _options(record),
    ]
    return document(f"{record.name} · Syncline", "".join(body))


def document(title: str, body: str, style: str = "") -> str:
    head = f"<meta charset='utf-8'/><title>{escape(title)}</title><style>{STYLE}{style}</style>"
    text = f"<!DOCTYPE html>\n<html lang='en'><head>{head}</head><body>{body}</body></html>\n"
    return visible(text, lines=True)


def plots(record: RunRecord) -> list[str]:
    """Loss and metrics over epochs and over time, staleness, rates."""
    marks = [(each["seconds"], _event_words(each)) for each in record.faults]
    over, seconds = f"{record.word}s", _seconds(record)
    wanted = {"Loss": ["loss", *(name for name in record.metrics if name == "test loss")]}
    wanted |= {f"Test {n.removeprefix('test ')}": [n] for n in record.metrics if n != "test loss"}
    drawn = []
    for title, names in wanted.items():
        by_epoch: list[svg.Series] = []
        by_time: list[svg.Series] = []
        for name in names:
            called, points = "training loss" if name == "loss" else name, record.metric(name)
            by_epoch.append((called, [(epoch, value) for epoch, _, value in points]))
            by_time.append((called, sorted((when, value) for _, when, value in points)))
        y = title.split()[-1].lower()
        drawn.append(svg.lines(f"{title} over {over}", by_epoch, x=over, y=y))
        drawn.append(svg.lines(f"{title} over time", by_time, x=seconds, y=y, marks=marks))
    notes = [
        svg.lines(title, [(name, noted)], x="iterations", y=name)
        for name, title in NOTES.items()
        if (noted := record.noted(name))
    ]
    rates = svg.lines(
        "Rates of learners", learner_rates(record), x=seconds, y="gradients/s", marks=marks, zero=True
    )
    return [*drawn, *(notes or [staleness_plot(record)]), rates]


def _seconds(record: RunRecord) -> str:
    return "virtual seconds" if record.virtual else "seconds"


def staleness_plot(record: RunRecord) -> str:
    found = record.histogram
    total = sum(found.values()) or 1
    values = [
        (str(sigma), 100 * found.get(sigma, 0) / total, f"σ = {sigma}: {found.get(sigma, 0)} gradients")
        for sigma in range(max(found, default=0) + 1)
    ]
    return svg.bars("Staleness of gradients", values[:60], x="σ, versions behind", y="% of gradients")


def learner_rates(record: RunRecord) -> list[svg.Series]:
    """Gradients a second of each learner, between samples half a second or more apart."""
    apart = max(0.5, record.seconds / 120)
    kept: list[Line] = []
    for each in record.samples:
        since = each["seconds"] - kept[-1]["seconds"] if kept else apart
        if since >= apart or since < 0:
            kept.append(each)
    series: dict[int, list[svg.Point]] = {}
    for before, after in pairwise(kept):
        steps = {each["rank"]: each.get("steps") or 0 for each in learners_of(before)}
        span = after["seconds"] - before["seconds"]
        for each in learners_of(after):
            done = (each.get("steps") or 0) - steps.get(each["rank"], 0)
            if span > 0 and done >= 0 and each.get("state") not in GONE:
                series.setdefault(each["rank"], []).append((after["seconds"], done / span))
    return [(f"learner {rank}", series[rank]) for rank in sorted(series)[: len(svg.COLOURS)]]


# -- words and tables ------------------------------------------------------------------------------------------


def _subtitle(record: RunRecord) -> str:
    options = record.options
    model = f"{options.get('model') or options.get('function')}"
    parameters = f" of {options['parameters']:,} parameters" if options.get("parameters") else ""
    what = f"{model}{parameters}, {options.get('sync')}, {options.get('learners')} learners × batch {options.get('batch_size')}"
    first = record.starts[0].get("time") or record.started.get("time") or 0 if record.starts else 0
    when = datetime.fromtimestamp(first, UTC)
    state = "ended without a word" if record.state == "gone" else record.state
    error = f": {record.end['error']}" if record.end and record.end.get("error") else ""
    where = (
        f"simulated, on {options.get('cluster') or 'a cluster'}" if record.virtual else options.get("machine")
    )
    return f"{what} · {where} · {when:%Y-%m-%d %H:%M} UTC · {state}{error}"


def _numbers(record: RunRecord) -> str:
    last, staleness = record.last, record.staleness
    measured = [(name, points[-1][2]) for name in record.metrics if (points := record.metric(name))]
    shown = [
        *((measure(name, value), name) for name, value in measured),
        (f"{len(record.epochs)}", f"{record.word}s"),
        (f"{last.get('version', 0):,}", "updates"),
        (f"{last.get('gradients', 0):,}", "gradients folded"),
        (f"{last.get('dropped', 0):,}", "gradients dropped"),
        (f"{staleness.get('mean') or 0:.2f}", "mean staleness"),
        (f"{staleness.get('max') or 0}", "largest staleness"),
        (f"{record.throughput:,.0f}", "examples per virtual second" if record.virtual else "examples/s"),
        (f"{record.seconds:,.1f} s", "virtual, in all" if record.virtual else "in all"),
    ]
    if record.took is not None:
        shown.append((f"{record.took:,.1f} s", "really taken, to simulate it"))
    cells = (f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in shown)
    return f"<div class='numbers'>{''.join(cells)}</div>"


def measure(name: str, value: float) -> str:
    """A metric for people: accuracy in per cent."""
    return f"{100 * value:.2f} %" if name.endswith("accuracy") else f"{value:.4g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Texts in rows; numbers stand on the right."""
    kind = " class='n'" if numbers else ""
    top = "".join(f"<th{kind}>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _epochs(record: RunRecord) -> str:
    if not record.epochs:
        return "<p class='faint'>None was completed.</p>"
    names = [name.removeprefix("test ") for name in record.metrics]
    notes = [name for name in NOTES if record.noted(name)]
    rows = []
    for each in record.epochs:
        cells = [measure(name, each["metrics"][name]) if name in each["metrics"] else "–" for name in names]
        noted = [f"{each['notes'][name]:.4g}" if name in each["notes"] else "–" for name in notes]
        place = [str(each["epoch"] + 1), str(each.get("version")), f"{each['seconds']:.1f}"]
        rows.append([*place, f"{each['loss']:.4g}", *noted, *cells])
    head = [record.word, "version", _seconds(record), "training loss", *notes, *record.metrics]
    return table(head, rows)


def _learners(record: RunRecord) -> str:
    rates = record.learner_rates(window=float("inf"))
    rows = []
    for each in learners_of(record.last):
        loss = f"{each['loss']:.4g}" if each["loss"] is not None else "–"
        rate = f"{rates.get(each['rank'], 0.0):.1f}"
        rows.append([str(each["rank"]), str(each.get("state")), str(each.get("steps")), rate, loss])
    return table(["learner", "at the end", "gradients", "gradients/s", "last loss"], rows)


def _event_words(event: Line) -> str:
    who = f"learner {event['rank']} " if event.get("rank") is not None else ""
    lines = str(event.get("what") or "").strip().splitlines() or [str(event.get("event"))]
    return f"{who}{lines[0]}"


def _events(record: RunRecord) -> str:
    first = record.faults + record.warnings
    shown = first + [each for each in record.events if each not in first]
    if not shown:
        return "<p class='faint'>None.</p>"
    rows = [[f"{e['seconds']:.2f}", str(e.get("event") or ""), _event_words(e)] for e in shown[:200]]
    more = f"<p class='faint'>and {len(shown) - 200} more in events.jsonl</p>" if len(shown) > 200 else ""
    return table([_seconds(record), "kind", "what"], rows, numbers=False) + more


def _options(record: RunRecord) -> str:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {item}" for key, item in value.items())
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    names = {"machine": "machine that simulated it"} if record.virtual else {}
    rows = [[names.get(key, key), text(value)] for key, value in record.options.items() if value is not None]
    return table(["option", "value"], rows, numbers=False)
