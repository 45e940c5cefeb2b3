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
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter) or _without_marks(letter) for letter in letters), error.end


def _without_marks(letter: str) -> str:
    return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"
