"""The dial: when gradients become an update, and who waits, as one record, `Sync`.

Responsible for the presets, for parsing and printing them, for what contradicts itself, for the two
numbers that follow from a record (the quorum and the rate factor), and for dials that change from epoch to
epoch (`Course`). Not responsible for carrying any of it out.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from syncline.errors import DialError, NotYetError

Late = Literal["fold", "drop"]
Rate = Literal["given", "share", "staleness"]
AUTO = "auto<="
SANDBLASTER = "sandblaster"  # in the place of a dial: a batch method, which folds nothing (M18)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """When a fold happens, what it contains, and who waits for it; λ is the number of live learners."""

    one_from_each: bool = False  # quorum λ: one gradient of one iteration from each, folded in rank order
    splits: int | None = None  # quorum max(1, ⌊λ/splits⌋), first come; None: 1
    backup: int = 0  # quorum min(λ₀ − backup, λ), first come
    lead: int | None = None  # own gradients not yet folded when a learner goes on; None: free
    slack: int | None = None  # steps ahead of the slowest; None: any
    push: int = 1  # a push every so many steps
    fetch: int = 1  # a fetch every so many steps
    late: Late = "fold"  # a gradient that missed its fold goes into the next, or is dropped
    rate: Rate = "given"  # factor 1, c/λ, or each gradient divided by max(1, σ)
    reference_batch: int | None = None  # B: factor √(λμ/B)
    local_lr: float | None = None  # of the learner's own steps between fetches
    auto: bool = False  # lead adapts to the communication, up to what is given; over all-reduce

    def __post_init__(self) -> None:
        _check_values(self)
        for wrong, reason in _contradictions(self):
            if wrong:
                raise DialError(f"{_shown(self)} contradicts itself: {reason}")

    @classmethod
    def parse(cls, text: str) -> Sync:
        """The record of a preset: `name[:value][,key=value…]`, as in `softsync:2` or `async:rate=given`."""
        name, *rest = re.split(r"[:,]", text, maxsplit=1)
        preset = _preset(name.strip(), text)
        items = [item.strip() for item in rest[0].split(",")] if rest else []
        changes: dict[str, Any] = {}
        if items and ("=" not in items[0] or items[0].startswith(AUTO)):
            changes |= preset.read_value(items.pop(0), text)
        elif preset.required:
            raise DialError(f"{text!r} lacks its number: write {preset.syntax}, for example {preset.base}")
        for item in items:
            changes |= preset.read_option(item, text, changes)
        return replace(preset.base, **changes)

    def __str__(self) -> str:
        """The preset's text, which parses to an equal record; `Sync(...)` for a record that is no preset."""
        preset = next((preset for preset in PRESETS if preset.covers(self)), None)
        return preset.text(self) if preset else _shown(self)

    @property
    def lockstep(self) -> bool:
        """Every fold takes one gradient of the same iteration from each learner."""
        return self.one_from_each

    @property
    def delay(self) -> int:
        """Versions by which a lockstep learner runs ahead of the folds."""
        return (self.lead or 0) if self.one_from_each else 0

    @property
    def waits(self) -> bool:
        """A learner may have to wait for another: who has no data must say so."""
        return self.one_from_each or self.slack is not None or self.lead is not None

    @property
    def local(self) -> bool:
        """Learners step by themselves between pushes and fetches (M9)."""
        return self.push > 1 or self.fetch > 1

    @property
    def weighs(self) -> bool:
        """Gradients of one fold count by their staleness: the mean is weighted (M4)."""
        return self.rate == "staleness" and self.splits is not None

    def quorum(self, live: int, initial: int | None = None) -> int:
        """Gradients in one update, at least 1; `initial` is λ₀, the learners that the run started with."""
        if self.one_from_each:
            return max(1, live)
        if self.splits is not None:
            return max(1, live // self.splits)
        if self.backup:
            return max(1, min((live if initial is None else initial) - self.backup, live))
        return 1

    def factor(self, live: int, batch_size: int | None) -> float:
        """What the fold's learning rate is multiplied by."""
        live = max(1, live)
        if self.reference_batch is not None:
            return math.sqrt(live * self._known(batch_size) / self.reference_batch)
        return self.quorum(live) / live if self.rate == "share" else 1.0

    def check(self, learners: int, batch_size: int | None = None) -> None:
        """Refuse what cannot work with so many learners."""
        if learners < 1:
            raise DialError(f"{self} needs at least 1 learner, got {learners}")
        if batch_size is not None and batch_size < 1:
            raise DialError(f"{self} needs a batch_size of at least 1, got {batch_size}")
        if self.splits is not None and self.splits > learners:
            raise DialError(
                f"{self} needs n <= learners, got n = {self.splits} with {learners} learners: an update "
                f"would take ⌊{learners}/{self.splits}⌋ = 0 gradients; use softsync:{learners} (one gradient in "
                f"each update, as async) or at least {self.splits} learners"
            )
        if self.backup >= learners:
            fewer = f"use backup:{learners - 1} at most" if learners > 1 else "use hardsync"
            raise DialError(
                f"{self} needs b < learners, got b = {self.backup} with {learners} learners: the quorum would "
                f"be {learners} − {self.backup} = {learners - self.backup}; {fewer}, or at least {self.backup + 1} learners"
            )
        if self.reference_batch is not None:
            self._known(batch_size)
        if self.local_lr is None and max(self.push, self.fetch) > 1:
            raise DialError(
                f"{self} needs local_lr, the rate of a learner's own steps between fetches, since push = "
                f"{self.push} and fetch = {self.fetch}: write downpour:push={self.push},fetch={self.fetch},"
                "local_lr=0.1 with a rate of your own"
            )

    def _known(self, batch_size: int | None) -> int:
        if batch_size is None:
            raise DialError(
                f"{self} multiplies the rate by √(learners × batch_size / {self.reference_batch}), but "
                "batch_size is not known here: give batch_size, or leave reference_batch out and set the rate yourself"
            )
        return batch_size


def as_sync(value: str | Sync) -> Sync:
    """The record itself, or the record that a preset's text names."""
    if isinstance(value, Sync):
        return value
    if isinstance(value, str):
        return Sync.parse(value)
    raise DialError(
        f"sync must be a text such as 'softsync:2' or a Sync record, got {type(value).__name__} {value!r}"
    )


@dataclass(frozen=True, slots=True)
class Course:
    """Dials by the epoch they begin with: `hardsync until 1 then softsync:1` is hardsync for one epoch."""

    dials: tuple[tuple[int, Sync], ...]

    def __post_init__(self) -> None:
        epochs = [epoch for epoch, _ in self.dials]
        if not epochs or epochs[0] != 0 or any(a >= b for a, b in pairwise(epochs)):
            raise DialError(f"the dials of a run begin with epoch 0, then rise: got epochs {epochs}")

    @classmethod
    def of(cls, value: str | Sync | Mapping[int, str | Sync] | Course) -> Course:
        """A dial, or several: as a text with `until … then …`, or as {first epoch: dial}."""
        if isinstance(value, Course):
            return value
        if isinstance(value, Mapping):
            for epoch in value:
                _check_whole("the epoch that a dial begins with", epoch, 0)
            return cls(tuple((epoch, as_sync(value[epoch])) for epoch in sorted(value)))
        if not isinstance(value, str) or not re.search(r"\buntil\b", value):
            return cls(((0, as_sync(value)),))
        first, *rest = re.split(r"\s+until\s+", value.strip())
        texts = [(0, first)]
        for part in rest:
            match = re.fullmatch(r"(\d+)\s+then\s+(.+)", part)
            if match is None:
                raise DialError(
                    f"{value!r}: write 'DIAL until EPOCH then DIAL', for example 'hardsync until 1 then softsync:1'"
                )
            texts.append((int(match[1]), match[2]))
        return cls(tuple((epoch, as_sync(dial)) for epoch, dial in texts))

    @property
    def first(self) -> Sync:
        return self.dials[0][1]

    def at(self, epoch: int) -> int:
        """Which of the dials is in force in this epoch."""
        return max(number for number, (begin, _) in enumerate(self.dials) if begin <= epoch)

    def __str__(self) -> str:
        text = str(self.first)
        return text + "".join(f" until {epoch} then {dial}" for epoch, dial in self.dials[1:])


# -- one record --------------------------------------------------------------------------------------------


def _check_values(sync: Sync) -> None:
    for name in ("one_from_each", "auto"):
        if not isinstance(getattr(sync, name), bool):
            raise DialError(f"{name} must be True or False, got {getattr(sync, name)!r}")
    for name, least in (("backup", 0), ("push", 1), ("fetch", 1)):
        _check_whole(name, getattr(sync, name), least)
    for name, least in (("splits", 1), ("lead", 0), ("slack", 0), ("reference_batch", 1)):
        if getattr(sync, name) is not None:
            _check_whole(name, getattr(sync, name), least)
    for name, choice in (("late", Late), ("rate", Rate)):
        if getattr(sync, name) not in get_args(choice):
            raise DialError(f"{name} must be one of {_listed(get_args(choice))}, got {getattr(sync, name)!r}")
    rate = sync.local_lr
    if rate is not None and not (isinstance(rate, int | float) and 0 < rate < math.inf):
        raise DialError(f"local_lr must be a finite number > 0, got {rate!r}")


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DialError(f"{name} must be a whole number >= {least}, got {value!r}")


def _contradictions(sync: Sync) -> Iterable[tuple[bool, str]]:
    each, lead, slack, backup, auto = sync.one_from_each, sync.lead, sync.slack, sync.backup > 0, sync.auto
    several, drop, scaled = max(sync.push, sync.fetch) > 1, sync.late == "drop", sync.rate != "given"
    splits, joint = sync.splits is not None, sync.reference_batch is not None
    free, ahead = lead is None, not each and bool(lead)
    yield each and splits, "one_from_each takes all learners, splits a part of them; set one"
    yield each and backup, "one_from_each waits for all learners, backup leaves some out; set one"
    yield each and free, "one_from_each needs a lead: 0 waits for each fold, k goes on k folds ahead"
    yield each and slack is not None, "one_from_each already keeps all learners within lead; leave slack out"
    yield each and drop, "with one_from_each no gradient is late; leave late out"
    yield (
        each and scaled,
        "with one_from_each all gradients of a fold have the same staleness: leave rate='given', set the lr",
    )
    yield (
        auto and not (each and lead),
        "auto adapts the lead of lockstep learners: give one_from_each and lead",
    )
    yield splits and backup, "splits and backup both set the quorum; set one"
    yield ahead, "lead > 0 needs one_from_each: who comes first has no iteration to run ahead of"
    yield backup and free, "backup needs lead=0: who was left out goes on from the update that left it out"
    yield backup and scaled, "backup folds fresh gradients only, so the rate is 'given'"
    yield drop and free, "late='drop' needs lead=0, or a free learner's work is mostly dropped"
    yield several and not free, "push or fetch > 1 needs lead=None: local steps wait for no fold"
    yield several and slack is not None, "slack counts single steps: leave push and fetch at 1"
    yield joint and not each, "reference_batch needs one_from_each: √(λμ/B) is for updates of λμ examples"


def _shown(sync: Sync) -> str:
    changed = (f for f in fields(Sync) if getattr(sync, f.name) != f.default)
    return f"Sync({', '.join(f'{f.name}={getattr(sync, f.name)!r}' for f in changed)})"


# -- the presets -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named record: the words for a table of presets, and how its text is read and written."""

    name: str
    syntax: str
    meaning: str
    quorum: str
    rate: str
    paper: str
    base: Sync
    value: str | None = None  # the field that the number after the colon sets
    least: int = 1
    less: str = ""  # what to write instead of a number below `least`
    required: bool = False
    options: tuple[str, ...] = ()
    adapts: bool = False  # `auto<=n` is understood for the number

    def covers(self, sync: Sync) -> bool:
        """Some text of this preset gives this record."""
        fixed = {f.name for f in fields(Sync)} - {self.value, "auto", *self.options}
        if any(getattr(sync, name) != getattr(self.base, name) for name in fixed):
            return False
        number = getattr(sync, self.value) if self.value else self.least
        return number is not None and number >= self.least and (self.adapts or not sync.auto)

    def text(self, sync: Sync) -> str:
        items = [f"{AUTO if sync.auto else ''}{getattr(sync, self.value)}"] if self.value else []
        changed = (name for name in self.options if getattr(sync, name) != getattr(self.base, name))
        items += [f"{name}={getattr(sync, name)}" for name in changed]
        return f"{self.name}:{','.join(items)}" if items else self.name

    def read_value(self, item: str, text: str) -> dict[str, Any]:
        """The number after the colon."""
        if self.value is None:
            raise DialError(f"{text!r}: {self.name} takes no number, got {item!r}; {self._options_text()}")
        auto = self.adapts and item.startswith(AUTO)
        number = _read(int, "a whole number", item.removeprefix(AUTO) if auto else item, text)
        if number < self.least:
            letter = self.syntax[-1]
            raise DialError(
                f"{text!r}: {self.syntax} needs {letter} >= {self.least}, got {number}{self.less}"
            )
        return {self.value: number, "auto": True} if auto else {self.value: number}

    def read_option(self, item: str, text: str, before: dict[str, Any]) -> dict[str, Any]:
        """One `key=value`."""
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise DialError(f"{text!r}: {item!r} is no option; write key=value, separated by commas")
        if key not in self.options:
            raise DialError(
                f"{text!r}: {self.name} has no option {key!r}{nearest(key, self.options)}; "
                f"{self._options_text()}"
            )
        if key in before:
            raise DialError(f"{text!r} gives {key} twice; give it once")
        if key == "rate" and value not in (rates := get_args(Rate)):
            raise DialError(
                f"{text!r}: no rate is called {value!r}{nearest(value, rates)}; there are: {', '.join(rates)}"
            )
        if key == "rate":
            return {key: value}
        kind, words = (float, "a number") if key == "local_lr" else (int, "a whole number")
        return {key: _read(kind, words, value, text)}

    def _options_text(self) -> str:
        return f"its options are {_listed(self.options)}" if self.options else "it has no options"


def _preset(name: str, text: str) -> Preset:
    for preset in PRESETS:
        if preset.name == name:
            return preset
    known = ", ".join(preset.syntax for preset in PRESETS)
    if name == SANDBLASTER:
        raise DialError(
            f"{text!r}: sandblaster is a batch method's, whole and from the start of a run: only train takes it, as "
            'sync="sandblaster" with optimizer=sl.LBFGS(...)'
        )
    if name in LATER:
        raise NotYetError(f"{text!r} ({LATER[name]}) is understood but not built yet; working now: {known}")
    names = [*(preset.name for preset in PRESETS), *LATER, SANDBLASTER]
    raise DialError(f"no preset is called {name!r}{nearest(name, names)}; there are: {known}")


def _read(kind: Callable[[str], Any], words: str, value: str, text: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise DialError(f"{text!r}: {value!r} is not {words}") from None


def nearest(word: object, known: Iterable[str]) -> str:
    """The end of a message: the known name that the user may have meant."""
    near = difflib.get_close_matches(str(word).lower(), list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


PRESETS: tuple[Preset, ...] = (
    Preset(
        name="hardsync",
        syntax="hardsync",
        meaning="everybody waits for everybody, every step",
        quorum="λ, one from each",
        rate="1, or √(λμ/B) with reference_batch=B",
        paper="Rudra",
        base=Sync(one_from_each=True, lead=0),
        options=("reference_batch",),
    ),
    Preset(
        name="softsync",
        syntax="softsync:n",
        meaning="nobody waits for another; an update takes the first λ/n gradients",
        quorum="max(1, ⌊λ/n⌋)",
        rate="1/n (c/λ where n does not divide λ)",
        paper="Rudra",
        base=Sync(splits=1, rate="share"),
        value="splits",
        less=": n = 1 takes as many gradients as there are learners",
        options=("rate",),
    ),
    Preset(
        name="async",
        syntax="async",
        meaning="nobody waits; every gradient is an update",
        quorum="1",
        rate="1/λ; 1 with rate=given; each by its staleness with rate=staleness",
        paper="Rudra",
        base=Sync(rate="share"),
        options=("rate",),
    ),
    Preset(
        name="downpour",
        syntax="downpour:push=p,fetch=f",
        meaning="learners step by themselves, push sums and fetch weights now and then",
        quorum="1 push, the sum of up to p gradients",
        rate="1",
        paper="DistBelief",
        base=Sync(),
        options=("push", "fetch", "local_lr"),
    ),
    Preset(
        name="ssp",
        syntax="ssp:s",
        meaning="async, but nobody is more than s steps ahead of the slowest",
        quorum="1",
        rate="1",
        paper="Ho et al. 2013",
        base=Sync(slack=1),
        value="slack",
        least=0,
        less=": s = 0 lets nobody run ahead",
        required=True,
        options=("rate",),
    ),
    Preset(
        name="backup",
        syntax="backup:b",
        meaning="an update takes the first of each round; the b slowest are dropped",
        quorum="min(λ₀ − b, λ), first come",
        rate="1",
        paper="Chen et al. 2016",
        base=Sync(backup=1, lead=0, late="drop"),
        value="backup",
        less=": b = 0 means hardsync, write hardsync",
        required=True,
    ),
    Preset(
        name="delayed",
        syntax="delayed:k",
        meaning="lockstep, but learners go on k folds ahead, so that communication hides",
        quorum="λ, one from each, all of one iteration",
        rate="1, or √(λμ/B) with reference_batch=B",
        paper="AGD",
        base=Sync(one_from_each=True, lead=1),
        value="lead",
        less=": k = 0 means hardsync, write hardsync",
        required=True,
        options=("reference_batch",),
        adapts=True,
    ),
)

LATER = {
    "diloco": "H local steps between outer updates",
}
