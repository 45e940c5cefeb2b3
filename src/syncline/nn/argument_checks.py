"""Arguments that come from a file: names against a callable's signature, values against the kinds that its annotations name.

Not responsible for calling anything, nor for callables whose annotations name no kinds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, get_args, get_type_hints

from syncline.dial import nearest
from syncline.errors import UsageError

MOST = 1 << 40  # of anything: beyond, torch's own arithmetic overflows


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value must be, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]

    def wrong(self, value: Any) -> str | None:
        return None if self.fits(value) else f"expected {self.words}, got {shown(value)}"


def shown(value: Any) -> str:
    """A value on one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def _number(low: float, high: float = math.inf, *, closed: bool = True) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (low <= value if closed else low < value) and value < high

    return fits


def _several(fits: Callable[[Any], bool], *, alone: bool) -> Callable[[Any], bool]:
    return lambda value: (
        (alone and fits(value))
        or (isinstance(value, list | tuple) and (bool(value) or not alone) and all(map(fits, value)))
    )


def choice(*names: str) -> Kind:
    """One of these words."""
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def at_least(least: int) -> Kind:
    return Kind(f"a whole number of at least {least}", _whole(least))


COUNT = at_least(1)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str) and bool(value.strip()))
SHARE = Kind("a number from 0 to below 1", _number(0.0, 1.0))
NOT_NEGATIVE = Kind("a finite number of at least 0", _number(0.0))

Count = Annotated[int, COUNT]
Place = Annotated[int, Kind("a whole number", _whole(-MOST))]
Number = Annotated[float, Kind("a finite number", _number(-math.inf, closed=False))]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, Kind("a finite number above 0", _number(0.0, closed=False))]
Share = Annotated[float, SHARE]
Flag = Annotated[bool, FLAG]
Text = Annotated[str, TEXT]
Counts = Annotated[
    Any, Kind("a whole number of at least 1, or a list of them", _several(_whole(1), alone=True))
]
Wholes = Annotated[
    Any, Kind("a whole number of at least 0, or a list of them", _several(_whole(0), alone=True))
]
Shape = Annotated[Any, Kind("a list of whole numbers of at least 1", _several(_whole(1), alone=False))]


def check(kind: Kind, **values: Any) -> None:
    """Values by name that have to be of a kind."""
    for name, value in values.items():
        if not kind.fits(value):
            raise UsageError(f"{name} must be {kind.words}, got {value!r}")


def wrong_arguments(
    function: Any, given: int, arguments: Mapping[str, Any], beside: Sequence[str] = ()
) -> Iterator[tuple[str | None, str]]:
    """(argument, what is wrong with it) by the signature of the callable, if it has one that can be read.

    `beside` are other names that may have been meant.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in parameters if p.kind in positional][:given]
    free = {p.name: p for p in parameters if p not in places}
    named = {
        name: p
        for name, p in free.items()
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        known = ", ".join(named) or "none"
        unknown = {key: nearest(key, [*beside, *named]) for key in arguments if key not in named}
        for key, hint in unknown.items():
            yield key, f"unknown argument{hint}; there are: {known}"
        named = {
            name: p for name, p in named.items() if not any(repr(name) in hint for hint in unknown.values())
        }
    for name, p in named.items():
        if p.default is inspect.Parameter.empty and name not in arguments:
            yield None, f"lacks its argument {name!r}"


def wrong_values(function: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(argument, what was expected of it) where the callable's annotation names a kind."""
    kinds = _kinds(function)
    for name, value in arguments.items():
        if name in kinds and (words := kinds[name].wrong(value)):
            yield name, words


@lru_cache(maxsize=256)
def _kinds(function: Any) -> dict[str, Kind]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # annotations of the user's that mean nothing here
        return {}
    found: dict[str, Kind] = {}
    for name, hint in hints.items():
        for part in (hint, *get_args(hint)):  # `Annotated[int, kind]`, also beside None
            for note in getattr(part, "__metadata__", ()):
                if isinstance(note, Kind):
                    found[name] = note
    return found
