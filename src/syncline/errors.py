"""One tree of errors, so that `except SynclineError` catches what this library raises on purpose.

    SynclineError
    ├── UsageError (ValueError)        bad input, found before anything starts
    │   ├── DialError                  a dial that cannot be: unknown preset, contradiction, wrong numbers
    │   ├── LayoutError                layouts differ, a parameter in two optimizers, unsupported optimizer
    │   ├── LoopError                  learners' loops differ: they wait for each other, or one was refused and goes on
    │   └── NotYetError                understood, but not built yet
    └── RunError (RuntimeError)        something went wrong during a run
        ├── LearnerError               a learner's code raised: .rank, .traceback
        ├── InvariantError             something that always holds does not (checked simulated runs)
        ├── CheckpointError            a checkpoint cannot be written, found or read (table.checkpoints)
        └── LostError                  a process died and the run cannot go on without it

    SynclineWarning (RuntimeWarning)   hardly meant, or worth knowing: the run goes on
    └── LostWarning                    a learner is gone

Not responsible for wording: whoever raises says what is wrong, where, and what to do instead.
"""

from __future__ import annotations


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


class LearnerError(RunError):
    """A learner's code raised; the message contains its traceback."""

    def __init__(self, rank: int, traceback: str) -> None:
        super().__init__(rank, traceback)  # both stay in args: the error has to survive pickling
        self.rank = rank
        self.traceback = traceback

    def __str__(self) -> str:
        return f"learner {self.rank} raised:\n\n{self.traceback.rstrip()}"


class LostError(RunError):
    """All learners, a shard or another process that the run needs is gone."""


class InvariantError(RunError):
    """Something that always holds does not: a bug of the protocols, found by a checked simulated run."""


class SynclineWarning(RuntimeWarning):
    """Something of a run that its user should know; it goes on."""


class LostWarning(SynclineWarning):
    """A learner is gone, and the others go on."""
