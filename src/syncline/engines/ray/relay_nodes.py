"""A relay's ways between the nodes of a tree on several machines: sums go up, answers come back (M14).

A sum goes as a learner's gradient does: its values first, to every machine with shards or to that of the node above, then its tickets.
What the leading shard reads in learners' own slots (random states, buffers) goes to its machine before them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.engines.local.exchange import Ring
from syncline.engines.local.record_codec import ANSWER, BESIDE, PART, WHOLE, Part, Record, Whole
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.tree_root_end import NodeDesk
from syncline.engines.ray.bulk_connection import Frame
from syncline.engines.ray.frame_kinds import Kind, place_of, unplaced

if TYPE_CHECKING:
    from syncline.engines.ray.relay import Running


@dataclass(frozen=True, slots=True)
class SumOut:
    """A sum that is to leave this machine."""

    kind: Kind
    site: int  # where its tickets go
    parts: list[Part]

    @property
    def body(self) -> bytes:
        return b"".join(PART.pack(*part.record(part.way)) for part in self.parts)


@dataclass(slots=True)
class TreeNode:
    """One that has to do with this machine."""

    site: int
    parent: int | None  # the machine of the one above; None: the root
    desk: NodeDesk
    bell: WakeUp
    above: WakeUp | None
    way: int = 0
    # of a sum, as far as read
    parts: dict[Kind, list[Part]] = field(default_factory=lambda: defaultdict(list))
    # to a node above that this machine has not heard of
    early: deque[list[Part]] = field(default_factory=deque)

    def ring_of(self, kind: int) -> tuple[Ring, WakeUp | None]:
        """What arrives here goes into which ring, and wakes whom; None: the leading shard."""
        if kind in (Kind.SUM, Kind.OVER):
            return (self.desk.sums, None) if kind == Kind.SUM else (self.desk.over, self.above)
        return (self.desk.answers if kind == Kind.ANSWER else self.desk.back), self.bell

    def pop(self, kind: Kind, ring: Ring) -> list[Part] | None:
        """All of its next sum."""
        parts = self.parts[kind]
        while (record := ring.pop()) is not None:
            parts.append(Part.of(record))
            if parts[-1].learner == WHOLE:
                return self.parts.pop(kind)
        return None


class NodeWays:
    """Of all nodes."""

    def __init__(self, relay: Running) -> None:
        self._relay = relay
        self._arrived: dict[tuple[int, int], deque[Record]] = defaultdict(deque)  # by name and kind

    def scan(self) -> bool:
        """True if something waits for room."""
        relay = self._relay
        for name, node in list(relay.nodes.items()) if relay.whole() else ():
            if node.site == relay.site:
                self._collect(name, node)
                continue
            if relay.site == relay.leader:
                self._answer(name, node.site, Kind.ANSWER, node.desk.answers)
            if node.parent == relay.site:
                self._answer(name, node.site, Kind.BACK, node.desk.back)
        return self._deliver()

    def _answer(self, name: int, site: int, kind: Kind, ring: Ring) -> None:
        said = []
        while (record := ring.pop()) is not None:
            said.append(ANSWER.pack(*record))
        if said:
            self._relay.send(site, kind, b"".join(said), place=place_of(0, 0, name))

    # -- up ----------------------------------------------------------------------------------------------

    def _collect(self, name: int, node: TreeNode) -> None:
        relay = self._relay
        if relay.site != relay.leader:
            while (parts := node.pop(Kind.SUM, node.desk.sums)) is not None:
                relay.up.pass_on(name, SumOut(Kind.SUM, relay.leader, parts))
        if node.parent is None or node.parent == relay.site:
            return
        while (parts := node.pop(Kind.OVER, node.desk.over)) is not None:
            node.early.append(parts)
        while node.early and node.early[0][0].way <= node.way:
            parts = node.early.popleft()
            if parts[0].way == node.way:
                relay.up.pass_on(name, SumOut(Kind.OVER, node.parent, parts))

    def send_values(self, name: int, out: SumOut) -> set[int]:
        """To all who need them; the machines whose word is to be waited for."""
        relay, whole = self._relay, Whole.of(out.parts[-1])
        table = relay.table(whole.table)
        if out.kind == Kind.OVER:
            parts = {out.site: [(0, table.size)]}
        else:
            parts = {site: table.spans[site] for site in table.servers() if site != relay.site}
        full, options = bool(whole.full), whole.options
        for site, spans in parts.items():
            relay.up.send_slot(site, whole.table, name, whole.slot, spans, full=full, options=options)
        targets, buffers = set(parts), table.layout.buffers.nbytes > 0
        for part in out.parts[:-1]:  # what lies in slots of learners here goes to the leading shard's machine
            known = relay.learners.get(part.learner)
            if known is not None and known.site == relay.site != relay.leader:
                beside = int(part.said[BESIDE])
                if relay.up.send_beside(whole.table, part.learner, beside, buffers=buffers):
                    targets.add(relay.leader)
        return targets - {out.site}

    # -- what arrives ------------------------------------------------------------------------------------

    def arrive(self, site: int, frame: Frame) -> None:
        form = PART if frame.kind in (Kind.SUM, Kind.OVER) else ANSWER
        self._arrived[unplaced(frame.place)[2], frame.kind].extend(form.iter_unpack(frame.body))

    def _deliver(self) -> bool:
        for (name, kind), arrived in list(self._arrived.items()):
            node = self._relay.node(name)
            if node is None:
                arrived.clear()
            else:
                ring, bell = node.ring_of(kind)
                before = len(arrived)
                while arrived and ring.push(arrived[0]):
                    arrived.popleft()
                if len(arrived) < before:
                    (bell or self._relay.parts.shards[0]).ring()
            if not arrived:
                del self._arrived[name, kind]
        return bool(self._arrived)
