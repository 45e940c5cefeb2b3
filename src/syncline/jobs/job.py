"""The record of a job: read from TOML, checked as a whole, written back.

All problems are found in one go, each with its file, line and key. Not responsible for making objects (build.py).
"""

# ruff: noqa: RUF009 - kinds make fields

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from syncline.dial import SANDBLASTER, Course, Sync, nearest
from syncline.engines.checkpoint_options import AUTO, END
from syncline.errors import UsageError
from syncline.jobs import build, keys, nets
from syncline.jobs.keys import REQUIRED, JobError, Key, Named, Wrong, shown
from syncline.jobs.names import METHODS, NAMES, one_line, resolve, takes_model
from syncline.jobs.toml import dumps, lines_of, override, parse_override
from syncline.learn.gradient_ways import parse_way
from syncline.learn.loader import POLICIES
from syncline.nn.file_arguments import wrong_arguments
from syncline.topologies import parse_topology

Problem = tuple[tuple[str, ...], str]  # the key's path, what is wrong
NO_MODEL = "missing; name a model, such as 'mlp' or 'package.module:callable', or list layers"
LARGEST = 1 << 20  # bytes of a job file


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
        shown_path = path[:-1] if path[-1] == "name" else path  # a name may stand for its whole table
        layer = path[0] == "layers" and len(path) > 1  # the words name it
        key = "" if layer else f"{'.'.join(shown_path)}: "
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return f"--set {self.overrides[path[:length]]}: {key}{words}"
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}: {key}{words}"
        below = [text for origin, text in self.overrides.items() if origin[: len(path)] == path]
        return f"--set {below[0]}: {key}{words}" if below else f"{self.name}: {key}{words}"

    def told(self, problems: Iterable[Problem]) -> list[str]:
        return [" ".join(self.located(problem).split()) for problem in problems]

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
        self.source.refuse(problems or _problems(values, self.source.folder))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def load(cls, file: str | Path, overrides: Iterable[str] = ()) -> Job:
        """The job of a file, changed by `key=value` overrides."""
        path = Path(file)
        try:
            with path.open("rb") as stream:
                content = stream.read(LARGEST + 1)
        except OSError as error:
            raise JobError([f"{file}: cannot be read: {error.strerror or error}"]) from error
        except ValueError as error:  # a zero byte in the name
            raise JobError([f"{str(file)!r}: cannot be read: {error}"]) from error
        if len(content) > LARGEST:
            raise JobError([f"{file}: more than {LARGEST:,} bytes, no job file"])
        try:
            text = content.decode("utf-8-sig")  # some editors put a mark first
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            raise JobError([f"{file}:{line}: not UTF-8, byte 0x{content[error.start]:02x}"]) from error
        return cls.parse(text, overrides, name=str(file), folder=str(path.absolute().parent))

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
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise JobError([_not_toml(name, error)]) from error
        except (RecursionError, ValueError) as error:  # nested beyond reason, numbers of thousands of digits
            raise JobError([f"{name}: not readable: {one_line(error)}"]) from error
        origins = _override_all(table, overrides)
        source = Source(name=name, folder=folder, lines=lines_of(text), overrides=origins)
        values, problems = _read(_evaluate_from_data(table))
        source.refuse(problems)
        return cls(**values, source=source)

    def table(self) -> dict[str, Any]:
        """The job as plain values, defaults included: keys in the order of the reference, without those that are not set."""
        found = {key.name: _plain(getattr(self, key.name)) for key in KEYS}
        return {name: value for name, value in found.items() if value is not None and value != []}

    @property
    def model_name(self) -> str:
        """What is trained, in a word."""
        return self.model.name if self.model is not None else f"net of {len(self.layers)} layers"

    def dumps(self) -> str:
        """The job as TOML; reading it gives an equal job."""
        return dumps(self.table())

    def build(self) -> dict[str, Any]:
        """The keyword arguments of `train`; everything that can be refused before it starts is refused here."""
        try:
            return build.build(self)
        except build.Failed as failed:
            raise JobError(self.source.told([failed.problem])) from failed


KEYS = keys.keys_of(Job)
BY_NAME: Mapping[str, Key] = {each.name: each for each in KEYS}


# -- reading -------------------------------------------------------------------------------------------------


def _not_toml(name: str, error: tomllib.TOMLDecodeError) -> str:
    words = " ".join(str(error).split())
    found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", words)
    line = f":{found[1]}" if found and found[1] else ""
    return f"{name}{line}: not TOML: {words}"


def _override_all(table: dict[str, Any], overrides: Iterable[str]) -> dict[tuple[str, ...], str]:
    origins = {}
    for text in overrides:
        try:
            path, value = parse_override(text)
            path = override(table, path, value)
        except UsageError as error:
            raise JobError([f"--set: {one_line(error)}"]) from error
        origins[path] = " ".join(text.split())
    return origins


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


