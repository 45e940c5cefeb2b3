"""The leading shard's log on its way to shards elsewhere: what an entry needs goes before it, and no more than they have room for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.engines.local.exchange import Ring
from syncline.engines.local.record_codec import ENTRY, Record, encode_entry
from syncline.engines.local.server import LOG_ENTRIES
from syncline.engines.local.shared_memory import SharedWords
from syncline.engines.ray.frame_kinds import LANE, WORD, Kind, place_of
from syncline.engines.ray.relay_log import MOST
from syncline.messages.log import GiveState, Leave, PutValues, Take
from tests.unit.engines.ray.doubles import Relayed, Sent, frame, rang

LEARNER = 1


def log_of(machine: Relayed) -> Ring:
    """As shards there write and read it."""
    return Ring(SharedWords(machine.log), 0, capacity=LOG_ENTRIES, form=ENTRY)


def leader() -> tuple[Relayed, Ring]:
    """On machine 0, with a learner; the other shards are on machines 1 and 2."""
    machine = Relayed(0, (0, 1, 2))
    machine.table()
    machine.learner(LEARNER, 0)
    machine.lane(LEARNER)
    return machine, log_of(machine)


def entries(sent: list[Sent], site: int) -> list[Record]:
    return [
        record
        for each in sent
        if each.site == site and each.kind == Kind.ENTRIES
        for record in ENTRY.iter_unpack(each.body)
    ]


def test_a_gradient_that_lies_beside_the_leading_shard_goes_before_its_entry() -> None:
    machine, log = leader()
    lane, table = machine.running.lanes[0, LEARNER], machine.running.tables[0]
    take = encode_entry(Take(0, LEARNER, 5, 0, True, 8, 0, 0, False, 1.0), slot=1)
    log.push(take)
    machine.running.log.scan()
    sent = machine.sent()
    for site in (1, 2):
        *values, last = [each for each in sent if each.site == site]
        assert last.kind == Kind.ENTRIES and entries(sent, site) == [take]
        assert {each.place for each in values} == {place_of(LANE, 0, LEARNER)}
        low, high = table.spans[site][0]
        assert (values[0].offset, len(values[0].body)) == (lane.slot(1) + low, high - low)


def test_what_a_learner_elsewhere_has_sent_itself_is_not_sent_again() -> None:
    machine, log = leader()
    machine.learner(2, 1)
    machine.lane(2)
    log.push(encode_entry(PutValues(0, 2, 0, 0, 1), slot=0))
    machine.running.log.scan()
    assert [each.kind for each in machine.sent()] == [Kind.ENTRIES, Kind.ENTRIES]


def test_who_has_left_is_forgotten_when_the_log_says_so() -> None:
    machine, log = leader()
    log.push(encode_entry(Leave(LEARNER)))
    machine.running.log.scan()
    assert machine.running.learners == {} and machine.running.lanes == {}
    assert machine.running.learner(LEARNER) is None, "and not waited for"


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 400)), max_size=12))
def test_no_machine_gets_more_than_it_has_room_for_and_all_get_all(said: list[tuple[int, int]]) -> None:
    machine, log = leader()
    count = LOG_ENTRIES
    for number in range(count):
        assert log.push(encode_entry(GiveState(0, LEARNER, number)))
    got: dict[int, list[Record]] = {1: [], 2: []}
    read = {1: 0, 2: 0}
    steps = iter(said)
    while min(map(len, got.values())) < count:
        machine.running.log.scan()
        sent = machine.sent()
        for site in got:
            got[site] += entries(sent, site)
            assert len(got[site]) - read[site] <= MOST
        site, most = next(steps, (min(read, key=lambda each: read[each]), MOST))
        heard = min(most, len(got[site]) - read[site])
        read[site] += heard
        machine.running.log.logged(site, frame(Kind.LOGGED, WORD.pack(heard)))
    for found in got.values():
        assert [record[3] for record in found] == list(range(count))


def test_entries_that_arrive_wait_for_room_wake_shards_and_are_counted() -> None:
    machine = Relayed(1, (0, 1))
    log, number = log_of(machine), LOG_ENTRIES + 10
    records = [encode_entry(GiveState(0, 0, each)) for each in range(number)]
    for first in range(0, number, MOST):
        body = b"".join(ENTRY.pack(*record) for record in records[first : first + MOST])
        machine.running.log.entries(0, frame(Kind.ENTRIES, body))
    assert machine.running.log.scan(), "some have no room"
    assert rang(machine.bells[1])
    assert machine.sent() == [Sent(0, Kind.LOGGED, 0, 0, WORD.pack(LOG_ENTRIES))]
    heard = []
    while (record := log.pop()) is not None:
        heard.append(record[3])
    assert not machine.running.log.scan() and rang(machine.bells[1])
    assert machine.sent() == [Sent(0, Kind.LOGGED, 0, 0, WORD.pack(10))]
    while (record := log.pop()) is not None:
        heard.append(record[3])
    assert heard == list(range(number))


def test_how_far_shards_are_and_their_norms_are_told_once_to_whom_they_concern() -> None:
    one, other = Relayed(1, (0, 1, 2)), Relayed(0, (0, 1, 2))
    here, there = one.table(), other.table()
    one.running.log.scan()
    assert one.sent() == [], "nothing was made yet"
    here.shelf.marks.reach(1, 4)
    norms = [float(index) for index in range(len(one.layout.parts[1].pieces))]
    here.shelf.norms.tell(1, 1, norms)
    one.running.log.scan()
    sent = one.sent()
    assert [(each.site, each.kind) for each in sent] == [(0, Kind.REACHED), (0, Kind.NORMS), (2, Kind.NORMS)]
    one.running.log.scan()
    assert one.sent() == []
    other.running.log.reached(1, frame(Kind.REACHED, sent[0].body))
    assert there.shelf.marks.reached(1) == 4 and rang(other.bells[0])
    other.running.log.norms(1, frame(Kind.NORMS, sent[1].body))
    assert there.shelf.norms.of(1) == (1, norms) and rang(other.bells[0])


def test_nothing_leaves_before_all_machines_are_connected() -> None:
    machine, log = leader()
    del machine.running.peers[2]
    log.push(encode_entry(GiveState(0, LEARNER, 0)))
    machine.running.log.scan()
    assert machine.sent() == []
