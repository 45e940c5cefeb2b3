"""What the leading shard tells the nodes of a tree (M14)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncline.protocols.tree_up import Count


@dataclass(frozen=True, slots=True)
class Taken:
    """A node's sum is in the sequence: the next may come."""

    table: int
    number: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A node's sum counts for nothing: it is to be made anew without these gradients, or with iterations counted so."""

    table: int
    number: int
    without: frozenset[tuple[int, int]] = frozenset()
    counted: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counted:
    """Tell all nodes how to form sums from now on."""

    table: int
    count: Count


ToNodes = Taken | Refused | Counted
