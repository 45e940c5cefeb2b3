"""Places in frames, and whole objects on their way to an agent."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.engines.local.shared_pickle import Parcel, pack, unpack
from syncline.engines.ray.bulk_connection import Connection, Frame, Lost
from syncline.engines.ray.frame_kinds import (
    AGENT,
    LANE,
    MOST,
    TABLE,
    Kind,
    ObjectConnection,
    place_of,
    unplaced,
)
from tests.unit.engines.ray.doubles import SECRET

Ends = tuple[ObjectConnection, ObjectConnection]


@given(st.sampled_from([0, LANE, TABLE]), st.integers(0, 0xFFFF), st.integers(-(1 << 39), (1 << 39) - 1))
def test_a_place_says_which_memory_table_and_learner(what: int, table: int, learner: int) -> None:
    place = place_of(what, table, learner)
    assert unplaced(place) == (what, table, learner)
    assert 0 <= place < 1 << 64


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = ObjectConnection(socket.create_connection(server.getsockname()), SECRET)
        far = ObjectConnection(server.accept()[0], SECRET)
    yield near, far
    near.close()
    far.close()


def gathered(ends: Ends) -> tuple[int, Parcel]:
    """The next object, while the other end sends."""
    near, far = ends
    while True:
        near.flush()
        if (frame := far.receive(0)) is not None and (found := far.gather(frame)) is not None:
            return found


@pytest.mark.parametrize("length", [3, 1 << 16], ids=["inline", "with bulk beside it"])
def test_objects_arrive_whole_in_their_order_with_their_place(ends: Ends, length: int) -> None:
    message = {"values": torch.arange(length), "words": "some"}
    ends[0].tell(message, place=7)
    ends[0].tell(["next"])
    place, parcel = gathered(ends)
    found: Any = unpack(parcel)
    assert place == 7 and found["words"] == "some" and torch.equal(found["values"], message["values"])
    assert unpack(gathered(ends)[1]) == ["next"]


def test_a_parcel_can_be_told_again_and_is_its_owners_to_close(ends: Ends) -> None:
    parcel = pack(torch.ones(1 << 16))
    for _ in range(2):
        ends[0].tell(parcel, place=1)
        assert unpack(gathered(ends)[1]).sum() == 1 << 16
    before = len(os.listdir("/proc/self/fd"))
    parcel.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_nothing_is_told_over_a_connection_that_is_lost(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(Lost):
        ends[0].receive(None)
    ends[0].tell("in vain")


@pytest.mark.parametrize(
    "kind, length", [(Kind.SAID, MOST + 1), (Kind.CARGO, 2 << 20)], ids=["huge", "bulk of no object"]
)
def test_what_nobody_has_announced_has_no_place(ends: Ends, kind: Kind, length: int) -> None:
    near, far = ends
    raw = Connection(near._socket, run=SECRET.run, incarnation=AGENT, into=lambda head: None)
    raw.queue(kind, memoryview(b"x").cast("B"))
    head = bytearray(raw._queue[0])
    head[-8:] = length.to_bytes(8, "big")
    near._socket.sendall(head)
    with pytest.raises(Lost, match="bytes where 1,048,576 belong"):
        far.receive(None)
    assert far.refused["oversized"] == 1


def test_bulk_of_another_size_than_its_object_said_ends_the_connection(ends: Ends) -> None:
    near, _ = ends
    near.send(Kind.SAID, pickle.dumps((b"", b"", 2 << 20)))
    near.send(Kind.CARGO, bytes(3 << 20))
    with pytest.raises(Lost, match="3,145,728 bytes"):
        gathered(ends)


def test_frames_of_other_kinds_are_no_object(ends: Ends) -> None:
    assert ends[1].gather(Frame(Kind.PULSE, 0, 0, memoryview(b""))) is None
