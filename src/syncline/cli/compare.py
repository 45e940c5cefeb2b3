"""Several runs side by side: a table, and a plot drawn by the report's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from syncline.cli.plain_output import duration, last_and_best, lasted
from syncline.errors import RunError, UsageError
from syncline.report import svg_plots as svg
from syncline.report.event_lines import write_whole
from syncline.report.html_page import measure
from syncline.report.run_record import RunRecord


def comparison(records: Sequence[RunRecord]) -> Table:
    """One column per run; where a row has a best value it is marked."""
    table = Table(header_style="bold", title="", show_edge=False)
    table.add_column("")
    for record in records:
        table.add_column(record.name, overflow="fold")
    rows: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("state", lambda r: r.state),
        ("dial", lambda r: str(r.options.get("sync"))),
        ("learners × batch", lambda r: f"{r.options.get('learners')} × {r.options.get('batch_size')}"),
        ("engine", lambda r: _engine(r)),
        ("epochs", lambda r: str(len(r.epochs))),
        ("updates", lambda r: f"{r.last.get('version') or 0:,}"),
        ("mean staleness", lambda r: f"{r.staleness.get('mean') or 0:.2f}"),
        ("largest staleness", lambda r: str(r.staleness.get("max") or 0)),
        ("gradients dropped", lambda r: f"{r.last.get('dropped') or 0:,}"),
        ("examples/s", lambda r: f"{r.throughput:,.0f}"),
        ("time", lasted),
        ("simulating took", lambda r: duration(r.took) if r.took is not None else "–"),
        ("faults", lambda r: str(len(r.faults))),
        ("training loss", _training_loss),
    ]
    for name, value in rows:
        if name == "simulating took" and all(record.took is None for record in records):
            continue
        table.add_row(name, *map(value, records))
    for name in dict.fromkeys(name for record in records for name in reversed(record.metrics)):
        best = _best(records, name)
        cells = [last_and_best(record, name) for record in records]
        table.add_row(name, *(f"[green]{c}[/]" if n == best else c for n, c in enumerate(cells)))
    return table


def _engine(record: RunRecord) -> str:
    name, cluster = str(record.options.get("engine")), record.options.get("cluster")
    return f"{name}, {cluster}" if cluster else name


def _training_loss(record: RunRecord) -> str:
    points = record.metric("loss")
    return measure("loss", points[-1][2]) if points else "–"


def _best(records: Sequence[RunRecord], name: str) -> int | None:
    """Whose last value of a metric is best."""
    values = {n: points[-1][2] for n, record in enumerate(records) if (points := record.metric(name))}
    pick = max if name.endswith("accuracy") else min
    return pick(values, key=lambda number: values[number]) if len(values) > 1 else None


def _seconds(records: Sequence[RunRecord]) -> str:
    kinds = {record.virtual for record in records}
    if len(kinds) > 1:
        return "seconds, of simulated runs virtual"
    return "virtual seconds" if True in kinds else "seconds"


def write_plot(records: Sequence[RunRecord], path: Path) -> None:
    """Loss and test metrics of all runs over epochs and over time, as SVG."""
    if path.suffix.lower() != ".svg":
        raise UsageError(f"plots are SVG, which every browser shows: write --plot {path.with_suffix('.svg')}")
    names = dict.fromkeys(["loss", *(name for record in records for name in record.metrics)])
    plots = []
    for name in names:
        title = "Training loss" if name == "loss" else name.capitalize()
        for which, x in ((0, "epochs"), (1, _seconds(records))):
            series = [
                (
                    f"{each.name} ({each.options.get('sync')})",
                    sorted((p[which], p[2]) for p in each.metric(name)),
                )
                for each in records
            ]
            over = "epochs" if which == 0 else "time"
            plots.append(svg.lines(f"{title} over {over}", series, x=x, y=name.removeprefix("test ")))
    try:
        write_whole(path, svg.side_by_side(plots))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
