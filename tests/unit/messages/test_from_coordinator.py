"""What the coordinator tells learners and shards."""

from __future__ import annotations

from syncline import messages as m
from syncline.messages import from_coordinator, to_coordinator
from tests.unit.messages.words import check_values, classes


def test_words_are_values() -> None:
    check_values(from_coordinator)


def test_no_word_hides_one_that_goes_the_other_way() -> None:
    """Both are read as `messages`."""
    for module in (from_coordinator, to_coordinator):
        for kind in classes(module):
            assert getattr(m, kind.__name__) is kind
