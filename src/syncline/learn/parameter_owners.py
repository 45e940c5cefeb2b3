"""Which of a session's optimizers has which parameter: each one at most once (M6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from torch import nn

from syncline.errors import LayoutError, UsageError


class Holder(Protocol):
    """A table."""

    def holds(self, parameters: set[int]) -> bool: ...


Table = TypeVar("Table", bound=Holder)


class ParameterOwners:
    """The parameters that are in a table, by identity, with the names that their first table gave them."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def check(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """A further table wants these; refused if another has one of them already."""
        for name, parameter in named:
            if id(parameter) in self._names:
                raise LayoutError(
                    f"'{name}' is in two optimizers (the first calls it '{self._names[id(parameter)]}'): its updates would "
                    "overwrite each other. Give each optimizer its own parameters."
                )

    def claim(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """The table is open, and these are its."""
        self._names.update((id(parameter), name) for name, parameter in named)


def tables_of(model: nn.Module, tables: Sequence[Table]) -> list[Table]:
    """Those that `session.put` is about."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"session.put takes an nn.Module, got {type(model).__name__}")
    own = {id(parameter) for parameter in model.parameters()}
    found = [table for table in tables if table.holds(own)]
    if not found:
        raise UsageError("session.put: no optimizer of this session holds a parameter of that model")
    return found
