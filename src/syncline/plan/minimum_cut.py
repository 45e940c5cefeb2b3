"""The cheapest choice of one of two for every layer, exactly, by one minimum cut.

Costs are a number for each layer and choice, and a 2 × 2 table for each pair of layers that are connected; a table is
*submodular* when both alike costs no more than both mixed choices together. Pure; not responsible for what costs mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Table = Sequence[Sequence[float]]
Pairs = Mapping[tuple[int, int], Table]
TINY = 1e-12  # of the largest capacity: less is rounding


def is_submodular(table: Table) -> bool:
    (a, b), (c, d) = table
    return a + d <= b + c + TINY * max(abs(a), abs(b), abs(c), abs(d))


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
        least = TINY * max(self._left, default=0.0)
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
