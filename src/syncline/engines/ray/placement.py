"""Which learner runs on which node, and on which of its GPUs. Pure: no Ray, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from syncline.engines.local.host_interface import Seats
from syncline.engines.run import RunSpec
from syncline.errors import UsageError
from syncline.roles.run_plan import Seat


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster, as Ray counts it."""

    id: str
    host: str
    cores: int
    gpus: int = 0
    home: bool = False  # the caller's own

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
    learners: int, nodes: Sequence[Node], *, most: int | None = None, servers: int = 0, seats: int = 1
) -> list[int]:
    """The node of every rank, as an index: each learner goes where most cores are left; the first nodes may be the servers'."""
    room = [0 if index < servers else room_on(node, most, seats) for index, node in enumerate(nodes)]
    if not any(room) and seats > 1:
        each = ", ".join(f"{node.cores} on {node}" for node in nodes[servers:])
        raise UsageError(
            f"group={seats}: the seats of a group share the memory of one node, a core for each, and no node has so many ({each}); "
            "take a smaller group, or one group over several machines under torchrun"
        )
    if sum(room) < learners:
        each = ", ".join(f"{count} on {node}" for node, count in zip(nodes, room, strict=True))
        limits = f" at learners_per_node={most}" if most else ""
        limits += f" (server_nodes={servers} are for the shards)" if servers else ""
        cores = (
            "as many cores" if seats == 1 else f"{seats} cores each on one node, for the seats of its group"
        )
        raise UsageError(
            f"learners={learners} need {cores}, the Ray cluster has room for {sum(room)}{limits}: {each}; "
            "add nodes, or ask for fewer learners"
        )
    counts: Counter[int] = Counter()
    for _ in range(learners):
        counts[max(range(len(nodes)), key=lambda node: (room[node] - counts[node], -node))] += 1
    return [node for node in range(len(nodes)) for _ in range(counts[node])]


def room_on(node: Node, most: int | None, seats: int) -> int:
    """Learners that a node has cores for."""
    return min(node.cores // seats, most or node.cores)


def spread(shards: int, dealt: Sequence[int], servers: int = 0) -> tuple[int, ...]:
    """The node of every shard: in turn over the servers' nodes, or over those with learners; the first is the caller's."""
    usable = list(range(servers)) if servers else sorted({0, *dealt})
    return tuple(usable[shard % len(usable)] for shard in range(shards))


def gpu_of(index: int, gpus: int) -> str:
    """The device of a node's learner of this index: GPUs are dealt in turn, several learners may share one."""
    if gpus == 0:
        raise UsageError('device="cuda" but this node has no GPU')
    return f"cuda:{index % gpus}"


class GpuDealer(Seats):
    """A machine's GPUs, dealt to its learners in turn; who leaves makes room."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._places: dict[int, int] = {}  # learner -> its place

    def __call__(self, spec: RunSpec, learner: int, rank: int) -> Seat:
        seat = spec.seat(rank)
        if seat.device != "cuda":
            return seat
        taken = set(self._places.values())
        place = self._places[learner] = next(each for each in range(len(taken) + 1) if each not in taken)
        devices = tuple(gpu_of(place * spec.group + each, self._gpus) for each in range(spec.group))
        return replace(seat, device=devices[0], devices=devices)

    def forget(self, learner: int) -> None:
        self._places.pop(learner, None)
