"""The tree of errors: what `except` catches, what an error carries, and that it survives a trip between processes."""

from __future__ import annotations

import pickle
import signal

import pytest

from syncline import errors
from syncline.errors import LearnerError, SynclineError


@pytest.mark.parametrize("kind, also", [
    (errors.UsageError, ValueError), (errors.DialError, errors.UsageError), (errors.LayoutError, errors.UsageError),
    (errors.LoopError, errors.UsageError), (errors.NotYetError, errors.UsageError), (errors.RunError, RuntimeError),
    (errors.LearnerError, errors.RunError), (errors.LostError, errors.RunError), (errors.InvariantError, errors.RunError),
])  # fmt: skip
def test_one_except_catches_what_is_raised_on_purpose(kind: type, also: type) -> None:
    assert issubclass(kind, SynclineError) and issubclass(kind, also)


def test_warnings_and_signals_are_no_errors_of_the_library() -> None:
    assert issubclass(errors.LostWarning, errors.SynclineWarning) and issubclass(
        errors.SynclineWarning, RuntimeWarning
    )
    ended = errors.Terminated("weights")
    assert isinstance(ended, SystemExit) and ended.code == 143 and ended.result == "weights"
    assert not isinstance(ended, SynclineError)
    stopped = errors.interrupted("weights")
    assert type(stopped) is KeyboardInterrupt and stopped.result == "weights"  # type: ignore[attr-defined]
    assert ended.code == 128 + signal.SIGTERM


TRACE = "Traceback …\n  File x\nKeyError: 'x'\n\n"


@pytest.mark.parametrize("what, first", [
    ("", "learner 3 raised KeyError: 'x'"),
    ("KeyError: 'x', in loss", "learner 3 raised KeyError: 'x', in loss"),
    ("syncline.errors.UsageError: one batch", "learner 3: one batch"),
    ("mine.syncline.errors.UsageError: x", "learner 3 raised mine.syncline.errors.UsageError: x"),
])  # fmt: skip
def test_a_learners_error_says_what_it_raised_before_its_traceback(what: str, first: str) -> None:
    error = LearnerError(3, TRACE, what)
    told = str(error).splitlines()
    assert told[0] == first and told[1] == "" and told[-1] == "KeyError: 'x'"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.traceback) == (str(error), 3, TRACE)


def test_a_learner_that_left_no_traceback_has_raised_nothing_in_particular() -> None:
    assert LearnerError(0, "").what == "" and errors.raised_in("a\nb: c\n") == "b: c"


def test_results_belong_to_one_error_only() -> None:
    one, other = errors.RunError("a"), errors.RunError("b")
    one.result = 3
    assert other.result is None and errors.RunError.result is None
