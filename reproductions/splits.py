"""Where the time of one update goes when a model is cut over machines: computation, parameters, features; by `sl.plan`'s costs,
or with servers in the simulator.

Shared by the figures of SINGA, DistBelief and COTS. Computation and communication are added, as those papers' systems had them.
"""

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import machine
from syncline import Cluster, Sim, plan
from syncline.cluster import Compute, Link
from syncline.plan import step_seconds
from syncline.plan.costs import Measured
from syncline.plan.graph import LayerGraph
from syncline.sim.group_times import groups_of, seats_of

FREE = Link()
UPDATES = 20  # of each group, in the simulator


@dataclass(frozen=True)
class Split:
    """Seconds of one update of a group."""

    what: str
    workers: int
    group: int
    computation: float
    parameters: float  # added up in the group, pushed and read
    features: float  # and their gradients, between layers
    total: float


def split(
    what: str,
    model: nn.Module,
    example: Any,
    cluster: Cluster,
    choices: Mapping[str, str] | None,
    *,
    group: int,
    workers: int | None = None,
) -> Split:
    """Of a model with these choices (patterns), the cheapest where there are none. `example` is the batch of a group."""
    everybody = workers or group
    found = plan(model, example, cluster, group, given=choices)  # one group: its own batch
    return _priced(what, model, example, cluster, found.choices, group, everybody)


def _priced(
    what: str,
    model: nn.Module,
    example: Any,
    cluster: Cluster,
    choices: Mapping[str, str],
    group: int,
    workers: int,
) -> Split:
    graph = LayerGraph(model, example, group)
    graph.find_ways(Measured.ways)
    units = [(unit, choices[unit.name]) for unit in graph.units]
    alone = Measured(graph, workers, True, replace(cluster, card=FREE, memory=FREE), None)
    prices = Measured(graph, workers, True, cluster, None)
    computation = sum(alone.unit(unit, way).seconds for unit, way in units)
    held = sum(prices.unit(unit, way).seconds for unit, way in units) - computation
    features = 0.0
    for link in graph.links:
        other = units[link.target[0]][1] if link.target[0] >= 0 else ""
        features += prices.link(link, units[link.source[0]][1], other).seconds
    return Split(what, workers, group, computation, held, features, computation + held + features)


def simulated(
    what: str,
    model: nn.Module,
    example: torch.Tensor,
    cluster: Cluster,
    choices: Mapping[str, str] | None,
    *,
    group: int,
    workers: int,
    shards: int,
    sync: str,
) -> Split:
    """The same with servers, whom all groups share: a group's step by its plan, the table's time as the simulator has it."""
    groups, seats = workers // group, seats_of(cluster, group)
    batch = len(example) // groups if sync == "hardsync" else len(example)
    part = torch.empty(batch, *example.shape[1:], device="meta")
    found = plan(model, part, cluster, group, given=choices)
    step = step_seconds(model, part, seats, group, found.choices)
    priced = _priced(what, model, part, seats, found.choices, group, group)
    sent = sum(row.parameters for row in found.rows if groups > 1 or row.choice == "data")
    timing = Sim(groups_of(cluster, group, Compute(base=step))).timing(
        parameters=sent, examples=10**9, learners=groups, batch_size=batch, sync=sync, shards=shards,
        steps=UPDATES * (groups if sync == "async" else 1),
    )  # fmt: skip
    total = timing.seconds / UPDATES
    parameters = total - priced.computation - priced.features
    return Split(what, workers, group, priced.computation, parameters, priced.features, total)


def options_of(doc: str | None, **defaults: str) -> argparse.Namespace:
    """The command line of a figure."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--picture", type=Path)
    return parser.parse_args()


def show(rows: Sequence[Split], head: str, base: float | None = None) -> None:
    """A table; with a base the speed-up over it."""
    print(f"\n{head}")
    print(
        f"  {'':<22}{'workers':>8}{'group':>6}{'computation':>13}{'parameters':>12}{'features':>10}{'total s':>10}{'x one':>8}"
    )
    for row in rows:
        over = f"{base / row.total:.2f}" if base else ""
        print(
            f"  {row.what:<22}{row.workers:>8}{row.group:>6}{row.computation:>13.3f}{row.parameters:>12.3f}{row.features:>10.3f}"
            f"{row.total:>10.3f}{over:>8}"
        )


def write(rows: Sequence[Split], file: Path | None) -> None:
    """With what it was made on, as a comment."""
    if file is None:
        return
    names = [field.name for field in fields(Split)]
    with file.open("w", newline="") as stream:
        stream.write(f"# {json.dumps(machine.describe())}\n")
        writer = csv.writer(stream)
        writer.writerow(names)
        for row in rows:
            values = [getattr(row, name) for name in names]
            writer.writerow([f"{value:.4f}" if isinstance(value, float) else value for value in values])


def draw(rows: Sequence[Split], file: Path | None, title: str, *, speed: bool = False) -> None:
    """Seconds by workers, or with `speed` how much faster than one; a line for each kind."""
    if file is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for what in dict.fromkeys(row.what for row in rows):
        own = [row for row in rows if row.what == what]
        values = [own[0].total / row.total if speed else row.total for row in own]
        axis.plot([row.workers for row in own], values, "o-", label=what)
    _finish(figure, axis, title, "speed-up" if speed else "seconds of an update", file)


def draw_split(rows: Sequence[Split], file: Path | None, title: str) -> None:
    """Where the time of each row goes, as a bar."""
    if file is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    names, below = [f"{row.workers}/{row.group}" for row in rows], [0.0] * len(rows)
    for part in ("computation", "parameters", "features"):
        values = [getattr(row, part) for row in rows]
        axis.bar(names, values, bottom=below, label=part)
        below = [a + b for a, b in zip(below, values, strict=True)]
    _finish(figure, axis, title, "seconds of an update", file, "workers/group size")


def _finish(figure: Any, axis: Any, title: str, y: str, file: Path, x: str = "workers") -> None:
    axis.set(xlabel=x, ylabel=y, title=title)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
