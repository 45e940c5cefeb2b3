"""The control channel: whole messages, whoever stops in the middle of one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from syncline.engines.local.control_channel import NOTHING, Channel, Closed
from syncline.engines.local.shared_memory import Region
from tests.unit.engines.local.doubles import open_descriptors


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    mine, theirs = Channel.pair()
    other = Channel(theirs)
    yield mine, other
    mine.close()
    other.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    mine, other = ends
    for message in ("a", list(range(1000)), None):
        mine.send(message)
    assert [other.receive() for _ in range(3)] == ["a", list(range(1000)), None]


def test_taking_gives_nothing_where_nothing_is(ends: tuple[Channel, Channel]) -> None:
    mine, other = ends
    assert other.take() is NOTHING
    mine.send("later")
    assert other.take() == "later"
    assert other.take() is NOTHING


def test_half_a_message_keeps_nobody_waiting() -> None:
    """A sender that is stopped in the middle: the rest is taken when it comes, after every single byte."""
    sender, collected = socket.socketpair()
    through, theirs = Channel.pair()
    other, watched = Channel(theirs), Channel(collected)
    through.send({"some": "message", "bulk": "x" * 300})
    whole = theirs.recv(1 << 16)
    for byte in whole[:-1]:
        sender.send(bytes([byte]))
        assert watched.take() is NOTHING
    sender.send(whole[-1:])
    assert watched.take() == {"some": "message", "bulk": "x" * 300}
    for each in (through, other, watched):
        each.close()
    sender.close()


def test_posting_to_somebody_that_does_not_read_keeps_nobody_waiting(ends: tuple[Channel, Channel]) -> None:
    mine, other = ends
    messages = [(number, "x" * 5000) for number in range(200)]
    for message in messages:
        mine.post(message)
    assert not mine.flush()  # a socket holds some 200 KB
    got = []
    while len(got) < len(messages):
        mine.flush()
        if (message := other.take()) is not NOTHING:
            got.append(message)
    assert got == messages and mine.flush()


def test_descriptors_of_posted_messages_live_until_they_are_sent(ends: tuple[Channel, Channel]) -> None:
    mine, other = ends
    before = open_descriptors()
    for number in range(100):
        region = Region(8)
        region.words[0] = number
        mine.post((region, torch.full((3000,), float(number)), "x" * 5000))
        region.release()
    for number in range(100):
        while (message := other.take()) is NOTHING:
            mine.flush()
        found, tensor, _ = message
        assert found.words[0] == number and tensor.mean() == number
        found.release()
        del message, tensor
    assert open_descriptors() == before


def test_a_dead_party_is_told_of_by_taking_and_forgotten_by_posting(ends: tuple[Channel, Channel]) -> None:
    mine, other = ends
    other.close()
    mine.post("into the void")
    assert mine.flush()
    with pytest.raises(Closed):
        mine.take()
    with pytest.raises(Closed):
        mine.send("x")
    mine.close()
    mine.post("after the end")
    with pytest.raises(Closed):
        mine.take()


def test_receiving_waits_for_a_whole_message(ends: tuple[Channel, Channel]) -> None:
    mine, other = ends
    sender = threading.Thread(target=lambda: mine.send(["x" * 1000] * 2000))
    sender.start()
    assert other.receive() == ["x" * 1000] * 2000
    sender.join()
