"""What cutting a layer costs: SINGA's counts of floats (S3, S4), or seconds on a cluster, and memory in each process.

Not responsible for finding the cheapest plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.parallel.windows import Route
from syncline.plan.cut import Table
from syncline.plan.graph import LayerGraph, Unit


class Wire(Protocol):
    latency: float
    bandwidth: float | None


class Machines(Protocol):
    """What is asked of a `Cluster`."""

    @property
    def card(self) -> Any: ...
    @property
    def memory(self) -> Any: ...
    @property
    def compute(self) -> Any: ...
    def machine_of_learner(self, rank: int) -> int: ...


# -- SINGA's counts (S3): P parameters, D features of all layers, B examples, N workers in groups of M -----------


def data_parallel(P: float, N: float) -> float:
    return 2 * P * N


def model_parallel(D: float, N: float, B: float) -> float:
    return 2 * D * N * B


def grouped(P: float, N: float, D: float, B: float, M: float) -> float:
    return 2 * P * N / M + 2 * D * B * M


def best_group(P: float, N: float, D: float, B: float) -> float:
    """The M at which groups cost least, √(PN/(DB)), between 1 and N."""
    return min(float(N), max(1.0, math.sqrt(P * N / (D * B))))


@dataclass(frozen=True, slots=True)
class Price:
    """Of one layer in one way, or of one link: what is compared, and what is shown."""

    cost: float
    bytes: float = 0.0
    seconds: float = 0.0


class Singa:
    """Floats through the switch for one mini-batch of all groups (S4)."""

    ways = ("data", "model")

    def __init__(self, graph: LayerGraph, workers: int, local_update: bool) -> None:
        self._graph, self._groups = graph, workers / graph.group
        self._local = local_update and workers == graph.group

    def unit(self, unit: Unit, way: str) -> Price:
        copies = self._graph.group if way == "data" else 0 if self._local else 1
        floats = 2 * unit.parameters * copies * self._groups
        return Price(floats, 4 * floats)

    def link(
        self, features: int, routes: Sequence[tuple[Route, int]], way: str, other: str, end: bool
    ) -> Price:
        together = (way == "data" and other == "data") or end
        floats = 0 if together else 2 * features * self._graph.group * self._graph.batch * self._groups
        return Price(floats, 4 * floats)


class Measured:
    """Seconds of one step of a group: computation, moves up and down, gradients added in the group and at the table."""

    ways = ("data", "model", "spatial")

    def __init__(
        self,
        graph: LayerGraph,
        workers: int,
        local_update: bool,
        cluster: Machines,
        compute: Mapping[str, float] | None,
    ) -> None:
        self._graph, self._cluster = graph, cluster
        self._local = local_update and workers == graph.group
        self._places = [cluster.machine_of_learner(rank) for rank in range(graph.group)]
        self._seconds = dict(compute) if compute is not None else self._by_work()
        if missing := [
            unit.name for unit in graph.units if unit.parameters and unit.name not in self._seconds
        ]:
            raise UsageError(
                f"compute: no seconds for layer {missing[0]!r}; give them for {', '.join(missing)}, or leave it out"
            )

    def _by_work(self) -> dict[str, float]:
        """The cluster's seconds for the batch, shared out by work."""
        whole = self._cluster.compute.seconds(self._graph.batch)
        work = sum(unit.work for unit in self._graph.units)
        return {unit.name: whole * unit.work / work for unit in self._graph.units}

    def unit(self, unit: Unit, way: str) -> Price:
        size, _, copies = self._graph.held(unit, way)
        seats = self._graph.group
        seconds = self._seconds.get(unit.name, 0.0) * self._graph.share(unit, way)
        table = (
            0.0 if self._local and not copies else 2 * size / (seats if copies else 1)
        )  # pushed and read, by parts
        ring = 2 * size * (seats - 1) / seats if copies and seats > 1 else 0.0
        link = self._slowest()
        if size:
            seconds += self._transfer(table, link) + self._transfer(ring, link, 2 * (seats - 1))
        return Price(seconds, seats * (table + ring), seconds)

    def link(
        self, features: int, routes: Sequence[tuple[Route, int]], way: str, other: str, end: bool
    ) -> Price:
        """Up and down; the model's results go up only."""
        times = 1 if end else 2
        seconds = times * sum(self._route(*each) for each in routes)
        return Price(seconds, float(times * sum(route.moved * size for route, size in routes)), seconds)

    def _route(self, route: Route, size: int) -> float:
        """Everybody sends and receives at once; a machine's card is shared by those on it."""
        if not route.moved:
            return 0.0
        out: dict[int, float] = {}
        into: dict[int, float] = {}
        inside = [0.0] * self._graph.group
        for a, b in route.pieces:
            count = route.count(a, b) * size
            if a != b and self._places[a] == self._places[b]:
                inside[b] += count
            elif a != b:
                out[self._places[a]] = out.get(self._places[a], 0.0) + count
                into[self._places[b]] = into.get(self._places[b], 0.0) + count
        between = max((*out.values(), *into.values()), default=0.0)
        return (self._transfer(between, self._cluster.card) if between else 0.0) + (
            self._transfer(max(inside), self._cluster.memory) if max(inside) else 0.0
        )

    def _slowest(self) -> Wire:
        wire: Wire = self._cluster.card if len(set(self._places)) > 1 else self._cluster.memory
        return wire

    def _transfer(self, count: float, wire: Wire, messages: int = 1) -> float:
        return messages * wire.latency + (count / wire.bandwidth if wire.bandwidth else 0.0) if count else 0.0


