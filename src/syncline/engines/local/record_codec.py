"""Records of fixed size for what is said through the rings of shared memory: a tag, then the fields.

What is the engine's own goes beside the fields (the slot of a draft) and is seen by no role. Not responsible for the rings.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import NamedTuple

from syncline.messages import log
from syncline.messages import to_leader as say
from syncline.messages.to_tree_nodes import Counted, Refused, Taken, ToNodes
from syncline.protocols.folding import Ticket
from syncline.protocols.tree_up import Count

# -- learners to the leading shard ---------------------------------------------------------------------------

NOTE = struct.Struct("=12qd")  # tag, ten numbers, what is the engine's own, loss
BESIDE, LOSS = 11, 12
Record = Sequence[int | float]
States = Callable[[int, int], bytes]  # (table, slot) -> the random states that lie in it

_KINDS: tuple[type, ...] = (
    say.Gradient,
    say.AskBatch,
    say.Used,
    say.CloseLoader,
    say.StreamEnded,
    say.Blocked,
    say.Rest,
    say.Reread,
    say.Put,
    say.AskState,
    say.Load,
    say.Fetch,
    say.Await,
    say.Meet,
    say.Farewell,
)
_TAGS = {kind: tag for tag, kind in enumerate(_KINDS)}
_NUMBERS = {
    kind: kind._fields[:10]
    if kind is say.Gradient
    else tuple(field.name for field in fields(kind) if field.name != "states")
    for kind in _KINDS
}
_STATED = {kind for kind in _KINDS[1:] if any(field.name == "states" for field in fields(kind))}
_PAD = (0,) * BESIDE


_PLACES = [  # of the table and the loader in a record
    tuple(1 + names.index(name) if name in names else None for name in ("table", "loader"))
    for names in _NUMBERS.values()
]


def speaks_of(record: Record) -> tuple[int | None, int]:
    """The table and the loader of a message."""
    table, loader = _PLACES[int(record[0])]
    return (
        None if table is None else int(record[table]),
        say.NO_LOADER if loader is None else int(record[loader]),
    )


def encode(message: say.ToLeader, slot: int = 0) -> Record:
    """With the slot of a draft. Random states lie in a slot already: only that there are some is said."""
    kind = type(message)
    if kind is say.Gradient:
        beside = slot << 1 | bool(message.states)  # type: ignore[union-attr]
        return (_TAGS[kind], *message[:10], beside, float(message.loss))  # type: ignore[index,union-attr]
    beside = slot << 1 | (kind in _STATED and bool(message.states))  # type: ignore[union-attr]
    found = (_TAGS[kind], *(getattr(message, name) for name in _NUMBERS[kind]))
    return (*found, *_PAD[len(found) :], beside, 0.0)


def decode(record: Record, states: States) -> tuple[say.ToLeader, int]:
    """The message, and the slot of its draft."""
    kind, beside = _KINDS[int(record[0])], int(record[BESIDE])
    slot = beside >> 1
    held = states(int(record[1]), slot) if beside & 1 else b""
    if kind is say.Gradient:
        return say.Gradient(*record[1:9], bool(record[9]), bool(record[10]), held, record[LOSS]), slot  # type: ignore[arg-type,call-arg]
    found = record[1 : 1 + len(_NUMBERS[kind])]
    return kind(*found, held) if kind in _STATED else kind(*found), slot


# -- nodes of a tree -----------------------------------------------------------------------------------------

PART = struct.Struct("=15qd")
WHOLE = 0  # in place of a learner: their numbers begin with 1
ANSWER = struct.Struct("=4q")  # tag, table or learner, a number; which parent of the node says it
# the last three: one of several, before what they belong to
_TAKEN, _REFUSED, _COUNTED, _WITHOUT, _AT, _MODE = range(6)


class Part(NamedTuple):
    """Of a sum: what a learner said, as it said it; the last, of WHOLE, is the sum itself."""

    way: int  # counts the parents that the sender had before
    learner: int
    rank: int
    said: Record

    def record(self, way: int) -> Record:
        return (way, self.learner, self.rank, *self.said)

    @classmethod
    def of(cls, record: Record) -> Part:
        way, learner, rank = map(int, record[:3])
        return cls(way, learner, rank, record[3:])

    def ticket(self, iteration: int = 0) -> Ticket:
        """Of a gradient."""
        _, _, number, stamp, step, examples = map(int, self.said[:6])
        return Ticket(self.learner, self.rank, number, stamp, step, examples, iteration)


class Whole(NamedTuple):
    """A sum, after its parts: nothing before it counts."""

    table: int
    number: int
    iteration: int
    options: int
    full: int
    slot: int
    counted: int  # number of the `Count` that it was formed under

    def record(self, way: int) -> Record:
        return Part(way, WHOLE, 0, (*self, *_PAD[:5], 0.0)).record(way)

    @classmethod
    def of(cls, part: Part) -> Whole:
        return cls._make(map(int, part.said[: len(cls._fields)]))


def encode_answer(message: ToNodes, way: int = 0) -> list[Record]:
    """As many records as it has learners, then its own."""
    if isinstance(message, Taken):
        return [(_TAKEN, message.table, message.number, way)]
    if isinstance(message, Counted):
        count = message.count
        counted = [(_AT, learner, at, way) for learner, at in count.active.items()]
        mode = (_MODE, count.lockstep, count.equal, way)
        return [*counted, mode, (_COUNTED, message.table, count.number, way)]
    without = [(_WITHOUT, learner, number, way) for learner, number in message.without]
    counted = [(_AT, learner, at, way) for learner, at in message.counted.items()]
    return [*without, *counted, (_REFUSED, message.table, message.number, way)]


class Answers:
    """A node's side: records in, messages out."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._without: set[tuple[int, int]] = set()
        self._counted: dict[int, int] = {}
        self._mode = False, False

    def add(self, record: Record) -> ToNodes | None:
        """The message that it completes."""
        tag, first, second, _ = map(int, record)
        if tag == _WITHOUT:
            self._without.add((first, second))
        elif tag == _AT:
            self._counted[first] = second
        elif tag == _MODE:
            self._mode = bool(first), bool(second)
        else:
            without, counted, mode = frozenset(self._without), self._counted, self._mode
            self._begin()
            if tag == _TAKEN:
                return Taken(first, second)
            if tag == _COUNTED:
                return Counted(first, Count(second, *mode, counted))
            return Refused(first, second, without, counted)
        return None


