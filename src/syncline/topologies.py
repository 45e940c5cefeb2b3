"""Topologies by name, and which dials go over them: `servers:S`, `tree:F` and its options, `allreduce` and its."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from syncline.dial import Course, nearest
from syncline.errors import DialError, UsageError
from syncline.protocols.lifecycle import Faults

MOST_SHARDS = 8  # that are started unasked
SHARD_BYTES = 4 << 20  # a shard holds at least this much, unless the user names the number of shards
ROOMY_SHARD_BYTES = SHARD_BYTES // 8  # the same where many learners leave cores to the shards
MANY = 4  # learners
TREE = "tree:F[,broadcast][,servers=S]"

Mode = Literal["blocking", "layerwise"]
Apply = Literal["end", "reverse", "arrival"]
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class Topology(ABC):
    """Who keeps the weights, and how gradients come together: chosen once, before a run starts."""

    shards: int  # of its tables; 0 where learners keep them themselves
    fixed_members: ClassVar[bool]  # nobody joins, and nobody can be missed

    def sized(self, learners: int, cores: int, *, lockstep: bool) -> Topology:
        """The same, with what the user left open."""
        return self

    @abstractmethod
    def check(
        self, course: Course, faults: Faults, *, clip_norm: float | None, warm: int, clocks: bool = False
    ) -> None:
        """Refuse what does not go over it."""


@dataclass(frozen=True, slots=True)
class Servers(Topology):
    """A table cut over shards; `fixed`: the user named their number."""

    shards: int
    fixed: bool
    least: int = SHARD_BYTES  # of a table on each, where their number is not fixed
    fixed_members: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"servers:{self.shards}"

    def sized(self, learners: int, cores: int, *, lockstep: bool) -> Servers:
        """Small tables use one of the shards all the same."""
        if self.fixed:
            return self
        # in lockstep they work while the learners wait, so every core can fold; otherwise they get the spare cores
        wanted = learners if lockstep else cores - learners
        least = ROOMY_SHARD_BYTES if learners >= MANY and cores >= learners + 2 else SHARD_BYTES
        return Servers(max(1, min(MOST_SHARDS, cores, max(2, wanted))), False, least)

    def check(self, course: Course, faults: Faults, **rest: Any) -> None:
        if any(dial.auto for _, dial in course.dials):
            raise DialError(
                f"{course}: the delay adapts over all-reduce only; give delayed:k, or topology='allreduce'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees(Topology):
    """Leaves that add the gradients of `fan_in` learners each, nodes above them as needed, shards at the root (R7, R8)."""

    fan_in: int
    broadcast: bool = False  # versions flow down unasked, and a free learner waits for none
    root: Servers = Servers(2, False)
    fixed_members: ClassVar[bool] = False

    @property
    def shards(self) -> int:  # type: ignore[override]
        return self.root.shards

    def __str__(self) -> str:
        items = [str(self.fan_in), *(["broadcast"] if self.broadcast else []), f"servers={self.shards}"]
        return f"tree:{','.join(items)}"

    def sized(self, learners: int, cores: int, *, lockstep: bool) -> Trees:
        return replace(self, root=self.root.sized(learners, cores, lockstep=lockstep))

    def check(self, course: Course, faults: Faults, **rest: Any) -> None:
        """What can be done to a sum (M14)."""
        self.root.check(course, faults, **rest)
        for _, dial in course.dials:
            reason = ""
            if dial.backup > 0 or dial.late == "drop":
                reason = "a leaf's sum is taken whole, so a late gradient cannot be left out of it; use hardsync or softsync:n"
            elif dial.rate == "staleness":
                reason = "gradients are added before their staleness is known, so none can be damped by its own; use rate=share"
            if reason:
                raise DialError(f"{dial} over {self}: {reason}, or topology='servers'")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Topology):
    """Every learner keeps the whole model; gradients are averaged by a collective of all (A1, A2)."""

    mode: Mode = "blocking"
    apply: Apply = "end"  # of layer-wise: all at the end, from the last bucket to the first, as they arrive
    bucket: int = 1 << 20  # bytes that are fused into one reduction
    shards: ClassVar[int] = 0  # type: ignore[misc]
    fixed_members: ClassVar[bool] = True

    @property
    def layerwise(self) -> bool:
        return self.mode == "layerwise"

    def __str__(self) -> str:
        changed = [f"apply={self.apply}"] if self.apply != "end" else []
        changed += [f"bucket={self.bucket}"] if self.bucket != AllReduce().bucket else []
        return f"allreduce:{','.join([self.mode, *changed])}"

    def check(
        self, course: Course, faults: Faults, *, clip_norm: float | None, warm: int, clocks: bool = False
    ) -> None:
        """A collective of fixed members."""
        for _, dial in course.dials:
            if not dial.lockstep:
                raise DialError(
                    f"{dial} over {self}: a collective waits for everybody, so no gradient can come early or late; "
                    "use hardsync, delayed:k or delayed:auto<=k, or topology='servers'"
                )
        if len(course.dials) > 1 and any(dial.auto for _, dial in course.dials):
            raise DialError(f"{course}: a delay that adapts does not go into a course; give it alone")
        if self.apply != "end" and any(dial.delay for _, dial in course.dials):
            raise UsageError(
                f"{self} with {course}: a delayed gradient is applied k steps later, whole; leave apply= out"
            )
        if clip_norm is not None and self.apply != "end":
            raise UsageError(
                f"{self} with clip_norm={clip_norm}: the norm is that of all gradients, which are not there when the "
                "first are applied; use apply=end"
            )
        if clocks:
            raise UsageError(
                f"{self} with clocks=True: vector clocks are the servers', here each update takes one gradient of each "
                "learner; leave clocks= out, or use topology='servers'"
            )
        wrong = (
            (warm > 0, f"warmstart={warm}: during a warm start one learner updates alone"),
            (faults.on_error == "continue", 'on_error="continue": the others cannot go on without a learner'),
            (faults.replace, "replace=True: a lost learner's place cannot be taken"),
        )
        for refused, reason in wrong:
            if refused:
                raise UsageError(
                    f"{self} has fixed membership and does not go with {reason}; use topology='servers'"
                )


def parse_topology(text: str) -> Topology:
    if not isinstance(text, str):
        raise UsageError(f"topology must be a text such as 'servers:2' or 'allreduce', got {text!r}")
    name, _, value = text.partition(":")
    if name == "tree":
        return _tree(text, value)
    if name == "allreduce":
        return _all_reduce(text, value)
    if name != "servers":
        raise UsageError(
            f"unknown topology {text!r}: use servers or servers:S (S shards), e.g. servers:2, allreduce, or {TREE}"
        )
    if not value:
        return Servers(2, False)
    if not re.fullmatch("[0-9]+", value) or int(value) < 1:
        raise UsageError(f"topology {text!r}: the number of shards must be a whole number of at least 1")
    return Servers(int(value), True)


def _tree(text: str, value: str) -> Trees:
    first, *items = [item.strip() for item in value.split(",")]
    fan_in = _whole(text, "F, the learners of a leaf,", first, 2)
    options: dict[str, Any] = {}
    for item in items:
        key, _, given = (part.strip() for part in item.partition("="))
        if key in options:
            raise UsageError(f"topology {text!r} gives {key} twice; give it once")
        if item == "broadcast":
            options[key] = True
        elif key == "servers":
            options[key] = Servers(_whole(text, "servers", given, 1), True)
        else:
            raise UsageError(
                f"topology {text!r}: {item!r} is none of broadcast, servers=S{nearest(key, ('broadcast', 'servers'))}; "
                f"write {TREE}"
            )
    root = options.get("servers", Servers(2, False))
    return Trees(fan_in=fan_in, broadcast="broadcast" in options, root=root)


def _whole(text: str, name: str, given: str, least: int) -> int:
    if not re.fullmatch("[0-9]+", given) or int(given) < least:
        raise UsageError(
            f"topology {text!r}: {name} must be a whole number of at least {least}, got {given!r}; write for example "
            "tree:4 or tree:4,broadcast,servers=2"
        )
    return int(given)


def _all_reduce(text: str, value: str) -> AllReduce:
    fields: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in value.split(","))):
        key, equals, given = (part.strip() for part in item.partition("="))
        if not equals and key in get_args(Mode):
            key, given = "mode", key
        if key in fields:
            raise UsageError(f"topology {text!r} gives {key} twice; give it once")
        if key == "bucket":
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", given.lower())
            fields[key] = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
            if fields[key] < 1:
                raise UsageError(
                    f"topology {text!r}: bucket is a size such as 65536, 512KiB or 4MiB of at least one byte, got {given!r}"
                )
        elif (key == "mode" and given in get_args(Mode)) or (key == "apply" and given in get_args(Apply)):
            fields[key] = given
        else:
            raise UsageError(
                f"topology {text!r}: {item!r} is none of blocking, layerwise, apply=end, apply=reverse, "
                "apply=arrival, bucket=SIZE (such as 1MiB)"
            )
    found = AllReduce(**fields)
    if not found.layerwise and ("apply" in fields or "bucket" in fields):
        raise UsageError(
            f"topology {text!r}: apply= and bucket= are of allreduce:layerwise; a blocking reduction is one buffer"
        )
    return found
