"""A machine's part of a run: who shares which memory with whom, in which order they hear of it, and what waits for a relay."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from syncline import messages as m
from syncline.engines.local.exchange import LINE
from syncline.engines.local.host_interface import (
    Begun,
    Forget,
    LaneHere,
    LearnerKnown,
    SendOut,
    SentOut,
    Sites,
    TableHere,
)
from syncline.engines.local.local_host import LocalHost, geometry_of
from syncline.engines.local.server import Call, LocalServer
from syncline.engines.local.shared_pickle import pack
from syncline.engines.local.table_memory import WAITS, Geometry, Mailbox, TableMemory
from syncline.topologies import Servers
from tests.unit.engines.local.doubles import Children, layout_of, said_to, spec_of

LAYOUT = layout_of(4, 5000, shards=2)


class Machine:
    """One of a run's, with the shards that these sites give it, and what it has passed on to the supervisor."""

    def __init__(self, shards: tuple[int, ...] = (0, 0), site: int = 0, *, several: bool = False) -> None:
        self.children: Any = Children()
        self.heard: list[tuple[str, Any]] = []
        self.parts: Any = None

        def relay(parts: Any) -> Any:
            self.parts = parts
            return parts

        tell: Callable[..., None] = lambda process, what: self.heard.append((process.role, what))  # noqa: E731
        live = (0, 1) if several else (0,)
        self.sites, spec = Sites(shards, live), spec_of(topology=Servers(len(shards), True))
        self.host = LocalHost(
            spec,
            self.children,
            pack("task"),
            tell,
            tell,
            sites=self.sites,
            site=site,
            relay=relay if several else None,
        )
        self.host.start_servers(0, self.sites, {}, again=False)

    def learner(self, learner: int = 1, rank: int = 0) -> Any:
        self.host.introduce(learner, rank, self.host.site)
        return self.host.start_learner(learner, rank)

    def make_table(self) -> None:
        """As the coordinator has it made, with learner 1's first values."""
        self.host.initialise(1, m.Initialise(0, LAYOUT))
        made: dict[str, Any] = dict.fromkeys(("template", "dial", "learners", "warm", "batch_size"), 0)
        self.host.tell_shards(
            m.MakeTable(table=0, layout=LAYOUT, initial={}, limit=None, clip_norm=None, **made)
        )
        self.host.tell_shards(m.JoinTable(0, 1, 0, first=True))
        self.host.reply(1, m.Opened(0, LAYOUT))

    def told(self, role: str, kind: type, rank: int = 0) -> list[Any]:
        return [each for each in said_to(self.children.of(role, rank)) if isinstance(each, kind)]


def same(*regions: Any) -> bool:
    """All are one memory."""
    regions[0].words[0] += 1
    return len({region.words[0] for region in regions}) == 1


@pytest.mark.parametrize(
    "dial, learners, sites, expected",
    [
        ("hardsync", 3, Sites((0,)), Geometry(2, 3, None, 6)),
        ("delayed:3", 3, Sites((0,)), Geometry(4, 8, None, 12)),
        ("hardsync", 3, Sites((0,), (0, 1)), Geometry(2, 4, None, 6)),
        ("hardsync", 3, Sites((0,), (0, 1, 2, 3)), Geometry(2, 5, None, 6)),
        ("hardsync", 3, Sites((0,), (0,), grows=True), Geometry(2, 5, None, 6)),
    ],
)
def test_there_is_room_for_what_the_dial_and_the_machines_need(
    dial: str, learners: int, sites: Sites, expected: Geometry
) -> None:
    assert geometry_of(spec_of(learners, dial=dial), sites) == expected


