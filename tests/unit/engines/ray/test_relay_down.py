"""Which versions a machine is sent."""

from collections import deque

from syncline.engines.ray.relay_down import Flow


def test_the_newest_goes_unasked_to_a_machine_that_has_all_of_the_former_one() -> None:
    flow = Flow(deque(maxlen=4))
    assert flow.has_room_for(0)
    flow.unanswered, flow.there = 1, deque([0])
    assert not flow.has_room_for(1), "parts of other machines may be under way"
    flow.unanswered = 0
    assert flow.has_room_for(3) and not flow.has_room_for(0)
