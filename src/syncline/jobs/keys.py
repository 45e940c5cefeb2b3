"""What a job may say: every key with its kind, its default and its meaning, and the checks of single values.

`KEYS` is the reference that docs/howto/job_file.md prints. Not responsible for names (names.py) or for what contradicts what.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.engines.checkpoint_options import AUTO, END
from syncline.errors import UsageError
from syncline.learn.gradient_ways import WAYS
from syncline.learn.training import read_stop
from syncline.parallel.rules import WAYS as CUTS

MOST = 2**63 - 1
REQUIRED = object()  # as a default: there is none


class JobError(UsageError):
    """A job that cannot run: all its problems, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(tuple(problems))  # stays in args: the error has to survive pickling
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Wrong(Exception):
    """A value is not what its key expects; says what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Something by name: a built-in one or `"package.module:callable"`, with its arguments."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.arguments, dict):
            raise UsageError(
                f"Named takes a name and a dict of arguments, got {self.name!r}, {self.arguments!r}"
            )
        object.__setattr__(self, "arguments", copy.deepcopy(self.arguments))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={shown(value)}' for key, value in self.arguments.items())})"

    def table(self) -> dict[str, Any]:
        return {"name": self.name, **copy.deepcopy(self.arguments)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a job."""

    name: str
    kind: str  # in words, for messages and the reference
    read: Callable[[Any], Any]  # the value from the file to the record's; raises Wrong
    default: Any = REQUIRED
    meaning: str

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    def __call__(self, value: Any) -> Any:
        """The record's value, or Wrong with what was expected and what came."""
        try:
            return self.read(value)
        except Wrong as wrong:
            reason = f" ({wrong})" if str(wrong) else ""
            raise Wrong(f"expected {self.kind}, got {shown(value)}{reason}") from None


