"""A cluster as a record: how long learners compute, what links carry, what shards' work costs, who shares a machine.

Numbers in, seconds out. Some have a name: those of the papers, and this machine or the cluster at hand as they were measured (files of
the user's cache). Their figures are the papers' own where they give any, docs/howto/simulator.md says for each where it is from; the
computation is that of one model, for another give `compute=`. Not responsible for when anything happens (`sim`).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from syncline.dial import nearest
from syncline.errors import UsageError

KINDS = ("none", "uniform", "normal", "lognormal", "exponential", "pareto")
TAIL = 2.5  # of the pareto jitter: the share of factors beyond x falls as x^-2.5
LEAST = 0.05  # no step is faster than this share of its usual time
_STRAGGLERS = -1  # the draw that says where stragglers begin
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_NORMAL = NormalDist()


def _mix(word: int) -> int:
    """The finaliser of splitmix64: every bit of the input changes every bit of the output half of the time."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, *place: int) -> float:
    """In the open interval (0, 1), by its place alone: (seed, learner, step) gives the same number every time.

    Counter-based, so that the order of events does not matter and a run that goes on draws what it would have drawn.
    """
    word = _mix((seed + _STEP) & _MASK)
    for part in place:
        word = _mix((word ^ part) + _STEP & _MASK)
    return ((word >> 11) + 0.5) / (1 << 53)


def _number(owner: str, name: str, value: Any, *, least: float = 0.0, above: bool = False) -> None:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or value < least or (above and value == least):
        raise UsageError(
            f"{owner}: {name} must be a number {'>' if above else '>='} {least:g}, got {value!r}"
        )


