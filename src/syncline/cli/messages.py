"""What goes wrong, on stderr: one message, no traceback unless --debug; exit code 2 for bad input, 1 for failures."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer

from syncline.errors import LearnerError, SynclineError, UsageError
from syncline.jobs import JobError

USAGE, FAILURE, INTERRUPTED = 2, 1, 130


@contextmanager
def told(debug: bool) -> Iterator[None]:
    """Errors become messages and exit codes."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            raise
        say(f"error: {message(error)}")
        raise typer.Exit(USAGE if isinstance(error, UsageError) else FAILURE) from None


def message(error: Exception) -> str:
    """Short: of a traceback in the text only its first and last line."""
    if isinstance(error, JobError):
        return "\n".join(error.problems)
    if isinstance(error, LearnerError):
        return f"learner {error.rank} raised {_last(error.traceback)}; --debug shows where"
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:
        return f"{text.splitlines()[0]} {_last(text)}; --debug shows where"
    if isinstance(error, SynclineError):
        return text
    return f"{type(error).__name__}: {' '.join(text.split())}; --debug shows where"


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def warn_shortly() -> None:
    """Warnings are one line each: whoever is on the command line has no use for the place in our code."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> Any:
        say(f"warning: {message}")

    warnings.showwarning = show
