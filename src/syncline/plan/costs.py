"""What cutting a layer costs: SINGA's counts of floats (S3, S4), or seconds on a cluster. And layers measured.

A price has what is compared, `cost`, and what is shown: bytes that move in one step, all processes, and seconds.
Not responsible for memory, nor for finding the cheapest plan.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncline.errors import UsageError
from syncline.parallel.program import Step
from syncline.parallel.windows import Route
from syncline.plan.graph import LayerGraph, Link, Unit

# -- SINGA's counts (S3): P parameters, D features of all layers, B examples, N workers in groups of M ----------


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
    cost: float
    bytes: float
    seconds: float = 0.0


class Singa:
    """Floats through the switch for one mini-batch of all groups (S4)."""

    ways = ("data", "model")

    def __init__(self, graph: LayerGraph, workers: int, local_update: bool) -> None:
        self._graph, self._groups = graph, workers / graph.group
        self._local = local_update and workers == graph.group

    def unit(self, unit: Unit, way: str) -> Price:
        copies = self._graph.group if way == "data" else 0 if self._local else 1
        return self._floats(2 * unit.parameters * copies)

    def whole(self, parameter: Tensor) -> Price:
        """Price a parameter that every process holds."""
        return self._floats(2 * parameter.numel() * self._graph.group)

    def link(self, link: Link, way: str, other: str) -> Price:
        """Of the model's result (other is "") nothing moves."""
        apart = other and (way, other) != ("data", "data")
        features = math.prod(link.made.shape) // self._graph.batch
        return self._floats(2 * features * self._graph.group * self._graph.batch if apart else 0)

    def _floats(self, count: int) -> Price:
        return Price(count * self._groups, 4 * count * self._groups)


class Measured:
    """Seconds of one step of a group: computation, moves up and down, gradients added in the group and at the table.

    Of the cluster it asks for `card`, `memory`, `compute` and `machine_of_learner`, as `Cluster` has them.
    """

    ways = ("data", "model", "spatial")

    def __init__(
        self,
        graph: LayerGraph,
        workers: int,
        local_update: bool,
        cluster: Any,
        compute: Mapping[str, float] | None,
        *,
        table: bool = True,
    ) -> None:
        self._graph, self._cluster, self._through = graph, cluster, table
        self._local = local_update and workers == graph.group
        self._moves: dict[tuple[int, int], tuple[float, int]] = {}
        self._places = [cluster.machine_of_learner(rank) for rank in range(graph.group)]
        self._wire = cluster.card if len(set(self._places)) > 1 else cluster.memory
        everywhere = {cluster.machine_of_learner(rank) for rank in range(workers)}
        self._table = cluster.card if len(everywhere) > 1 else cluster.memory
        work = sum(unit.work for unit in graph.units)
        if not work:
            raise UsageError(
                "plan: the model has no layers inside it that take time; put it into nn.Sequential"
            )
        each = cluster.compute.seconds(graph.batch) / work
        by_work = {unit.name: unit.work * each for unit in graph.units}
        self._seconds = compute if compute is not None else by_work
        missing = [unit.name for unit in graph.units if unit.parameters and unit.name not in self._seconds]
        if missing:
            raise UsageError(
                f"compute: no seconds for {', '.join(map(repr, missing))}; give them too, or leave it out"
            )

    def unit(self, unit: Unit, way: str) -> Price:
        size, _, copies = self._graph.held(unit, way)
        seconds = self._seconds.get(unit.name, 0.0) * self._graph.share(unit, way)
        return self._updated(size, copies, seconds)

    def whole(self, parameter: Tensor) -> Price:
        """Price a parameter that every process holds."""
        return self._updated(parameter.nbytes, True, 0.0)

    def _updated(self, size: int, copies: bool, seconds: float) -> Price:
        """Price the update of `size` bytes of parameters in each process, plus `seconds`. `copies`: all processes hold the same."""
        seats = self._graph.group
        copies = copies and seats > 1
        ring = 2 * size * (seats - 1) / seats if copies else 0.0
        apart = not self._through or (self._local and not copies)
        table = 0.0 if apart else 2 * size / (seats if copies else 1)  # pushed and read, by parts
        seconds += _seconds(self._table, table) + _seconds(self._wire, ring, 2 * (seats - 1))
        return Price(seconds, seats * (table + ring), seconds)

    def link(self, link: Link, way: str, other: str) -> Price:
        """Up and down; the model's results go up only."""
        times, moves = 2 if other else 1, [self._move(*each) for each in self._graph.routes(link, way, other)]
        seconds = times * sum(seconds for seconds, _ in moves)
        return Price(seconds, float(times * sum(moved for _, moved in moves)), seconds)

    def _move(self, route: Route, size: int) -> tuple[float, int]:
        """Seconds and bytes. Everybody sends and receives at once; a machine's card is shared by those on it."""
        key = id(route), size  # the graph keeps its routes, and many arrays have one
        if key in self._moves:
            return self._moves[key]
        out, into, inside = Counter[int](), Counter[int](), Counter[int]()
        for a, b in route.pieces:
            count, one, other = route.count(a, b) * size, self._places[a], self._places[b]
            if a != b and one == other:
                inside[b] += count
            elif a != b:
                out[one] += count
                into[other] += count
        between = max((*out.values(), *into.values()), default=0)
        within = _seconds(self._cluster.memory, max(inside.values(), default=0))
        self._moves[key] = _seconds(self._cluster.card, between) + within, route.moved * size
        return self._moves[key]


def _seconds(wire: Any, count: float, messages: int = 1) -> float:
    return messages * wire.latency + (count / wire.bandwidth if wire.bandwidth else 0.0) if count else 0.0


# -- layers measured --------------------------------------------------------------------------------------------


def measure(model: nn.Module, example: Any, *, times: int = 3) -> dict[str, float]:
    """Seconds of every layer, up and down, for a batch like the example, on this machine: the least of some times."""
    graph, found = LayerGraph(model, example, 1), Counter[str]()
    device = next(leaf.device for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor))
    for unit in graph.units:
        for step in unit.steps:
            if step.path is not None:
                layer = model.get_submodule(step.path)
                found[unit.name] += min(_once(layer, step, device) for _ in range(times))  # type: ignore[assignment]
    return dict(found)


def _once(layer: nn.Module, step: Step, device: torch.device) -> float:
    arrays = [slot.array for slot, _ in step.reads]
    inputs = [torch.zeros(array.shape, dtype=array.dtype, device=device) for array in arrays]
    learned = [x.requires_grad_() for x in inputs if x.is_floating_point()] + list(layer.parameters())
    _settle(device)
    start = time.perf_counter()
    leaves = pytree.tree_leaves(layer(*inputs))
    sums = [leaf.sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.grad(sums, learned, allow_unused=True)
    _settle(device)
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
