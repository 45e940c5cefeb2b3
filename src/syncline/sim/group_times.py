"""A cluster whose learners are groups of seats: how long a group's step takes by its plan, and what it shares of machines and cards.

To the simulator a group is one learner (M15). Not responsible for the plan, nor for what moves between seats: `plan` prices that.
"""

from __future__ import annotations

from dataclasses import replace

from syncline.cluster import Cluster, Compute


def seats_of(cluster: Cluster, group: int) -> Cluster:
    """As one seat finds it: the others on its machine crowd it and share the cores."""
    here = min(group, cluster.learners_per_machine or group)
    cores = cluster.cores or here
    slower = (1 + cluster.crowding * (min(here, cores) - 1)) * max(1.0, here / cores)
    usual = cluster.compute
    return replace(cluster, compute=Compute(base=usual.base * slower, per_example=usual.per_example * slower))


def groups_of(cluster: Cluster, group: int, compute: Compute) -> Cluster:
    """The same machines with a group, which takes so long, in the place of its seats.

    Jitter and stragglers are those of groups, and a group is as slow as its slowest seat; one on several machines has all their cards.
    """
    per_machine = cluster.learners_per_machine
    here = min(group, per_machine or group)
    beside = cluster.crowding * here / (1 + cluster.crowding * (here - 1))
    machines, bandwidth = -(-group // here), cluster.card.bandwidth
    speeds = [1.0] * (-len(cluster.speeds) % group)
    dealt = (*cluster.speeds, *speeds)
    return replace(
        cluster,
        compute=compute,
        crowding=beside,
        speeds=tuple(min(dealt[first : first + group]) for first in range(0, len(dealt), group)),
        learners_per_machine=max(1, per_machine // group) if per_machine is not None else None,
        cores=max(1, cluster.cores // here) if cluster.cores is not None else None,
        card=replace(cluster.card, bandwidth=bandwidth * machines if bandwidth is not None else None),
        copy=replace(cluster.copy, per_byte=cluster.copy.per_byte / group),
    )
