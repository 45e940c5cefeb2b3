"""The port of a learner elsewhere, against a stand-in that says what the test wants."""

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from syncline import messages as m
from syncline.dial import Course
from syncline.engines.local.shared_memory import WakeUp
from syncline.engines.local.table_memory import PORTION
from syncline.engines.ray.bulk_connection import Connection
from syncline.engines.ray.frame_kinds import WORDS, Kind, Objects, place_of
from syncline.engines.ray.remote_learner import OVERTAKEN, RemoteLearner, RemotePort
from syncline.ports import Portion, Reset
from syncline.roles.run_plan import RunPlan, Seat
from syncline.table.layout import lay_out

RUN, LEARNER = b"the run!", 3


class StandIn:
    """The other end of a port's connection."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._near = near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        self.objects = Objects()
        self.connection = Connection(
            far, run=RUN, incarnation=LEARNER, into=lambda head: memoryview(bytearray(head.length))
        )
        self.words(0, 0, 0)
        seat = Seat(plan=RunPlan(course=Course.of("hardsync"), learners=1), rank=0)
        self._bell = WakeUp()
        self.port = RemotePort(near, RemoteLearner(LEARNER, seat, 2, RUN, self._bell, 3))
        self.port._over = True  # its process does not end with the connection
        model = nn.Linear(3, 2)
        self.layout, _ = lay_out(model, [list(model.parameters())], cuttable=True, shards=1)

    def words(self, stop: int, generation: int, calls: int) -> None:
        self.connection.send(Kind.WORDS, WORDS.pack(stop, generation, calls, *[0] * 5))

    def opened(self) -> m.Opened:
        return m.Opened(0, self.layout, handle=([], []))

    def reading(self, released: int, version: int, place: int, generation: int = 0) -> None:
        words = (0, released, version, 0, 0, version, place, generation)
        self.connection.send(Kind.READING, WORDS.pack(*words))

    def close(self) -> None:
        self.connection.close()
        self._near.close()
        self._bell.close()


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    made = StandIn()
    yield made
    made.close()


def until(ready) -> None:
    while not ready():
        threading.Event().wait(0.001)


def test_what_new_servers_say_right_after_the_answer_to_a_rejoin_is_kept(stand_in: StandIn) -> None:
    port = stand_in.port
    old, new = Portion(0, 0, 0, 0, 4), Portion(0, 0, 1, 4, 8)
    stand_in.connection.send(Kind.PORTION, PORTION.pack(*old))
    stand_in.objects.send(stand_in.connection, Kind.ANSWER, m.Rejoined([], 1))
    stand_in.connection.send(Kind.PORTION, PORTION.pack(*new))
    until(lambda: port._portions.get(0, {}).get(0) == new)
    port.ask(m.Rejoin(0, 1))
    assert port.portion(0, 0, block=False) == new


def test_a_version_is_read_from_where_it_came_to(stand_in: StandIn) -> None:
    port, flat = stand_in.port, stand_in.layout.parameters
    table = port.open(stand_in.opened())
    values = torch.zeros(flat.nbytes, dtype=torch.uint8)
    for view in flat.views(flat.segments(values)):
        view.fill_(7.0)
    assert table.wait(0, block=False) is None
    stand_in.connection.send(Kind.VERSION, values.numpy(), place=place_of(0, 1))
    stand_in.reading(1, 5, 1)
    reading = table.wait(0)
    into = [torch.zeros(2, 3), torch.zeros(2)]
    assert reading is not None and table.read(reading, into) == 5
    assert all((tensor == 7.0).all() for tensor in into)
    stand_in.reading(2, 6, OVERTAKEN)
    reading = table.wait(1)
    assert reading is not None and table.read(reading, into) is None  # wants one delivered


def test_drafts_are_free_when_the_shards_have_taken_them(stand_in: StandIn) -> None:
    table = stand_in.port.open(stand_in.opened())
    drafts = [table.draft(), table.draft()]
    assert table.draft(block=False) is None
    stand_in.connection.send(Kind.FREED, place=place_of(0, 1))
    again = table.draft()
    assert again is not None and drafts[1] is not None and again.place == drafts[1].place == 1


def test_whoever_waits_hears_that_the_servers_are_new_ones(stand_in: StandIn) -> None:
    table = stand_in.port.open(stand_in.opened())
    stand_in.words(0, 1, 0)
    with pytest.raises(Reset):
        table.wait(0)
    with pytest.raises(Reset):
        stand_in.port.portion(0, 0, block=True)
    stand_in.reading(1, 5, 0, generation=1)  # not for it before it has rejoined
    until(lambda: stand_in.connection.flush())
    assert table.wait(0, block=False) is None
