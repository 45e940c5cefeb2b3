"""Runs that go on: known while they do, and ended before the interpreter is, whatever a script forgot.

Not responsible for how a run is ended: its handle is.
"""

from __future__ import annotations

import atexit
import sys
import threading

from syncline.engines.run import Handle

LONGEST = 10.0  # seconds that a run gets to end when its script has

_live: set[Handle] = set()
_lock = threading.Lock()


def began(handle: Handle) -> None:
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # the last to come is called first: before that which runs need is ended
    with _lock:
        _live.add(handle)


def ended(handle: Handle) -> None:
    with _lock:
        _live.discard(handle)


def live() -> list[Handle]:
    """All runs of this process that go on."""
    with _lock:
        return list(_live)


def end_all() -> list[Handle]:
    """Those that went on; none does afterwards."""
    found = live()
    for handle in found:
        handle.stop()
    for handle in found:
        handle.end(LONGEST)
    return found


def _at_exit() -> None:
    if found := end_all():
        what = "a run was" if len(found) == 1 else f"{len(found)} runs were"
        sys.stderr.write(
            f"syncline: {what} still going on at the end of the script, and stopped; call wait() to see it through\n"
        )
