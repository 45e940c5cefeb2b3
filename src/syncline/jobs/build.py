"""From names to objects: the keyword arguments of `train`, tried on two examples before any process starts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import Dataset, IterableDataset

from syncline.batch.commands import is_method
from syncline.dial import SANDBLASTER, Sync
from syncline.engines.run import Engine
from syncline.jobs.keys import Named
from syncline.jobs.names import NAMES, one_line, resolve, takes_model
from syncline.learn.gradient_ways import Supervised, parse_way
from syncline.learn.loader import reader
from syncline.learn.server_session import check_batches
from syncline.learn.session import make_optimizer, refuse_sparse
from syncline.nn.layer_records import NetError
from syncline.nn.net import Net, by_layer

if TYPE_CHECKING:
    from syncline.jobs.job import Job

TRIED = 2  # examples
# What a name may stand for instead of a callable that makes it.
READY: Mapping[str, type] = {"model": nn.Module, "data": Dataset, "evaluate": Dataset, "engine": Engine}
Problem = tuple[tuple[str, ...], str]  # the key's path, what is wrong


class Failed(Exception):
    """Making one of the job's objects failed: its key and what to say."""

    def __init__(self, key: str | tuple[str, ...], words: str) -> None:
        super().__init__(key, words)
        self.problem: Problem = (key,) if isinstance(key, str) else key, words


def build(job: Job) -> dict[str, Any]:
    """The arguments; raises Failed."""
    others = (*NAMES, "layers", "source")
    plain = [each.name for each in fields(job) if each.name not in others]
    made: dict[str, Any] = {name: getattr(job, name) for name in (*plain, "gradient")}
    made["sync"] = Sync(**job.sync) if isinstance(job.sync, dict) else job.sync
    plainly_named = ":" not in job.engine.name and not job.engine.arguments
    made["engine"] = job.engine.name if plainly_named else _make(job, "engine")
    made["data"] = _make(job, "data")
    made["collate"] = _function(job, "collate", job.collate)
    made["model"] = _net(job, made) if job.layers else _make(job, "model")
    made["evaluate"] = _evaluation(job, job.evaluate) if job.evaluate else None
    for key in ("loss", "objective", "regulariser", "optimizer", "schedule"):
        made[key] = _function(job, key, getattr(job, key))
    if job.layers:
        made["optimizer"] = _by_layer(job, made)
    if isinstance(job.gradient, Named):
        made["gradient"] = _function(job, "gradient", job.gradient)
    if job.sync == SANDBLASTER and not is_method(made["optimizer"]):  # it makes one
        made["optimizer"] = _attempt("optimizer", "", made["optimizer"])
    made["callbacks"] = tuple(_function(job, "callbacks", named) for named in job.callbacks)
    _try(job, made)
    if job.model is not None and any(map(is_parametrized, made["model"].modules())):
        made["model"] = _function(job, "model", job.model)  # it does not travel: learners make it
    return made


def _function(job: Job, key: str, named: Named | None) -> Callable[..., Any] | None:
    if named is None:
        return None
    found = resolve(named.name, NAMES[key], job.source.folder)
    return partial(found, **copy.deepcopy(named.arguments)) if named.arguments else found


def _make(job: Job, key: str) -> Any:
    """Call what the job names, as a plain script would after `torch.manual_seed(seed)`."""
    named, kind = getattr(job, key), READY[key]
    found = resolve(named.name, NAMES[key], job.source.folder)
    if isinstance(found, kind):
        return found
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            made = found(**copy.deepcopy(named.arguments))
    except Exception as error:  # the user's code runs here
        raise Failed(key, f"{named} failed: {one_line(error)}") from error
    if not isinstance(made, kind):
        wanted = f"{kind.__module__.split('.')[0]} {kind.__name__}"
        raise Failed(key, f"{named} gave {type(made).__name__}, expected a {wanted}")
    return made


def _net(job: Job, made: dict[str, Any]) -> Net:
    """Of the job's layers; inputs without a shape take that of the first examples."""
    example = None
    shapes = [each for each in job.layers if each["type"] == "input" and "shape" not in each]
    if shapes and not isinstance(made["data"], IterableDataset):
        example = _attempt("data", "the first examples cannot be read: ", _examples, job, made, "data")
    try:
        with torch.random.fork_rng(devices=[]):  # as a plain script would after `torch.manual_seed(seed)`
            torch.manual_seed(job.seed)
            return Net(job.layers, example=example)
    except NetError as error:
        (problem,) = located(error)
        raise Failed(*problem) from error


