"""What holds for all words of a module: they are values, which travel."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from types import ModuleType, UnionType
from typing import Any, get_args


def classes(module: ModuleType) -> list[type]:
    """Those that it defines itself."""
    return [
        each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__
    ]


def made(kind: Any, start: int = 0) -> Any:
    """With another number in each field."""
    names = kind._fields if issubclass(kind, tuple) else [field.name for field in dataclasses.fields(kind)]
    return kind(**dict(zip(names, range(start, start + len(names)), strict=True)))


def check_values(module: ModuleType) -> None:
    """Equal where their class and content is, never changed, and the same on the other side of a pipe."""
    for kind in classes(module):
        word = made(kind)
        assert issubclass(kind, tuple) or (
            dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen
        ), kind
        back = pickle.loads(pickle.dumps(word))
        assert back == word and type(back) is kind
        assert made(kind, 1) != word or word == kind()


def check_union(module: ModuleType, union: UnionType, *bases: type) -> None:
    """Whoever has a case for each of the union has one for each word."""
    assert {*get_args(union)} == {*classes(module)} - {*bases}
