"""Arguments that come from a file, against a signature and the kinds in its annotations."""

from __future__ import annotations

import math
from typing import Any

import pytest

from syncline.errors import UsageError
from syncline.nn.argument_checks import (
    COUNT,
    MOST,
    SHARE,
    Count,
    Counts,
    Flag,
    Number,
    Place,
    Positive,
    Shape,
    Share,
    Text,
    Wholes,
    check,
    choice,
    shown,
    wrong_arguments,
    wrong_values,
)


def everything(
    shape: Any,
    count: Count = 1,
    place: Place = 0,
    number: Number = 0.0,
    positive: Positive = 1.0,
    share: Share = 0.0,
    flag: Flag = False,
    text: Text = "a",
    counts: Counts | None = None,
    wholes: Wholes = 0,
    to: Shape = (),
    free: Any = None,
) -> None: ...


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("count", [1, MOST], [0, True, 1.0, MOST + 1, "1", None]),
        ("place", [-1, 0], [False, 0.0, -MOST - 1]),
        ("number", [-1, 0.5], [True, math.inf, -math.inf, math.nan, "1"]),
        ("positive", [1, 1e-9], [0, -1.0, math.inf, math.nan]),
        ("share", [0, 0.99], [1, 1.0, -0.1, True]),
        ("flag", [True, False], [0, 1, "true"]),
        ("text", ["a"], ["", "  ", 1]),
        ("counts", [2, [1, 2], (3,)], [0, [], [1, 0], [True], "12"]),
        ("wholes", [0, [0, 1]], [-1, [], [0.0]]),
        ("to", [[], [1, 2]], [3, [0], [1.0]]),
        ("free", [None, "anything", math.nan], []),
    ],
)
def test_a_value_is_of_the_kind_that_its_annotation_names(
    name: str, right: list[Any], wrong: list[Any]
) -> None:
    assert all(not [*wrong_values(everything, {name: value})] for value in right)
    for value in wrong:
        ((found, words),) = wrong_values(everything, {name: value})
        assert found == name and words.startswith("expected ") and words.endswith(f", got {value!r}")


@pytest.mark.parametrize(
    "arguments, found",
    [
        ({"units": 3}, []),
        ({"units": 3, "bias": False}, []),
        ({}, [(None, "lacks its argument 'units'")]),
        ({"units": 3, "shape": 1}, [("shape", "unknown argument; there are: units, bias")]),
        ({"unit": 3}, [("unit", "unknown argument, did you mean 'units'?; there are: units, bias")]),
        (
            {"units": 3, "nmae": 1},
            [("nmae", "unknown argument, did you mean 'name'?; there are: units, bias")],
        ),
    ],
)
def test_names_are_those_of_the_signature(arguments: dict[str, Any], found: list[Any]) -> None:
    def dense(shape: Any, units: int, *, bias: bool = True) -> None: ...

    got = [*wrong_arguments(dense, 1, arguments, ["name"])]
    assert got == found


def test_who_takes_any_name_lacks_only_what_it_must_have() -> None:
    def free(shape: Any, units: int, **rest: Any) -> None: ...

    assert [*wrong_arguments(free, 1, {"units": 1, "other": 2})] == []
    assert [*wrong_arguments(free, 1, {"other": 2})] == [(None, "lacks its argument 'units'")]
    assert [*wrong_arguments(iter, 0, {"x": 1})] == [], "a signature that nobody can read refuses nothing"


def test_checks_and_words() -> None:
    check(COUNT, one=1, two=2)
    with pytest.raises(UsageError, match=r"two must be a whole number of at least 1, got 0"):
        check(COUNT, one=1, two=0)
    assert choice("a", "b").wrong("c") == "expected one of a, b, got 'c'" and choice("a").wrong("a") is None
    assert SHARE.wrong("x" * 100) == f"expected a number from 0 to below 1, got '{'x' * 56}…"
    assert len(shown("x" * 100)) == 58 and shown("x" * 58) == repr("x" * 58)
