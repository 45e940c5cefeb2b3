"""Models cut over the processes of a group: windows of arrays, moves between them, layers by type (C4, D1, S4)."""

from syncline.parallel.module import Part, Partitioned, partition
from syncline.parallel.move import Group, Move, joined
from syncline.parallel.rules import Want, layer
from syncline.parallel.windows import Box, cut, even

__all__ = [
    "Box",
    "Group",
    "Move",
    "Part",
    "Partitioned",
    "Want",
    "cut",
    "even",
    "joined",
    "layer",
    "partition",
]
