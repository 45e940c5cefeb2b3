"""What learners and shards tell the coordinator."""

from __future__ import annotations

from syncline.messages import to_coordinator
from syncline.messages.to_coordinator import STREAM, Counts, OpenLoader
from tests.unit.messages.words import check_values


def test_words_are_values() -> None:
    check_values(to_coordinator)


def test_a_loader_is_named_in_errors_by_what_is_known_of_it() -> None:
    assert str(OpenLoader(0, 100, 8, "partition", None)) == "100 examples in batches of 8 (partition)"
    assert str(OpenLoader(0, 0, 8, STREAM, 3)) == "a stream in batches of 8"


def test_nobody_counts_in_the_table_of_another() -> None:
    Counts().examples[0] = 1
    assert Counts().examples == {}
