"""From names to objects: the keyword arguments of `train`, tried on two examples before any process starts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import Dataset, IterableDataset

from syncline.batch.commands import is_method
from syncline.dial import SANDBLASTER, Sync
from syncline.engines.run import Engine
from syncline.jobs.keys import KEYS, Named
from syncline.jobs.names import NAMES, one_line, resolve, takes_model
from syncline.learn.feed import reader
from syncline.learn.session import check_batches, make_optimizer, refuse_sparse

if TYPE_CHECKING:
    from syncline.jobs.job import Job

TRIED = 2  # examples
READY: Mapping[str, tuple[type, ...]] = {  # what a name may stand for instead of a callable that makes it
    "model": (nn.Module,),
    "data": (Dataset,),
    "evaluate": (Dataset,),
    "engine": (Engine,),
}
Problem = tuple[tuple[str, ...], str]


class _Failed(Exception):
    """Making one of the job's objects failed: its key and what to say."""

    def __init__(self, key: str, words: str) -> None:
        super().__init__(key, words)
        self.problem: Problem = (key,), words


def build(job: Job) -> tuple[dict[str, Any], list[Problem]]:
    """The arguments, and the first thing that went wrong in making them."""
    try:
        return _build(job), []
    except _Failed as failed:
        return {}, [failed.problem]


def _build(job: Job) -> dict[str, Any]:
    made: dict[str, Any] = {key.name: getattr(job, key.name) for key in KEYS if key.name not in NAMES}
    made["sync"] = Sync(**job.sync) if isinstance(job.sync, dict) else job.sync
    made["engine"] = job.engine.name if _plainly_named(job.engine) else _make(job, "engine", Engine)
    made["model"] = _make(job, "model", nn.Module)
    made["data"] = _data(job, "data")
    made["evaluate"] = _data(job, "evaluate") if job.evaluate else None
    for key in ("loss", "objective", "optimizer", "schedule", "collate"):
        made[key] = _function(job, key, getattr(job, key))
    if job.sync == SANDBLASTER and not is_method(made["optimizer"]):  # it makes one
        made["optimizer"] = _attempt("optimizer", "", made["optimizer"])
    made["callbacks"] = tuple(_function(job, "callbacks", named) for named in job.callbacks)
    _try(job, made)
    if any(map(is_parametrized, made["model"].modules())):  # such a module does not travel: learners make it
        made["model"] = _function(job, "model", job.model)
    return made


def _plainly_named(engine: Named) -> bool:
    return ":" not in engine.name and not engine.arguments


def _function(job: Job, key: str, named: Named | None) -> Callable[..., Any] | None:
    if named is None:
        return None
    found = resolve(named.name, NAMES[key], job.source.folder)
    return partial(found, **copy.deepcopy(named.arguments)) if named.arguments else found


def _make(job: Job, key: str, *kinds: type) -> Any:
    """Call what the job names, as a plain script would after `torch.manual_seed(seed)`."""
    named: Named = getattr(job, key)
    found = resolve(named.name, NAMES[key], job.source.folder)
    if isinstance(found, kinds):
        return found
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            made = found(**copy.deepcopy(named.arguments))
    except Exception as error:  # the user's code runs here
        raise _Failed(key, f"{named} failed: {one_line(error)}") from error
    if not isinstance(made, kinds):
        names = " or ".join(f"{kind.__module__.split('.')[0]} {kind.__name__}" for kind in kinds)
        raise _Failed(key, f"{named} gave {type(made).__name__}, expected a {names}")
    return made


def _data(job: Job, key: str) -> Any:
    named: Named = getattr(job, key)
    if key == "evaluate" and takes_model(resolve(named.name, NAMES[key], job.source.folder)):
        return _function(job, key, named)
    return _make(job, key, Dataset)


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
        optimizer = _attempt(
            "optimizer", f"{job.optimizer} failed: ", make_optimizer, twin, made["optimizer"]
        )
        schedule = made["schedule"]
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
    except Exception as error:  # the user's code runs here
        raise _Failed(key, before + one_line(error)) from error


def _one_batch(job: Job, key: str, model: nn.Module, made: dict[str, Any]) -> None:
    data = made[key]
    count = min(TRIED, _attempt(key, f"{getattr(job, key)} has no length: ", len, data), job.batch_size)
    if count == 0:
        raise _Failed(key, "the data set is empty")
    read = reader(data, made["collate"])
    batch = _attempt(key, "the first examples cannot be read: ", read, torch.arange(count))
    with torch.random.fork_rng(devices=[]):
        what, value = _loss_of(job, key, model, batch, made)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise _Failed(what, f"expected a scalar tensor, got {got}; reduce it, for example with .mean()")
    if key == "data":
        _attempt(what, f"{getattr(job, what)} has no gradient: ", value.backward)


def _loss_of(job: Job, key: str, model: nn.Module, batch: Any, made: dict[str, Any]) -> tuple[str, Any]:
    """Which of loss and objective it is, and its value on a batch."""
    where = f"failed on the first examples of {key}: "
    if made["objective"] is not None:
        return "objective", _attempt("objective", f"{job.objective} {where}", made["objective"], model, batch)
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        kind = type(batch).__name__
        raise _Failed("loss", f"takes batches of (input, target), {key} gives a {kind}; use an objective")
    output = _attempt("model", f"{job.model} {where}", model, batch[0])
    return "loss", _attempt("loss", f"{job.loss} {where}", made["loss"], output, batch[1])