# -- servers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shards, site, several, places",
    [
        ((0, 0, 0), 0, False, {0: (2, -1, 2), 1: (2, 0, 2), 2: (2, 1, 2)}),
        ((0,), 0, False, {0: (0, -1, 0)}),
        ((0, 1, 0), 0, True, {0: (2, -1, 2), 2: (2, 0, 2), "relay": (2, 1)}),
        ((0, 1, 0), 1, True, {1: (1, 0, 1), "relay": (1, None)}),
        ((0, 0), 0, True, {0: (1, -1, 2), 1: (1, 0, 2), "relay": (1, None)}),
    ],
)
def test_who_reads_the_log_and_who_is_woken(shards: Any, site: int, several: bool, places: Any) -> None:
    """Of each shard here: how many read its log, which of them it is, how many it wakes; the relay writes the log where nobody leads."""
    machine = Machine(shards, site, several=several)
    found: dict[Any, Any] = {}
    for process in machine.children.by_pid.values():
        if process.role == "shard":
            spec = machine.children.spec_of("shard", process.rank)
            found[process.rank] = (spec.readers, spec.reader, len(spec.others))
    if several:
        found["relay"] = (machine.parts.readers, machine.parts.reader)
    assert found == places


def test_what_all_shards_hear_the_leading_one_hears_last() -> None:
    machine, order = Machine((0, 0, 0)), list[int]()
    for shard, process in machine.host.shards.items():
        process.channel.post = lambda message, shard=shard: order.append(shard)  # type: ignore[method-assign,misc]
    machine.host.tell_shards(m.CutDone())
    assert order == [2, 1, 0]


def test_a_learner_and_all_shards_share_its_desk_its_lane_and_the_table() -> None:
    machine = Machine()
    learner = machine.learner()
    machine.make_table()
    spec = machine.children.spec_of("learner")
    (first, opened) = machine.told("learner", (m.Initialise, m.Opened))  # type: ignore[arg-type]
    shards = [
        {kind: machine.told("shard", kind, shard)[0] for kind in (Call, m.MakeTable, m.JoinTable)}
        for shard in (0, 1)
    ]
    assert [each[Call].method for each in shards] == [LocalServer.add_learner] * 2
    assert same(spec.desk, *(each[Call].arguments[1] for each in shards))
    assert same(first.handle, opened.handle, *(each[m.MakeTable].handle for each in shards))
    assert same(first.lane, opened.lane, *(each[m.JoinTable].lane for each in shards))
    assert said_to(learner)[0] == "task"


def test_what_shards_told_each_other_of_a_table_is_void_when_it_is_made_anew_and_its_values_stay() -> None:
    machine = Machine()
    machine.learner()
    machine.make_table()
    region = machine.told("shard", m.MakeTable)[0].handle
    shelf = TableMemory(region, LAYOUT, places=machine.host.geometry.places)
    shelf.marks.reach(0, 5), shelf.ring[0][0].fill_(3.0)
    machine.make_table()
    assert shelf.marks.reached(0) == -1 and bool((shelf.ring[0][0] == 3.0).all())
    assert same(region, machine.told("shard", m.MakeTable)[1].handle)


def test_a_learner_that_rejoins_new_servers_gets_a_desk_of_theirs_and_a_new_lane() -> None:
    machine = Machine()
    machine.learner()
    machine.make_table()
    host, old = machine.host, machine.children.spec_of("learner").desk
    host.end_servers()
    host.start_servers(1, machine.sites, {1: 0}, again=True)
    assert not machine.told("shard", Call), "new shards know of nobody"
    host.tell_shards(m.JoinTable(0, 1, 0))
    host.reply(1, m.Rejoined([m.Opened(0, LAYOUT)]))
    (rejoined,) = machine.told("learner", m.Rejoined)
    generation, desk = rejoined.desk
    assert generation == 1 and same(desk, machine.told("shard", Call)[0].arguments[1]) and old.fd == -1
    assert same(rejoined.tables[0].lane, machine.told("shard", m.JoinTable)[0].lane)


