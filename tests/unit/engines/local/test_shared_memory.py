"""How a process waits."""

import os
import time
from collections.abc import Callable

import pytest

from syncline.engines.local.shared_memory import PAGE, Region, Waiter, WakeUp, whole_pages
from tests.unit.engines.local.doubles import open_descriptors


def test_a_loop_that_always_finds_work_while_it_yields_still_listens() -> None:
    """Where cores are to spare every wait ends in its first yields: the supervisor must not wait for that to end."""
    bell = WakeUp()
    mine, other = os.pipe()
    waiter = Waiter(bell, yields=1_000_000)
    waiter.watch(mine)
    os.write(other, b"stop")
    rounds, deadline = 0, time.monotonic() + 30
    while mine not in waiter.turn(worked=rounds % 2 == 1):
        rounds += 1
        assert time.monotonic() < deadline, f"nothing was heard in {rounds} rounds"
    for end in (mine, other):
        os.close(end)
    bell.close()


@pytest.mark.parametrize("nbytes, expected", [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_a_region_is_whole_pages(nbytes: int, expected: int) -> None:
    assert whole_pages(nbytes) == Region(nbytes).nbytes == expected


@pytest.mark.parametrize("make", [lambda: Region(8), WakeUp])
def test_a_descriptor_is_given_back_once_and_with_its_owner_at_last(
    make: Callable[[], Region | WakeUp],
) -> None:
    before = open_descriptors()
    made, other = make(), make()
    made.close()
    made.close()
    assert made.fd == -1
    del made, other
    assert open_descriptors() == before
