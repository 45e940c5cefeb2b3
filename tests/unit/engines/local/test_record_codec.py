"""Messages through the rings of shared memory: what comes out is what went in, and fits its record."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from syncline.engines.local.record_codec import (
    ENTRY,
    NOTE,
    decode,
    decode_entry,
    encode,
    encode_entry,
    speaks_of,
)
from syncline.messages import log
from syncline.messages import to_leader as say


def made(kind: Any, first: int) -> Any:
    """With a different number in each field."""
    names = (
        kind.__annotations__
        if issubclass(kind, tuple)
        else {f.name: f.type for f in dataclasses.fields(kind)}
    )
    values = {
        "int": lambda index: first + index,
        "bool": lambda index: bool(index % 2),
        "bytes": lambda index: b"s",
    }
    return kind(
        *(values.get(kind_of, float)(index) for index, kind_of in enumerate(map(name_of, names.values())))
    )


def name_of(annotation: Any) -> str:
    return getattr(annotation, "__forward_arg__", annotation)


SAID = [kind for kind in get_args(say.ToLeader) if kind is not say.Sum]  # nodes of trees are no processes yet


@pytest.mark.parametrize("kind", SAID, ids=lambda kind: kind.__name__)
def test_what_a_learner_says_arrives_as_it_was(kind: Any) -> None:
    message = made(kind, 10)
    record = NOTE.unpack(NOTE.pack(*encode(message, slot=3)))
    found, slot = decode(record, lambda table, slot: b"s")
    assert type(found) is kind
    assert (found, slot) == (message, 3)
    assert speaks_of(record) == (getattr(message, "table", None), getattr(message, "loader", say.NO_LOADER))


@pytest.mark.parametrize("kind", get_args(log.Entry), ids=lambda kind: kind.__name__)
def test_an_entry_of_the_log_arrives_as_it_was(kind: Any) -> None:
    entry = made(kind, 10)
    found, slot = decode_entry(ENTRY.unpack(ENTRY.pack(*encode_entry(entry, slot=1))))
    assert type(found) is kind
    assert (found, slot) == (entry, 1)
    assert [type(value) for value in found] == [type(value) for value in entry]