def test_of_a_learner_that_left_nothing_stays() -> None:
    machine = Machine()
    learner, spec = machine.learner(), machine.children.spec_of("learner")
    machine.make_table()
    machine.host.forget(1)
    assert (spec.desk.fd, spec.bell.fd, learner.bell) == (-1, -1, None)
    assert machine.host.vitals().learners == {}
    machine.host.reply(1, m.Stale())  # to nobody
    assert not machine.told("learner", m.Stale)


def test_a_word_for_all_learners_is_seen_and_wakes_them() -> None:
    machine = Machine()
    processes = [machine.learner(learner, learner - 1) for learner in (1, 2)]
    machine.host.announce(2, 9)
    assert [machine.children.spec_of("learner", rank).hub.words[2] for rank in (0, 1)] == [9, 9]
    assert [os.eventfd_read(process.bell.fd) for process in processes] == [1, 1]


def test_vitals_are_what_the_processes_show() -> None:
    machine = Machine()
    machine.learner()
    desk = Mailbox(machine.children.spec_of("learner").desk)
    desk.notes.push((0,) * 12 + (0.0,))
    desk.words[WAITS] = 1
    machine.children.spec_of("shard", 1).beats.words[LINE] = 5
    assert machine.host.vitals().learners == {1: (1, True)} and machine.host.vitals().shards == {0: 0, 1: 5}


# -- beside a relay --------------------------------------------------------------------------------------------


def test_the_relay_hears_of_everything_that_shards_elsewhere_need() -> None:
    machine = Machine((0, 1), several=True)
    machine.learner()
    machine.make_table()
    machine.host.introduce(2, 1, 1)
    machine.host.forget(1)
    kinds = [type(each) for each in said_to(machine.children.of("relay"))]
    table = [TableHere, LaneHere, TableHere]
    assert kinds == [LearnerKnown, *table, LearnerKnown, Forget]
    here, there = machine.told("relay", LearnerKnown)
    assert (here.learner, here.site, there.learner, there.site) == (1, 0, 2, 1)
    assert [each.made for each in machine.told("relay", TableHere)] == [False, True]


def test_a_learners_last_words_wait_until_what_it_said_before_is_out() -> None:
    machine = Machine((0, 1), several=True)
    learner, relay = machine.learner(), machine.children.of("relay")
    machine.host.hear(learner, m.Log({}))
    machine.host.hear(learner, m.Initialised(0, None))  # type: ignore[arg-type]
    machine.host.hear(learner, m.Returned(3))
    machine.host.lose(learner, "signal SIGKILL")
    assert machine.heard == [("learner", m.Log({}))] and learner.state == "returned"
    assert machine.told("relay", SendOut) == [SendOut(1, 0), SendOut(1), SendOut(1)]
    for _ in range(4):  # one too many
        machine.host.hear(relay, SentOut(1, None))
    assert [what for _, what in machine.heard[1:]] == [
        m.Initialised(0, None),
        m.Returned(3),
        "signal SIGKILL",
    ]  # type: ignore[arg-type]


def test_a_new_relay_is_asked_again_for_what_is_still_held() -> None:
    machine = Machine((0, 1), several=True)
    machine.host.hear(machine.learner(), m.Returned(3))
    machine.host.start_servers(1, machine.sites, {}, again=True)
    assert machine.told("relay", SendOut) == [SendOut(1)]


def test_a_table_is_opened_here_when_its_first_values_have_come() -> None:
    machine = Machine((0, 1), site=1, several=True)
    machine.learner()
    machine.make_table()
    assert not machine.told("learner", m.Opened)
    machine.host.hear(machine.children.of("relay", 1), Begun(0))
    assert [each.table for each in machine.told("learner", m.Opened)] == [0]


def test_who_waits_for_first_values_of_lost_servers_is_told_that_they_are_new() -> None:
    machine = Machine((0, 1), site=1, several=True)
    machine.learner()
    machine.make_table()
    machine.host.start_servers(1, machine.sites, {1: 1}, again=True)
    assert machine.told("learner", m.Stale) == [m.Stale()] and not machine.told("learner", m.Opened)
