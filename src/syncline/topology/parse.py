"""Topologies by name: `servers`, `servers:S`; those that come later are understood and refused."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.errors import NotYetError, UsageError

AUTO_SHARDS = 2


@dataclass(frozen=True, slots=True)
class Servers:
    """A table cut over shards; `fixed`: the user named their number."""

    shards: int
    fixed: bool

    def __str__(self) -> str:
        return f"servers:{self.shards}" if self.fixed else "servers"


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
        return Servers(AUTO_SHARDS, False)
    if not value.isdigit() or int(value) < 1:
        raise UsageError(f"topology {text!r}: the number of shards must be a whole number of at least 1")
    return Servers(int(value), True)
