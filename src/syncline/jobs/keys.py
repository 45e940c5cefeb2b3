"""The kinds of a job's keys: what each may say, in words, and the checks of single values.

Not responsible for which keys there are (job.py), for names (names.py) or for what contradicts what.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from syncline.engines.checkpoint_options import AUTO, END
from syncline.engines.checkpoint_options import IF_EXISTS as RUN_EXISTS
from syncline.errors import UsageError
from syncline.learn.gradient_ways import WAYS
from syncline.learn.train_and_evaluate import read_stop
from syncline.parallel.rules import WAYS as CUTS

MOST = 2**63 - 1
REQUIRED = MISSING  # as a default: there is none


class JobError(UsageError):
    """A job that cannot run: all its problems, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(tuple(problems))  # stays in args: the error has to survive pickling
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Wrong(Exception):
    """A value is not what its key expects; says what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Something by name: a built-in one or `"package.module:callable"`, with its arguments."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.arguments, dict):
            raise UsageError(
                f"Named takes a name and a dict of arguments, got {self.name!r}, {self.arguments!r}"
            )
        object.__setattr__(self, "arguments", copy.deepcopy(self.arguments))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={shown(value)}' for key, value in self.arguments.items())})"

    def table(self) -> dict[str, Any]:
        return {"name": self.name, **copy.deepcopy(self.arguments)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a job."""

    name: str
    kind: str  # in words
    read: Callable[[Any], Any]  # the value from the file to the record's; raises Wrong
    default: Any
    meaning: str

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    def __call__(self, value: Any) -> Any:
        """The record's value, or Wrong with what was expected and what came."""
        try:
            return self.read(value)
        except Wrong as wrong:
            reason = f" ({wrong})" if str(wrong) else ""
            raise Wrong(f"expected {self.kind}, got {shown(value)}{reason}") from None


def shown(value: Any) -> str:
    """A value on one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# -- kinds ---------------------------------------------------------------------------------------------------


def _kind(words: str, read: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
    """What a key's value may be: in words, and how it is read. With a default and a meaning it makes a field of the record."""
    return lambda default, meaning: field(
        default=default, metadata={"kind": words, "read": read, "meaning": meaning}
    )


def _fitting(fits: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """As it is, where it fits."""

    def read(value: Any) -> Any:
        if not fits(value):
            raise Wrong
        return value

    return read


def _whole(least: int) -> Callable[[Any], int]:
    return _fitting(lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= MOST)


_text = _fitting(lambda v: isinstance(v, str) and bool(v.strip()) and "\0" not in v)


def _dial(value: Any) -> str | dict[str, Any]:
    return dict(value) if isinstance(value, dict) and value else _text(value)


def _cadence(value: Any) -> int | str:
    if not isinstance(value, str):
        return _whole(1)(value)
    seconds = re.fullmatch(r"(\d+(\.\d+)?)\s*s", value.strip())
    if value not in (AUTO, END) and not (seconds and float(seconds[1]) > 0):
        raise Wrong
    return value


def _cut(value: Any) -> str | dict[str, str]:
    if isinstance(value, Mapping) and value and all(way in CUTS for way in value.values()):
        return dict(value)
    if value in ("auto", "data") or (isinstance(value, str) and value.endswith(".json")):
        return str(value)
    raise Wrong


def _devices(value: Any) -> str | tuple[str, ...]:
    return tuple(map(_text, value)) if isinstance(value, list | tuple) and value else _text(value)


def _named(value: Any) -> Named:
    if isinstance(value, Named):
        return value
    if isinstance(value, str):
        return Named(name=_text(value))
    if not isinstance(value, dict):
        raise Wrong
    if "name" not in value:
        raise Wrong("the table lacks its name")
    if not isinstance(value["name"], str) or not value["name"].strip():
        raise Wrong("the table's name is no text")
    return Named(name=value["name"], arguments={key: item for key, item in value.items() if key != "name"})


def _several(value: Any) -> tuple[Named, ...]:
    if not isinstance(value, list | tuple):
        raise Wrong
    return tuple(map(_named, value))


def _gradient(value: Any) -> str | Named:
    if isinstance(value, str):
        module, colon, path = value.partition(":")
        names = [*module.split("."), *path.split(".")]
        own = colon and module not in WAYS and all(name.isidentifier() for name in names)
        return Named(name=value) if own else _text(value)
    return _named(value)


def _layers(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple) or not value:
        raise Wrong
    return tuple(copy.deepcopy(dict(each)) if isinstance(each, dict) else each for each in value)


def _stop(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Wrong
    try:
        read_stop(value)
    except UsageError as error:
        raise Wrong(str(error).removeprefix("stop: ")) from None
    return dict(value)


_NAME = "a name, or a table with a name and its arguments"
DIAL = _kind('a dial such as "softsync:2", or a table of the fields of Sync', _dial)
TOPOLOGY = _kind('a topology such as "servers:2"', _text)
COUNT = _kind("a whole number of at least 1", _whole(1))
NUMBER = _kind("a whole number of at least 0", _whole(0))
POLICY = _kind("ledger, partition or sample", _text)
POSITIVE = _kind(
    "a finite number > 0",
    _fitting(lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf),
)
DEVICES = _kind('a device such as "cuda:0", or a list of them', _devices)
TABLE_DEVICE = _kind('"cpu" or a GPU of the learners', _text)
DATA_DEVICE = _kind('"cuda"', _text)
CUT = _kind("auto, data, the file of a plan, or a table of layers and ways", _cut)
FLAG = _kind("true or false", _fitting(lambda v: isinstance(v, bool)))
PATH = _kind("a path", _text)
CADENCE = _kind('a number of updates, seconds such as "30s", auto, or end', _cadence)
IF_EXISTS = _kind("refuse, resume, replace or new", _fitting(lambda v: v in RUN_EXISTS))
ON_ERROR = _kind("raise or continue", _fitting(lambda v: v in ("raise", "continue")))
NAMED = _kind(_NAME, _named)
LAYERS = _kind("a list of layers, each a table with name and type", _layers)
EVALUATE = _kind("a table of what differs from data, or " + _NAME, _named)
GRADIENT = _kind("backprop, cd:k, pcd:k, or " + _NAME, _gradient)
STOP = _kind("a table with loss, plateau or gradient_norm", _stop)
NAMED_LIST = _kind("a list of names or tables", _several)
