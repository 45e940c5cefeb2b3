"""What frames mean between the machines of a run; whole objects as frames.

Objects are packed as for local processes (code by cloudpickle, bulk beside it), and never read before the handshake.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import struct
import threading
from enum import IntEnum
from typing import Any

from syncline.engines.authentication import Secret
from syncline.engines.local.shared_pickle import Parcel, pack
from syncline.engines.ray.bulk_connection import Connection, Frame, Head, Lost

MOST = 1 << 30  # bytes of an object without its bulk
WORD = struct.Struct("!q")
AGENT = 0  # incarnation of what is said to an agent itself; of a relay's it is its generation, from 1 on
LANE, TABLE = 1, 2  # memory that is written to
_LEARNERS = 1 << 39  # learners' numbers, and nodes' below zero, are moved by so much


def place_of(what: int, table: int, learner: int = 0) -> int:
    """Of a frame: the memory that it goes into."""
    return what << 56 | table << 40 | (learner + _LEARNERS)


def unplaced(place: int) -> tuple[int, int, int]:
    return place >> 56, place >> 40 & 0xFFFF, (place & (1 << 40) - 1) - _LEARNERS


class Kind(IntEnum):
    """Of a frame."""

    # between relays, towards shards
    WRITE = 1  # bytes into the same place of the same memory
    NOTE = 2  # of a learner, to the leading shard; what belongs to it has come before
    MARK = 3  # to be answered when all before it is there
    MARKED = 4
    SUM = 5  # of a tree's node, to the leading shard: its tickets
    OVER = 6  # the same, to the node above
    # towards learners
    RELEASE = 10  # of a ticket, by one shard
    FREED = 11  # a slot, by one shard
    PORTION = 12
    VERSION = 13  # of one shard's part: it is whole, or will not come
    WANT = 14  # to the leading shard's machine: its own learners wait for that version
    BRING = 15  # from the leading shard's machine: that version to that machine
    BEGUN = 16  # from there: all that a learner begins a table with has come before
    ANSWER = 17  # of the leading shard, to a tree's node
    BACK = 18  # of the node above
    GOT = 19  # to the leading shard's machine: the version that came last is here, or will never be, and there is room
    # between shards
    ENTRIES = 20  # of the log
    LOGGED = 21  # so many of them have reached the shards
    NORMS = 22
    REACHED = 23  # a version, by one shard
    # to an agent, and its answers
    CARGO = 40  # the bulk of the object before it
    CONTROL = 41  # this connection is the supervisor's
    SAID = 42  # an object, either way
    PULSE = 43  # it lives
    LINK = 44  # this connection is another relay's


class ObjectConnection(Connection):
    """To an agent, or its own: sends and gathers objects; their bulk goes from memory into memory."""

    def __init__(self, end: socket.socket, secret: Secret) -> None:
        super().__init__(end, run=secret.run, incarnation=AGENT, into=self._place)
        self._telling = threading.Lock()  # an object's frames follow each other
        self._began: tuple[int, Parcel] | None = None  # its bulk is on its way

    def tell(self, message: Any, *, place: int = 0) -> None:
        """In vain where the connection is lost: whoever receives notices."""
        if self.lost:
            return
        parcel = message if isinstance(message, Parcel) else pack(message)
        assert len(parcel.fds) == (parcel.bulk >= 0), "no descriptor leaves its machine"
        head = pickle.dumps((parcel.pickled, parcel.inline, parcel.bulk))
        with contextlib.suppress(Lost), self._telling:
            self.send(Kind.SAID, head, place=place)
            if parcel.bulk >= 0:
                self.send(Kind.CARGO, mmap.mmap(parcel.fds[0], parcel.bulk, prot=mmap.PROT_READ))
        if not isinstance(message, Parcel):
            parcel.close()

    def _place(self, head: Head) -> memoryview | None:
        """Where the body of an object's frame goes."""
        if head.kind == Kind.SAID and head.length <= MOST:
            return memoryview(bytearray(head.length))
        if head.kind == Kind.CARGO and self._began is not None and self._began[1].bulk == head.length:
            fd = os.memfd_create("syncline-cargo", os.MFD_CLOEXEC)
            os.ftruncate(fd, head.length)
            self._began[1].fds.append(fd)
            return memoryview(mmap.mmap(fd, head.length))
        return None

    def gather(self, frame: Frame) -> tuple[int, Parcel] | None:
        """(its place, the object, packed), once all of it is there."""
        if frame.kind == Kind.CARGO:
            found, self._began = self._began, None
            return found
        if frame.kind != Kind.SAID:
            return None
        pickled, inline, bulk = pickle.loads(frame.body)
        parcel = Parcel(pickled, inline, [], bulk, int(bulk >= 0))
        if bulk < 0:
            return frame.place, parcel
        self._began = (frame.place, parcel)
        return None
