"""The record of a job: read from TOML, checked as a whole, written back.

All problems are found in one go, each with its file, line and key. Not responsible for making objects (build.py).
"""

# ruff: noqa: RUF009 - kinds make fields

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from syncline.dial import nearest
from syncline.engines.checkpoint_options import AUTO, REFUSE
from syncline.errors import UsageError
from syncline.jobs import build, checks, keys
from syncline.jobs.build import Problem
from syncline.jobs.keys import REQUIRED, JobError, Key, Named, Wrong
from syncline.jobs.names import one_line
from syncline.jobs.toml import TooDeep, dumps, lines_of, override, parse_override

NO_MODEL = "missing; name a model, such as 'mlp' or 'package.module:callable', or list layers"
LARGEST = 1 << 20  # bytes of a job file
MOST_TOLD, LONGEST = 50, 1000  # problems of a job, letters of each


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a job's keys were written."""

    name: str = "job"
    folder: str | None = None  # beside which callables are looked for
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    overrides: Mapping[tuple[str, ...], str] = field(default_factory=dict)

    def located(self, problem: Problem) -> str:
        """One line: file, line or override, key, what is wrong."""
        path, words = problem
        shown_path = (
            path[:-1] if len(path) > 1 and path[-1] == "name" else path
        )  # a name may stand for its whole table
        layer = path[0] == "layers" and len(path) > 1  # the words name it
        key = "" if layer else f"{'.'.join(shown_path)}: "
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return f"--set {self.overrides[path[:length]]}: {key}{words}"
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}: {key}{words}"
        for origin, text in self.overrides.items():
            if origin[: len(path)] == path:
                return f"--set {text}: {key}{words}"
        below = next((f":{line}" for origin, line in self.lines.items() if origin[: len(path)] == path), "")
        return f"{self.name}{below}: {key}{words}"

    def told(self, problems: Iterable[Problem]) -> list[str]:
        """Return one line for each of the first problems; those beyond `MOST_TOLD` are not even looked for."""
        lines = [" ".join(self.located(problem).split()) for problem in islice(problems, MOST_TOLD + 1)]
        lines = [line if len(line) <= LONGEST else f"{line[:LONGEST]}…" for line in lines]
        if len(lines) > MOST_TOLD:
            lines[-1] = f"{self.name}: there are more problems; mend these first"
        return lines

    def refuse(self, problems: Iterable[Problem]) -> None:
        if found := self.told(problems):
            raise JobError(found)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A whole run: what `train` takes, by name. Checked when made; docs/howto/job_file.md explains every key."""

    sync: str | dict[str, Any] = keys.DIAL("softsync:1", "when gradients become an update, and who waits")
    topology: str = keys.TOPOLOGY("servers", "where gradients are folded")
    learners: int = keys.COUNT(2, "λ, how many compute gradients")
    batch_size: int = keys.COUNT(32, "μ, examples in a learner's batch")
    global_batch_size: int | None = keys.COUNT(
        None, "examples in the batches of all learners together; in place of batch_size"
    )
    epochs: int | None = keys.COUNT(
        None, "the run ends after so many passes over the data (1 where steps is not given either)"
    )
    steps: int | None = keys.COUNT(None, "the run ends after so many updates; instead of epochs")
    seed: int = keys.NUMBER(0, "of the model's start, the data's order and the learners' random numbers")
    policy: str = keys.POLICY(
        "ledger", "who gets which examples: whoever asks, fixed parts, or drawn with replacement"
    )
    clip_norm: float | None = keys.POSITIVE(None, "clips the folded gradient to this norm")
    warmstart: int = keys.NUMBER(0, "updates that the first learner makes alone before the others join")
    device: str | tuple[str, ...] | None = keys.DEVICES(
        None, "where learners compute: dealt out in turn; CPUs where it is left out"
    )
    table_device: str | None = keys.TABLE_DEVICE(
        None, "where their table lies; with them where it is left out"
    )
    data_device: str | None = keys.DATA_DEVICE(
        None, "all data lie on each learner's GPU, where they are tensors"
    )
    threads: int | None = keys.COUNT(None, "torch's threads in each learner")
    group: int = keys.COUNT(1, "processes of each learner, which hold one model together")
    plan: str | dict[str, str] | None = keys.CUT(
        None, "how the model is cut over a group; auto is the cheapest way"
    )
    local_update: bool = keys.FLAG(True, "one group updates what is cut over its processes by itself")
    check: bool = keys.FLAG(False, "the first batch of a model that is cut is compared with the whole model")
    run_dir: str | None = keys.PATH(None, "the folder that the run writes its record to")
    resume: str | None = keys.PATH(None, "the folder of a run to go on with")
    if_exists: str = keys.IF_EXISTS(
        REFUSE, "where run_dir holds a run: continue it, delete it, or write to the next free name"
    )
    checkpoint_every: int | str = keys.CADENCE(
        AUTO,
        "between two checkpoints in run_dir; auto is a minute (end in a simulated run), end only the last one, which is always written",
    )
    keep_checkpoints: int = keys.COUNT(2, "how many checkpoints stay")
    clocks: bool = keys.FLAG(False, "the vector clock of every update is kept in run_dir (clocks.bin)")
    on_error: str = keys.ON_ERROR("raise", "a learner's exception ends the run, or only that learner")
    replace: bool = keys.FLAG(False, "another learner takes the place of a lost one")
    patience: float | None = keys.POSITIVE(
        60.0, "seconds after which a learner that is not heard of is named"
    )
    kill_hung: bool = keys.FLAG(False, "and then ended")
    model: Named | None = keys.NAMED(None, "what is trained; either this or layers")
    layers: tuple[dict[str, Any], ...] = keys.LAYERS(
        (), "what is trained, as a net written here (docs/howto/layers.md)"
    )
    data: Named = keys.NAMED(REQUIRED, "what it is trained on")
    evaluate: Named | None = keys.EVALUATE(
        None, "a data set (or a function of the model) to test on after each epoch"
    )
    loss: Named | None = keys.NAMED(None, "(output, target) to a scalar; either this or objective")
    objective: Named | None = keys.NAMED(None, "(model, batch) to a scalar, for any other kind of batch")
    gradient: str | Named = keys.GRADIENT(
        "backprop",
        "the way to one: contrastive divergence needs no loss, nor does a function (model, batch) -> loss that fills .grad",
    )
    regulariser: Named | None = keys.NAMED(None, "a penalty of the model's weights, added to every gradient")
    stop: dict[str, Any] | None = keys.STOP(
        None,
        "the run ends before its end: at a loss, after a plateau of epochs (of metric, where given), at a norm of the data's gradient",
    )
    optimizer: Named = keys.NAMED(REQUIRED, "what applies a fold")
    schedule: Named | None = keys.NAMED(None, "of the learning rate, stepped each epoch")
    collate: Named | None = keys.NAMED(
        None, "a list of examples to a batch, where torch's own way does not fit"
    )
    engine: Named = keys.NAMED(Named(name="local"), "on what it runs")
    callbacks: tuple[Named, ...] = keys.NAMED_LIST(
        (), "called with each epoch's record; one that returns True ends the run"
    )
    source: Source = field(default=Source(), repr=False, compare=False)

    def __post_init__(self) -> None:
        values, problems = _read(self.table())
        defaults = {key.name: None if key.required else key.default for key in KEYS}
        self.source.refuse(problems or checks.problems(defaults | values, self.source.folder))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def load(cls, file: str | Path, overrides: Iterable[str] = ()) -> Job:
        """The job of a file, changed by `key=value` overrides."""
        folder = str(Path(file).absolute().parent)
        return cls.parse(read_text(file), overrides, name=str(file), folder=folder)

    @classmethod
    def builtin(cls, overrides: Iterable[str] = ()) -> Job:
        """The job that ships with the package: digits, a small network, softsync."""
        text = resources.files(__package__).joinpath("builtin.toml").read_text(encoding="utf-8")
        return cls.parse(text, overrides, name="built-in job")

    @classmethod
    def parse(
        cls, text: str, overrides: Iterable[str] = (), *, name: str = "job", folder: str | None = None
    ) -> Job:
        """The job of a text; `name` stands before each problem."""
        table, lines = read_table(text, name)
        origins = {}
        for given in overrides:
            try:
                path, value = parse_override(given)
                path = override(table, path, value)
            except UsageError as error:
                raise JobError([f"--set: {one_line(error)}"]) from error
            origins[path] = " ".join(given.split())
        source = Source(name=name, folder=folder, lines=lines, overrides=origins)
        values, problems = _read(_evaluate_from_data(table), lambda key: checks.elsewhere(key, table, folder))
        source.refuse(problems)
        return cls(**values, source=source)

    def table(self) -> dict[str, Any]:
        """The job as plain values, defaults included: keys in the order of the reference, without those that are not set."""
        found = {key.name: _plain(getattr(self, key.name)) for key in KEYS}
        return {name: value for name, value in found.items() if value is not None and value != []}

    def dumps(self) -> str:
        """The job as TOML; reading it gives an equal job."""
        return dumps(self.table())

    def build(self) -> dict[str, Any]:
        """The keyword arguments of `train`; everything that can be refused before it starts is refused here."""
        try:
            return build.build(self)
        except build.Failed as failed:
            raise JobError(self.source.told([failed.problem])) from failed


KEYS = tuple(Key(name=f.name, default=f.default, **f.metadata) for f in fields(Job) if f.metadata)
BY_NAME: Mapping[str, Key] = {each.name: each for each in KEYS}


# -- reading -------------------------------------------------------------------------------------------------


def read_text(file: str | Path) -> str:
    """Return the text of a job file; raise `JobError` where there is none."""
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(LARGEST + 1)
    except OSError as error:
        raise JobError([f"{file}: cannot be read: {error.strerror or error}"]) from error
    except ValueError as error:  # a zero byte in the name
        raise JobError([f"{str(file)!r}: cannot be read: {error}"]) from error
    if len(content) > LARGEST:
        raise JobError([f"{file}: more than {LARGEST:,} bytes, no job file"])
    try:
        return content.decode("utf-8-sig")  # some editors put a mark first
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise JobError([f"{file}:{line}: not UTF-8, byte 0x{content[error.start]:02x}"]) from error


def read_table(text: str, name: str) -> tuple[dict[str, Any], Mapping[tuple[str, ...], int]]:
    """Return a job's text as a table, with the lines of its keys; raise `JobError` where it is not TOML."""
    try:
        lines = lines_of(text)
        return tomllib.loads(text), lines
    except TooDeep as error:
        raise JobError([f"{name}:{error.line}: {error}"]) from error
    except tomllib.TOMLDecodeError as error:
        words = " ".join(str(error).split())
        found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", words)
        line = f":{found[1]}" if found and found[1] else ""
        raise JobError([f"{name}{line}: not TOML: {words}"]) from error
    except ValueError as error:  # numbers of thousands of digits
        raise JobError([f"{name}: not readable: {one_line(error)}"]) from error


