"""What learners say to shards elsewhere: values go first, a note when they have arrived, and never another before it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.engines.local.exchange import Ring
from syncline.engines.local.host_interface import SendOut, SentOut
from syncline.engines.local.record_codec import NOTE, PART, Record, Whole, encode
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.tree_node import PARTS, NodeDesk, name_of
from syncline.engines.ray.frame_kinds import LANE, TABLE, Kind, place_of
from syncline.engines.ray.relay_up import TreeNode
from syncline.messages.to_leader import Await, Fetch, Gradient
from tests.unit.engines.ray.doubles import Relayed, Sent, frame, rang

LEARNER = 1


def gradient(number: int, *, full: bool = True, options: int = 0, states: bytes = b"") -> Gradient:
    return Gradient(0, number, 0, 0, 8, 0, 0, options, full, False, states, 0.5)


def machine_of_a_learner() -> tuple[Relayed, Ring]:
    """On machine 1; the shards are on machines 0 and 2. And what the learner says there."""
    machine = Relayed(1, (0, 2))
    machine.table()
    machine.lane(LEARNER)
    return machine, machine.learner(LEARNER, 1).desk.notes


def marked(machine: Relayed, mark: Sent) -> None:
    """That machine has all that was sent before."""
    machine.running.up.marked(mark.site, frame(Kind.MARKED, mark.body))


def notes(machine: Relayed, *numbers: int, full: bool = True, options: int = 0) -> list[Record]:
    return [encode(gradient(number, full=full, options=options), slot=1) for number in numbers]


def test_a_gradients_note_goes_out_when_every_machine_has_its_part() -> None:
    machine, desk = machine_of_a_learner()
    lane, table = machine.running.lanes[0, LEARNER], machine.running.tables[0]
    lane.lane.slots[1].segments[0].fill_(3.0)
    (note,) = notes(machine, 5)
    desk.push(note)
    machine.running.up.scan()
    sent = machine.sent()
    written = [each for each in sent if each.kind == Kind.WRITE]
    for site in (0, 2):
        there = [(each.offset, each.body) for each in written if each.site == site]
        assert there[: len(table.spans[site])] == [
            (lane.slot(1) + low, bytes(lane.region.bytes[lane.slot(1) + low : lane.slot(1) + high]))
            for low, high in table.spans[site]
        ]
    assert {each.place for each in written} == {place_of(LANE, 0, LEARNER)}
    (mark,) = [each for each in sent if each.kind == Kind.MARK]
    assert mark.site == 2 and Kind.NOTE not in [each.kind for each in sent], (
        "the leader's order is enough for it"
    )
    machine.running.up.scan()
    assert machine.sent() == []
    marked(machine, mark)
    machine.running.up.scan()
    assert machine.sent() == [Sent(0, Kind.NOTE, LEARNER, 0, NOTE.pack(*note))]


def test_buffers_and_random_states_go_to_the_leading_shards_machine_alone() -> None:
    machine, desk = machine_of_a_learner()
    lane = machine.running.lanes[0, LEARNER]
    lane.lane.slots[0].write_states(b"states")
    desk.push(encode(gradient(0, states=b"some"), slot=0))
    machine.running.up.scan()
    beside = [each for each in machine.sent() if each.offset >= lane.slot(0) + lane.at.buffers]
    assert {each.site for each in beside if each.body.endswith(b"states")} == {0}
    at_buffers = [each for each in beside if each.offset == lane.slot(0) + lane.at.buffers]
    assert [(each.site, len(each.body)) for each in at_buffers] == [(0, machine.layout.buffers.nbytes)]


def test_a_gradient_with_gaps_brings_its_mask_and_options_go_once_to_each_machine_and_slot() -> None:
    machine, desk = machine_of_a_learner()
    lane = machine.running.lanes[0, LEARNER]

    def sent_at(room: int, *said: Record) -> list[int]:
        for each in said:
            desk.push(each)
        found = []
        for _ in said:
            machine.running.up.scan()
            sent = machine.sent()
            found += [each.site for each in sent if each.offset == lane.slot(1) + room]
            marked(machine, next(each for each in sent if each.kind == Kind.MARK))
            machine.running.up.scan()
        return found

    assert sent_at(lane.at.options, *notes(machine, 0)) == [0, 2]
    assert sent_at(lane.at.mask, *notes(machine, 1, full=False)) == [0, 2]
    assert sent_at(lane.at.mask, *notes(machine, 2)) == []
    assert sent_at(lane.at.options, *notes(machine, 3, options=1)) == [0, 2]
    assert sent_at(lane.at.options, *notes(machine, 4, options=1)) == [], "they lie there"


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["gradient", "word", "order", "turn", "mark"]), max_size=30))
def test_notes_leave_in_their_order_and_none_before_its_values(steps: list[str]) -> None:
    machine, desk = machine_of_a_learner()
    said, left = list[Record](), list[bytes]()
    before = list[int]()  # of each order: the notes that go out before it
    marks, answered = list[Sent](), 0

    def turn() -> None:
        machine.running.up.scan()
        for each in machine.sent():
            if each.kind == Kind.MARK:
                marks.append(each)
            elif each.kind == Kind.NOTE:
                left.append(each.body)
        assert left == [NOTE.pack(*record) for record in said[: len(left)]]
        assert all(len(left) >= count for count in before[: len(machine.supervisor.heard)])
        assert sum(record[0] == 0 for record in said[: len(left)]) <= answered, "its values are not there"
        assert len(marks) <= 1, "one is waited for at a time"

    def answer() -> None:
        nonlocal answered
        if marks:
            mark = marks.pop()
            answered += mark.site == 2  # a gradient's; an order waits for the leading shard's machine
            marked(machine, mark)

    for number, step in enumerate(steps):
        if step == "turn":
            turn()
        elif step == "mark":
            answer()
        elif step == "order":
            machine.running.up.send_out(SendOut(LEARNER))
            before.append(len(said))
        else:
            message = gradient(number) if step == "gradient" else Await(0, number)
            said.append(encode(message, 1))
            desk.push(said[-1])
    while len(left) < len(said) or len(machine.supervisor.heard) < len(before):
        turn()
        answer()


def test_first_values_go_to_all_machines_with_shards_and_all_else_to_the_leading_ones() -> None:
    machine, _ = machine_of_a_learner()
    table = machine.running.tables[0]
    machine.running.up.send_out(SendOut(LEARNER, 0))
    machine.running.up.scan()
    sent = machine.sent()
    values = [(each.site, each.offset) for each in sent if each.place == place_of(LANE, 0, LEARNER)]
    assert {site for site, _ in values} == {0, 2}
    assert [
        (each.site, each.offset, len(each.body)) for each in sent if each.place == place_of(TABLE, 0)
    ] == [(0, table.first, table.end - table.first)]
    marks = [each for each in sent if each.kind == Kind.MARK]
    assert [each.site for each in marks] == [0, 2]
    marked(machine, marks[0])
    machine.running.up.scan()
    assert machine.supervisor.heard == []
    machine.running.up.lose(2)
    machine.running.up.scan()
    assert machine.supervisor.heard == [SentOut(LEARNER, 0)], "nobody waits for a machine that is gone"


def test_notes_that_arrive_wait_for_room_and_are_answered_in_their_order() -> None:
    machine = Relayed(0, (0, 2))
    desk, up = machine.learner(LEARNER, 1).desk, machine.running.up
    records = [encode(Fetch(0, number), 0) for number in range(100)]
    for record in records:
        up.note(1, frame(Kind.NOTE, NOTE.pack(*record), place=LEARNER))
    mark = (LEARNER).to_bytes(8, "little") + (9).to_bytes(8, "little")
    up.mark(1, frame(Kind.MARK, mark))
    heard: list[Record] = []
    while up.scan():
        assert machine.sent() == [] and rang(machine.bells[0])
        while (record := desk.notes.pop()) is not None:
            heard.append(record)
    while (record := desk.notes.pop()) is not None:
        heard.append(record)
    assert heard == [tuple(map(float, record)) for record in records]
    assert machine.sent() == [Sent(1, Kind.MARKED, 0, 0, mark)]


def node_on(machine: Relayed, site: int, *, parent: int | None) -> TreeNode:
    desk = NodeDesk(Region(NodeDesk.nbytes()))
    found = machine.running.nodes[name_of(2)] = TreeNode(site, parent, desk, WakeUp(), WakeUp())
    machine.lane(name_of(2))
    return found


def test_a_sums_values_go_before_its_tickets_to_the_machine_above_or_to_all_with_shards() -> None:
    machine, _ = machine_of_a_learner()
    node = node_on(machine, 1, parent=2)
    whole, place = Whole(0, 7, 0, 0, True, 1, 1).record(0), place_of(0, 0, name_of(2))

    def turn() -> list[Sent]:
        machine.running.tree.scan()
        machine.running.up.scan()
        return machine.sent()

    node.desk.over.push(whole)
    *values, tickets = turn()
    assert tickets == Sent(2, Kind.OVER, place, 0, PART.pack(*whole))
    assert {(each.site, each.kind) for each in values} == {(2, Kind.WRITE)}
    assert sum(len(each.body) for each in values) >= machine.running.tables[0].size
    node.desk.sums.push(whole)
    *values, mark = turn()
    assert {each.site for each in values} == {0, 2} and (mark.site, mark.kind) == (2, Kind.MARK)
    assert turn() == []
    marked(machine, mark)
    assert turn() == [Sent(0, Kind.SUM, place, 0, PART.pack(*whole))]


def test_a_sum_for_a_former_parent_is_dropped_and_one_for_a_later_parent_waits() -> None:
    machine, _ = machine_of_a_learner()
    node = node_on(machine, 1, parent=2)
    node.way = 1

    def passed(way: int) -> bool:
        node.desk.over.push(Whole(0, way, 0, 0, True, 1, 1).record(way))
        machine.running.tree.scan()
        machine.running.up.scan()
        return any(each.kind == Kind.OVER for each in machine.sent())

    assert [passed(0), passed(2), passed(1)] == [False, False, False], "that of way 2 is before it"
    node.way = 2
    machine.running.tree.scan()
    machine.running.up.scan()
    over = [each.body for each in machine.sent() if each.kind == Kind.OVER]
    assert over == [PART.pack(*Whole(0, 2, 0, 0, True, 1, 1).record(2))]


def test_tickets_of_a_node_that_arrive_wait_for_room_and_wake_the_leading_shard() -> None:
    machine = Relayed(0, (0, 2))
    node = node_on(machine, 1, parent=None)
    records = [Whole(0, number, 0, 0, True, 0, 1).record(0) for number in range(PARTS + 5)]
    body = b"".join(PART.pack(*record) for record in records)
    machine.running.tree.arrive(1, frame(Kind.SUM, body, place=place_of(0, 0, name_of(2))))
    heard = []
    waits = True
    while waits:
        waits = machine.running.tree.scan()
        assert rang(machine.bells[0])
        while (record := node.desk.sums.pop()) is not None:
            heard.append(record)
    assert heard == [tuple(map(float, record)) for record in records]
    assert all(before[2 + 2] < after[2 + 2] for before, after in pairwise(heard))
