"""A relay without a process: its supervisor is a script, its peers write down what they are sent."""

from __future__ import annotations

import select
from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
from torch import nn

from syncline.engines.authentication import Secret
from syncline.engines.local.control_channel import NOTHING, Closed
from syncline.engines.local.exchange import LINE, Ring
from syncline.engines.local.host_interface import LaneHere, RelayParts, Sites, TableHere
from syncline.engines.local.server import LOG_ENTRIES
from syncline.engines.local.shared_memory import Region, WakeUp
from syncline.engines.local.table_memory import Geometry, Lane, Mailbox, TableMemory
from syncline.engines.ray.bulk_connection import Frame
from syncline.engines.ray.relay import Relay, Running
from syncline.engines.ray.relay_memory import LaneMemory, Learner, Table
from syncline.table.layout import Layout, lay_out

SLOTS, PLACES = 2, 3
GEOMETRY = Geometry(SLOTS, PLACES, sums=SLOTS)
SECRET = Secret(b"the run!", b"k" * 32)


@cache
def layout_over(shards: int) -> Layout:
    model = nn.Sequential(nn.Linear(256, 4), nn.BatchNorm1d(4))
    return lay_out(model, [model.parameters()], cuttable=True, shards=shards)[0]


class Supervisor:
    """The relay's channel to it: says these in turn, with None a turn of the relay's loop passes; then it is gone.

    Something that can be called is asked in every turn, until it says yes.
    """

    def __init__(self) -> None:
        self.says, self._bell = deque[Any](), WakeUp()
        self._bell.ring()
        self.heard: list[Any] = []

    def fileno(self) -> int:
        return self._bell.fd

    def take(self) -> Any:
        if not self.says:
            raise Closed
        if callable(self.says[0]):
            if self.says[0]():
                self.says.popleft()
            return NOTHING
        said = self.says.popleft()
        return NOTHING if said is None else said

    def receive(self) -> Any:
        """The next message: whoever waits for it does nothing else."""
        for said in self.says:
            if said is not None and not callable(said):
                self.says.remove(said)
                return said
        raise Closed

    def send(self, message: Any) -> None:
        self.heard.append(message)


class Sent(NamedTuple):
    site: int
    kind: int
    place: int
    offset: int
    body: bytes


class Peer:
    """Another machine, as far as it is sent something."""

    def __init__(self, site: int, sent: list[Sent]) -> None:
        self._site, self._sent, self._bell = site, sent, WakeUp()
        self.refused: Counter[str] = Counter()

    def fileno(self) -> int:
        return self._bell.fd

    def queue(self, kind: int, *bodies: Any, place: int = 0, offset: int = 0) -> int:
        self._sent.append(Sent(self._site, kind, place, offset, b"".join(map(bytes, bodies))))
        return len(self._sent)

    def sent(self, frame: int) -> bool:
        return True


class Relayed:
    """A machine's relay, and what its peers were sent since one looked last."""

    def __init__(self, site: int, shards: tuple[int, ...], *, linked: bool = True) -> None:
        sites = Sites(shards, tuple(range(3)))
        here, leads = sites.of(site), shards[0] == site
        readers = max(1, len(here))
        self.log = Region(8 * Ring.words(LOG_ENTRIES, readers))
        self.bells = {shard: WakeUp() for shard in here}
        self.beats = Region(8 * LINE)
        reader = readers - 1 if leads and set(shards) != {site} else None
        settings = (GEOMETRY, self.log, readers, reader, WakeUp(), self.bells, self.beats)
        self.supervisor = Supervisor()
        self.running = Running(self.supervisor, Relay(RelayParts(site, sites, 0, *settings), SECRET, {}))  # type: ignore[arg-type]
        self.layout, self.frames = layout_over(len(shards)), list[Sent]()
        for other in self.running.others() if linked else ():
            self.running.peers[other] = Peer(other, self.frames)  # type: ignore[assignment]

    def run(self, *said: Any) -> list[Any]:
        """Until all of it was said; what the relay has said."""
        self.supervisor.says.extend(said)
        with pytest.raises(Closed):
            self.running.run()
        assert not self.supervisor.says, "it waits for a word that nobody says"
        return self.supervisor.heard

    def has_said(self, kind: type) -> Callable[[], bool]:
        return lambda: any(isinstance(each, kind) for each in self.supervisor.heard)

    def table(self, number: int = 0) -> Table:
        region = Region(TableMemory.nbytes(self.layout, places=PLACES))
        here = TableHere(number, self.layout, region)
        found = Table(here, GEOMETRY, self.running.sites, self.running.site)
        self.running.tables[number] = found
        return found

    def learner(self, number: int, site: int) -> Learner:
        found = self.running.learners[number] = Learner(site, Mailbox(Region(Mailbox.nbytes())), WakeUp())
        return found

    def lane(self, number: int, table: int = 0) -> LaneMemory:
        region = Region(Lane.nbytes(self.layout, slots=SLOTS))
        found = self.running.lanes[table, number] = LaneMemory(
            LaneHere(table, number, self.layout, region), SLOTS
        )
        return found

    def sent(self) -> list[Sent]:
        found = self.frames[:]
        self.frames.clear()
        return found


def frame(kind: int, body: bytes = b"", *, place: int = 0) -> Frame:
    return Frame(kind, 0, place, memoryview(body))


def rang(bell: WakeUp) -> bool:
    """Since one looked last."""
    poll = select.poll()
    poll.register(bell.fd, select.POLLIN)
    found = bool(poll.poll(0))
    bell.quiet()
    return found
