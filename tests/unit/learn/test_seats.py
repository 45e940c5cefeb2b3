"""Seats of a group without processes: windows written by several, one version read by all, gradients that some lack."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.errors import LoopError
from syncline.learn.seats import Line, SeatPort, SeatTable, joined_masks
from syncline.parallel import Box, Part
from syncline.parallel.seat_tensors import Windows
from syncline.ports import Reading

WHOLE = {
    "rows": Part((5, 2), ((Box(((0, 3), (0, 2))),), (Box(((3, 5), (0, 2))),))),
    "gates": Part(
        (8,), ((Box(((0, 2),)), Box(((4, 6),))), (Box(((2, 4),)), Box(((6, 8),))))
    ),
    "all": Part((3,), ((Box(((0, 3),)),), (Box(((0, 3),)),))),
    "one": Part((), ((Box(()),), (Box(()),))),
    "first": Part((4,), ((Box(((0, 4),)),), (Box(((0, 0),)),))),
}  # fmt: skip


def windows(rank: int) -> Windows:
    return Windows(WHOLE, list(WHOLE), rank, 2)


def test_what_seats_write_together_is_what_each_reads_its_part_of() -> None:
    whole = [torch.randn(part.shape) for part in WHOLE.values()]
    into = [torch.full(part.shape, float("nan")) for part in WHOLE.values()]
    for rank in range(2):
        targets = windows(rank).targets(into)
        for target, own in zip(targets.tensors, windows(rank).read(whole), strict=True):
            target.copy_(own)
        targets.flush()
    assert all(torch.equal(a, b) for a, b in zip(into, whole, strict=True))


def test_each_seat_writes_its_own_places_only() -> None:
    into = [torch.zeros(part.shape) for part in WHOLE.values()]
    for rank in range(2):
        targets = windows(rank).targets(into)
        for target in targets.tensors:
            target.fill_(1.0)
        before = [tensor.clone() for tensor in into]
        targets.flush()
        assert sum(int((a != b).sum()) for a, b in zip(into, before, strict=True)) <= 6
    assert all(bool((tensor == 1).all()) for tensor in into)


@pytest.mark.parametrize(
    ("masks", "found"),
    [
        ([b"", b""], []),
        ([b"\1\0", b""], []),
        ([b"\1\0", b"\0\1"], []),
        ([b"\1\0\0", b"\1\1\0"], [True, True, False]),
    ],
)
def test_a_parameter_has_a_gradient_if_some_seat_has_one(masks: list[bytes], found: list[bool]) -> None:
    assert joined_masks(masks) == found


# -- reading -------------------------------------------------------------------------------------------------


class Pair(Line):
    """Two seats as threads."""

    seats = 2

    def __init__(self, seat: int, down: queue.Queue[Any], up: queue.Queue[bytes]) -> None:
        self.seat, self._down, self._up = seat, down, up

    def tell(self, answer: Any) -> None:
        self._down.put(answer)

    def hear(self) -> Any:
        return self._down.get(timeout=30)

    def done(self, word: bytes) -> None:
        self._up.put(word)

    def gather(self) -> list[bytes]:
        return [self._up.get(timeout=30)]


class Engine:
    """Of a port, what seats need here."""

    learner, rank = 1, 0


class Moving:
    """A table that goes on while it is read: this seat finds these versions, one after the other."""

    layout = None
    buffers: Sequence[Tensor] = ()
    others: Sequence[Tensor] = ()

    def __init__(self, versions: list[int | None]) -> None:
        self._versions, self.asked, self.said = versions, [], 0

    def narrow_to(self, own: Any, reads: Any) -> None:
        pass

    def copy(self, reading: Reading, into: list[Tensor]) -> int | None:
        self.asked.append(reading.version)
        return self._versions.pop(0)

    def has_read(self) -> None:
        self.said += 1


class NoWindows:
    reads = ()

    def read(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        return list(wholes)


class NoShares:
    parameters = buffers = others = NoWindows()


def pair(*actions: Any) -> list[Any]:
    """Both seats at once."""
    down: queue.Queue[Any] = queue.Queue()
    up: queue.Queue[bytes] = queue.Queue()
    found: list[Any] = [None, None]

    def run(seat: int) -> None:
        try:
            found[seat] = actions[seat](SeatPort(Engine(), Pair(seat, down, up)))  # type: ignore[arg-type]
        except LoopError as error:
            found[seat] = error

    threads = [threading.Thread(target=run, args=(seat,), daemon=True) for seat in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def read(moving: Moving) -> Any:
    def action(port: SeatPort) -> int | None:
        table = SeatTable(moving, NoShares(), port)  # type: ignore[arg-type]
        return table.read(Reading(5), [torch.zeros(1)])

    return action


def test_seats_that_read_different_versions_agree_on_the_newest() -> None:
    first, second = Moving([5, 7]), Moving([6, 7])
    assert pair(read(first), read(second)) == [7, 7]
    assert first.asked == [5, 6] and second.asked == [5, 7]
    assert (first.said, second.said) == (1, 0), "the first seat says so for both, when both have read"


def test_who_is_overtaken_asks_for_a_delivery_with_the_others() -> None:
    assert pair(read(Moving([5])), read(Moving([None]))) == [None, None]


def test_seats_at_different_places_are_told_both() -> None:
    found = pair(
        lambda port: port.told("here", lambda: 1),
        lambda port: port.told("there", lambda: 2),
    )
    assert found[0] == 1 and "is at 'there' where the first seat is at 'here'" in str(found[1])