class _Numbers:
    """All fields of such a record are numbers that are not negative."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            _number(type(self).__name__, item.name, getattr(self, item.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(_Numbers):
    """Seconds of one mini-batch of μ examples: base + per_example·μ."""

    base: float = 1.0
    per_example: float = 0.0

    def seconds(self, examples: int) -> float:
        return self.base + self.per_example * examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(_Numbers):
    """Seconds of work on some bytes."""

    fixed: float = 0.0
    per_byte: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.fixed + self.per_byte * nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What data pass: `latency` for every message, `setup` more for bulk data, bytes per second (None: no limit)."""

    latency: float = 0.0
    bandwidth: float | None = None
    setup: float = 0.0

    def __post_init__(self) -> None:
        _number("Link", "latency", self.latency)
        _number("Link", "setup", self.setup)
        if self.bandwidth is not None:
            _number("Link", "bandwidth", self.bandwidth, above=True)

    def seconds(self, nbytes: int) -> float:
        """For which these bytes occupy it."""
        return nbytes / self.bandwidth if self.bandwidth is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """By what factor a step takes longer or shorter than usual.

    uniform: 1 ± spread. normal: standard deviation `spread`, cut at three of them. lognormal: mean 1. exponential,
    pareto: 1 plus a tail of mean `spread`, pareto's the heavier.
    """

    kind: str = "none"
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"Jitter: kind is one of {', '.join(KINDS)}, got {self.kind!r}")
        _number("Jitter", "spread", self.spread)
        if self.kind == "uniform" and self.spread >= 1:
            raise UsageError(
                f"Jitter: uniform of spread {self.spread:g} would give times <= 0; it must be < 1"
            )

    @classmethod
    def parse(cls, text: str) -> Jitter:
        """`lognormal:0.2`, or `none`."""
        kind, _, spread = text.partition(":")
        if kind in KINDS and kind != "none" and not spread:
            raise UsageError(f"jitter {text!r} needs a spread; write for example '{kind}:0.2'")
        return cls(kind=kind, spread=_parsed("jitter", spread) if spread else 0.0)

    def factor(self, share: float) -> float:
        """The value below which this share of all factors lies."""
        spread = self.spread
        if self.kind == "none" or spread == 0:
            return 1.0
        if self.kind == "uniform":
            return 1 + spread * (2 * share - 1)
        if self.kind == "normal":
            return max(LEAST, 1 + spread * min(3.0, max(-3.0, _NORMAL.inv_cdf(share))))
        if self.kind == "lognormal":
            return math.exp(spread * _NORMAL.inv_cdf(share) - spread * spread / 2)
        if self.kind == "exponential":
            return 1 - spread * math.log1p(-share)
        return 1 + spread * (TAIL - 1) * ((1 - share) ** (-1 / TAIL) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Machines, links and costs; ranks and shards are dealt to machines in their order."""

    name: str = "equal"
    compute: Compute = field(default_factory=Compute)
    jitter: Jitter = field(default_factory=Jitter)
    stragglers: float = 0.0  # share of learners that are slow throughout
    slowdown: float = 2.0  # by how much those are slower
    speeds: tuple[float, ...] = ()  # of the first ranks; the others have 1
    crowding: float = 0.0  # by which share each further learner on a machine slows all of them
    learners_per_machine: int | None = 1  # None: all are on one machine
    shards_per_machine: int | None = 1
    beside: bool = False  # shards are on the learners' machines, not on their own
    cores: int | None = None  # of a machine; None: everybody has one
    slice: float | None = None  # seconds of a core before the next in its queue; None: shared at every moment
    spin: float = 0.0  # seconds for which somebody who waits keeps its core (with slices)
    card: Link = field(default_factory=Link)  # each machine's network card, each way
    memory: Link = field(default_factory=Link)  # inside a machine
    delay: float = 0.0  # mean of what a message between machines takes longer, drawn at random for each
    copy: Cost = field(default_factory=Cost)  # a learner's: hand over a gradient, take over weights
    take: Cost = field(default_factory=Cost)  # a shard's: one gradient
    fold: Cost = field(default_factory=Cost)  # a shard's: one update
    serve: Cost = field(default_factory=Cost)  # a shard's: weights for one learner
    message: float = 0.0  # a shard's seconds for each message that comes in
    reply: float = 0.0  # the leading shard's seconds for each learner that it lets go on

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise UsageError(
                    f"Cluster: {name} is a {kind.__name__}, got {getattr(self, name)!r}; write {name}={_EXAMPLES[kind]}, with "
                    f"from syncline.cluster import {kind.__name__}"
                )
        for name in ("stragglers", "crowding", "message", "reply", "spin", "delay"):
            _number("Cluster", name, getattr(self, name))
        _number("Cluster", "slowdown", self.slowdown, least=1.0)
        if self.slice is not None:
            _number("Cluster", "slice", self.slice, above=True)
        if self.stragglers > 1:
            raise UsageError(
                f"Cluster: stragglers is a share of the learners, at most 1, got {self.stragglers:g}"
            )
        if not isinstance(self.speeds, tuple | list):
            raise UsageError(
                f"Cluster: speeds are those of the first ranks, as (1.0, 0.5), got {self.speeds!r}"
            )
        for speed in self.speeds:
            _number("Cluster", "a speed", speed, above=True)
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"Cluster: {name} is a whole number >= 1, or None, got {value!r}")
        if not isinstance(self.beside, bool):
            raise UsageError(f"Cluster: beside is True or False, got {self.beside!r}")

    # -- where ---------------------------------------------------------------------------------------------

    def machine_of_learner(self, rank: int) -> int:
        """Learners' machines are 0, 1, …"""
        return rank // self.learners_per_machine if self.learners_per_machine else 0

    def machine_of_shard(self, shard: int) -> int:
        """Machines of shards alone are -1, -2, …"""
        place = shard // self.shards_per_machine if self.shards_per_machine else 0
        return place if self.beside else -1 - place

    def crowd(self, rank: int, learners: int) -> int:
        """How many of so many learners are on the machine of this one, itself included."""
        if self.learners_per_machine is None:
            return max(1, learners)
        first = rank - rank % self.learners_per_machine
        return max(1, min(self.learners_per_machine, learners - first))

    # -- how long ------------------------------------------------------------------------------------------

    def straggles(self, rank: int, seed: int) -> bool:
        """Of any first ranks the given share does, to one; the seed says which."""
        start = uniform(seed, _STRAGGLERS)
        return math.floor((rank + 1) * self.stragglers + start) > math.floor(rank * self.stragglers + start)

    def pace(self, rank: int, *, seed: int, learners: int) -> float:
        """By what this learner's usual times are multiplied throughout a run."""
        speed = self.speeds[rank] if rank < len(self.speeds) else 1.0
        slow = self.slowdown if self.straggles(rank, seed) else 1.0
        beside = min(self.crowd(rank, learners), self.cores or learners) - 1  # at the same time
        return slow / speed * (1 + self.crowding * max(0, beside))

    def step_seconds(self, examples: int, *, rank: int, step: int, seed: int, learners: int) -> float:
        """The computation of one gradient."""
        return self.pace(rank, seed=seed, learners=learners) * self.one_step(
            examples, rank=rank, step=step, seed=seed
        )

    def one_step(self, examples: int, *, rank: int, step: int, seed: int) -> float:
        """The same for a learner of pace 1."""
        usual = self.compute.seconds(examples)
        if self.jitter.kind == "none":
            return usual
        return usual * self.jitter.factor(uniform(seed, rank, step))

    # -- names and texts -----------------------------------------------------------------------------------

    @classmethod
    def equal(cls, *, compute: float = 1.0, transfer: float = 0.01, latency: float = 0.001) -> Cluster:
        """Equal learners: fixed times for a gradient's computation, a move of bulk data, a message."""
        for name, value in (("compute", compute), ("transfer", transfer), ("latency", latency)):
            _number("Sim", name, value)
        link = Link(latency=latency, setup=transfer)
        return cls(compute=Compute(base=compute), card=link, memory=link)

    @classmethod
    def named(cls, name: str, **changes: Any) -> Cluster:
        """One of `p775`, `ethernet-1g`, `dgx-1`, `this-machine`, `this-cluster`, `equal`; with fields changed as `replace` does."""
        known = [item.name for item in fields(cls)]
        for key in changes:
            if key not in known:
                raise UsageError(
                    f"Cluster has no field {key!r}{nearest(key, known)}; there are: {', '.join(known)}"
                )
        return replace(cluster_named(name), **changes)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A name, and changes: `ethernet-1g:stragglers=0.1,slowdown=3,jitter=lognormal:0.2`."""
        name, colon, rest = text.strip().partition(":")
        cluster = cls.named(name)
        parts = [part for part in map(str.strip, rest.split(",")) if part]
        if colon and not parts:
            raise UsageError(
                f"cluster {text!r}: nothing is behind the colon; write {name!r}, or for example '{name}:stragglers=0.1'"
            )
        for part in parts:
            key, equals, value = part.partition("=")
            if not equals:
                raise UsageError(
                    f"cluster {text!r}: {part!r} is no key=value; write for example 'p775:stragglers=0.1'"
                )
            cluster = _changed(cluster, key.strip(), value.strip())
        return cluster

    def record(self) -> dict[str, Any]:
        """Plain values, for files; `from_record` takes them back."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Cluster:
        known = {item.name for item in fields(cls)}
        if unknown := sorted(record.keys() - known):
            raise UsageError(f"no cluster: unknown fields {unknown}; known are {sorted(known)}")
        made: dict[str, Any] = {
            name: _PARTS[name](**value) if name in _PARTS else tuple(value) if name == "speeds" else value
            for name, value in record.items()
        }
        return cls(**made)


_PARTS: dict[str, Any] = {
    "compute": Compute,
    "jitter": Jitter,
    "card": Link,
    "memory": Link,
    "copy": Cost,
    "take": Cost,
    "fold": Cost,
    "serve": Cost,
}
_EXAMPLES = {  # what to write where a part is something else
    Compute: "Compute(base=0.01, per_example=0.002)",
    Jitter: "Jitter(kind='lognormal', spread=0.2)",
    Link: "Link(latency=1e-4, bandwidth=125e6)",
    Cost: "Cost(fixed=1e-5, per_byte=1e-10)",
}
_WHOLE = ("learners_per_machine", "shards_per_machine", "cores")
_PLAIN = ("stragglers", "slowdown", "crowding", "delay", "message", "reply", "slice", "spin")
_SHORT = {  # words of the text form for parts of parts
    "base": ("compute", "base"),
    "per_example": ("compute", "per_example"),
    "latency": ("card", "latency"),
    "bandwidth": ("card", "bandwidth"),
    "setup": ("card", "setup"),
    "memory_latency": ("memory", "latency"),
    "memory_bandwidth": ("memory", "bandwidth"),
}
KEYS = ("jitter", "speeds", "beside", *_WHOLE, *_PLAIN, *_SHORT)


def _changed(cluster: Cluster, key: str, value: str) -> Cluster:
    made: Any
    if key == "jitter":
        made = Jitter.parse(value)
    elif key == "speeds":
        made = tuple(_parsed(key, each) for each in value.split("/"))
    elif key == "beside":
        if value not in ("true", "false"):
            raise UsageError(f"cluster: beside is true or false, got {value!r}")
        made = value == "true"
    elif key in _WHOLE:
        made = None if value == "all" else _parsed(key, value, int, "a whole number, or 'all'")
    elif key in _PLAIN:
        made = _parsed(key, value)
    elif key in _SHORT:
        part, name = _SHORT[key]
        made, key = replace(getattr(cluster, part), **{name: _parsed(key, value)}), part
    else:
        raise UsageError(
            f"cluster: unknown key {key!r}{nearest(key, KEYS)}; known are {', '.join(sorted(KEYS))}"
        )
    return replace(cluster, **{key: made})


def _parsed(key: str, text: str, kind: type = float, words: str = "a number") -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"cluster: {key} takes {words}, got {text!r}") from None


