"""What the coordinator answers to learners. `handle`, `lane` and `desk` are the engine's own, opaque to roles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from syncline.table.layout import Layout


@dataclass(frozen=True, slots=True)
class Initialise:
    """You are the lowest live rank: publish the table's first values, then say `Initialised`."""

    table: int
    layout: Layout
    handle: Any = None  # the engine's own, and added by it
    lane: Any = None


@dataclass(frozen=True, slots=True)
class Personal:
    """What a checkpoint holds of one rank."""

    steps: int = 0
    random: bytes = b""  # states of its random generators
    buffers: dict[int, list[Tensor]] = field(default_factory=dict)  # by table


@dataclass(frozen=True, slots=True)
class Opened:
    """The table is there; ticket 0 is released when you may read."""

    table: int
    layout: Layout
    personal: Personal | None = None  # of a run that goes on
    handle: Any = None  # the engine's own, and added by it
    lane: Any = None


@dataclass(frozen=True, slots=True)
class Rejoined:
    """You are among the learners again: what you do from here on reaches the new servers."""

    tables: list[Opened]
    desk: Any = None  # the engine's own, and added by it


@dataclass(frozen=True, slots=True)
class Stop:
    """To all: the run ends."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """To all: the servers are new ones, whatever was asked of the old ones is void."""


@dataclass(frozen=True, slots=True)
class Call:
    """To all: who waits in a step asks why (`Called`)."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The servers were started anew since: rejoin, then ask again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request fails with this error in the learner."""

    error: Exception
