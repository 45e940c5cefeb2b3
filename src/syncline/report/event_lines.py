"""events.jsonl: one JSON object a line, appended and flushed line by line; readers tolerate what is torn.

A line that could not be written in whole is taken back, so that a full disk leaves complete lines only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from syncline.engines.checkpoint_options import EVENTS
from syncline.errors import RunError

__all__ = [
    "EVENTS",
    "LineWriter",
    "append_whole",
    "number",
    "plain",
    "read_lines",
    "replacing",
    "write_whole",
]


def plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers that are not finite become "nan", "inf" or "-inf", unknown kinds their text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    single = getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0  # numpy's or torch's
    return plain(value.item()) if single and callable(getattr(value, "item", None)) else str(value)


def number(value: Any) -> float | None:
    """Return the number that `plain` wrote, or None where there is none."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf


class LineWriter:
    """Appends lines to a file; an error is raised once per line, and leaves whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            append_whole(path, b"")
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 1))
                self._torn = file.read(1) not in (b"", b"\n")  # by a run that was killed
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}; give another run folder") from error

    def write(self, line: Mapping[str, Any]) -> None:
        """One line, or OSError and nothing."""
        text = json.dumps(plain(line), separators=(",", ":"), ensure_ascii=False) + "\n"
        append_whole(self._path, ("\n" + text if self._torn else text).encode("utf-8", "replace"))
        self._torn = False


def append_whole(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """All of it, or OSError and nothing; `lasting`: it is on the disk when this returns."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    start = os.fstat(file).st_size
    try:
        while content:
            content = content[os.write(file, content) :]
        if lasting:
            os.fsync(file)
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, start)
        raise
    finally:
        os.close(file)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file that may be growing or damaged; what is no JSON object is left out."""
    return (line for _, line in numbered_lines(path))


def numbered_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of `read_lines` with their numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield number, value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write to, beside; then it is renamed. An OSError leaves nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_whole(path: Path, text: str) -> None:
    """A file that is there in whole or not at all; raises OSError."""
    with replacing(path) as beside, beside.open("w", encoding="utf-8", errors="replace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
