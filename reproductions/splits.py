"""Where the time of one update goes when a model is cut over machines: computation, parameters, features; by `sl.plan`'s costs.

Shared by the figures of SINGA, DistBelief and COTS. Computation and communication are added, as those papers' systems had them.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from syncline import Cluster, plan
from syncline.cluster.record import Link
from syncline.plan.costs import Measured
from syncline.plan.graph import LayerGraph

FREE = Link()


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
    if file is None:
        return
    names = [field.name for field in fields(Split)]
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)
