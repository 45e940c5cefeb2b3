"""Messages through the rings of shared memory: what comes out is what went in, and fits its record."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from syncline.engines.local.record_codec import (
    ANSWER,
    ENTRY,
    NOTE,
    PART,
    WHOLE,
    Answers,
    Part,
    Whole,
    decode,
    decode_entry,
    encode,
    encode_answer,
    encode_entry,
    speaks_of,
)
from syncline.messages import log
from syncline.messages import to_leader as say
from syncline.messages.to_tree_nodes import Counted, Refused, Taken
from syncline.protocols.tree_up import Count


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


SAID = [kind for kind in get_args(say.ToLeader) if kind is not say.Sum]  # that is many records


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


def test_a_sum_arrives_as_what_its_learners_said() -> None:
    gradient = say.Gradient(1, 8, 7, 6, 5, 4, 3, 2, True, False, b"", 0.5)
    part = Part(0, 9, 3, encode(gradient, 1))
    found = Part.of(PART.unpack(PART.pack(*part.record(way=4))))
    assert (found.way, found.learner, found.rank) == (4, 9, 3)
    assert decode(found.said, lambda table, slot: b"") == (gradient, 1)
    ticket = found.ticket(iteration=11)
    assert (ticket.learner, ticket.rank, ticket.number, ticket.stamp, ticket.step) == (9, 3, 8, 7, 6)
    assert (ticket.count, ticket.iteration) == (5, 11)
    whole = Whole(1, 2, 3, 4, True, 5, 6)
    last = Part.of(PART.unpack(PART.pack(*whole.record(way=4))))
    assert (last.way, last.learner, Whole.of(last)) == (4, WHOLE, whole)


ANSWERED = [
    Taken(1, 2),
    Refused(1, 2),
    Refused(1, 2, frozenset({(7, 8), (9, 10)}), {7: 3}),
    Counted(1, Count(8, True, False, {7: 3, 9: 4})),
    Counted(1, Count(9, False, True)),
]


def test_answers_to_nodes_arrive_one_after_another() -> None:
    answers, found = Answers(), []
    for record in [record for message in ANSWERED for record in encode_answer(message)]:
        if (message := answers.add(ANSWER.unpack(ANSWER.pack(*record)))) is not None:
            found.append(message)
    assert found == ANSWERED