# -- those with a name -------------------------------------------------------------------------------------

HOW = {
    "this-machine": "run python -m tools.calibration.calibrate, or pass the Cluster that calibrate() gives",
    "this-cluster": "call sl.Ray(...).measure(keep=True), or pass the Cluster that it gives",
}


FIGURES = (
    Cluster.equal(),
    # Rudra's: cifar10_full on nodes of 32 cores, about four learners each, one parameter server. base and per_example from the
    # baseline's 22,392 s for 140 epochs and Table 2's other times; the server's costs from its 30-softsync row at μ = 4, where it
    # has no time left.
    Cluster(
        name="p775",
        compute=Compute(base=0.008, per_example=0.00313),
        jitter=Jitter(kind="lognormal", spread=0.1),
        crowding=0.12,
        learners_per_machine=4,
        card=Link(latency=5e-6, bandwidth=24e9),
        memory=Link(latency=2e-6, bandwidth=100e9),
        take=Cost(fixed=1e-4, per_byte=3e-10),
        fold=Cost(fixed=5e-4, per_byte=8e-10),
        serve=Cost(fixed=1e-4, per_byte=3e-10),
        message=1e-5,
    ),
    # SINGA's: 72 nodes of four cores on 1 Gbit/s; an AlexNet-like net, 27.3 s for 256 images on one node.
    Cluster(
        name="ethernet-1g",
        compute=Compute(base=0.05, per_example=27.25 / 256),
        jitter=Jitter(kind="normal", spread=0.05),
        card=Link(latency=1e-4, bandwidth=125e6),
        memory=Link(latency=5e-6, bandwidth=10e9),
        take=Cost(fixed=2e-5, per_byte=3e-10),
        fold=Cost(fixed=2e-5, per_byte=1e-9),
        serve=Cost(fixed=2e-5, per_byte=2e-10),
        message=2e-5,
    ),
    # Eight P100 with four NVLinks each, every GPU as a machine of its own; AlexNet, about 1,300 images/s each.
    Cluster(
        name="dgx-1",
        compute=Compute(base=0.004, per_example=1 / 1300),
        jitter=Jitter(kind="normal", spread=0.01),
        beside=True,
        card=Link(latency=1e-5, bandwidth=80e9),
        memory=Link(latency=5e-6, bandwidth=500e9),
        take=Cost(fixed=1e-5, per_byte=6e-12),
        fold=Cost(fixed=2e-5, per_byte=1.2e-11),
        serve=Cost(fixed=1e-5),
        message=5e-6,
    ),
)
NAMED = {**{cluster.name: cluster for cluster in FIGURES}, **dict.fromkeys(HOW)}


def kept_file(name: str = "this-machine") -> Path:
    """`$XDG_CACHE_HOME/syncline/this-machine.json`, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncline" / f"{name}.json"


def keep(cluster: Cluster) -> Path:
    path = kept_file(cluster.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cluster.record(), indent=1) + "\n", encoding="utf-8")
    return path


def cluster_named(name: str) -> Cluster:
    if not isinstance(name, str) or name not in NAMED:
        raise UsageError(
            f"unknown cluster {name!r}{nearest(name, NAMED)}; use one of {', '.join(NAMED)}, or build a Cluster of your own"
        )
    if (known := NAMED[name]) is not None:
        return known
    path = kept_file(name)
    if not path.exists():
        raise UsageError(f"{name!r} is not measured yet ({path} is not there): {HOW[name]}")
    try:
        return Cluster.from_record(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, UsageError) as error:
        raise UsageError(f"{path} holds no cluster ({error}); measure again: {HOW[name]}") from error