def _read(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Values of the record by key, and what is wrong with single ones."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    meant = set(table)  # keys that are not reported as missing
    for name, value in table.items():
        if name not in BY_NAME:
            problems.append(((name,), f"unknown key{nearest(name, BY_NAME)}"))
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


# -- checks over several keys --------------------------------------------------------------------------------


def _problems(values: Mapping[str, Any], folder: str | None) -> list[Problem]:
    """What is wrong with a job whose single values are right."""
    whole = {key.name: None if key.required else key.default for key in KEYS} | dict(values)
    layers = whole["layers"] if whole["model"] is None else None
    return [
        *_contradictions(whole),
        *_dial(whole),
        *_words(whole),
        *_names(whole, folder),
        *nets.problems(layers or (), folder),
    ]


def _contradictions(job: Mapping[str, Any]) -> Iterator[Problem]:
    if job["epochs"] is not None and job["steps"] is not None:
        yield (
            ("steps",),
            f"give either epochs or steps, got epochs = {job['epochs']} and steps = {job['steps']}",
        )
    if job["model"] is not None and job["layers"]:
        yield ("layers",), "give either model or layers, not both"
    for key in ("loss", "objective"):
        if job[key] is not None and nets.has_losses(job["layers"]):
            yield (key,), "the layers have their own losses; take those away, or this"
    if job["gradient"] != "backprop":
        for key in ("loss", "objective"):
            if job[key] is not None:
                yield (
                    (key,),
                    f"gradient = {shown(str(job['gradient']))} needs none; take it away, or gradient",
                )
    elif job["loss"] is None and job["objective"] is None and not nets.has_losses(job["layers"]):
        yield (
            ("loss",),
            "missing; give a loss of (output, target), such as 'cross_entropy', or an objective of (model, batch)",
        )
    if job["loss"] is not None and job["objective"] is not None:
        yield ("objective",), "give either loss or objective, not both"
    if job["checkpoint_every"] not in (AUTO, END) and job["run_dir"] is None and job["resume"] is None:
        yield ("checkpoint_every",), "needs run_dir, the folder to write to"
    if job["clocks"] and job["run_dir"] is None and job["resume"] is None:
        yield ("clocks",), "needs run_dir, the folder to write to"


def _dial(job: Mapping[str, Any]) -> Iterator[Problem]:
    value = job["sync"]
    batch = job["optimizer"] is not None and job["optimizer"].name in METHODS
    if value == SANDBLASTER:
        if job["steps"] is None:
            yield ("steps",), "missing; sandblaster ends after so many iterations, for example steps = 100"
        if not batch and ":" not in job["optimizer"].name:
            methods = ", ".join(METHODS)
            yield (
                ("optimizer", "name"),
                f"{job['optimizer'].name!r} is no batch method; sandblaster takes {methods}",
            )
        return
    if batch:
        yield ("sync",), f"{job['optimizer'].name!r} is a batch method: give sync = 'sandblaster' with it"
    if isinstance(value, dict):
        known = [entry.name for entry in fields(Sync)]
        unknown = [key for key in value if key not in known]
        for key in unknown:
            yield ("sync", key), f"unknown field{nearest(key, known)}; there are: {', '.join(known)}"
        each = value.get("one_from_each", False)
        if not isinstance(each, bool):
            yield ("sync", "one_from_each"), f"expected true or false, got {shown(each)}"
        if unknown or not isinstance(each, bool):
            return
    try:
        for _, dial in Course.of(Sync(**value) if isinstance(value, dict) else value).dials:
            dial.check(job["learners"], job["batch_size"])
    except UsageError as error:
        yield ("sync",), one_line(error)


def _words(job: Mapping[str, Any]) -> Iterator[Problem]:
    try:
        parse_topology(job["topology"])
    except ValueError as error:  # a UsageError, or a number that int() does not take
        yield ("topology",), one_line(error)
    if isinstance(job["gradient"], str) and job["gradient"] != "backprop":
        try:
            parse_way(job["gradient"])
        except UsageError as error:
            yield ("gradient",), one_line(error)
    policy = job["policy"]
    if policy not in POLICIES:
        yield ("policy",), f"expected one of {', '.join(POLICIES)}, got {policy!r}{nearest(policy, POLICIES)}"
    for key in ("device", "table_device", "data_device"):
        devices = job[key] or ()
        for name in (devices,) if isinstance(devices, str) else devices:
            try:
                torch.device(name)
            except RuntimeError:
                yield (key,), f"{shown(name)} is no device that torch knows, as 'cpu' or 'cuda:0'"


def _names(job: Mapping[str, Any], folder: str | None) -> Iterator[Problem]:
    wrong: set[str] = set()
    for key in NAMES:
        value = job[key]
        if (
            value is None
            or isinstance(value, str)
            or (key == "evaluate" and "data" in wrong and value.name == job["data"].name)
        ):
            continue  # most likely the same mistake
        for named in value if isinstance(value, tuple) else (value,):
            for problem in _name(key, named, folder, job["sync"] == SANDBLASTER):
                wrong.add(key)
                yield problem


def _name(key: str, named: Named, folder: str | None, batch: bool) -> Iterator[Problem]:
    role = NAMES[key]
    try:
        found = resolve(named.name, role, folder)
    except UsageError as error:
        yield (key, "name"), one_line(error)
        return
    if isinstance(found, build.READY.get(key, ())):
        if named.arguments:
            yield (key,), f"{named.name!r} is made already and takes no arguments"
        return
    if not callable(found):
        yield (key, "name"), f"{named.name!r} is a {type(found).__name__}, not a callable"
        return
    given = (
        1 if key == "evaluate" and takes_model(found) else 0 if key == "optimizer" and batch else role.given
    )
    for argument, words in wrong_arguments(found, given, named.arguments):
        yield (key, argument) if argument else (key,), f"{named.name}: {words}"
