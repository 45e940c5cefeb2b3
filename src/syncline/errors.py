"""One tree of errors, so that `except SynclineError` catches what this library raises on purpose.

    SynclineError
    ├── UsageError (ValueError)        bad input, found before anything starts
    │   ├── DialError                  a dial that cannot be: unknown preset, contradiction, wrong numbers
    │   ├── LayoutError                layouts differ, a parameter in two optimizers, unsupported optimizer
    │   ├── LoopError                  learners' loops differ: they wait for each other, or one was refused and goes on
    │   └── NotYetError                understood, but not built yet
    └── RunError (RuntimeError)        something went wrong during a run: .result, where weights came of it nevertheless
        ├── LearnerError               a learner's code raised: .rank, .traceback
        ├── InvariantError             something that always holds does not (checked simulated runs)
        ├── CheckpointError            a checkpoint cannot be written, found or read (table.checkpoints)
        └── LostError                  a process died and the run cannot go on without it

    KeyboardInterrupt                  Ctrl-C has ended a run: its .result is what was trained
    Terminated (SystemExit, code 143)  SIGTERM has: .result, too
    SynclineWarning (RuntimeWarning)   hardly meant, or worth knowing: the run goes on
    ├── NothingLeft                    a resumed run has made its epochs or steps already
    └── LostWarning                    a learner is gone

Not responsible for wording: whoever raises says what is wrong, where, and what to do instead.
"""

from __future__ import annotations

import re
import signal
from typing import Any

OWN = re.compile(r"syncline\.errors\.\w+: ")  # an error of this library says by itself what is wrong


class SynclineError(Exception):
    """The base of all errors of this library."""


class UsageError(SynclineError, ValueError):
    """Bad input, found before anything starts."""


class DialError(UsageError):
    """A dial that cannot be."""


class LayoutError(UsageError):
    """Parameters or an optimizer that cannot make a table."""


class LoopError(UsageError):
    """Learners do not call the same in the same order."""


class NotYetError(UsageError):
    """Understood, but not built yet."""


class RunError(SynclineError, RuntimeError):
    """Something went wrong during a run."""

    outcome: Any = None  # of an engine that has the last weights nevertheless
    result: Any = None  # the same for the caller: `error.result.state_dict()`


class LearnerError(RunError):
    """A learner's code raised; the message says what, then its traceback."""

    def __init__(self, rank: int, traceback: str, what: str = "") -> None:
        super().__init__(rank, traceback, what)  # all stay in args: the error has to survive pickling
        self.rank = rank
        self.traceback = traceback
        self.what = what or raised_in(traceback)

    def __str__(self) -> str:
        own = OWN.match(self.what)
        first = f": {self.what[own.end() :]}" if own else f" raised {self.what}"
        return f"learner {self.rank}{first}\n\n{self.traceback.rstrip()}"


def raised_in(traceback: str) -> str:
    """What was raised: its type and words."""
    return (traceback.strip().splitlines() or [""])[-1]


class LostError(RunError):
    """All learners, a shard or another process that the run needs is gone."""


class InvariantError(RunError):
    """Something that always holds does not: a bug of the protocols, found by a checked simulated run."""


class Terminated(SystemExit):
    """SIGTERM has ended a run; `result` is what was trained."""

    def __init__(self, result: Any) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.result = result


def interrupted(result: Any) -> KeyboardInterrupt:
    """Ctrl-C has ended a run. Of that very class: only so Python ends as a shell expects it, and its loop with it."""
    error = KeyboardInterrupt("Ctrl-C has ended the run; what was trained is this exception's .result")
    error.result = result  # type: ignore[attr-defined]
    return error


class SynclineWarning(RuntimeWarning):
    """Something of a run that its user should know; it goes on."""


class NothingLeft(SynclineWarning):
    """A run that is resumed has made its epochs or steps already."""


class LostWarning(SynclineWarning):
    """A learner is gone, and the others go on."""
