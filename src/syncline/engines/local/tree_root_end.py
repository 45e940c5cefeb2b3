"""The leading shard's end of a tree's nodes on shared memory: their sums come in, answers go out (M14).

A sum is many records, the last of which makes it one. Not responsible for what becomes of it (`topology.trunk`), nor for the memory
that it lies in, which is its node's.
"""

from __future__ import annotations

from collections import defaultdict, deque

from syncline.engines.local.exchange import Ring
from syncline.engines.local.record_codec import ANSWER, PART, WHOLE, Part, Record, encode_answer
from syncline.engines.local.shared_memory import Region, SharedWords
from syncline.messages.to_tree_nodes import ToNodes

PARTS, ANSWERS = 64, 256  # records; what has no room waits with who writes


def name_of(node: int) -> int:
    """Where learners have theirs."""
    return -1 - node


class NodeDesk:
    """Between one node and the leading shard: sums there, answers back; and the same with the node above it."""

    def __init__(self, region: Region) -> None:
        cells = SharedWords(region)
        both = Ring.words(PARTS) + Ring.words(ANSWERS)
        self.sums = Ring(cells, 0, capacity=PARTS, form=PART)
        self.answers = Ring(cells, Ring.words(PARTS), capacity=ANSWERS, form=ANSWER)
        self.over = Ring(cells, both, capacity=PARTS, form=PART)
        self.back = Ring(cells, both + Ring.words(PARTS), capacity=ANSWERS, form=ANSWER)
        region.close()

    @staticmethod
    def nbytes() -> int:
        return 16 * (Ring.words(PARTS) + Ring.words(ANSWERS))


class Branches:
    """All nodes, by name."""

    def __init__(self) -> None:
        self.desks: dict[int, NodeDesk] = {}
        self._parts: dict[int, list[Part]] = defaultdict(list)
        self._unsaid: dict[int, deque[Record]] = defaultdict(deque)  # what a desk has no room for

    def forget(self, name: int) -> None:
        for kept in (self.desks, self._parts, self._unsaid):
            kept.pop(name, None)

    def pop(self, name: int) -> list[Part] | None:
        """All of a node's next sum."""
        desk, parts = self.desks[name], self._parts[name]
        while (record := desk.sums.pop()) is not None:
            parts.append(Part.of(record))
            if parts[-1].learner == WHOLE:
                del self._parts[name]
                return parts
        return None

    def tell(self, message: ToNodes, name: int | None) -> list[int]:
        """One, or all; who has something to read now."""
        told = [name] if name is not None else list(self.desks)
        records = encode_answer(message)
        for each in told:
            self._unsaid[each].extend(records)
        return self.flush()

    def flush(self) -> list[int]:
        """Say what there is room for; who has something to read now."""
        told = []
        for name, unsaid in list(self._unsaid.items()):
            desk = self.desks.get(name)
            while unsaid and (desk is None or desk.answers.push(unsaid[0])):
                unsaid.popleft()
            if not unsaid:
                del self._unsaid[name]
            told.append(name)
        return told
