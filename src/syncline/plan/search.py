"""`plan(model, example, cluster, group)`: the cheapest way to cut every layer, as a record to print, save and edit.

Not responsible for cutting: `parallel` takes `plan.choices`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncline.errors import UsageError
from syncline.parallel.program import chosen
from syncline.plan.costs import Machines, Measured, Price, Singa, best_group, memory_of, numbers, table_of
from syncline.plan.elimination import cheapest
from syncline.plan.graph import LayerGraph, Unit


@dataclass(frozen=True, slots=True)
class Row:
    """A layer in the way it is cut: bytes that move for it in one step, all processes; seconds; bytes held by each."""

    layer: str
    choice: str
    parameters: int
    features: int
    bytes: float
    seconds: float
    memory: float


@dataclass(slots=True)
class Plan:
    """How each layer is cut over a group. `choices` may be edited."""

    choices: dict[str, str]
    rows: tuple[Row, ...]
    group: int
    workers: int
    batch: int  # of a group
    costs: str

    @property
    def layers(self) -> dict[str, int]:
        """Parameters by layer: what the model has to have."""
        return {row.layer: row.parameters for row in self.rows}

    @property
    def bytes(self) -> float:
        return sum(row.bytes for row in self.rows)

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def memory(self) -> float:
        return sum(row.memory for row in self.rows)

    def __str__(self) -> str:
        heads = ("layer", "choice", "parameters", "bytes", "seconds", "memory")
        lines = [heads] + [
            (
                row.layer,
                self.choices.get(row.layer, row.choice),
                f"{row.parameters:,}",
                *_shown(row.bytes, row.seconds, row.memory),
            )
            for row in self.rows
        ]
        total = sum(row.parameters for row in self.rows)
        lines.append(("all", "", f"{total:,}", *_shown(self.bytes, self.seconds, self.memory)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        text = [
            "  ".join(
                cell.ljust(w) if i < 2 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        groups = (
            f"{self.workers // self.group} groups of {self.group}"
            if self.workers > self.group
            else f"a group of {self.group}"
        )
        return "\n".join([f"{groups}, {self.batch} examples each, costs {self.costs}", *text])

    def save(self, file: Path | str) -> None:
        record: dict[str, Any] = {"choices": self.choices, "rows": [asdict(row) for row in self.rows]}
        record |= {"group": self.group, "workers": self.workers, "batch": self.batch, "costs": self.costs}
        Path(file).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path | str) -> Plan:
        try:
            record = json.loads(Path(file).read_text(encoding="utf-8"))
            return cls(**{**record, "rows": tuple(Row(**row) for row in record["rows"])})
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} is no plan: {error}") from error


def _shown(size: float, seconds: float, memory: float) -> tuple[str, str, str]:
    return f"{size:,.0f}", f"{seconds:.6f}", f"{memory:,.0f}"


def plan(
    model: nn.Module,
    example: Any,
    cluster: Machines | None = None,
    group: int | None = None,
    *,
    workers: int | None = None,
    costs: str | None = None,
    compute: Mapping[str, float] | None = None,
    memory: float = math.inf,
    given: Mapping[str, str] | None = None,
    local_update: bool = True,
    states: int = 1,
    grid: tuple[int, int] | None = None,
    batch_dim: int = 0,
) -> Plan:
    """The cheapest plan for a group of processes, exactly.

    `example` is a mini-batch of all `workers` (of one group if that is not given); without `group` every size that
    divides the workers is tried. `costs="singa"` counts floats (S4); "measured" are seconds on the `cluster`, with
    `compute` seconds of each layer for the group's batch (see `measure`), else the cluster's own by the layers' work.
    `memory` limits each process, with so many `states` of the optimizer. `given` choices, names or patterns, stay.
    """
    if group is None and workers is None:
        raise UsageError(
            "plan: say group= (processes that hold one model) or workers= (all of them, and the best group is found)"
        )
    costs = costs or ("singa" if cluster is None else "measured")
    if costs not in ("singa", "measured") or (costs == "measured" and cluster is None):
        raise UsageError(
            f"plan: costs are 'singa', or 'measured' with a cluster; got {costs!r} and cluster {cluster!r}"
        )
    everybody = workers or group or 1
    sizes = (
        [group] if group is not None else [size for size in range(1, everybody + 1) if everybody % size == 0]
    )
    if not all(isinstance(size, int) and size >= 1 and everybody % size == 0 for size in sizes):
        raise UsageError(f"plan: group is a whole number that divides the {everybody} workers, got {group!r}")
    options = {
        "compute": compute,
        "memory": memory,
        "given": given or {},
        "local_update": local_update,
        "states": states,
    }
    found, errors = [], []
    for size in sizes:
        try:
            part = _resized(example, size, everybody, batch_dim)
            graph = LayerGraph(model, part, size, grid=grid, batch_dim=batch_dim)
            found.append(_planned(graph, everybody, costs, cluster, options))
        except UsageError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda pair: pair[0])[1]


def _resized(example: Any, group: int, workers: int, dim: int) -> Any:
    """A group's part of the mini-batch, as shapes."""
    if group == workers:
        return example
    first = next(leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor))
    batch = first.shape[dim]
    if batch * group % workers:
        raise UsageError(f"plan: a mini-batch of {batch} cannot be dealt to {workers // group} groups")

    def part(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = shape[dim] * group // workers if len(shape) > dim and shape[dim] == batch else shape[dim]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(Tensor, part, example)


def _planned(
    graph: LayerGraph, workers: int, costs: str, cluster: Machines | None, options: dict[str, Any]
) -> tuple[float, Plan]:
    local, compute = options["local_update"], options["compute"]
    prices: Singa | Measured = (
        Measured(graph, workers, local, cluster, compute)
        if costs == "measured" and cluster is not None
        else Singa(graph, workers, local)
    )
    graph.price_ways(prices.ways)
    _keep_given(graph, options["given"])
    ways = [list(unit.ways) for unit in graph.units]
    own = [[prices.unit(unit, way) for way in mine] for unit, mine in zip(graph.units, ways, strict=True)]
    rows = [[price.cost for price in row] for row in own]
    sizes = [
        [memory_of(graph, unit, way, options["states"]) for way in mine]
        for unit, mine in zip(graph.units, ways, strict=True)
    ]
    tables = [
        table_of(
            graph, prices, i, ways[link.source[0]], ways[link.target[0]] if link.target[0] >= 0 else [""]
        )
        for i, link in enumerate(graph.links)
    ]
    pairs: dict[tuple[int, int], list[list[float]]] = {}
    for link, table in zip(graph.links, tables, strict=True):
        _add_link(link.source[0], link.target[0], numbers(table), rows, pairs)
    best = cheapest(rows, pairs, sizes, options["memory"])
    if best is None:
        least = sum(min(row) for row in sizes)
        raise UsageError(
            f"plan: a process needs at least {least:,.0f} bytes with {graph.group} in the group, the limit is {options['memory']:,.0f}: "
            "take a larger group, a smaller batch, or an optimizer with fewer states"
        )
    return _record(graph, workers, costs, ways, best, own, sizes, tables)


def _keep_given(graph: LayerGraph, given: Mapping[str, str]) -> None:
    names = [unit.name for unit in graph.units]
    for name, way in chosen(given, names, names).items():
        unit = graph.units[names.index(name)]
        if way not in unit.ways:
            for step in unit.steps:
                step.rule.place(replace(step.call, way=way))  # says why it cannot
            raise UsageError(
                f"plan: layer {name!r} cannot be cut as {way!r} with these costs; it can be {', '.join(unit.ways)}"
            )
        unit.ways = {way: unit.ways[way]}


def _add_link(
    a: int, b: int, table: Any, rows: list[list[float]], pairs: dict[tuple[int, int], list[list[float]]]
) -> None:
    """To the pair's table; a link of a unit with itself, or to the result, is the unit's own cost."""
    if b < 0 or a == b:
        for i, row in enumerate(table):
            rows[a][i] += row[0] if b < 0 else row[i]
        return
    if (b, a) in pairs:
        a, b, table = b, a, [list(column) for column in zip(*table, strict=True)]
    held = pairs.setdefault((a, b), [[0.0] * len(row) for row in table])
    for mine, more in zip(held, table, strict=True):
        mine[:] = [x + y for x, y in zip(mine, more, strict=True)]


def _record(
    graph: LayerGraph,
    workers: int,
    costs: str,
    ways: list[list[str]],
    best: list[int],
    own: list[list[Price]],
    sizes: list[list[float]],
    tables: list[list[list[Price]]],
) -> tuple[float, Plan]:
    """Moves are shown with the layer that reads, those of the result with the layer that makes it."""
    shown = [[own[i][choice]] for i, choice in enumerate(best)]
    for link, table in zip(graph.links, tables, strict=True):
        a, b = link.source[0], link.target[0]
        shown[b if b >= 0 else a].append(table[best[a]][best[b] if b >= 0 else 0])
    rows = tuple(
        _row(unit, ways[i][best[i]], shown[i], sizes[i][best[i]]) for i, unit in enumerate(graph.units)
    )
    choices = {row.layer: row.choice for row in rows}
    cost = sum(price.cost for prices in shown for price in prices)
    return cost, Plan(choices, rows, graph.group, workers, graph.batch, costs)


def _row(unit: Unit, way: str, prices: list[Price], memory: float) -> Row:
    moved, seconds = sum(price.bytes for price in prices), sum(price.seconds for price in prices)
    return Row(unit.name, way, unit.parameters, unit.features, moved, seconds, memory)


__all__ = ["Plan", "Row", "best_group", "plan"]