# -- the log -------------------------------------------------------------------------------------------------

ENTRY = struct.Struct("=11qd")  # tag, nine numbers, slot, weight or factor
NO_SLOT = -1
_ENTRIES = (
    log.Take,
    log.Fold,
    log.Release,
    log.Free,
    log.PutValues,
    log.GiveState,
    log.LoadState,
    log.Snapshot,
    log.Finish,
    log.Change,
    log.Cut,
    log.Leave,
)
_ENTRY_TAGS: dict[type, int] = {kind: tag for tag, kind in enumerate(_ENTRIES)}
_COUNTS = [len(kind._fields) for kind in _ENTRIES]
_REAL = {log.Take, log.Fold}  # their last field is no whole number


def encode_entry(entry: log.Entry, slot: int = NO_SLOT) -> Record:
    """With the slot of the draft that it speaks of."""
    kind = type(entry)
    numbers, real = (entry[:-1], entry[-1]) if kind in _REAL else (entry, 0.0)
    return (_ENTRY_TAGS[kind], *numbers, *_PAD[: 9 - len(numbers)], slot, real)


def decode_entry(record: Record) -> tuple[log.Entry, int]:
    """The entry, and the slot of its draft."""
    tag = int(record[0])
    kind, count, slot = _ENTRIES[tag], _COUNTS[tag], int(record[10])
    if kind is log.Take:
        found: log.Entry = log.Take(*record[1:5], bool(record[5]), *record[6:9], bool(record[9]), record[11])  # type: ignore[arg-type,call-arg]
    elif kind is log.Fold:
        found = log.Fold(*record[1:6], record[11])  # type: ignore[arg-type,call-arg]
    elif kind is log.Release:
        found = log.Release(*record[1:5], *map(bool, record[5:7]))  # type: ignore[arg-type,call-arg]
    else:
        found = kind._make(record[1 : 1 + count])  # type: ignore[arg-type,call-arg]
    return found, slot
