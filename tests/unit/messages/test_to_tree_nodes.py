"""What the leading shard tells the nodes of a tree."""

from __future__ import annotations

from syncline.messages import to_tree_nodes
from tests.unit.messages.words import check_union, check_values


def test_answers_are_values() -> None:
    check_values(to_tree_nodes)


def test_every_answer_is_in_the_union_that_nodes_hear() -> None:
    check_union(to_tree_nodes, to_tree_nodes.ToNodes)
