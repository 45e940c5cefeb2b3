"""The shape of a tree of servers (R7, M14): which learner sends to which leaf, which node to which above it.

Joins and losses in, moves out. The root (the shards) is `ROOT`; leaves are numbered first, then level by level upwards. On a
cluster a leaf is a machine (`Tree.over`). Not responsible for what travels (`tree_up`, `tree_down`), nor for starting anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from syncline.errors import UsageError

ROOT = -1


class Tree:
    """Consecutive learners share a leaf, consecutive nodes a node above them, at most `fan_in` each.

    Levels are added until the root has at most `fan_in` below it. After losses a node may have more.
    """

    def __init__(self, learners: Iterable[int], fan_in: int) -> None:
        leaves = dict(enumerate(_groups(list(learners), fan_in if fan_in > 1 else 1)))
        self._rise([*leaves] or [0], fan_in)
        self.leaf.update((learner, number) for number, group in leaves.items() for learner in group)

    @classmethod
    def over(cls, leaves: Sequence[int], fan_in: int, aside: Iterable[int] = ()) -> Tree:
        """Leaves of these names, whose learners are `place`d; those aside count for no level, and are below the root."""
        tree = cls.__new__(cls)
        tree._rise(leaves, fan_in, aside)
        return tree

    def _rise(self, leaves: Sequence[int], fan_in: int, aside: Iterable[int] = ()) -> None:
        if fan_in < 2:
            raise UsageError(f"a tree needs a fan-in of at least 2, got {fan_in}")
        self.fan_in = fan_in
        self.leaf: dict[int, int] = {}  # learner -> its leaf
        self._leaves = {*leaves, *aside}
        self.parent: dict[int, int] = dict.fromkeys(aside, ROOT)  # node -> the node above, or ROOT
        self._next = max(self._leaves) + 1  # the next node's number
        level = sorted(leaves)
        while len(level) > fan_in:
            groups, level = _groups(level, fan_in), []
            for group in groups:
                level.append(self._number())
                self.parent |= dict.fromkeys(group, level[-1])
        self.parent |= dict.fromkeys(level, ROOT)

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    @property
    def leaves(self) -> list[int]:
        return sorted(self._leaves)

    @property
    def nodes(self) -> list[int]:
        """In the order of their numbers: none above a node comes before it, but where a leaf was renewed."""
        return sorted(self.parent)

    @property
    def depth(self) -> int:
        """Levels between the learners and the root."""
        return max((len(self.way(leaf)) for leaf in self._leaves), default=0)

    def children(self, node: int) -> list[int]:
        """Learners of a leaf; nodes of any other, and of the root."""
        below = self.leaf if node in self._leaves else self.parent
        return [child for child, above in below.items() if above == node]

    def under(self, node: int) -> list[int]:
        """The learners whose gradients pass it."""
        return [learner for below in self.below(node).values() for learner in below]

    def below(self, node: int) -> dict[int, list[int]]:
        """Its children, and the learners whose gradients each passes on; a learner passes its own."""
        if node in self._leaves:
            return {learner: [learner] for learner in self.children(node)}
        found: dict[int, list[int]] = {child: [] for child in self.children(node)}
        for learner in self.leaf:
            route = [*self.route(learner), ROOT]
            if node in route:
                found[route[route.index(node) - 1]].append(learner)
        return found

    def route(self, learner: int) -> list[int]:
        """The nodes from its leaf to the one below the root."""
        return self.way(self.leaf[learner])

    def way(self, node: int) -> list[int]:
        """It, and those above it."""
        nodes = [node]
        while (node := self.parent[node]) != ROOT:
            nodes.append(node)
        return nodes

    def join(self, learner: int) -> int:
        """The leaf with the fewest learners."""
        counts = Counter(self.leaf.values())
        leaf = self.leaf[learner] = min(self.leaves, key=lambda leaf: counts[leaf])
        return leaf

    def place(self, learner: int, leaf: int) -> None:
        """It sends there."""
        self.leaf[learner] = leaf

    def leave(self, learner: int) -> None:
        self.leaf.pop(learner, None)

    def lose(self, node: int) -> dict[int, int | None]:
        """A node is gone: what was directly below it, and where that goes; None: nowhere, it leaves.

        Learners go to the emptiest of the other leaves, nodes to the one above the lost one.
        """
        above = self.parent.pop(node)
        orphans = self.children(node)
        if node not in self._leaves:
            self.parent |= dict.fromkeys(orphans, above)
            return dict.fromkeys(orphans, above)
        self._leaves.discard(node)
        for learner in orphans:
            del self.leaf[learner]
        return {learner: self.join(learner) if self._leaves else None for learner in orphans}

    def renew(self, leaf: int) -> int:
        """A leaf is gone, and another takes its place with all its learners: its number."""
        new = self._number()
        self.parent[new] = self.parent.pop(leaf)
        self._leaves = self._leaves - {leaf} | {new}
        self.leaf = {learner: new if at == leaf else at for learner, at in self.leaf.items()}
        return new


def _groups(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
