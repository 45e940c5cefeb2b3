"""A run as its lines tell it: fed live by `Recording`, or read from a folder, finished or growing.

Responsible for what the numbers mean (rates, the best epoch, how a run ended); not for how they are shown.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syncline.dial import SANDBLASTER
from syncline.errors import UsageError
from syncline.report.event_lines import EVENTS, number, numbered_lines
from syncline.terminal import visible

MOST_SAMPLES = 2000  # beyond, every second one goes
# Events that are no faults: changes, and what is only said.
QUIET: tuple[str, ...] = ("joined", "left", "replaced", "recovered", "paused", "cut", "delay", "dial")
QUIET += ("checkpoint", "missed", "warning")
SILENCE = 15.0  # seconds without a line after which a run on another machine counts as gone
GONE = ("lost", "raised", "killed")  # states of learners that are no more
ENDED = ("returned", *GONE)
Line = dict[str, Any]


# -- what lines are checked against before anything of them is used ---------------------------------------------

Count = Annotated[int, Meta(ge=0, le=2**53)]
Number = float | Literal["nan", "inf", "-inf"] | None  # as `plain` writes it
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Numbers = dict[str, Number]


class AnyLine(msgspec.Struct):
    """A line of a kind that has no fields of interest."""

    seconds: Seconds | None = None
    time: Seconds | None = None


class OptionFields(msgspec.Struct, frozen=True):
    """The options in a start line that figures are made of."""

    epochs: Count | None = None
    steps: Count | None = None
    examples: Count | None = None
    parameters: Count | None = None


class ResumedFrom(msgspec.Struct):
    """The checkpoint in the start line of a run that was resumed."""

    version: Count | None = None
    epoch: Count | None = None
    early: list[Count] = []


class StartLine(AnyLine):
    """The start of a session."""

    run: OptionFields = OptionFields()
    resumed: ResumedFrom | None = None


class EpochLine(AnyLine, kw_only=True):
    """The end of an epoch, or of a batch method's iteration."""

    epoch: Count
    version: Count | None = None
    examples: Count | None = None
    loss: Number = None
    losses: Numbers = {}
    metrics: Numbers = {}
    notes: Numbers = {}


class EventLine(AnyLine):
    """Something that happened."""

    rank: Count | None = None
    details: dict[str, Any] = {}


class StalenessFields(msgspec.Struct):
    """The staleness in statistics."""

    mean: Number = None
    max: Count | None = None
    histogram: dict[Count, Count] = {}


class LearnerFields(msgspec.Struct):
    """One learner in statistics."""

    rank: Count
    steps: Count | None = None
    loss: Number = None


class EndLine(AnyLine):
    """The end of a session, with statistics where it came by itself."""

    version: Count | None = None
    gradients: Count | None = None
    dropped: Count | None = None
    examples: Count | None = None
    throughput: Number = None
    staleness: StalenessFields | None = None
    missing: list[Count] = []
    learners: list[LearnerFields] = []


class StatisticsLine(EndLine, kw_only=True):
    """The state of a run at one time."""

    version: Count


KINDS: dict[str, type[AnyLine]] = {
    "start": StartLine,
    "epoch": EpochLine,
    "event": EventLine,
    "statistics": StatisticsLine,
    "end": EndLine,
}

