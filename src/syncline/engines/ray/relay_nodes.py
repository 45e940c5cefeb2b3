"""A relay's ways between the nodes of a tree on several machines: sums go up, answers come back (M14).

A sum goes as a learner's gradient does: its values first, to every machine with shards or to that of the node above, then its tickets.
What the leading shard reads in learners' own slots (random states, buffers) goes to its machine before them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncline.engines.local.exchange import Ring
from syncline.engines.local.host_interface import NodeKnown, NodeMoved
from syncline.engines.local.record_codec import ANSWER, BESIDE, PART, WHOLE, Part, Record, Whole
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.tree_node import NodeDesk
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
    parts: dict[Kind, list[Part]] = field(
        default_factory=lambda: defaultdict(list)
    )  # of a sum, as far as read
    early: deque[list[Part]] = field(
        default_factory=deque
    )  # to a node above that this machine has not heard of

    @classmethod
    def of(cls, known: NodeKnown) -> TreeNode:
        return cls(known.site, known.parent, NodeDesk(known.desk), known.bell, known.above)

    def move(self, moved: NodeMoved) -> None:
        self.parent, self.way, self.above = moved.parent, moved.way, moved.above

    def ring_of(self, kind: int) -> tuple[Ring, WakeUp | None]:
        """What arrives here goes into which ring, and wakes whom; None: the leading shard."""
        if kind in (Kind.SUM, Kind.OVER):
            return (self.desk.sums, None) if kind == Kind.SUM else (self.desk.over, self.above)
        return (self.desk.answers if kind == Kind.ANSWER else self.desk.back), self.bell


class NodeWays:
    """Of all nodes."""

    def __init__(self, relay: Running) -> None:
        self._relay = relay
        self._arrived: dict[tuple[int, int], deque[Record]] = defaultdict(deque)  # by name and kind
        kinds = (Kind.SUM, Kind.OVER, Kind.ANSWER, Kind.BACK)
        self.handlers: dict[int, Callable[[int, Frame], None]] = dict.fromkeys(kinds, self._arrive)

    def scan(self) -> bool:
        """True if something waits for room."""
        relay = self._relay
        for name, node in list(relay.nodes.items()) if relay.whole() else ():
            if node.site == relay.site:
                self._collect(name, node)
            else:
                self._answer(name, node)
        return self._deliver()

    # -- up ----------------------------------------------------------------------------------------------

    def _collect(self, name: int, node: TreeNode) -> None:
        relay = self._relay
        if relay.site != relay.leader:
            while (parts := _pop(node, Kind.SUM, node.desk.sums)) is not None:
                relay.up.pass_on(name, SumOut(Kind.SUM, relay.leader, parts))
        if node.parent is None or node.parent == relay.site:
            return
        while (parts := _pop(node, Kind.OVER, node.desk.over)) is not None:
            node.early.append(parts)
        while node.early and node.early[0][0].way <= node.way:
            parts = node.early.popleft()
            if parts[0].way == node.way:
                relay.up.pass_on(name, SumOut(Kind.OVER, node.parent, parts))

    def send_values(self, name: int, out: SumOut) -> set[int]:
        """To all who need them; the machines whose word is to be waited for."""
        relay, whole = self._relay, Whole.of(out.parts[-1])
        table = relay.table(whole.table)
        targets = [site for site in table.servers() if site != relay.site]
        if out.kind == Kind.OVER:
            targets = [out.site]
        for site in targets:
            spans = table.spans[site] if out.kind == Kind.SUM else [(0, table.size)]
            options = whole.options
            relay.up.send_slot(
                site, whole.table, name, whole.slot, spans, full=bool(whole.full), options=options
            )
        if self._send_beside(whole.table, out.parts[:-1], buffers=table.layout.buffers.nbytes > 0):
            targets.append(relay.leader)
        return set(targets) - {out.site}

    def _send_beside(self, table: int, parts: list[Part], *, buffers: bool) -> bool:
        """What lies in slots of learners here, to the leading shard's machine."""
        relay, sent = self._relay, False
        for part in parts:
            known = relay.learners.get(part.learner)
            if known is not None and known.site == relay.site != relay.leader:
                beside = int(part.said[BESIDE])
                sent |= relay.up.send_beside(table, part.learner, beside, buffers=buffers)
        return sent

    # -- back --------------------------------------------------------------------------------------------

    def _answer(self, name: int, node: TreeNode) -> None:
        relay = self._relay
        if relay.site == relay.leader:
            self._send_all(name, node.site, Kind.ANSWER, node.desk.answers)
        if node.parent == relay.site:
            self._send_all(name, node.site, Kind.BACK, node.desk.back)

    def _send_all(self, name: int, site: int, kind: Kind, ring: Ring) -> None:
        said = []
        while (record := ring.pop()) is not None:
            said.append(ANSWER.pack(*record))
        if said:
            self._relay.send(site, kind, b"".join(said), place=place_of(0, 0, name))

    # -- what arrives ------------------------------------------------------------------------------------

    def _arrive(self, site: int, frame: Frame) -> None:
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


def _pop(node: TreeNode, kind: Kind, ring: Ring) -> list[Part] | None:
    """All of its next sum."""
    parts = node.parts[kind]
    while (record := ring.pop()) is not None:
        parts.append(Part.of(record))
        if parts[-1].learner == WHOLE:
            return node.parts.pop(kind)
    return None
