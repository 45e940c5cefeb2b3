"""Output where not every letter can be written (PYTHONIOENCODING=ascii): others stand for those that cannot."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

PLAIN = {
    "λ": "lambda",
    "μ": "mu",
    "σ": "sigma",
    "×": "x",
    "−": "-",
    "–": "-",
    "…": "...",
    "·": "-",
    "→": "->",
    "≤": "<=",
    "√": "sqrt",
    "⌊": "[",
    "⌋": "]",
    "━": "-",
    **dict.fromkeys("█▉▊▋▌▍▎▏", "#"),
}


def write_all_letters() -> None:
    """From here on nothing fails for a letter."""
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
