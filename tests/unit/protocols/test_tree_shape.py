"""Shapes of trees of servers (R7, M14): who is below whom, and where those below a lost node go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.protocols.tree_shape import ROOT, Tree


@given(st.integers(1, 300), st.integers(2, 9))
def test_every_learner_has_one_way_to_the_root_and_nobody_has_more_below_than_the_fan_in(
    learners: int, fan_in: int
) -> None:
    tree = Tree(range(100, 100 + learners), fan_in)
    assert all(len(tree.children(node)) <= fan_in for node in (*tree.nodes, ROOT))
    assert sorted(each for leaf in tree.leaves for each in tree.children(leaf)) == [*tree.leaf]
    depth = 1
    while fan_in ** (depth + 1) < learners:
        depth += 1
    assert {len(tree.route(each)) for each in tree.leaf} == {depth} == {tree.depth}


def test_levels_above_the_leaves_appear_beyond_the_square_of_the_fan_in() -> None:
    assert Tree(range(16), 4).depth == 1
    assert Tree(range(17), 4).depth == 2
    with pytest.raises(UsageError, match="fan-in of at least 2, got 1"):
        Tree(range(3), 1)


def test_learners_of_a_lost_leaf_go_to_the_emptiest_others_and_leave_with_the_last() -> None:
    tree = Tree(range(5), 2)
    assert tree.lose(0) == {0: 2, 1: 1}  # leaf 2 had one learner, then both have two
    assert tree.route(0) == [2, 4]  # three leaves made a level of two above them
    tree.lose(1)
    assert tree.lose(2) == dict.fromkeys((4, 0, 2, 3, 1)) and not tree.leaves


def test_nodes_below_a_lost_one_go_to_the_one_above_it() -> None:
    tree = Tree(range(8), 2)
    assert tree.lose(4) == {0: ROOT, 1: ROOT}
    assert tree.route(0) == [0]


def test_a_joiner_goes_to_the_leaf_with_the_fewest_learners() -> None:
    tree = Tree(range(7), 3)  # leaves of 3, 3 and 1
    assert [tree.join(learner) for learner in (10, 11, 12)] == [2, 2, 0]
    tree.leave(4)
    assert tree.join(13) == 1
    assert Tree((), 2).join(1) == 0  # there is a leaf before anybody comes


def test_leaves_of_given_names_have_levels_above_them_and_those_aside_none() -> None:
    tree = Tree.over([3, 5, 8], 2, aside=[9])
    assert tree.leaves == [3, 5, 8, 9] and tree.nodes == [3, 5, 8, 9, 10, 11]
    assert [tree.way(leaf) for leaf in tree.leaves] == [[3, 10], [5, 10], [8, 11], [9]]
    tree.place(1, 5), tree.place(2, 9), tree.place(4, 5)
    assert tree.below(ROOT) == {10: [1, 4], 11: [], 9: [2]}
    assert tree.below(10) == {3: [], 5: [1, 4]} and tree.below(5) == {1: [1], 4: [4]}
    assert tree.under(10) == [1, 4]


def test_a_renewed_leaf_has_the_learners_and_the_place_of_the_lost_one() -> None:
    tree = Tree(range(6), 2)
    above = tree.parent[1]
    new = tree.renew(1)
    assert new not in range(5) and tree.leaves == [0, 2, new]
    assert tree.children(new) == [2, 3] and tree.parent[new] == above and 1 not in tree.nodes


@given(st.integers(1, 40), st.integers(2, 4), st.lists(st.integers(0, 99), max_size=12))
def test_whichever_nodes_are_lost_every_learner_left_has_a_way_to_the_root(
    learners: int, fan_in: int, losses: list[int]
) -> None:
    tree = Tree(range(learners), fan_in)
    for choice in losses:
        if not tree.nodes:
            break
        lost = tree.nodes[choice % len(tree.nodes)]
        below = tree.children(lost)
        moved = tree.lose(lost)
        assert list(moved) == below and lost not in tree.nodes
        for child, above in moved.items():
            assert above == (
                tree.leaf.get(child) if lost < len(range(0, learners, fan_in)) else tree.parent[child]
            )
    assert all(tree.route(learner)[0] in tree.leaves for learner in tree.leaf)
    assert set(tree.leaf) == (set(range(learners)) if tree.leaves else set())
