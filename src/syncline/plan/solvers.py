"""The cheapest choice of one of several for every layer, exactly, under a limit on memory, for any graph.

Costs are a number for each layer and choice, and a table for each pair of layers that are connected. With two choices and
2 × 2 tables that are all *submodular* (both alike cost no more than both mixed choices together) it is one minimum cut. Else
layers are eliminated one after the other, those with few neighbours first: of each the best choices for every choice
of its neighbours are kept. With a limit these are fronts: pairs of cost and memory of which none is worse in both.
Pure; not responsible for what costs and memory mean.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Table = Sequence[Sequence[float]]
Pairs = Mapping[tuple[int, int], Table]
Rows = Sequence[Sequence[float]]  # by layer and choice
Entry = tuple[float, float, Any]  # cost, memory, how it came about
Front = list[Entry]
TINY = 1e-9
ROUNDS = 24  # of looking for a price of memory


def cheapest(costs: Rows, pairs: Pairs, memory: Rows, limit: float = math.inf) -> list[int] | None:
    """The number of a choice for each layer; None if nothing fits into the limit."""
    found = _priced(costs, pairs, memory, 0.0)
    if total(found, memory) <= limit:
        return found
    if sum(map(min, memory)) > limit:
        return None
    found = [row.index(min(row)) for row in memory]
    low, price = 0.0, math.inf
    for _ in range(ROUNDS):  # the least price at which the memory suffices, to some digits
        middle = (low + price) / 2
        if price == math.inf:
            middle = max(2 * low, total(found, costs, pairs) / max(limit, TINY), TINY)
        tried = _priced(costs, pairs, memory, middle)
        if total(tried, memory) > limit:
            low = middle
            continue
        price = middle
        found = min(found, tried, key=lambda each: total(each, costs, pairs))
    # No solution that fits is cheaper than the one at hand if a part of it is worse, at this price, by more than this
    # than another part for the same neighbours: at a price nothing is cheaper than the cheapest (duality).
    price = low if price == math.inf else price
    least = _priced(costs, pairs, memory, price)
    gap = total(found, costs, pairs) + price * limit
    gap = gap - total(least, costs, pairs) - price * total(least, memory)
    return _eliminate(costs, pairs, memory, limit, price, gap + TINY + 1e-9 * abs(gap))


def total(choices: Sequence[int], rows: Rows, pairs: Pairs | None = None) -> float:
    inner = sum(rows[i][choice] for i, choice in enumerate(choices))
    return inner + sum(table[choices[i]][choices[j]] for (i, j), table in (pairs or {}).items())


def _priced(costs: Rows, pairs: Pairs, memory: Rows, price: float) -> list[int]:
    """The cheapest with memory at a price, and no limit."""
    rows = [[c + price * m for c, m in zip(*each, strict=True)] for each in zip(costs, memory, strict=True)]
    if all(len(row) == 2 for row in rows) and all(is_submodular(table) for table in pairs.values()):
        return minimum_cut(rows, pairs)
    found = _eliminate(rows, pairs, [[0.0] * len(row) for row in rows])
    assert found is not None
    return found


@dataclass(slots=True)
class _Factor:
    """Fronts for every choice of some layers; the layers eliminated into it need at least `least` memory."""

    scope: tuple[int, ...]
    fronts: dict[tuple[int, ...], Front]
    least: float = 0.0


def _eliminate(
    costs: Rows,
    pairs: Pairs,
    memory: Rows,
    limit: float = math.inf,
    price: float = 0.0,
    gap: float = math.inf,
) -> list[int] | None:
    holders: list[list[_Factor]] = [[] for _ in costs]  # by layer, the factors with it in scope
    for pair, table in pairs.items():
        keys = product(*(range(len(costs[i])) for i in pair))
        factor = _Factor(pair, {(a, b): [(table[a][b], 0.0, None)] for a, b in keys})
        for i in pair:
            holders[i].append(factor)
    least = [min(row) for row in memory]
    everything, left, ends = sum(least), set(range(len(costs))), list[_Factor]()
    queue = [(_degree(found), i) for i, found in enumerate(holders)]
    heapq.heapify(queue)
    while left:
        degree, layer = heapq.heappop(queue)
        mine = holders[layer]
        if layer not in left or degree != _degree(mine):  # an entry of the past
            continue
        floor = least[layer] + sum(factor.least for factor in mine)
        scope = tuple(sorted({i for factor in mine for i in factor.scope} - {layer}))
        made = _Factor(scope, {}, floor)
        for key in product(*(range(len(costs[i])) for i in scope)):
            chosen = dict(zip(scope, key, strict=True))
            entries = _entries(layer, mine, chosen, costs[layer], memory[layer])
            made.fronts[key] = _best(entries, limit - (everything - floor), price, gap)
        left.remove(layer)
        for i in scope:
            holders[i] = [factor for factor in holders[i] if layer not in factor.scope] + [made]
            heapq.heappush(queue, (_degree(holders[i]), i))
        ends += [made] if not scope else []
    front: Front = [(0.0, 0.0, None)]
    for factor in ends:
        front = _best(_sums(front, factor.fronts[()]), limit, price, gap)
    return _read(min(front, key=lambda entry: entry[0])[2], len(costs)) if front else None


def _degree(factors: list[_Factor]) -> int:
    return len({i for factor in factors for i in factor.scope})


def _entries(
    layer: int, factors: list[_Factor], chosen: dict[int, int], costs: Sequence[float], sizes: Sequence[float]
) -> Front:
    """Every choice of a layer with all that was eliminated beside it, its neighbours' being chosen."""
    entries: Front = []
    for choice, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        front: Front = [(cost, size, None)]
        for factor in factors:
            where = tuple(choice if i == layer else chosen[i] for i in factor.scope)
            front = _best(_sums(front, factor.fronts[where]))
        entries += [(c, m, ((layer, choice), made)) for c, m, made in front]
    return entries


