"""Commands of batch methods (M18): what comes back of a program, and what no shard could carry out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from syncline.batch import commands as c
from syncline.batch.methods import LBFGS
from syncline.errors import UsageError

VECTORS = ("x", "g")
GOOD: list[c.Command] = [
    c.Dot("n", "x", "g"),
    c.Largest("n", "x"),
    c.Copy("x", "g"),
    c.Swap("x", "g"),
    c.Fill("x", 1.0),
    c.Scale("x", 2),
    c.Axpy("x", 0.5, "g"),
    c.Multiply("x", "g"),
    c.Combine("x", ((1.0, "x"), (-1.0, "g"))),
    c.Evaluate("x", "g", "n"),
]


@pytest.mark.parametrize("command", GOOD, ids=lambda command: type(command).__name__)
def test_every_vector_and_every_number_of_a_command_is_looked_at(command: Any) -> None:
    c.check((command,), VECTORS)
    fields = {name: getattr(command, name) for name in command.__slots__}
    for name, value in fields.items():
        if isinstance(value, tuple):
            bad: list[Any] = [((1.0, "x"), (math.inf, "g")), ((1.0, "x"), (1.0, "other"))]
        elif value in VECTORS:
            bad = ["other"]
        else:
            bad = [] if isinstance(value, str) else [math.nan, -math.inf]
        for each in bad:
            with pytest.raises(UsageError):
                c.check((type(command)(**{**fields, name: each}),), VECTORS)


@pytest.mark.parametrize(
    "program, message",
    [
        ((c.Copy("x", "z"),), r"Copy\(to='x', of='z'\) names 'z'; the method's vectors are x, g"),
        ((c.Evaluate(at="old"),), "names 'old'"),
        ((c.Combine("x", ((1.0, "y"),)),), "names 'y'"),
        ((c.Scale("x", float("nan")),), "has the number nan; the method must end or restart instead"),
        ((c.Combine("x", ((float("inf"), "g"),)),), "has the number inf"),
        ((c.Dot("a", "x", "x"), c.Largest("a", "x")), "two results of one program have the same name: a, a"),
        (("dot",), "a program is a tuple of commands, got 'dot' in it"),
    ],
)
def test_a_program_that_no_shard_could_carry_out_is_refused(program: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        c.check(program, ("x", "g"))


def test_scalars_come_back_in_the_order_of_the_commands_that_measure() -> None:
    program = (c.Largest("top", "g"), c.Copy("x", "g"), c.Evaluate(loss="f"), c.Dot("gg", "g", "g"))
    assert c.results(program) == ("top", "f", "gg")
    assert c.results((c.Fill("x", 0.0),)) == ()


def test_a_method_is_an_object_with_vectors_and_not_the_class_of_one() -> None:
    assert c.is_method(LBFGS()) and not c.is_method(LBFGS)
    assert not c.is_method(lambda state=None: iter(())) and not c.is_method("lbfgs")
