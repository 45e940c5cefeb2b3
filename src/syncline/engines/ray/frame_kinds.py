"""What frames mean between a learner on another node and its stand-in beside the shards; whole objects as frames.

Objects are packed as for local processes (code by cloudpickle, bulk beside it), and never read before the handshake.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import threading
from enum import IntEnum
from typing import Any

from syncline.engines.local.packing import Parcel, pack, unpack
from syncline.engines.ray.bulk_connection import Connection, Frame, Head

MOST = 1 << 30  # bytes of an object without its bulk
WORDS = struct.Struct("!8q")
AGENT = 0  # incarnation of what is said to an agent itself


def place_of(table: int, index: int) -> int:
    """A frame's place: a slot, or a version's, of a table."""
    return table << 16 | index


class Kind(IntEnum):
    """Of a frame."""

    # a learner to its stand-in
    ASK = 1  # the coordinator, and wait for its answer
    TELL = 2  # the coordinator
    OPEN = 3  # an ASK that the stand-in must understand
    LAST = 4  # a TELL: how its function ended
    NOTE = 5  # to the leading shard; what belongs to it has come before
    SLOT = 6  # a whole slot
    STATES = 7  # random states, for the message that follows
    FIRST = 8  # a new table's first buffers and other tensors; its weights come as a slot
    READY = 9  # it has memory for a table's versions
    # a stand-in to its learner
    ANSWER = 20
    READING = 21  # so far tickets are released
    VERSION = 22  # of the weights
    PORTION = 23
    WORDS = 24  # of the hub
    FREED = 25  # a slot
    # others
    CARGO = 40  # the bulk of the object before it
    ORDER = 41  # to an agent: start a learner on this connection
    TASK = 42  # to an agent: what its learners run
    DONE = 43  # from an agent
    PULSE = 44  # to an agent, and its answer: it lives
    MIRROR = 45  # to an agent: versions come on this connection
    HELD = 46  # to an agent: the version before it is whole; and its answer: it can be read


OBJECTS = frozenset(
    map(int, (Kind.ASK, Kind.TELL, Kind.OPEN, Kind.LAST, Kind.ANSWER, Kind.ORDER, Kind.TASK, Kind.DONE))
)


class Objects:
    """Sends and gathers objects on one connection; their bulk goes from memory into memory."""

    def __init__(self) -> None:
        self._sending = threading.Lock()  # an object's frames follow each other
        self._began: tuple[int, Parcel] | None = None  # its bulk is on its way
        self._area: mmap.mmap | None = None

    def send(self, connection: Connection, kind: int, message: Any, *, place: int = 0) -> int:
        """The number of its last frame."""
        parcel = message if isinstance(message, Parcel) else pack(message)
        assert len(parcel.fds) == (parcel.bulk >= 0), "no descriptor leaves its node"
        head = pickle.dumps((parcel.pickled, parcel.sizes, parcel.inline, parcel.bulk))
        with self._sending:
            number = connection.send(kind, head, place=place)
            if parcel.bulk >= 0:
                area = mmap.mmap(parcel.fds[0], parcel.bulk, prot=mmap.PROT_READ)
                number = connection.send(Kind.CARGO, area)
        if not isinstance(message, Parcel):
            parcel.close()
        return number

    def into(self, head: Head) -> memoryview | None:
        """Where the body of an object's frame goes."""
        if head.kind in OBJECTS and head.length <= MOST:
            return memoryview(bytearray(head.length))
        if head.kind == Kind.CARGO and self._began is not None and self._began[1].bulk == head.length:
            fd = os.memfd_create("syncline-cargo", os.MFD_CLOEXEC)
            os.ftruncate(fd, head.length)
            self._began[1].fds.append(fd)
            self._area = mmap.mmap(fd, head.length)
            return memoryview(self._area)
        return None

    def gather(self, frame: Frame) -> tuple[int, Parcel] | None:
        """(kind, the object, packed), once all of it is there."""
        if frame.kind == Kind.CARGO:
            found, self._began, self._area = self._began, None, None
            assert found is not None
            return found
        pickled, sizes, inline, bulk = pickle.loads(frame.body)
        parcel = Parcel(pickled, sizes, inline, [], bulk, int(bulk >= 0))
        if bulk < 0:
            return frame.kind, parcel
        self._began = (frame.kind, parcel)
        return None


def receive_object(connection: Connection, objects: Objects, seconds: float) -> tuple[int, Any] | None:
    """The next whole object, where nothing else comes; None if it takes longer."""
    while (frame := connection.receive(seconds)) is not None:
        if (found := objects.gather(frame)) is not None:
            return found[0], unpack(found[1])
    return None
