"""The log's entries."""

from __future__ import annotations

from syncline.messages import log
from tests.unit.messages.words import check_union, check_values, classes, made


def test_entries_are_values() -> None:
    check_values(log)


def test_every_entry_is_in_the_union_that_shards_carry_out() -> None:
    check_union(log, log.Entry)


def test_all_but_the_leaving_of_a_learner_begin_with_their_table() -> None:
    """Shards look at it to see whether an entry is theirs."""
    assert {kind for kind in classes(log) if getattr(made(kind), "table", None) != 0} == {log.Leave}