# -- the record -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunRecord:
    """Everything a display needs; `feed` takes the lines in order."""

    path: Path
    options: Line = field(default_factory=dict)
    epochs: list[Line] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)  # statistics
    end: Line | None = None
    starts: list[Line] = field(default_factory=list)
    last_time: float = 0.0  # of the last line, by the machine's clock
    seconds: float = 0.0
    # epochs, and how many events, before the last start
    earlier: tuple[frozenset[int], int] = (frozenset(), 0)
    damage: list[str] = field(default_factory=list)  # what was wrong with lines that were left out
    _offset: float = 0.0  # seconds of the sessions before this one
    _since: dict[int, float] = field(
        default_factory=dict
    )  # rank -> steps of the furthest learner when it joined
    _furthest: float = 0.0  # steps of the furthest learner, counted so

    def feed(self, line: Line, where: str = "a line") -> None:
        """Take one line in, or note its damage; a kind that is not known is passed over, so that later versions may add some."""
        kind = line.get("kind")
        if not isinstance(kind, str):
            self.damage.append(f"{where} has no kind")
            return
        try:
            _check(line, KINDS.get(kind, AnyLine))
        except msgspec.ValidationError as error:
            self.damage.append(f"{where} ({kind}): {error}")
            return
        self.last_time = _finite(line.get("time")) or self.last_time
        if kind == "start":
            self._start(line)
        line = {**line, "seconds": self._offset + (_finite(line.get("seconds")) or 0.0)}
        self.seconds = max(self.seconds, line["seconds"])
        if kind == "epoch" and isinstance(line.get("epoch"), int):
            self.epochs = [each for each in self.epochs if each["epoch"] != line["epoch"]] + [_epoch(line)]
            self.epochs.sort(key=lambda each: each["epoch"])
        elif kind == "event":
            self.events.append(line)
        elif kind == "statistics" and isinstance(line.get("version"), int):
            if self.samples:  # of a learner that is gone the newest sample says all
                running = [each for each in learners_of(self.samples[-1]) if each.get("state") not in ENDED]
                self.samples[-1] = {**self.samples[-1], "learners": running}
            self.samples.append(line)
            self._place(line)
            if len(self.samples) > MOST_SAMPLES:
                del self.samples[1:-1:2]
        elif kind == "end":
            self.end = line
            self._place(line)

    def _start(self, line: Line) -> None:
        """Of the run, or of a session that goes on from a checkpoint: what came after that is forgotten."""
        before = self.options.get("engine")
        self.end = None
        self.starts.append(line)
        self.options = line["run"] if isinstance(line.get("run"), dict) else {}
        resumed = line.get("resumed")
        if isinstance(resumed, dict):
            epoch, version = _finite(resumed.get("epoch")) or 0, _finite(resumed.get("version")) or 0
            early = resumed.get("early")  # done before an earlier one
            ahead = early if isinstance(early, list) else []
            self.epochs = [each for each in self.epochs if each["epoch"] < epoch or each["epoch"] in ahead]
            self.samples = [each for each in self.samples if each["version"] <= version]
        self._since, self._furthest = {}, 0.0
        for each in self.samples if isinstance(resumed, dict) else ():
            self._place(each)
        self.earlier = frozenset(each["epoch"] for each in self.epochs), len(self.events)
        if before == self.options.get("engine") == "sim":  # virtual time goes on from the checkpoint's moment
            kept = (each["seconds"] for each in (*self.epochs, *self.samples))
            self.seconds = max(kept, default=self._offset)
        else:
            self._offset = self.seconds

    def _place(self, sample: Line) -> None:
        """Note where each learner is; a new one starts where the furthest one was in the sample before."""
        steps = {each["rank"]: _finite(each.get("steps")) or 0.0 for each in learners_of(sample)}
        for rank in steps:
            self._since.setdefault(rank, self._furthest)
        self._furthest = max([self._furthest, *(self._since[rank] + steps[rank] for rank in steps)])

    # -- what follows from it ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return visible(self.path.name or str(self.path))

    @property
    def state(self) -> str:
        """finished, stopped, failed, running, or gone: ended without a word."""
        if self.end is not None:
            return str(self.end.get("how", "finished"))
        return "running" if self._alive() else "gone"

    @property
    def started(self) -> Line:
        """Process, machine and time of the last start; a simulated run keeps them out of its lines."""
        start = self.starts[-1] if self.starts else {}
        kept = self._kept("started") if start and "pid" not in start else None
        return kept if isinstance(kept, dict) else start

    def _kept(self, key: str) -> Any:
        """Of run.json."""
        try:
            return json.loads((self.path / "run.json").read_text(encoding="utf-8")).get(key)
        except (OSError, ValueError, AttributeError):
            return None

    @property
    def virtual(self) -> bool:
        """Its seconds are those of a simulated cluster."""
        return self.options.get("engine") == "sim"

    @property
    def took(self) -> float | None:
        """Seconds that a simulated run really took, where that is known."""
        return _finite(self._kept("took")) if self.virtual else None

    def _alive(self) -> bool:
        start = self.started
        if start.get("host") != socket.gethostname():
            return time.time() - self.last_time < SILENCE
        try:
            os.kill(int(start["pid"]), 0)
        except PermissionError:
            return True
        except (OSError, KeyError, TypeError, ValueError, OverflowError):
            return False
        return True

    @property
    def last(self) -> Line:
        """The newest statistics; the end's where there is one."""
        if self.end is not None and isinstance(self.end.get("version"), int):
            return self.end
        return self.samples[-1] if self.samples else {}

    def metric(self, name: str) -> list[tuple[float, float, float]]:
        """Return (epochs done, seconds, value) of a test metric, or of `loss`, the training loss; values may be nan or inf."""
        found = []
        for each in self.epochs:
            value = each["loss"] if name == "loss" else each["metrics"].get(name.removeprefix("test "))
            if value is not None:
                found.append((each["epoch"] + 1.0, each["seconds"], value))
        return found

    @property
    def metrics(self) -> list[str]:
        """Names of all test metrics, as `test NAME`."""
        names = {name: None for each in self.epochs for name in each["metrics"]}
        return [f"test {name}" for name in names]

    @property
    def word(self) -> str:
        """What a record of the history is of."""
        return "iteration" if self.options.get("sync") == SANDBLASTER else "epoch"

    def noted(self, name: str) -> list[tuple[float, float]]:
        """(iterations done, value) of what a batch method says of itself."""
        return [(each["epoch"] + 1.0, each["notes"][name]) for each in self.epochs if name in each["notes"]]

    @property
    def staleness(self) -> Line:
        found = _inner(self.last, "staleness")
        return {**found, "mean": number(found.get("mean"))}

    @property
    def histogram(self) -> dict[int, int]:
        """Staleness to gradients."""
        found = {}
        for sigma, count in _inner(self.staleness, "histogram").items():
            if str(sigma).isdecimal() and isinstance(count, int):
                found[int(sigma)] = count
        return dict(sorted(found.items()))

    @property
    def throughput(self) -> float:
        """Examples a second over the last session, from its first statistics on."""
        if self.end is not None and (given := number(self.end.get("throughput"))) is not None:
            return given
        return self.rate("examples", window=30.0)

    def rate(self, key: str, *, window: float = 5.0) -> float:
        """How fast a number of the statistics has grown lately, per second."""
        return _growth([(each["seconds"], _finite(each.get(key)) or 0.0) for each in self._recent(window)])

    def learner_rates(self, *, window: float = 5.0) -> dict[int, float]:
        """Gradients a second, by rank."""
        points: dict[int, list[tuple[float, float]]] = {}
        for sample in self._recent(window):
            for each in learners_of(sample):
                steps = _finite(each.get("steps")) or 0.0
                points.setdefault(each["rank"], []).append((sample["seconds"], steps))
        return {rank: _growth(values) for rank, values in sorted(points.items())}

    @property
    def lags(self) -> dict[int, int]:
        """Return the steps by which each learner is behind the furthest one, since it joined."""
        last = learners_of(self.last)
        done = {
            each["rank"]: self._since.get(each["rank"], 0.0) + (_finite(each.get("steps")) or 0.0)
            for each in last
        }
        return {rank: int(max(done.values()) - steps) for rank, steps in done.items()}

    def _recent(self, window: float) -> list[Line]:
        if not self.samples:
            return []
        since = max(self.samples[-1]["seconds"] - window, self._offset)
        return [each for each in self.samples if each["seconds"] >= since]

    @property
    def faults(self) -> list[Line]:
        return [each for each in self.events if each.get("event") not in QUIET]

    @property
    def warnings(self) -> list[Line]:
        return [each for each in self.events if each.get("event") == "warning"]

    @property
    def goal(self) -> tuple[str, float] | None:
        """The number of the statistics that ends the run, and where it will be then; None: that is not known."""
        steps, epochs = _finite(self.options.get("steps")), _finite(self.options.get("epochs"))
        size = _finite(self.options.get("examples"))
        if steps:
            return "version", steps
        return ("examples", epochs * size) if epochs and size else None

    @property
    def progress(self) -> float | None:
        """The part that is done, where the end is known."""
        if self.end is not None and self.end.get("how") == "finished":
            return 1.0
        if self.goal is not None:
            key, end = self.goal
            return min(1.0, (_finite(self.last.get(key)) or 0) / end)
        epochs = _finite(self.options.get("epochs"))
        return len(self.epochs) / epochs if epochs else None


