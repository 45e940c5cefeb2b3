"""One small job of the hunt as a record, how a seed draws it, and the command that plays it again.

Not responsible for running it (`case_player`).
"""

from __future__ import annotations

import random
import shlex
from dataclasses import dataclass, fields, replace
from typing import Any

from syncline.cluster import Cluster
from syncline.dial import Course
from syncline.errors import UsageError
from syncline.protocols.lifecycle import Faults
from syncline.topologies import Servers, Trees

DIALS = (
    "hardsync",
    "softsync:1",
    "softsync:2",
    "softsync:1,rate=staleness",
    "async",
    "async:rate=staleness",
    "ssp:0",
    "ssp:2",
    "backup:1",
    "delayed:1",
    "delayed:3",
    "downpour",
    "downpour:push=3,fetch=4,local_lr=0.1",
    "downpour:push=1,fetch=6,local_lr=0.1",
    "hardsync until 1 then softsync:1",
    "async until 1 then delayed:2 until 2 then ssp:1",
)
CHANGES = ("hardsync", "softsync:1", "async", "ssp:1", "backup:1", "downpour:push=2,fetch=3,local_lr=0.1")
LOOPS = (
    "train",  # `train`'s, as a handler
    "own",  # over a session's loader
    "odd",  # leaves loops early, meets, accumulates, has a second loader
    "bare",  # has data of its own
)
POLICIES = ("ledger", "partition", "sample")
JITTERS = ("none", "uniform:0.5", "lognormal:0.5", "exponential:0.5", "pareto:1")
OPTIONS = ("seed", "sync", "learners", "shards", "script")  # fields that the command has options for
# One case in so many is long, with a learner that the others outrun, under dials that let them run far ahead.
ONE_LONG, LONG, SLOW = 100, 1000, 0.01
FAR = {"delayed:1": "delayed:100", "delayed:3": "delayed:300", "ssp:2": "ssp:300"}
FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job, a cluster and a script."""

    seed: int = 0
    sync: str = "hardsync"
    learners: int = 3
    shards: int = 1
    script: str = ""
    loop: str = "own"
    examples: int = 24
    batch_size: int = 2
    epochs: int = 2
    steps: int | None = None  # updates after which the run ends
    warmstart: int = 0
    policy: str = "ledger"
    replace: bool = False  # lost learners are replaced
    checkpoint_every: int | None = None  # None: no checkpoints
    clip: bool = False
    cluster: str = "equal"
    fan_in: int = 0  # of a tree; 0: flat servers
    broadcast: bool = False  # versions flow down it unasked
    late: bool = False  # bulk comes after its note, late, or never because its sender died

    def __post_init__(self) -> None:
        for name, known in (("loop", LOOPS), ("policy", POLICIES)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("learners", "shards", "examples", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        course = Course.of(self.sync)
        for _, dial in course.dials:
            dial.check(self.learners, self.batch_size)
        self.topology().check(course, Faults(), clip_norm=None, warm=0)
        Cluster.parse(self.cluster)

    def topology(self) -> Servers | Trees:
        root = Servers(self.shards, True)
        return Trees(fan_in=self.fan_in, broadcast=self.broadcast, root=root) if self.fan_in else root

    def changed(self, settings: list[str]) -> Case:
        """With fields set by `key=value` texts."""
        return replace(self, **dict(_read(text) for text in settings))

    def command(self) -> str:
        """Plays exactly this again; what has no option of its own and is not as usual, by `--set`."""
        words = ["syncline", "simulate", "--faults", "script"]
        for name in OPTIONS:
            words += [f"--{name}", str(getattr(self, name))]
        usual = Case()
        for name in [each.name for each in fields(self) if each.name not in OPTIONS]:
            value = getattr(self, name)
            text = str(value).lower() if isinstance(value, bool) else value
            if value != getattr(usual, name):
                words += ["--set", f"{name}={'' if value is None else text}"]
        return shlex.join(words)


def _read(text: str) -> tuple[str, Any]:
    """`key=value` of a case."""
    key, equals, value = text.partition("=")
    kinds = {f.name: str(f.type) for f in fields(Case)}
    if not equals or key not in kinds:
        raise UsageError(f"--set {text}: write key=value with one of {', '.join(sorted(kinds))}")
    kind = kinds[key]
    if kind == "bool":
        if value not in FLAGS:
            raise UsageError(f"--set {text}: {key} is true or false")
        return key, FLAGS[value]
    if kind == "str":
        return key, value
    if not value and "None" in kind:
        return key, None
    try:
        return key, int(value)
    except ValueError:
        raise UsageError(f"--set {text}: {key} is a whole number") from None


# -- drawing one -------------------------------------------------------------------------------------------


def random_case(seed: int, sync: str, *, learners: int | None = None, shards: int | None = None) -> Case:
    """The job of this seed under this dial; the same every time."""
    draw = random.Random(f"{seed}/{sync}")
    least = max(_least_learners(sync), 1)
    size = learners if learners is not None else draw.choice((least, max(least, 2), 3, 3, 4))
    case = Case(
        seed=seed,
        sync=sync,
        learners=max(size, least),
        shards=shards if shards is not None else draw.choice((1, 1, 2, 3)),
        loop=draw.choice(LOOPS),
        examples=draw.randint(8, 40),
        batch_size=draw.choice((1, 2, 3)),
        epochs=draw.choice((1, 2, 2, 3)),
        steps=draw.randint(1, 20) if draw.random() < 0.15 else None,
        warmstart=draw.choice((1, 3, 8)) if draw.random() < 0.2 else 0,
        policy=draw.choice(("ledger", "ledger", "ledger", "partition", "sample")),
        replace=draw.random() < 0.3,
        checkpoint_every=draw.choice((2, 4, 9, 1000)) if draw.random() < 0.5 else None,
        clip=draw.random() < 0.1,
        cluster=_random_cluster(draw),
    )
    count = draw.choice((0, 1, 1, 2, 2, 3, 4, 6))
    faults = [f"{_random_fault(draw, case)} at {_random_moment(draw, case)}" for _ in range(count)]
    case = replace(case, script="; ".join(faults), late=draw.random() < 0.5)
    far = random.Random(f"{seed}/{sync}/far")
    if far.randrange(ONE_LONG) == 0:
        case = _long(case, far)
    planted = random.Random(f"{seed}/{sync}/tree")  # its own: the others stay the same
    return _over_a_tree(case, planted) if planted.random() < 0.2 and _on_sums(sync) else _with_nodes(case)


def _long(case: Case, draw: random.Random) -> Case:
    """Make a case of many updates and few faults, in which one learner is a hundred times slower."""
    case = replace(
        case,
        sync=FAR.get(case.sync, case.sync),
        learners=max(2, case.learners),
        # In lockstep epochs begin for all at once: without a loader a learner runs as far ahead as the dial says.
        loop="bare" if case.sync in FAR else draw.choice(("train", "own", "bare")),
        steps=LONG,
        warmstart=0,
        checkpoint_every=None,
    )
    speeds = [1.0] * case.learners
    speeds[draw.randrange(case.learners)] = SLOW
    faults = [
        f"{_random_fault(draw, case)} at version {draw.randrange(1, LONG)}"
        for _ in range(draw.choice((0, 0, 1)))
    ]
    cluster = f"equal:latency=0.01,setup=0.01,speeds={'/'.join(f'{speed:g}' for speed in speeds)}"
    return replace(case, cluster=cluster, script="; ".join(faults), late=False)


def _on_sums(sync: str) -> bool:
    """A tree can follow it."""
    try:
        Trees(fan_in=2).check(Course.of(sync), Faults(), clip_norm=None, warm=0)
    except UsageError:
        return False
    return True


def _over_a_tree(case: Case, draw: random.Random) -> Case:
    """With faults of its nodes among the others."""
    lines = [line for line in case.script.split("; ") if line]
    lines = [line for line in lines if "change to" not in line or _on_sums(line.split()[2])]
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        line = f"kill node {draw.randrange(3)} at {_random_moment(draw, case)}"
        lines.insert(draw.randrange(len(lines) + 1), line)
    case = replace(case, fan_in=draw.choice((2, 2, 3)), script="; ".join(lines))
    return replace(case, broadcast=draw.random() < 0.5)


def _least_learners(sync: str) -> int:
    """So many does the dial need."""
    for count in range(1, 8):
        try:
            for _, dial in Course.of(sync).dials:
                dial.check(count, 1)
        except UsageError:
            continue
        return count
    raise UsageError(f"{sync} needs more learners than a hunt has")


def _random_cluster(draw: random.Random) -> str:
    parts = [
        f"jitter={draw.choice(JITTERS)}",
        f"latency={draw.choice((0, 0.001, 0.01, 0.3))}",
        f"setup={draw.choice((0, 0.01, 0.2, 1.5))}",
    ]
    if draw.random() < 0.3:
        parts.append("stragglers=0.4,slowdown=5")
    if draw.random() < 0.2:
        parts.append("message=0.05")
    return f"equal:{','.join(parts)}"


def _random_fault(draw: random.Random, case: Case) -> str:
    rank, length = draw.randrange(case.learners + 1), draw.choice((0.05, 0.5, 3, 9))
    kinds = ["kill learner"] * 5 + ["pause learner"] * 2 + ["pause shard", "add", "add", "change"]
    if case.checkpoint_every is not None:
        kinds += ["kill shard"] * 3
    if draw.random() < 0.15:
        kinds = ["stop"]
    kind = draw.choice(kinds)
    if kind == "add":
        return f"add {draw.choice((1, 1, 2))}"
    if kind == "change":
        return (
            f"change to {draw.choice([dial for dial in CHANGES if _least_learners(dial) <= case.learners])}"
        )
    if kind == "stop":
        return kind
    if kind.endswith("shard"):
        rank = draw.randrange(case.shards)
    return f"{kind} {rank} for {length} s" if kind.startswith("pause") else f"{kind} {rank}"


def _with_nodes(case: Case) -> Case:
    """Some have their shards on the first of several nodes, messages that take longer at random, and nodes that die or cannot be reached."""
    draw = random.Random(f"{case.seed}/{case.sync}/nodes")
    if draw.random() < 0.6:
        return case
    each, delay = draw.choice((1, 2)), draw.choice((0, 0.01, 0.3))
    parts = f"beside=true,shards_per_machine=all,learners_per_machine={each},delay={delay}"
    lines = [case.script] if case.script else []
    for _ in range(draw.choice((1, 1, 2))):
        length = draw.choice((0.05, 0.5, 3, 9))
        kind = draw.choice(("kill node", "kill node", "pause node", "cut link", "cut link"))
        first = (
            0 if kind == "pause node" or case.checkpoint_every is not None else 1
        )  # the first has the shards
        node = draw.randint(first, max(first, (case.learners - 1) // each))
        which = f"cut link 0-{max(1, node)}" if kind == "cut link" else f"{kind} {node}"
        lasts = "" if kind == "kill node" else f" for {length} s"
        lines.append(f"{which}{lasts} at {_random_moment(draw, case)}")
    return replace(case, cluster=f"{case.cluster},{parts}", script="; ".join(lines))


def _random_moment(draw: random.Random, case: Case) -> str:
    """Anywhere in the run; often in its first messages, or where something else happens too."""
    rounds = case.examples * case.epochs / (case.batch_size * case.learners)
    if draw.random() < 0.25:
        return f"version {draw.randrange(1, 4 + int(rounds))}"
    if draw.random() < 0.2:
        return f"{draw.choice((0, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.01, 0.3))} s"
    if draw.random() < 0.3:
        return f"{draw.randrange(1, 3 + int(rounds))} s"
    return f"{draw.uniform(0, 1.5 * rounds + 1):.4f} s"