def located(error: NetError) -> Iterator[Problem]:
    """Where in the job's list of layers."""
    for place, key, words in error.problems:
        yield ("layers", str(place), *([key] if key else [])), words


def _by_layer(job: Job, made: dict[str, Any]) -> Any:
    """The optimizer, with the layers' multipliers where they have some."""
    if all((rate, decay) == (1.0, 1.0) for rate, decay, _ in made["model"].groups()):
        return made["optimizer"]
    if takes_model(resolve(job.optimizer.name, NAMES["optimizer"], job.source.folder)):
        words = f"{job.optimizer.name} makes groups of its own; layers' rate and decay do not reach it"
        raise Failed("optimizer", words)
    return partial(by_layer, make=made["optimizer"])


def _evaluation(job: Job, named: Named) -> Any:
    ours = takes_model(resolve(named.name, NAMES["evaluate"], job.source.folder))
    return _function(job, "evaluate", named) if ours else _make(job, "evaluate")


# -- the trial -----------------------------------------------------------------------------------------------


def _try(job: Job, made: dict[str, Any]) -> None:
    """Refuse what does not fit together: batches and data, optimizer and model, schedule, loss."""
    model, data = made["model"], made["data"]
    batch = job.sync == SANDBLASTER
    if not isinstance(data, IterableDataset) and not batch:
        size = _attempt("data", f"{job.data} has no length: ", len, data)
        _attempt("batch_size", "", check_batches, size, job.batch_size)
    _attempt("model", "", refuse_sparse, model)
    twin = _attempt("model", f"{job.model} cannot be copied: ", copy.deepcopy, model)
    optimizer = scheduler = None
    if not batch:
        failed, schedule = f"{job.optimizer} failed: ", made["schedule"]
        optimizer = _attempt("optimizer", failed, make_optimizer, twin, made["optimizer"])
        scheduler = schedule and _attempt("schedule", f"{job.schedule} failed: ", schedule, optimizer)
    if job.device is not None and job.device != "cpu":
        return  # the learners will see
    for key in ("data", "evaluate"):
        if isinstance(made[key], Dataset) and not isinstance(made[key], IterableDataset):
            _one_batch(job, key, twin, made)
    if optimizer is not None:
        _attempt("optimizer", f"{job.optimizer} failed: ", optimizer.step)
    if scheduler is not None:
        _attempt("schedule", f"{job.schedule} failed: ", scheduler.step)


def _attempt(key: str, before: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Failed:
        raise
    except Exception as error:  # the user's code runs here
        raise Failed(key, before + one_line(error)) from error


def _examples(job: Job, made: dict[str, Any], key: str) -> Any:
    """A batch of the first ones."""
    count = min(TRIED, _attempt(key, f"{getattr(job, key)} has no length: ", len, made[key]), job.batch_size)
    if count == 0:
        raise Failed(key, "the data set is empty")
    return reader(made[key], made["collate"])(torch.arange(count))


def _one_batch(job: Job, key: str, model: nn.Module, made: dict[str, Any]) -> None:
    batch = _attempt(key, "the first examples cannot be read: ", _examples, job, made, key)
    with torch.random.fork_rng(devices=[]):
        what, value = _loss_of(job, key, model, batch, made)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise Failed(what, f"expected a scalar tensor, got {got}; reduce it, for example with .mean()")
    if key == "data" and what != "gradient":
        _attempt(what, f"{getattr(job, what)} has no gradient: ", value.backward)


def _loss_of(job: Job, key: str, model: nn.Module, batch: Any, made: dict[str, Any]) -> tuple[str, Any]:
    """Which of loss and objective it is, and its value on a batch."""
    where = f"failed on the first examples of {key}: "
    if job.gradient != "backprop":
        way = parse_way(made["gradient"])
        _attempt("gradient", "", way.check, model)
        if key == "data":
            _attempt("gradient", "", way.prepare, model, len(batch))
            return "gradient", _attempt("gradient", f"{job.gradient} {where}", way, model, batch)
        _attempt("evaluate", "", way.check_evaluation)
        return "gradient", _attempt("gradient", f"{job.gradient} {where}", way.test, model, batch)
    if job.loss is None and job.objective is None:
        return "layers", _attempt("layers", where, Supervised(None), model, batch)
    if made["objective"] is not None:
        return "objective", _attempt("objective", f"{job.objective} {where}", made["objective"], model, batch)
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        kind = type(batch).__name__
        raise Failed("loss", f"takes batches of (input, target), {key} gives a {kind}; use an objective")
    output = _attempt("model", f"{job.model} {where}", model, batch[0])
    return "loss", _attempt("loss", f"{job.loss} {where}", made["loss"], output, batch[1])