def learners_of(sample: Mapping[str, Any]) -> list[Line]:
    """The learners of one line of statistics, by rank."""
    found = sample.get("learners")
    rows = found if isinstance(found, list) else []
    known = [each for each in rows if isinstance(each, dict) and isinstance(each.get("rank"), int)]
    numbered = [{**each, "loss": number(each.get("loss"))} for each in known]
    return sorted(numbered, key=lambda each: each["rank"])


def read_run(folder: str | Path) -> RunRecord:
    """The record of a run folder."""
    path = Path(folder)
    if path.name == EVENTS:
        path = path.parent
    record = RunRecord(path)
    try:
        for count, line in numbered_lines(path / EVENTS):
            record.feed(line, f"line {count}")
    except OSError as error:
        raise UsageError(
            f"{folder}: no run folder, {EVENTS} cannot be read: {error.strerror or error}"
        ) from error
    if not record.starts:
        raise UsageError(f"{folder}: {EVENTS} holds no run")
    return record


def better(metric: str, new: float, old: float | None) -> bool:
    """Accuracy should be large, everything else small."""
    if new != new:
        return False
    return old is None or (new > old if metric == "accuracy" else new < old)


def judged(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """The metric that decides which model is best: accuracy, else loss, else the first there is."""
    for name in ("accuracy", "loss", *metrics):
        if name in metrics:
            return name, float(metrics[name])
    return None


def _check(line: Line, form: Any) -> None:
    """Raise `msgspec.ValidationError` if a line does not have this form."""
    try:
        msgspec.convert(line, form, str_keys=True)
    except UnicodeEncodeError:  # msgspec compares texts as UTF-8, in which lone surrogates cannot be written
        text = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace")
        msgspec.convert(json.loads(text), form, str_keys=True)


def _finite(value: Any) -> float | None:
    """Return the number, or None where there is none that can be counted with."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def _epoch(line: Line) -> Line:
    """Return an epoch's line with numbers under visible names as loss, metrics and notes; unknown ones are nan."""
    loss = number(line.get("loss"))
    found = {**line, "loss": math.nan if loss is None else loss}
    for key in ("metrics", "notes"):
        known = {visible(name): number(value) for name, value in _inner(line, key).items()}
        found[key] = {name: math.nan if value is None else value for name, value in known.items()}
    return found


def _inner(line: Mapping[str, Any], key: str) -> Line:
    value = line.get(key)
    return value if isinstance(value, dict) else {}


def _growth(points: list[tuple[float, float]]) -> float:
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return 0.0
    return max(0.0, (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))
