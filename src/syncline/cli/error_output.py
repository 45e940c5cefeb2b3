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
    """Short: without the traceback in its text."""
    if isinstance(error, JobError):
        return "\n".join(error.problems)
    text = str(error).strip()
    if isinstance(error, LearnerError) or "Traceback (most recent call last)" in text:
        first, *_, last = text.splitlines()
        words = f"{first} {last.strip()}" if first.endswith(":") else first
        return f"{words}; --debug shows where"
    if isinstance(error, SynclineError):
        return text
    return f"{type(error).__name__}: {' '.join(text.split())}; --debug shows where"


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
