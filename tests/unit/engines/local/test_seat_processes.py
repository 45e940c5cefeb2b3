"""What the seats of one learner say to each other over their sockets, and what follows when one is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from syncline.engines.local import seat_processes as seats
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.seat_processes import FirstLine, OtherLine
from syncline.engines.local.shared_memory import Region


class Group:
    """The lines of three seats, all in this process."""

    def __init__(self) -> None:
        mates, self.others = [], []
        for seat in (1, 2):
            mine, theirs = socket.socketpair()
            channel, other = Channel.pair()
            mates.append(seats._Mate(seat, 0, -1, mine, channel))
            self.others.append(OtherLine(seat, 3, theirs, Channel(other)))
        self.first, self.mates = FirstLine(mates), mates

    def close(self) -> None:
        for line, mate in zip(self.others, self.mates, strict=True):
            for end in (mate.line, mate.channel, line._line, line.channel):
                end.close()


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.close()


def test_every_other_seat_hears_what_the_first_tells_in_order(group: Group) -> None:
    for answer in ("a", {"b": list(range(3000))}, None):
        group.first.tell(answer)
    assert [[line.hear() for _ in range(3)] for line in group.others] == [
        ["a", {"b": list(range(3000))}, None]
    ] * 2


def test_memory_travels_by_descriptor_between_plain_answers(group: Group) -> None:
    region = Region(8)
    region.words[0] = 42
    for answer in ("before", region, lambda: "code", "after"):
        group.first.tell(answer)
    for line in group.others:
        before, shared, code, after = (line.hear() for _ in range(4))
        assert (before, code(), after) == ("before", "code", "after")
        assert shared.words[0] == 42
        shared.words[1] += 1
    assert region.words[1] == 2, "one memory for all"


def test_the_first_gathers_words_by_seat_whoever_comes_first(group: Group) -> None:
    long = bytes(range(256)) * 300
    group.others[1].done(b"")
    group.others[1].done(b"again")
    group.others[0].done(long)
    assert group.first.gather() == [long, b""]
    group.others[0].done(b"x")
    assert group.first.gather() == [b"x", b"again"]


def test_the_first_seat_is_held_up_while_what_ends_it_is_on_its_way(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not go on and say things to the servers that the others never agreed to."""
    held: list[float] = []
    monkeypatch.setattr(seats.time, "sleep", held.append)
    group.others[0].done(b"half of them")
    group.others[1]._line.close()
    with pytest.raises(Closed):
        group.first.gather()
    with pytest.raises(OSError):
        group.first.tell("all")
    assert held == [seats.GONE] * 2


def test_other_seats_notice_at_once_that_the_first_is_gone(group: Group) -> None:
    for mate in group.mates:
        mate.line.close()
    with pytest.raises(Closed):
        group.others[0].hear()


def test_each_end_of_a_line_has_its_own_verbs(group: Group) -> None:
    wrong: list[tuple[Any, Any]] = [(group.first.hear, ()), (group.first.done, (b"",))]
    wrong += [(group.others[0].tell, (1,)), (group.others[0].gather, ())]
    for verb, given in wrong:
        with pytest.raises(AssertionError, match="the first seat"):
            verb(*given)
    assert (group.first.seat, group.first.seats, group.others[1].seat, group.others[1].seats) == (0, 3, 2, 3)
