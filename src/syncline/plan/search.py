"""`plan(model, example, cluster, group)`: the cheapest way to cut every layer, as a record to print, save and edit.

Not responsible for cutting: `parallel` takes `plan.choices`.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncline.errors import UsageError
from syncline.parallel.module import arguments_of
from syncline.parallel.program import chosen
from syncline.plan.costs import Measured, Price, Singa
from syncline.plan.graph import LayerGraph
from syncline.plan.solvers import cheapest

WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A layer in the way it is cut: bytes that move for it in one step, all processes; seconds; bytes held by each.

    With the choice WHOLE it is a parameter that no layer of the plan holds.
    """

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
    rows: tuple[PlanRow, ...]
    group: int
    workers: int
    batch: int  # of a group
    costs: str
    # of the model: name ("" by place), shape, dtype
    inputs: tuple[tuple[str, tuple[int, ...], str], ...] = ()

    @property
    def example(self) -> Any:
        """What the model reads, as shapes; None where that is more than tensors."""
        names = [name for name, _, _ in self.inputs]
        tensors = [torch.empty(s, dtype=getattr(torch, k), device="meta") for _, s, k in self.inputs]
        if not tensors:
            return None
        return dict(zip(names, tensors, strict=True)) if names[0] else tuple(tensors)

    @property
    def layers(self) -> dict[str, int]:
        """Parameters by layer: what the model has to have."""
        return {row.layer: row.parameters for row in self.rows}

    @property
    def whole(self) -> dict[str, int]:
        """Names and sizes of the parameters that no layer of the plan holds: every process has all of them."""
        return {row.layer: row.parameters for row in self.rows if row.choice == WHOLE}

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
        count = sum(row.parameters for row in self.rows)
        rows = [*self.rows, PlanRow("all", "", count, 0, self.bytes, self.seconds, self.memory)]
        lines = [("layer", "choice", "parameters", "bytes", "seconds", "memory")]
        for row in rows:
            choice, seconds = self.choices.get(row.layer, row.choice), f"{row.seconds:.6f}"
            counts = (f"{row.parameters:,}", f"{row.bytes:,.0f}", seconds, f"{row.memory:,.0f}")
            lines.append((row.layer, choice, *counts))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        form = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<<>>>>", widths, strict=True))
        groups = f"{self.workers // self.group} groups" if self.workers > self.group else "a group"
        head = f"{groups} of {self.group}, {self.batch} examples each, costs {self.costs}"
        foot = []
        if whole := self.whole:
            foot = [
                f"{sum(whole.values()):,} parameters are read by no layer that the plan knows, and held whole by every process: "
                f"{', '.join(whole)}"
            ]
        return "\n".join([head, *(form.format(*line) for line in lines), *foot])

    def save(self, file: Path | str) -> None:
        Path(file).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path | str) -> Plan:
        try:
            record = json.loads(Path(file).read_text(encoding="utf-8"))
            rows = tuple(PlanRow(**row) for row in record["rows"])
            inputs = tuple((name, tuple(shape), kind) for name, shape, kind in record.get("inputs", ()))
            return cls(**{**record, "rows": rows, "inputs": inputs})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} is no plan: {error}") from error


@contextmanager
def _without_collections() -> Iterator[None]:
    """Graphs are many small objects that stay: going through all of torch's for them took half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collections()
def plan(
    model: nn.Module,
    example: Any,
    cluster: Any = None,
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
    if isinstance(cluster, str):
        raise UsageError(f"plan: the cluster is a record: Cluster.parse({cluster!r})")
    one_machine = cluster is not None and cluster.learners_per_machine is None
    everybody = workers or group or (cluster.cores if one_machine else None)
    if everybody is None:
        raise UsageError(
            "plan: say group= (processes that hold one model) or workers= (all, and the best group is found)"
        )
    costs = costs or ("singa" if cluster is None else "measured")
    if costs not in ("singa", "measured") or (costs == "measured" and cluster is None):
        raise UsageError(
            f"plan: costs are 'singa', or 'measured' with a cluster; got {costs!r} and cluster {cluster!r}"
        )
    sizes = [size for size in range(1, everybody + 1) if everybody % size == 0 and group in (None, size)]
    if not sizes:
        raise UsageError(f"plan: group is a whole number that divides the {everybody} workers, got {group!r}")
    found: list[tuple[float, Plan]] = []
    errors = []  # the first is the reason where no size can be
    for size in sizes:
        try:
            dealt = _dealt(example, size, everybody, batch_dim)
            graph = LayerGraph(model, dealt, size, grid=grid, batch_dim=batch_dim)
            prices: Any = Singa(graph, everybody, local_update)
            if costs == "measured":
                prices = Measured(graph, everybody, local_update, cluster, compute)
            graph.find_ways(prices.ways)
            _keep(graph, given or {})
            graph.settle_shared()
            cost, best = _cheapest(graph, prices, memory, states, everybody, costs)
            found.append((cost, replace(best, inputs=shapes_of(dealt))))
        except UsageError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda pair: pair[0])[1]


@_without_collections()
def step_seconds(
    model: nn.Module,
    example: Any,
    cluster: Any,
    group: int,
    choices: Mapping[str, str],
    compute: Mapping[str, float] | None = None,
) -> float:
    """Of a group whose layers are cut so, those with parameters that are not named by examples; without what goes to the table."""
    graph = LayerGraph(model, example, group)
    prices = Measured(graph, group, True, cluster, compute, table=False)
    graph.find_ways((*prices.ways, *({"rows"} & set(choices.values()))))
    names = [unit.name for unit in graph.units]
    named = {key: way for key, way in choices.items() if key in names or set(key) & set("*?[")}
    cut = chosen(named, names, names)
    rest = {unit.name: "data" for unit in graph.units if unit.holds and unit.name not in cut}
    _keep(graph, {**cut, **rest})
    return _cheapest(graph, prices, math.inf, 0, group, "measured")[1].seconds


def shapes_of(example: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Shapes by name or place, where the model reads tensors only."""
    args, kwargs = arguments_of(example)
    pairs = [*(("", value) for value in args), *kwargs.items()]
    if not all(isinstance(value, Tensor) for _, value in pairs):
        return ()
    return tuple((name, tuple(value.shape), str(value.dtype).split(".")[1]) for name, value in pairs)