def _sums(one: Front, two: Front) -> Front:
    return [(a[0] + b[0], a[1] + b[1], (a[2], b[2])) for a in one for b in two]


def _best(entries: Front, room: float = math.inf, price: float = 0.0, gap: float = math.inf) -> Front:
    """Those that fit, are not beaten in cost and memory, and can be part of the best."""
    kept: Front = []
    for entry in sorted(entries, key=lambda each: each[:2]):
        if entry[1] <= room and (not kept or entry[1] < kept[-1][1]):
            kept.append(entry)
    bound = min((cost + price * size for cost, size, _ in kept), default=0.0) + gap
    return [entry for entry in kept if entry[0] + price * entry[1] <= bound] if gap < math.inf else kept


def _read(made: Any, count: int) -> list[int]:
    """The choices, out of how an entry came about."""
    found, ends = [0] * count, [made]
    while ends:
        end = ends.pop()
        if end is not None and isinstance(end[0], int):
            found[end[0]] = end[1]
        elif end is not None:
            ends += end
    return found


# -- minimum cuts ----------------------------------------------------------------------------------------------

LEAST = 1e-12  # of the largest capacity: less is rounding


def is_submodular(table: Table) -> bool:
    (a, b), (c, d) = table
    return a + d <= b + c + LEAST * max(abs(a), abs(b), abs(c), abs(d))


def minimum_cut(costs: Sequence[Sequence[float]], pairs: Pairs) -> list[int]:
    """0 or 1 for each, with the least sum of all costs. Every pair has to be submodular."""
    rises = [one - zero for zero, one in costs]  # what choice 1 costs more
    network = FlowNetwork(len(costs) + 2)
    for (i, j), ((a, b), (c, d)) in pairs.items():
        rises[i] += c - a
        rises[j] += d - c
        network.add(i, j, max(0.0, b + c - a - d))
    source, sink = len(costs), len(costs) + 1
    for i, rise in enumerate(rises):
        network.add(source, i, rise) if rise > 0 else network.add(i, sink, -rise)
    reached = network.saturate(source, sink)
    return [0 if i in reached else 1 for i in range(len(costs))]


class FlowNetwork:
    """Pipes with capacities; flow is pushed along shortest ways until none is left (Dinic)."""

    def __init__(self, nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(nodes)]  # numbers of pipes; ^ 1 is the way back
        self._to: list[int] = []
        self._left: list[float] = []

    def add(self, start: int, end: int, capacity: float) -> None:
        for a, b, room in ((start, end, capacity), (end, start, 0.0)):
            self._out[a].append(len(self._to))
            self._to.append(b)
            self._left.append(room)

    def saturate(self, source: int, sink: int) -> set[int]:
        """Push what can be pushed; the nodes that can still be reached."""
        least = LEAST * max(self._left, default=0.0)
        while True:
            depth = self._depths(source, least)
            if sink not in depth:
                return set(depth)
            at = [0] * len(self._out)
            while path := self._path(source, sink, depth, at, least):
                amount = min(self._left[pipe] for pipe in path)
                for pipe in path:
                    self._left[pipe] -= amount
                    self._left[pipe ^ 1] += amount

    def _depths(self, source: int, least: float) -> dict[int, int]:
        depth, ring = {source: 0}, [source]
        while ring:
            found = []
            for node in ring:
                for pipe in self._out[node]:
                    if self._left[pipe] > least and self._to[pipe] not in depth:
                        depth[self._to[pipe]] = depth[node] + 1
                        found.append(self._to[pipe])
            ring = found
        return depth

    def _path(self, source: int, sink: int, depth: dict[int, int], at: list[int], least: float) -> list[int]:
        """A way on which something can be pushed; `at` remembers which pipes of a node are used up."""
        path: list[int] = []
        node = source
        while node != sink:
            pipes = self._out[node]
            while at[node] < len(pipes):
                pipe = pipes[at[node]]
                if self._left[pipe] > least and depth.get(self._to[pipe], -1) == depth[node] + 1:
                    break
                at[node] += 1
            if at[node] < len(pipes):
                path.append(pipes[at[node]])
                node = self._to[path[-1]]
            elif path:
                node = self._to[path.pop() ^ 1]
                at[node] += 1
            else:
                return []
        return path
