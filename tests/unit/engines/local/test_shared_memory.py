"""How a process waits."""

import os
import time

from syncline.engines.local.shared_memory import Waiter, WakeUp


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
