"""What goes wrong, on stderr: one message, no traceback unless --debug; exit code 2 for bad input, 1 for failures.

And output where not every letter can be written (PYTHONIOENCODING=ascii): others stand for those that cannot.
"""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import format_exception

import typer

from syncline.errors import LearnerError, SynclineError, UsageError
from syncline.terminal import visible

USAGE, FAILURE, INTERRUPTED = 2, 1, 130
PLAIN = {
    "λ": "lambda",
    "μ": "mu",
    "σ": "sigma",
    "×": "x",
    "−": "-",
    "–": "-",
    "·": "-",
    "→": "->",
    "≤": "<=",
    "√": "sqrt",
    "⌊": "[",
    "⌋": "]",
    "━": "-",
    **dict.fromkeys("█▉▊▋▌▍▎▏", "#"),
}


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
    from syncline.jobs import JobError  # imports torch

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
    print(visible(text, lines=True), file=sys.stderr, flush=True)


def warn_shortly() -> None:
    """Show a warning as one line, without the place in our code, and a traceback (--debug) without escape sequences."""
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
    sys.excepthook = lambda kind, error, trace: say("".join(format_exception(kind, error, trace)).rstrip())


def write_all_letters() -> None:
    """From here on no output fails for a letter."""
    codecs.register_error("syncline", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="syncline")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    found = ""
    for letter in error.object[error.start : error.end]:
        without_marks = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
        found += PLAIN.get(letter) or without_marks or "?"
    return found, error.end
