"""TOML as jobs need it beyond `tomllib`: writing, the lines of keys, and `key=value` overrides."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date, datetime, time
from typing import Any

from syncline.errors import UsageError

BARE = re.compile(r"[A-Za-z0-9_-]+")
DEEPEST = 64  # of keys and values; copying and writing a job recurse a few times for each level
LINED = 6  # parts of a key that problems name, at most
Path = tuple[str, ...]


# -- writing -------------------------------------------------------------------------------------------------


def dumps(table: Mapping[str, Any]) -> str:
    """TOML that `tomllib.loads` reads back as an equal table; plain keys first, then tables, each in its order."""
    return "\n".join(_lines(table, ())).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: Path) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict) and not _tables(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        inner = (*path, key)
        name = ".".join(map(_key, inner))
        if isinstance(value, dict):
            yield from ("", f"[{name}]", *_lines(value, inner))
        elif _tables(value):
            for item in value:
                yield from ("", f"[[{name}]]", *_lines(item, inner))


def _tables(value: Any) -> bool:
    """Written as [[tables]]."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    if not isinstance(key, str):
        raise UsageError(f"TOML keys are texts, got {key!r}")
    return key if BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, datetime | date | time):
        zone = value.utcoffset() if isinstance(value, datetime | time) else None
        if zone is not None and (isinstance(value, time) or zone.total_seconds() % 60):
            raise UsageError(f"TOML has no way to write the time zone of {value!r}")
        return value.isoformat()
    raise UsageError(f"TOML has no way to write {type(value).__name__} {value!r}")


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"TOML is UTF-8 and has no way to write {value!r}") from error
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's texts, but for that


# -- lines ---------------------------------------------------------------------------------------------------


class TooDeep(UsageError):
    """Keys or values are nested so deep that reading them would recurse without end or take quadratic time."""

    def __init__(self, line: int) -> None:
        super().__init__(f"keys or values are nested more than {DEEPEST} deep")
        self.line = line


def lines_of(text: str) -> dict[Path, int]:
    """Return the line of each key and table header of a correct file; raise `TooDeep` where it is nested beyond reason.

    Entries of [[tables]] are numbered: ("layers", "0", "name"). Keys inside a value, and parts of a key beyond `LINED`, are left out:
    a problem there is reported with the line of the key above.
    """
    found: dict[Path, int] = {}
    counts: dict[Path, int] = {}  # of [[tables]] so far
    above: Path = ()
    for line, brackets, key in _statements(text):
        if not brackets:
            for length in range(len(above) + 1, min(len(above) + len(key), LINED) + 1):
                found.setdefault((*above, *key)[:length], line)
            continue
        if brackets == 2:
            found.setdefault(key[:LINED], line)
            counts[key] = counts.get(key, -1) + 1
        above = ()
        for length, part in enumerate(key, 1):
            above += (part,)
            if key[:length] in counts:  # a list of tables: the last one's number
                above += (str(counts[key[:length]]),)
        found.setdefault(above[:LINED], line)
    return found


def _statements(text: str) -> Iterator[tuple[int, int, Path]]:
    """Yield the line, the brackets (0: an assignment) and the key of each header and assignment, in one pass over the tokens.

    The result means something only for a correct file; the work is linear for any text.
    """
    line = start = 1
    brackets = depth = 0
    key: list[str] = []
    outer: list[int] = []  # the depth inside each open bracket of a value
    in_value = False
    for token in TOKEN.finditer(text + "\n"):
        kind, word = token.lastgroup, token[0]
        if word == "\n" and not outer:
            if key:
                yield start, brackets, tuple(key)
            key, brackets, depth, in_value = [], 0, 0, False
        elif word == ".":
            depth += 1
        elif word == "=":
            in_value = True
        elif word in ("[", "{"):
            depth += 1
            if in_value:
                outer.append(depth)
            else:
                brackets += 1
        elif word in ("]", "}"):
            depth = outer.pop() - 1 if outer else 0
        elif in_value and kind == "words" and "," in word:
            depth = outer[-1] if outer else 0
        elif not in_value and kind in ("quoted", "words") and word.strip():
            start = start if key else line
            key.append(word.strip() if kind == "words" else _unquoted(word))
        if depth > DEEPEST:
            raise TooDeep(line)
        line += word.count("\n")


TOKEN = re.compile(
    r"""
    (?P<comment> \# [^\n]*+ )
  | (?P<quoted> "{3} (?: [^"\\]++ | \\. | "(?!"") )*+ "{0,5} | '{3} (?: [^']++ | '(?!'') )*+ '{0,5}
              | " (?: [^"\\\n]++ | \\. )*+ "? | ' [^'\n]*+ '? )
  | (?P<mark> [\[\]{}=.\n] )
  | (?P<words> [^\#"'\[\]{}=.\n]++ )
    """,
    re.VERBOSE | re.DOTALL,
)


def _unquoted(word: str) -> str:
    with suppress(tomllib.TOMLDecodeError):  # the file is refused as a whole
        word = tomllib.loads(f"key = {word}")["key"]
    return word


# -- overrides -----------------------------------------------------------------------------------------------


def parse_override(text: str) -> tuple[Path, Any]:
    """`key.inner=value`: the path and the value as TOML, or as a text where it is none; None for an empty value."""
    key, equals, value = text.partition("=")
    paths: list[Path] = []
    if equals and "\n" not in key:
        statement = f"{key.strip()} = 0"
        paths = [path for _, brackets, path in _statements(statement) if not brackets]
        try:
            tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            paths = []
    if not paths:
        raise UsageError(f"{text!r} is no key=value, as learners=4 or optimizer.lr=0.1")
    value = value.strip()
    read: dict[str, Any] = {}
    with suppress(tomllib.TOMLDecodeError, RecursionError):
        read = tomllib.loads(f"value = {value}")
        lines_of(f"value = {value}")
    return paths[-1], read["value"] if len(read) == 1 else value or None


def override(table: dict[str, Any], path: Path, value: Any) -> Path:
    """Set one key in place; None removes it. A name alone becomes a table where an argument is set below it, and one of
    several tables is meant by its name: layers.fc1.units. The path comes back, with numbers for such names."""
    *outer, last = path
    inner: Any = table
    reached: list[str] = []
    for depth, key in enumerate(outer, 1):
        if isinstance(inner, list):
            names = [each.get("name") for each in inner]
            if key not in names:
                where, known = ".".join(path[: depth - 1]), ", ".join(map(str, names))
                raise UsageError(f"{where} has none called {key!r}; there are: {known}")
            inner, key = inner[names.index(key)], str(names.index(key))
        else:
            inner = table.setdefault(key, {})
        reached.append(key)
        if isinstance(inner, str):
            table[key] = inner = {"name": inner}
        several = isinstance(inner, list) and inner and all(isinstance(each, dict) for each in inner)
        if not (isinstance(inner, dict) or (several and depth < len(outer))):
            raise UsageError(f"{'.'.join(path[:depth])} is no table; set it as a whole")
        table = inner
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value
    return (*reached, last)
