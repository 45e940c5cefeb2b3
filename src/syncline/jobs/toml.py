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
LONGEST = 100  # lines of one value; beyond, lines are not looked for any more
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


def lines_of(text: str) -> dict[Path, int]:
    """The line of each key and table header of a correct file; those of [[tables]] by number: ("layers", "0", "name")."""
    found: dict[Path, int] = {}
    counts: dict[Path, int] = {}  # of [[tables]] so far
    above: Path = ()
    for number, statement in _statements(text):
        table = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            *_, header = _paths(table)
            if statement.lstrip().startswith("[["):
                found.setdefault(header, number)
                counts[header] = counts.get(header, -1) + 1
            above = ()
            for length, part in enumerate(header, 1):
                above += (part,)
                if header[:length] in counts:  # a list of tables: the last one's number
                    above += (str(counts[header[:length]]),)
            found[above] = number
        else:
            for path in _paths(table):
                found.setdefault((*above, *path), number)
    return found


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Headers and assignments with their first line: as few lines as `tomllib` accepts."""
    start, held = 1, ""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not held:
            start = number
        held = f"{held}\n{line}" if held else line
        if number - start > LONGEST:
            return
        try:
            empty = not tomllib.loads(held)
        except tomllib.TOMLDecodeError:
            continue
        if not empty:
            yield start, held
        held = ""


def _paths(table: dict[str, Any]) -> Iterator[Path]:
    """All keys of an assignment, outer ones too."""
    for key, value in table.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))


# -- overrides -----------------------------------------------------------------------------------------------


def parse_override(text: str) -> tuple[Path, Any]:
    """`key.inner=value`: the path and the value as TOML, or as a text where it is none; None for an empty value."""
    key, equals, value = text.partition("=")
    paths: list[Path] = []
    if equals and "\n" not in key:
        with suppress(tomllib.TOMLDecodeError):
            paths = [*_paths(tomllib.loads(f"{key.strip()} = {{}}"))]
    if not paths:
        raise UsageError(f"{text!r} is no key=value, as learners=4 or optimizer.lr=0.1")
    value = value.strip()
    read: dict[str, Any] = {}
    with suppress(tomllib.TOMLDecodeError, RecursionError):
        read = tomllib.loads(f"value = {value}")
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
