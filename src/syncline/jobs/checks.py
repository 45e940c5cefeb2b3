"""What is wrong with a job whose single values are right: keys that contradict each other, names, words, layers.

Not responsible for single values (keys.py), nor for what only the made objects show (build.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch

from syncline.dial import SANDBLASTER, Course, Sync, nearest
from syncline.engines.checkpoint_options import AUTO, END
from syncline.errors import UsageError
from syncline.jobs.build import READY, Problem, located
from syncline.jobs.keys import Named, shown
from syncline.jobs.names import METHODS, NAMES, Role, one_line, resolve, takes_model
from syncline.learn.gradient_ways import parse_way
from syncline.learn.loader import POLICIES
from syncline.nn.argument_checks import wrong_arguments
from syncline.nn.layer_records import NetError, read_layers
from syncline.nn.registry import TYPES, layer
from syncline.topologies import parse_topology

MOST_MEANT = 4  # names in a hint
OWN = Role(what="layer type", names={}, given=0)


def problems(job: Mapping[str, Any], folder: str | None) -> Iterator[Problem]:
    """Yield all problems of a job, given as a value for each key; each is looked for when it is asked for."""
    yield from _contradictions(job)
    yield from _dial(job)
    yield from _words(job)
    yield from _names(job, folder)
    yield from _layers(job["layers"] if job["model"] is None else (), folder)


def elsewhere(key: str, table: Mapping[str, Any], folder: str | None) -> str:
    """Return the end of a message: the dotted names of the sections that know this key; empty where none does."""
    found = []
    for section, value in table.items():
        if isinstance(value, list):  # tables that are meant by their names
            named = [each for each in value if isinstance(each, dict) and isinstance(each.get("name"), str)]
            found += [f"{section}.{each['name']}.{key}" for each in named if key in each]
        elif (isinstance(value, dict) and key in value) or (
            section in NAMES and key in _arguments(section, value, folder)
        ):
            found.append(f"{section}.{key}")
    shown_names = [repr(name) for name in found[:MOST_MEANT]] + ["…"] * (len(found) > MOST_MEANT)
    return f", did you mean {' or '.join(shown_names)}?" if found else ""


def _arguments(section: str, value: Any, folder: str | None) -> Sequence[str]:
    """Return the arguments that a file may give to what a section names."""
    name = value.get("name") if isinstance(value, dict) else value
    if isinstance(name, str):
        with suppress(UsageError, TypeError, ValueError):  # a wrong name, or a callable without a signature
            role = NAMES[section]
            return [*inspect.signature(resolve(name, role, folder)).parameters][role.given :]
    return ()


def _contradictions(job: Mapping[str, Any]) -> Iterator[Problem]:
    given = [key for key in ("loss", "objective") if job[key] is not None]
    types = [each.get("type") for each in job["layers"] if isinstance(each, Mapping)]
    own = any(isinstance(name, str) and name in TYPES and TYPES[name].role == "loss" for name in types)
    if job["epochs"] is not None and job["steps"] is not None:
        both = f"got epochs = {job['epochs']} and steps = {job['steps']}"
        yield ("steps",), f"give either epochs or steps, {both}"
    if job["model"] is not None and job["layers"]:
        yield ("layers",), "give either model or layers, not both"
    for key in given if own else ():
        yield (key,), "the layers have their own losses; take those away, or this"
    if job["gradient"] != "backprop":
        for key in given:
            yield (key,), f"gradient = {shown(str(job['gradient']))} needs none; take it away, or gradient"
    elif not given and not own:
        yield (
            ("loss",),
            "missing; give a loss of (output, target), such as 'cross_entropy', or an objective of (model, batch)",
        )
    if len(given) == 2:
        yield ("objective",), "give either loss or objective, not both"
    if job["run_dir"] is None and job["resume"] is None:
        wanted = {"checkpoint_every": job["checkpoint_every"] not in (AUTO, END), "clocks": job["clocks"]}
        for key in wanted:
            if wanted[key]:
                yield (key,), "needs run_dir, the folder to write to"


def _dial(job: Mapping[str, Any]) -> Iterator[Problem]:
    value = job["sync"]
    batch = job["optimizer"] is not None and job["optimizer"].name in METHODS
    if value == SANDBLASTER:
        if job["steps"] is None:
            yield ("steps",), "missing; sandblaster ends after so many iterations, for example steps = 100"
        name = job["optimizer"].name
        if not batch and ":" not in name:
            words = f"{name!r} is no batch method; sandblaster takes {', '.join(METHODS)}"
            yield ("optimizer", "name"), words
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
        if value is None or isinstance(value, str):
            continue
        if key == "evaluate" and "data" in wrong and value.name == job["data"].name:
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
    if isinstance(found, READY.get(key, ())):
        if named.arguments:
            yield (key,), f"{named.name!r} is made already and takes no arguments"
        return
    if not callable(found):
        yield (key, "name"), f"{named.name!r} is a {type(found).__name__}, not a callable"
        return
    given = role.given  # positional arguments that come from the library
    if key == "evaluate" and takes_model(found):
        given = 1
    elif key == "optimizer" and batch:
        given = 0
    for argument, words in wrong_arguments(found, given, named.arguments):
        yield (key, argument) if argument else (key,), f"{named.name}: {words}"


def _layers(layers: Sequence[Any], folder: str | None) -> Iterator[Problem]:
    """Types that name a module are imported and registered first, as other names of a job are."""
    wrong = False
    for place, record in enumerate(layers):
        name = record.get("type") if isinstance(record, Mapping) else None
        if isinstance(name, str) and ":" in name and name not in TYPES:
            try:
                layer(name)(resolve(name, OWN, folder))
            except UsageError as error:
                wrong = True
                where = ("layers", str(place), "type")
                yield where, f"layer {record.get('name')!r}: type: {one_line(error)}"
    if layers and not wrong:
        try:
            read_layers(layers)
        except NetError as error:
            yield from located(error)