def _dealt(example: Any, group: int, workers: int, dim: int) -> Any:
    """A group's part of the mini-batch, as shapes."""
    if group == workers:
        return example
    batch = next(leaf.shape[dim] for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor))
    if batch * group % workers:
        raise UsageError(f"plan: a mini-batch of {batch} cannot be dealt to {workers // group} groups")

    def part(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if len(shape) > dim and shape[dim] == batch:
            shape[dim] = batch * group // workers
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(Tensor, part, example)


def _keep(graph: LayerGraph, given: Mapping[str, str]) -> None:
    """Leave given choices as the only ones."""
    names = [unit.name for unit in graph.units]
    for name, way in chosen(given, names, names).items():
        unit = graph.units[names.index(name)]
        if way not in unit.ways:
            for step in unit.steps:
                step.rule.place(replace(step.call, way=way))  # says why it cannot
            raise UsageError(
                f"plan: {name!r} cannot be cut as {way!r} with these costs, but as {', '.join(unit.ways)}"
            )
        unit.ways = {way: unit.ways[way]}


def _cheapest(
    graph: LayerGraph, prices: Any, limit: float, states: int, workers: int, costs: str
) -> tuple[float, Plan]:
    """Cost and plan. Moves are counted with the layer that reads, those of the result with the layer that makes it."""
    ways = [list(unit.ways) for unit in graph.units]
    own = [[prices.unit(unit, way) for way in unit.ways] for unit in graph.units]
    memory = [[0.0 for way in unit.ways] for unit in graph.units]
    if limit < math.inf:
        memory = [[graph.memory(unit, way, states) for way in unit.ways] for unit in graph.units]
    rows = [[price.cost for price in each] for each in own]
    pairs: dict[tuple[int, int], list[list[float]]] = {}
    tables: list[list[list[Price]]] = []
    for link in graph.links:
        others = ways[link.target[0]] if link.target[0] >= 0 else [""]
        tables.append([[prices.link(link, way, other) for other in others] for way in ways[link.source[0]]])
        costs_of = [[price.cost for price in row] for row in tables[-1]]
        _add(link.source[0], link.target[0], costs_of, rows, pairs)
    rest = {name: prices.whole(parameter) for name, parameter in graph.rest.items()}
    beside = {name: float((2 + states) * parameter.nbytes) for name, parameter in graph.rest.items()}
    best = cheapest(rows, pairs, memory, limit - sum(beside.values()))
    if best is None:
        least = sum(map(min, memory)) + sum(beside.values())
        raise UsageError(
            f"plan: a process needs at least {least:,.0f} bytes with {graph.group} in the group, the limit is "
            f"{limit:,.0f}: take a larger group, a smaller batch, or an optimizer with fewer states"
        )
    shown = [[own[i][choice]] for i, choice in enumerate(best)]
    for link, table in zip(graph.links, tables, strict=True):
        a, b = link.source[0], link.target[0]
        shown[b if b >= 0 else a].append(table[best[a]][best[b] if b >= 0 else 0])
    made = []
    for i, unit in enumerate(graph.units):
        moved, seconds = sum(price.bytes for price in shown[i]), sum(price.seconds for price in shown[i])
        way = ways[i][best[i]]
        held = graph.memory(unit, way, states)
        made.append(PlanRow(unit.name, way, unit.parameters, unit.features, moved, seconds, held))
    choices = {row.layer: row.choice for row in made}
    for name, price in rest.items():
        count = graph.rest[name].numel()
        made.append(PlanRow(name, WHOLE, count, 0, price.bytes, price.seconds, beside[name]))
    cost = sum(price.cost for each in (*shown, rest.values()) for price in each)
    return cost, Plan(choices, tuple(made), graph.group, workers, graph.batch, costs)


def _add(
    a: int, b: int, table: list[list[float]], rows: Any, pairs: dict[tuple[int, int], list[list[float]]]
) -> None:
    """To the pair's table; a link of a unit with itself, or to the result, is the unit's own cost."""
    if b < 0 or a == b:
        rows[a] = [cost + table[i][0 if b < 0 else i] for i, cost in enumerate(rows[a])]
        return
    if (b, a) in pairs:
        a, b, table = b, a, [list(column) for column in zip(*table, strict=True)]
    held = pairs.get((a, b), [[0.0] * len(row) for row in table])
    pairs[a, b] = [[x + y for x, y in zip(*each, strict=True)] for each in zip(held, table, strict=True)]
