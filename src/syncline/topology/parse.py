"""Topologies by name: `servers`, `servers:S`; those that come later are understood and refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.errors import NotYetError, UsageError

MOST_SHARDS = 8  # that are started unasked


@dataclass(frozen=True, slots=True)
class Servers:
    """A table cut over shards; `fixed`: the user named their number."""

    shards: int
    fixed: bool

    def __str__(self) -> str:
        return f"servers:{self.shards}" if self.fixed else "servers"


def auto_shards(learners: int, cores: int, *, lockstep: bool) -> int:
    """Shards to start when the user names no number; small tables use one of them all the same.

    In lockstep they work while the learners wait, so every core can fold; otherwise they get the spare cores.
    """
    wanted = learners if lockstep else cores - learners
    return max(1, min(MOST_SHARDS, cores, max(2, wanted)))


def parse_topology(text: str) -> Servers:
    if not isinstance(text, str):
        raise UsageError(f"topology must be a text such as 'servers:2', got {text!r}")
    name, _, value = text.partition(":")
    if name in ("tree", "allreduce"):
        raise NotYetError(
            f"topology {text!r} is understood but not built yet; working now: servers, servers:S"
        )
    if name != "servers":
        raise UsageError(f"unknown topology {text!r}: use servers or servers:S (S shards), e.g. servers:2")
    if not value:
        return Servers(2, False)
    if not re.fullmatch("[0-9]+", value) or int(value) < 1:
        raise UsageError(f"topology {text!r}: the number of shards must be a whole number of at least 1")
    return Servers(int(value), True)
