"""A shard's two sources, the log and the supervisor: neither is ahead of what it needs of the other."""

from __future__ import annotations

from typing import Any, cast

import torch

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.local.control_channel import Channel
from syncline.engines.local.exchange import LINE, Ring
from syncline.engines.local.record_codec import Whole
from syncline.engines.local.server import ENTRY, LOG_ENTRIES, Call, LocalServer, ServedTable, ServerSpec
from syncline.engines.local.shared_memory import Region, SharedWords, WakeUp
from syncline.engines.local.table_memory import Geometry, Lane, TableMemory
from syncline.engines.local.tree_node import NodeDesk, name_of
from syncline.messages.log import Change, GiveState
from syncline.messages.to_leader import Sum
from syncline.table.layout import lay_out


def test_what_the_log_has_no_room_for_follows_in_order() -> None:
    log, beats = Region(8 * Ring.words(LOG_ENTRIES, 2)), Region(8 * LINE * 3)
    channel, theirs = Channel.pair()
    bells = [WakeUp() for _ in range(3)]
    port = LocalServer(
        channel, ServerSpec(0, 3, log, 2, -1, bells[0], bells[1:], None, Geometry(2, 0), 0, beats)
    )
    followers = Ring(SharedWords(log), 0, capacity=LOG_ENTRIES, form=ENTRY, readers=2)
    count = LOG_ENTRIES + 300
    for number in range(count):
        port.append(GiveState(0, 0, number))
    assert not port._keeps_up()
    seen: list[list[int]] = [[], []]
    for reader, every in ((0, 1), (1, 2)):  # one reads all there is, the other lags
        for _ in range(LOG_ENTRIES // every):
            record = followers.pop(reader)
            assert record is not None
            seen[reader].append(int(record[3]))
    assert port._keeps_up()
    for reader in (0, 1):
        while (record := followers.pop(reader)) is not None:
            seen[reader].append(int(record[3]))
    assert seen == [list(range(count))] * 2
    channel.close()
    theirs.close()


def test_a_follower_reads_the_dial_that_the_log_turns_to_before_it_turns() -> None:
    log, beats = Region(8 * Ring.words(LOG_ENTRIES, 1)), Region(8 * LINE * 2)
    channel, theirs = Channel.pair()
    supervisor = Channel(theirs)
    bells = [WakeUp() for _ in range(2)]
    leader = LocalServer(
        channel, ServerSpec(0, 2, log, 1, -1, bells[0], bells[1:], None, Geometry(2, 0), 0, beats)
    )
    follower = LocalServer(
        channel, ServerSpec(1, 2, log, 1, 0, bells[1], bells[:1], None, Geometry(2, 0), 0, beats)
    )
    cast(Any, follower)._tables[0] = None  # a table that it knows of
    leader.append(Change(0, 1))
    supervisor.send(m.Dial(1, Sync.parse("async"), None))  # said to the leader first
    follower._read_log()
    assert set(follower._role.replay.dials) == {1}
    channel.close()
    supervisor.close()


def test_a_sum_waits_until_the_shard_knows_where_its_node_has_them() -> None:
    """A renewed leaf may pass on its first sum before the shard has read all that the supervisor said of it."""
    model = torch.nn.Linear(3, 1)
    layout, _ = lay_out(model, [model.parameters()], cuttable=True, shards=1)
    beats, desk = Region(8 * LINE), Region(NodeDesk.nbytes())
    lane = Region(Lane.nbytes(layout, slots=2))
    channel, theirs = Channel.pair()
    supervisor = Channel(theirs)
    node, bell = 2, WakeUp()
    spec = ServerSpec(0, 1, Region(8), 0, -1, bell, [], None, Geometry(2, 0, sums=2), 0, beats)
    shard = LocalServer(channel, spec)
    memory = Region(TableMemory.nbytes(layout, places=0))
    shard._tables[0] = ServedTable(memory, layout, 0, spec.geometry)
    heard: list[tuple[int, Sum]] = []
    cast(Any, shard)._role.note = lambda name, said: heard.append((name, said))
    supervisor.send(Call(LocalServer.add_node, (node, desk, WakeUp())))
    supervisor.send(Call(LocalServer.add_node_table, (node, 0, layout, lane)))
    shard._control()  # what it has heard of so far: there is such a node
    sent = NodeDesk(desk)
    sent.sums.push(Whole(0, 7, 0, 0, True, 1, 3).record(0))
    assert shard._read_notes()
    assert heard == [(name_of(node), Sum(0, 7, 0, (), 0, True, 3, ()))]
    channel.close()
    supervisor.close()
