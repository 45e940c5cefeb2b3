"""What learners and nodes tell the leading shard."""

from __future__ import annotations

from syncline.messages import to_leader as say
from tests.unit.messages.words import check_union, check_values


def test_words_are_values() -> None:
    check_values(say)


def test_every_word_is_in_the_union_that_the_leader_hears() -> None:
    check_union(say, say.ToLeader, say.OfTable, say.OfLoader)


def test_words_of_the_same_numbers_are_not_the_same() -> None:
    assert len({say.Used(1, 2), say.CloseLoader(1, 2), say.StreamEnded(1, 2)}) == 3
    assert len({say.Put(1, 2), say.AskState(1, 2), say.Load(1, 2), say.Await(1, 2), say.Put(1, 2)}) == 4
