"""What the parties of a batch method say to each other."""

from __future__ import annotations

from typing import get_args

from syncline.batch import messages
from syncline.batch.portions import Cancel
from tests.unit.messages.words import check_values, classes


def test_words_are_values() -> None:
    check_values(messages)


def test_the_coordinators_actions_are_all_that_nobody_else_says() -> None:
    said_by_shards_and_learners = {
        messages.Ran,
        messages.Added,
        messages.Ready,
        messages.Answered,
        messages.Dropped,
    }
    asked_by_the_engine = {messages.Save}
    expected = {*classes(messages), Cancel} - said_by_shards_and_learners - asked_by_the_engine
    assert {*get_args(messages.Action)} == expected
