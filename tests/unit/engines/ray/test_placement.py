"""Learners on nodes and GPUs: pure, so no cluster is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.engines.ray.placement import Node, chosen_nodes, deal, gpu_of
from syncline.errors import UsageError

HOME = Node("a" * 40, "10.0.0.1", 4, home=True)
SECOND = Node("b" * 40, "10.0.0.2", 8)
THIRD = Node("c" * 40, "10.0.0.3", 2)


def test_the_callers_node_comes_first_and_then_the_largest() -> None:
    assert chosen_nodes([THIRD, SECOND, HOME], None) == [HOME, SECOND, THIRD]
    assert chosen_nodes([THIRD, SECOND, HOME], 2) == [HOME, SECOND]


def test_too_few_nodes_are_one_line_with_the_numbers() -> None:
    with pytest.raises(
        UsageError, match=r"nodes=3, but the Ray cluster has 2: 10\.0\.0\.1 .*ask for fewer"
    ) as error:
        chosen_nodes([HOME, SECOND], 3)
    assert "\n" not in str(error.value)


def test_a_caller_outside_of_the_cluster_is_told_so() -> None:
    with pytest.raises(UsageError, match="on no node"):
        chosen_nodes([SECOND], None)


def test_learners_go_where_most_cores_are_left() -> None:
    assert deal(6, [HOME, SECOND]) == [0, 1, 1, 1, 1, 1]
    assert deal(4, [HOME, SECOND], most=2) == [0, 0, 1, 1]
    assert deal(3, [HOME, SECOND], servers=1) == [1, 1, 1]


def test_too_few_cores_are_one_line_with_the_numbers() -> None:
    with pytest.raises(
        UsageError, match=r"learners=7 .*room for 6: 4 on 10\.0\.0\.1 .*2 on 10\.0\.0\.3"
    ) as error:
        deal(7, [HOME, THIRD])
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="learners_per_node=1"):
        deal(3, [HOME, THIRD], most=1)


def test_a_group_has_its_seats_on_one_node() -> None:
    assert deal(3, [HOME, SECOND], seats=4) == [0, 1, 1]
    with pytest.raises(
        UsageError, match=r"learners=4 need 4 cores each on one node, .*room for 3: 1 on .*2 on"
    ):
        deal(4, [HOME, SECOND], seats=4)
    with pytest.raises(UsageError, match=r"group=9: .* no node has so many \(4 on .*, 8 on .*under torchrun"):
        deal(1, [HOME, SECOND], seats=9)


@given(
    cores=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    learners=st.integers(1, 20),
    most=st.none() | st.integers(1, 5),
)
def test_every_learner_has_a_node_and_no_node_more_than_it_has_room_for(cores, learners, most) -> None:
    nodes = [Node(str(i), f"10.0.0.{i}", count, home=i == 0) for i, count in enumerate(cores)]
    room = [min(count, most or count) for count in cores]
    if sum(room) < learners:
        with pytest.raises(UsageError):
            deal(learners, nodes, most=most)
        return
    dealt = deal(learners, nodes, most=most)
    assert len(dealt) == learners
    assert all(dealt.count(node) <= room[node] for node in range(len(nodes)))


def test_gpus_are_dealt_in_turn() -> None:
    assert [gpu_of(index, 2) for index in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    with pytest.raises(UsageError, match="no GPU"):
        gpu_of(0, 0)
