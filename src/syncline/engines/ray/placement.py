"""Which learner runs on which node, and on which of its GPUs. Pure: no Ray, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syncline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster, as Ray counts it."""

    id: str
    host: str
    cores: int
    gpus: int = 0
    home: bool = False  # the caller's own: the shards are there

    def __str__(self) -> str:
        return f"{self.host} ({self.id[:8]})"


def chosen_nodes(nodes: Sequence[Node], count: int | None) -> list[Node]:
    """The caller's own first, then the largest; all without a number."""
    if not any(node.home for node in nodes):
        raise UsageError("the process that starts the run is on no node of this Ray cluster: start it on one")
    ordered = sorted(nodes, key=lambda node: (not node.home, -node.cores, node.id))
    if count is None:
        return ordered
    if count > len(ordered):
        raise UsageError(
            f"nodes={count}, but the Ray cluster has {len(ordered)}: {', '.join(map(str, ordered))}; "
            "add some with `ray start --address=...`, or ask for fewer"
        )
    return ordered[:count]


def deal(
    learners: int, nodes: Sequence[Node], *, most: int | None = None, servers_alone: bool = False
) -> list[int]:
    """The node of every rank, as an index: each learner goes where most cores are left."""
    room = [0 if node.home and servers_alone else min(node.cores, most or node.cores) for node in nodes]
    if sum(room) < learners:
        raise UsageError(_too_few(learners, nodes, room, most, servers_alone))
    counts: Counter[int] = Counter()
    for _ in range(learners):
        counts[max(range(len(nodes)), key=lambda node: (room[node] - counts[node], -node))] += 1
    return [node for node in range(len(nodes)) for _ in range(counts[node])]


def _too_few(
    learners: int, nodes: Sequence[Node], room: Sequence[int], most: int | None, servers_alone: bool
) -> str:
    each = ", ".join(f"{count} on {node}" for node, count in zip(nodes, room, strict=True))
    limits = f" at learners_per_node={most}" if most else ""
    limits += " (server_nodes=1 keeps the first for the shards)" if servers_alone else ""
    return (
        f"learners={learners} need as many cores, the Ray cluster has room for {sum(room)}{limits}: {each}; "
        "add nodes, or ask for fewer learners"
    )


def next_node(counts: Sequence[int], usable: Iterable[int]) -> int | None:
    """Where one more learner goes: to the usable node with the fewest; None without one."""
    return min(usable, key=lambda node: (counts[node], node), default=None)


def gpu_of(index: int, gpus: int) -> str:
    """The device of a node's learner of this index: GPUs are dealt in turn, several learners may share one."""
    if gpus == 0:
        raise UsageError('device="cuda" but this node has no GPU')
    return f"cuda:{index % gpus}"