def shown(value: Any) -> str:
    """A value on one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# -- kinds ---------------------------------------------------------------------------------------------------


def _whole(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise Wrong
        return value

    return read


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise Wrong
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise Wrong
    return value


def _dial(value: Any) -> str | dict[str, Any]:
    if isinstance(value, dict) and value:
        return dict(value)
    return _text(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Wrong
    return value


def _cadence(value: Any) -> int | str:
    if isinstance(value, str):
        if value in (AUTO, END):
            return value
        if re.fullmatch(r"\d+(\.\d+)?\s*s", value.strip()) and float(value.strip()[:-1]) > 0:
            return value
        raise Wrong
    return _whole(1)(value)


def _cut(value: Any) -> str | dict[str, str]:
    if isinstance(value, Mapping) and value and all(way in CUTS for way in value.values()):
        return dict(value)
    if value in ("auto", "data") or (isinstance(value, str) and value.endswith(".json")):
        return str(value)
    raise Wrong


def _on_error(value: Any) -> str:
    if value not in ("raise", "continue"):
        raise Wrong
    return value


def _devices(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, list | tuple) and value:
        return tuple(map(_text, value))
    return _text(value)


def _named(value: Any) -> Named:
    if isinstance(value, Named):
        return value
    if isinstance(value, str):
        return Named(name=_text(value))
    if not isinstance(value, dict):
        raise Wrong
    if "name" not in value:
        raise Wrong("the table lacks its name")
    if not isinstance(value["name"], str) or not value["name"].strip():
        raise Wrong("the table's name is no text")
    return Named(name=value["name"], arguments={key: item for key, item in value.items() if key != "name"})


def _several(value: Any) -> tuple[Named, ...]:
    if not isinstance(value, list | tuple):
        raise Wrong
    return tuple(map(_named, value))


def _gradient(value: Any) -> str | Named:
    if isinstance(value, str):
        module, colon, path = value.partition(":")
        names = [*module.split("."), *path.split(".")]
        own = colon and module not in WAYS and all(name.isidentifier() for name in names)
        return Named(name=value) if own else _text(value)
    return _named(value)


def _layers(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple) or not value:
        raise Wrong
    return tuple(copy.deepcopy(dict(each)) if isinstance(each, dict) else each for each in value)


def _stop(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Wrong
    try:
        read_stop(value)
    except UsageError as error:
        raise Wrong(str(error).removeprefix("stop: ")) from None
    return dict(value)


NAME = "a name, or a table with a name and its arguments"

KEYS: tuple[Key, ...] = (
    Key(
        name="sync",
        kind='a dial such as "softsync:2", or a table of the fields of Sync',
        read=_dial,
        default="softsync:1",
        meaning="when gradients become an update, and who waits",
    ),
    Key(
        name="topology",
        kind='a topology such as "servers:2"',
        read=_text,
        default="servers",
        meaning="where gradients are folded",
    ),
    Key(
        name="learners",
        kind="a whole number of at least 1",
        read=_whole(1),
        default=2,
        meaning="λ, how many compute gradients",
    ),
    Key(
        name="batch_size",
        kind="a whole number of at least 1",
        read=_whole(1),
        default=32,
        meaning="μ, examples in a learner's batch",
    ),
    Key(
        name="global_batch_size",
        kind="a whole number of at least 1",
        read=_whole(1),
        default=None,
        meaning="examples in the batches of all learners together; in place of batch_size",
    ),
    Key(
        name="epochs",
        kind="a whole number of at least 1",
        read=_whole(1),
        default=None,
        meaning="the run ends after so many passes over the data (1 where steps is not given either)",
    ),
    Key(
        name="steps",
        kind="a whole number of at least 1",
        read=_whole(1),
        default=None,
        meaning="the run ends after so many updates; instead of epochs",
    ),
    Key(
        name="seed",
        kind="a whole number of at least 0",
        read=_whole(0),
        default=0,
        meaning="of the model's start, the data's order and the learners' random numbers",
    ),
    Key(
        name="policy",
        kind="ledger, partition or sample",
        read=_text,
        default="ledger",
        meaning="who gets which examples: whoever asks, fixed parts, or drawn with replacement",
    ),
    Key(
        name="clip_norm",
        kind="a finite number > 0",
        read=_positive,
        default=None,
        meaning="clips the folded gradient to this norm",
    ),
    Key(
        name="warmstart",
        kind="a whole number of at least 0",
        read=_whole(0),
        default=0,
        meaning="updates that the first learner makes alone before the others join",
    ),
    Key(
        name="device",
        kind='a device such as "cuda:0", or a list of them',
        read=_devices,
        default=None,
        meaning="where learners compute: dealt out in turn; CPUs where it is left out",
    ),
    Key(
        name="table_device",
        kind='"cpu" or a GPU of the learners',
        read=_text,
        default=None,
        meaning="where their table lies; with them where it is left out",
    ),
    Key(
        name="data_device",
        kind='"cuda"',
        read=_text,
        default=None,
        meaning="all data lie on each learner's GPU, where they are tensors",
    ),
    Key(
        name="threads",
        kind="a whole number of at least 1",
        read=_whole(1),
        default=None,
        meaning="torch's threads in each learner",
    ),
    Key(
        name="group",
        kind="a whole number of at least 1",
        read=_whole(1),
        default=1,
        meaning="processes of each learner, which hold one model together",
    ),
    Key(
        name="plan",
        kind="auto, data, the file of a plan, or a table of layers and ways",
        read=_cut,
        default=None,
        meaning="how the model is cut over a group; auto is the cheapest way",
    ),
    Key(
        name="local_update",
        kind="true or false",
        read=_flag,
        default=True,
        meaning="one group updates what is cut over its processes by itself",
    ),
    Key(
        name="check",
        kind="true or false",
        read=_flag,
        default=False,
        meaning="the first batch of a model that is cut is compared with the whole model",
    ),
    Key(
        name="run_dir",
        kind="a path",
        read=_text,
        default=None,
        meaning="the folder that the run writes its record to",
    ),
    Key(
        name="resume",
        kind="a path",
        read=_text,
        default=None,
        meaning="the folder of a run to go on with",
    ),
    Key(
        name="checkpoint_every",
        kind='a number of updates, seconds such as "30s", auto, or end',
        read=_cadence,
        default=AUTO,
        meaning="between two checkpoints in run_dir; auto is a minute (end in a simulated run), end only the last one, which is always written",
    ),
    Key(
        name="keep_checkpoints",
        kind="a whole number of at least 1",
        read=_whole(1),
        default=2,
        meaning="how many checkpoints stay",
    ),
    Key(
        name="clocks",
        kind="true or false",
        read=_flag,
        default=False,
        meaning="the vector clock of every update is kept in run_dir (clocks.bin)",
    ),
    Key(
        name="on_error",
        kind="raise or continue",
        read=_on_error,
        default="raise",
        meaning="a learner's exception ends the run, or only that learner",
    ),
    Key(
        name="replace",
        kind="true or false",
        read=_flag,
        default=False,
        meaning="another learner takes the place of a lost one",
    ),
    Key(
        name="patience",
        kind="a finite number > 0",
        read=_positive,
        default=60.0,
        meaning="seconds after which a learner that is not heard of is named",
    ),
    Key(
        name="kill_hung",
        kind="true or false",
        read=_flag,
        default=False,
        meaning="and then ended",
    ),
    Key(
        name="model",
        kind=NAME,
        read=_named,
        default=None,
        meaning="what is trained; either this or layers",
    ),
    Key(
        name="layers",
        kind="a list of layers, each a table with name and type",
        read=_layers,
        default=(),
        meaning="what is trained, as a net written here (docs/howto/layers.md)",
    ),
    Key(name="data", kind=NAME, read=_named, meaning="what it is trained on"),
    Key(
        name="evaluate",
        kind="a table of what differs from data, or " + NAME,
        read=_named,
        default=None,
        meaning="a data set (or a function of the model) to test on after each epoch",
    ),
    Key(
        name="loss",
        kind=NAME,
        read=_named,
        default=None,
        meaning="(output, target) to a scalar; either this or objective",
    ),
    Key(
        name="objective",
        kind=NAME,
        read=_named,
        default=None,
        meaning="(model, batch) to a scalar, for any other kind of batch",
    ),
    Key(
        name="gradient",
        kind="backprop, cd:k, pcd:k, or " + NAME,
        read=_gradient,
        default="backprop",
        meaning="the way to one: contrastive divergence needs no loss, nor does a function (model, batch) -> loss that fills .grad",
    ),
    Key(
        name="regulariser",
        kind=NAME,
        read=_named,
        default=None,
        meaning="a penalty of the model's weights, added to every gradient",
    ),
    Key(
        name="stop",
        kind="a table with loss, plateau or gradient_norm",
        read=_stop,
        default=None,
        meaning="the run ends before its end: at a loss, after a plateau of epochs (of metric, where given), at a norm of the data's gradient",
    ),
    Key(name="optimizer", kind=NAME, read=_named, meaning="what applies a fold"),
    Key(
        name="schedule",
        kind=NAME,
        read=_named,
        default=None,
        meaning="of the learning rate, stepped each epoch",
    ),
    Key(
        name="collate",
        kind=NAME,
        read=_named,
        default=None,
        meaning="a list of examples to a batch, where torch's own way does not fit",
    ),
    Key(
        name="engine",
        kind=NAME,
        read=_named,
        default=Named(name="local"),
        meaning="on what it runs",
    ),
    Key(
        name="callbacks",
        kind="a list of names or tables",
        read=_several,
        default=(),
        meaning="called with each epoch's record; one that returns True ends the run",
    ),
)
BY_NAME: Mapping[str, Key] = {key.name: key for key in KEYS}
