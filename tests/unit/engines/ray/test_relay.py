"""A relay's process, turn by turn: who is connected, what goes into whose memory, and what is said of those who do otherwise."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from syncline.engines.local.host_interface import (
    Begun,
    Forget,
    LaneHere,
    LearnerKnown,
    Linked,
    SiteGone,
    SiteJoined,
    TableHere,
)
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import PORTION, Lane, Mailbox, TableMemory
from syncline.engines.ray.bulk_connection import Connection, Frame
from syncline.engines.ray.frame_kinds import LANE, TABLE, Kind, place_of
from syncline.engines.ray.relay import Link, LinkLost, RefusedFrames
from tests.unit.engines.ray.doubles import PLACES, SECRET, SLOTS, Relayed, layout_over

LEARNER = 1


class Machine(Connection):
    """Another one of the run, and what it is sent."""

    def __init__(self, site: int, *, run: bytes = SECRET.run) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            end = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        super().__init__(end, run=run, incarnation=1, into=lambda head: memoryview(bytearray(head.length)))
        self.link = Link(site, WakeUp(theirs.detach()))
        self.got: list[Frame] = []

    def has(self, count: int) -> Callable[[], bool]:
        """It has got so many frames."""

        def look() -> bool:
            if (frame := self.receive(0)) is not None:
                self.got.append(frame)
            return len(self.got) >= count

        return look


@pytest.fixture
def machines() -> Iterator[Callable[..., Machine]]:
    with contextlib.ExitStack() as undo:

        def make(site: int, **options: Any) -> Machine:
            found = Machine(site, **options)
            undo.callback(found.close)
            return found

        yield make


@pytest.fixture
def relay() -> Iterator[Callable[..., Relayed]]:
    made: list[Relayed] = []

    def make(site: int = 0, shards: tuple[int, ...] = (0, 0)) -> Relayed:
        made.append(Relayed(site, shards, linked=False))
        return made[-1]

    yield make
    for each in made:
        for peer in each.running.peers.values():
            peer.close()


def garbage(machine: Machine) -> Callable[[], bool]:
    """Sends a frame that its incarnation does not know."""

    def send() -> bool:
        foreign = Connection(
            socket.socket(fileno=os.dup(machine.fileno())),
            run=b"another!",
            incarnation=1,
            into=lambda head: None,
        )
        foreign.send(Kind.NOTE, b"void")
        foreign._socket.close()
        return True

    return send


def known(learner: int, site: int) -> LearnerKnown:
    return LearnerKnown(learner, site, Region(Mailbox.nbytes()), WakeUp())


def table_here(*, made: bool = False) -> TableHere:
    layout = layout_over(2)
    return TableHere(0, layout, Region(TableMemory.nbytes(layout, places=PLACES)), made)


def lane_here(learner: int) -> LaneHere:
    layout = layout_over(2)
    return LaneHere(0, learner, layout, Region(Lane.nbytes(layout, slots=SLOTS)))


def test_it_says_once_that_it_has_a_way_to_all_and_counts_that_it_lives(machines, relay) -> None:
    one, other, it = machines(1), machines(2), relay()
    assert it.run(None, one.link, None, None) == []
    before = it.beats.words[0]
    assert it.run(other.link, it.has_said(Linked), None, None) == [Linked()]
    assert it.beats.words[0] > before > 2


def test_machines_without_shards_have_to_do_with_those_that_have_some(relay) -> None:
    assert relay(1, (0, 2)).running.others() == [0, 2]
    assert relay(0, (0, 2)).running.others() == [1, 2]
    it = relay(0, (0, 0))
    it.run(SiteGone(1))
    assert it.running.others() == [2]


def test_all_that_a_learner_begins_with_goes_to_machines_that_are_there_and_to_those_that_come(
    machines, relay
) -> None:
    early, late, it = machines(1), machines(2), relay()
    it.run(early.link, None, table_here(made=True), early.has(2), late.link, late.has(2))
    for machine in (early, late):
        first, begun = machine.got
        assert (first.kind, first.place, len(first.body)) == (
            Kind.WRITE,
            place_of(TABLE, 0),
            it.layout.buffers.nbytes,
        )
        assert (begun.kind, begun.place) == (Kind.BEGUN, 0)


def test_frames_that_are_refused_are_counted_for_every_machine_and_none_twice(machines, relay) -> None:
    one, other, it = machines(1), machines(2), relay()

    def refused() -> int:
        return sum(each.count for each in it.supervisor.heard if isinstance(each, RefusedFrames))

    it.run(one.link, other.link, garbage(one), lambda: refused() == 1, garbage(other), lambda: refused() == 2)
    assert it.run(garbage(one), lambda: refused() == 3, None, None) and refused() == 3


def test_a_machine_that_says_what_is_no_frame_is_lost_and_another_is_not(machines, relay) -> None:
    bad, good, it = machines(1), machines(2), relay()
    it.run(bad.link, good.link, None)
    bad.send(99)
    (lost,) = [each for each in it.run(it.has_said(LinkLost), None) if isinstance(each, LinkLost)]
    assert lost.site == 1 and list(it.running.peers) == [2]
    assert it.running.send(1, Kind.NOTE) == 0, "in vain"
    good.send(Kind.MARK, bytes(16))
    it.run(good.has(1))
    assert [frame.kind for frame in good.got] == [Kind.MARKED]


def test_what_is_sent_to_a_machine_that_never_connected_is_a_mistake(relay) -> None:
    with pytest.raises(AssertionError, match="machine 1 has not connected yet"):
        relay().running.send(1, Kind.NOTE)


def test_bytes_go_into_the_place_that_they_name(machines, relay) -> None:
    there, it = machines(1), relay()
    here, lane = table_here(), lane_here(LEARNER)
    it.run(there.link, here, known(LEARNER, 1), lane, None)
    slot = it.running.lanes[0, LEARNER].slot(1)
    there.send(Kind.WRITE, b"weights", place=place_of(TABLE, 0), offset=64)
    there.send(Kind.WRITE, b"gradient", place=place_of(LANE, 0, LEARNER), offset=slot)
    there.send(Kind.MARK, bytes(16))
    it.run(there.has(1))
    assert bytes(here.region.bytes[64:71]) == b"weights"
    assert bytes(lane.region.bytes[slot : slot + 8]) == b"gradient"


@pytest.mark.parametrize("what, offset", [(TABLE, 1 << 30), (LANE, 0), (7, 0)])
def test_bytes_for_words_or_beyond_all_memory_end_the_connection(
    machines, relay, what: int, offset: int
) -> None:
    there, it = machines(1), relay()
    it.run(there.link, table_here(), known(LEARNER, 1), lane_here(LEARNER), None)
    there.send(Kind.WRITE, bytes(2 << 20), place=place_of(what, 0, LEARNER), offset=offset)
    heard = it.run(it.has_said(LinkLost), None)
    (lost,) = [each for each in heard if isinstance(each, LinkLost)]
    assert lost.site == 1 and "bytes where 1,048,576 belong" in lost.why


def test_words_of_another_machine_that_come_before_the_supervisors_wait_for_them(machines, relay) -> None:
    there, it = machines(1), relay(0, (0, 0))
    it.run(there.link, None)
    there.send(Kind.PORTION, PORTION.pack(0, 1, 2, 3, 4, 5), place=LEARNER)  # nobody has named it yet
    it.run(lambda: LEARNER in it.running.learners, known(LEARNER, 0))
    assert it.running.learners[LEARNER].desk.portions.pop() == (0, 1, 2, 3, 4, 5)


def test_what_still_comes_for_a_learner_that_has_left_is_read_and_forgotten(machines, relay) -> None:
    there, it = machines(1), relay(0, (0, 2))
    it.run(there.link, table_here(), known(LEARNER, 1), lane_here(LEARNER), Forget(LEARNER))
    assert (LEARNER in it.running.learners) == it.running.log.reads
    it.running.forget(LEARNER)
    there.send(Kind.WRITE, b"late", place=place_of(LANE, 0, LEARNER), offset=1 << 20)
    there.send(Kind.MARK, bytes(16))
    it.run(there.has(1))
    assert not any(isinstance(each, LinkLost) for each in it.supervisor.heard)


def test_a_way_that_cannot_be_made_is_said(machines, relay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    it = relay()
    heard = it.run(SiteJoined(5, address), it.has_said(LinkLost))
    assert heard[-1].site == 5 and "refused" in heard[-1].why


def test_begun_is_passed_on(machines, relay) -> None:
    there, it = machines(0), relay(1, (0, 0))
    it.run(there.link, None)
    there.send(Kind.BEGUN, place=3)
    assert Begun(3) in it.run(it.has_said(Begun))