def table_of(
    graph: LayerGraph, prices: Singa | Measured, index: int, ways: Sequence[str], others: Sequence[str]
) -> list[list[Price]]:
    """A link's prices for every pair of ways of its ends."""
    link = graph.links[index]
    unit, call, result = link.source
    made = graph.units[unit].steps[call].outs[result].array
    features = math.prod(made.shape) // graph.batch
    end = link.target[0] < 0
    rows = []
    for way in ways:
        row = []
        for other in others:
            routes = [] if isinstance(prices, Singa) else graph.routes(link, way, other)
            row.append(prices.link(features, routes, way, other, end))
        rows.append(row)
    return rows


def numbers(prices: Sequence[Sequence[Price]]) -> Table:
    return [[price.cost for price in row] for row in prices]


def memory_of(graph: LayerGraph, unit: Unit, way: str, states: int) -> float:
    """Bytes in the fullest process: weights, gradients, the optimizer's states, and what backward needs."""
    parameters, activations, _ = graph.held(unit, way)
    return float((2 + states) * parameters + activations)


def measure(model: torch.nn.Module, example: Any, *, times: int = 3) -> dict[str, float]:
    """Seconds of every layer, up and down, for a batch like the example, on this machine: the least of some times."""
    args = example if isinstance(example, tuple) else (example,)
    graph = LayerGraph(model, example, 1)
    device = next((t.device for t in args if isinstance(t, Tensor)), torch.device("cpu"))
    found: dict[str, float] = {}
    for unit in graph.units:
        for step in unit.steps:
            if step.path is not None:
                layer = model.get_submodule(step.path)
                seconds = min(_once(layer, step, device) for _ in range(times))
                found[unit.name] = found.get(unit.name, 0.0) + seconds
    return found


def _once(layer: torch.nn.Module, step: Any, device: torch.device) -> float:
    inputs = [
        torch.zeros(
            slot.array.shape,
            dtype=slot.array.dtype,
            device=device,
            requires_grad=slot.array.dtype.is_floating_point,
        )
        for slot, _ in step.reads
    ]
    _settle(device)
    start = time.perf_counter()
    results = layer(*inputs)
    tensors = [
        t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad
    ]
    torch.autograd.grad(
        [t.sum() for t in tensors],
        [t for t in inputs if t.requires_grad] + list(layer.parameters()),
        allow_unused=True,
    )
    _settle(device)
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
