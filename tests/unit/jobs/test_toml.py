"""TOML beyond tomllib: what is written reads back equal; lines and overrides."""

from __future__ import annotations

import math
import string
import tomllib
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.jobs.toml import dumps, lines_of, override, parse_override

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=-3, minutes=-30))])
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    TEXT,
    st.datetimes(timezones=ZONES),
    st.dates(),
    st.times(),
)
KEYS = st.one_of(TEXT, st.text(string.ascii_lowercase, min_size=1, max_size=6))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
TABLES = st.dictionaries(KEYS, VALUES, max_size=6)


def typed(value: Any) -> Any:
    """A value with its types, so that True is not 1 and 1 is not 1.0."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value), value, math.copysign(1, value) if isinstance(value, float) else 0


@given(TABLES)
@settings(max_examples=300, deadline=None)
def test_what_is_written_reads_back_equal(table: dict[str, Any]) -> None:
    text = dumps(table)
    assert typed(tomllib.loads(text)) == typed(table)
    assert dumps(tomllib.loads(text)) == text, "a second time the same text"


def test_not_a_number() -> None:
    assert math.isnan(tomllib.loads(dumps({"x": math.nan}))["x"])


def test_the_text_is_the_usual_one() -> None:
    table = {
        "model": {"name": "mlp", "sizes": [64, 10]},
        "lr": 1e-5,
        "callbacks": [{"name": "a:b"}, {"name": "c:d", "at": {"x": 1}}],
        "a key": 'a"b\\\n\u0001',
        "mixed": [1, {"x": "y"}],
    }
    assert dumps(table).splitlines() == [
        "lr = 1e-05",
        '"a key" = "a\\"b\\\\\\n\\u0001"',
        'mixed = [1, {x = "y"}]',
        "",
        "[model]",
        'name = "mlp"',
        "sizes = [64, 10]",
        "",
        "[[callbacks]]",
        'name = "a:b"',
        "",
        "[[callbacks]]",
        'name = "c:d"',
        "",
        "[callbacks.at]",
        "x = 1",
    ]


@pytest.mark.parametrize(
    "value",
    [
        None,
        object(),
        {1: 2},
        "\ud800",
        time(1, tzinfo=UTC),
        datetime(2020, 1, 1, tzinfo=timezone(timedelta(seconds=1))),
        b"bytes",
    ],
)
def test_what_toml_cannot_say_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="TOML"):
        dumps({"x": value})


def test_a_date_is_no_datetime() -> None:
    assert dumps({"x": date(2020, 1, 2)}) == "x = 2020-01-02\n"


TEXT_WITH_LINES = '''# a comment
sync = "hardsync"

note = """
learners = 3
[data]
"""
[model]  # here
name = "mlp"
sizes = [
  64,
  10,
]
inner.deep = 1
[evaluate]
[[callbacks]]
name = "a:b"
'''


def test_lines() -> None:
    assert lines_of(TEXT_WITH_LINES) == {
        ("sync",): 2,
        ("note",): 4,
        ("model",): 8,
        ("model", "name"): 9,
        ("model", "sizes"): 10,
        ("model", "inner"): 14,
        ("model", "inner", "deep"): 14,
        ("evaluate",): 15,
        ("callbacks",): 16,
        ("callbacks", "0"): 16,
        ("callbacks", "0", "name"): 17,
    }


def test_lines_behind_a_long_value() -> None:
    text = "a = 1\nb = [\n" + "1,\n" * 30_000 + "]\nc = 2\n"
    assert lines_of(text) == {("a",): 1, ("b",): 2, ("c",): 30_004}


@pytest.mark.parametrize(
    "value",
    [
        '"""\n[a]\nb = 1\n"""',
        '"""""x"""""',
        "'''\n]]\n'' # b = 2\n'''",
        "'''''x'''''",
        r'"\"] = ["',
        r'"\\"',
        "'\\'",
        "[1.5, # ] b = 2\n{c = '}', d.e = [\n]}, [],\n]",
        "1979-05-27T07:32:00.5  # b = [",
    ],
)
def test_nothing_inside_a_value_is_a_key(value: str) -> None:
    text = f"first = {value}\n[ 'x.y' . z ] # [w]\nlast = 1\n"
    after = text.count("\n")
    assert tomllib.loads(text)["x.y"]["z"] == {"last": 1}
    assert lines_of(text) == {("first",): 1, ("x.y", "z"): after - 1, ("x.y", "z", "last"): after}


@given(st.text("ab.=[]{}#\"'\\\n ,", max_size=60))
@settings(max_examples=500, deadline=None)
def test_any_text_has_lines_or_is_too_deep(text: str) -> None:
    assert all(1 <= line <= text.count("\n") + 1 for line in lines_of(text).values())


@given(TABLES)
@settings(max_examples=100, deadline=None)
def test_every_key_that_is_written_has_a_line(table: dict[str, Any]) -> None:
    text = dumps(table)
    lines = lines_of(text)
    assert {key for key, *_ in lines} == set(table)
    for path, line in lines.items():
        if len(path) == 1 and not isinstance(table[path[0]], dict | list):
            assert tomllib.loads(text.split("\n")[line - 1]).keys() == {path[0]}


@pytest.mark.parametrize(
    "text, path, value",
    [
        ("learners=4", ("learners",), 4),
        ("sync=softsync:2", ("sync",), "softsync:2"),
        ('sync = "hardsync"', ("sync",), "hardsync"),
        ("optimizer.lr=1e-3", ("optimizer", "lr"), 1e-3),
        ("model.sizes=[64, 10]", ("model", "sizes"), [64, 10]),
        ("data={name='digits'}", ("data",), {"name": "digits"}),
        ('"a b".c=true', ("a b", "c"), True),
        ("run_dir=runs/a=b", ("run_dir",), "runs/a=b"),
        ("epochs=", ("epochs",), None),
        ("x=1\ny=2", ("x",), "1\ny=2"),
        ("x=[1", ("x",), "[1"),
    ],
)
def test_overrides(text: str, path: tuple[str, ...], value: Any) -> None:
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize("text", ["", "learners", "=3", "a b=3", "a..b=3", "a=1\n=b", "[x]=1", "#=1"])
def test_no_override(text: str) -> None:
    if text == "a=1\n=b":
        assert parse_override(text) == (("a",), "1\n=b")
        return
    with pytest.raises(UsageError, match=r"is no key=value, as learners=4"):
        parse_override(text)


def test_an_override_goes_where_it_belongs() -> None:
    table: dict[str, Any] = {"loss": "mse", "epochs": 3, "list": [1]}
    override(table, ("loss", "reduction"), "sum")
    override(table, ("epochs",), None)
    override(table, ("model", "name"), "mlp")
    assert table == {"loss": {"name": "mse", "reduction": "sum"}, "list": [1], "model": {"name": "mlp"}}
    with pytest.raises(UsageError, match="list is no table; set it as a whole"):
        override(table, ("list", "0"), 1)