def _evaluate_from_data(table: dict[str, Any]) -> dict[str, Any]:
    """A table under evaluate that names nothing changes what stands under data."""
    data, evaluate = table.get("data"), table.get("evaluate")
    if not isinstance(evaluate, dict) or "name" in evaluate:
        return table
    if isinstance(data, str):
        data = {"name": data}
    if isinstance(data, dict) and "name" in data:
        return {**table, "evaluate": {**data, **evaluate}}
    return {key: value for key, value in table.items() if key != "evaluate"}  # what is wrong is data


def _read(
    table: Mapping[str, Any], meant_as: Callable[[str], str] = lambda key: ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Values of the record by key, and what is wrong with single ones; `meant_as` is a hint for an unknown key."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    meant = set(table)  # keys that are not reported as missing
    for name, value in table.items():
        if len(problems) > MOST_TOLD:
            break
        if name not in BY_NAME:
            problems.append(((name,), f"unknown key{meant_as(name) or nearest(name, BY_NAME)}"))
            meant |= {key for key in BY_NAME if repr(key) in problems[-1][1]}
        else:
            try:
                values[name] = BY_NAME[name](value)
            except Wrong as wrong:
                problems.append(((name,), str(wrong)))
    if not meant & {"model", "layers"}:
        problems.append((("model",), NO_MODEL))
    missing = [key for key in KEYS if key.required and key.name not in meant]
    problems += [((key.name,), f"missing; expected {key.kind}") for key in missing]
    return values, problems


def _plain(value: Any) -> Any:
    if isinstance(value, Named):
        return value.table()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return copy.deepcopy(value)
