"""A net as data: layer records (plain tables) read and checked as a graph, before anything is made of them.

A problem is (place of the layer in the list, its key, words); all of one kind are found together. Not responsible for shapes,
which only the layers themselves know (net.py), nor for lines of files (jobs).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any

from torch import nn

from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.nn.argument_checks import FLAG, NOT_NEGATIVE, shown, wrong_arguments, wrong_values
from syncline.nn.registry import LayerType, find_type, wrong_initialiser

OWN = ("name", "type", "sources", "output", "freeze", "rate", "decay", "init", "share")
MOST_NAMED = 100  # problems of one kind: finding more costs milliseconds each
NAME = re.compile(r"[A-Za-z][\w-]*")
TAKEN = {
    *dir(nn.Module()),
    *["objective", "parts", "reaching", "table", "groups", "records", "losses", "outputs"],
}
Problem = tuple[int, str | None, str]


class NetError(UsageError):
    """Layers that make no net: all problems, one line each."""

    def __init__(self, problems: Sequence[Problem], names: Sequence[Any]) -> None:
        super().__init__(tuple(problems), tuple(names))
        self.problems = [(place, key, f"{_who(names, place)}: {words}") for place, key, words in problems]

    def __str__(self) -> str:
        return "\n".join(words for _, _, words in self.problems)


def _who(names: Sequence[Any], place: int) -> str:
    name = names[place] if place < len(names) else None
    return f"layer {name!r}" if isinstance(name, str) and name else f"layer {place + 1}"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer; `place` is its position in the list."""

    place: int
    name: str
    type: LayerType
    sources: tuple[str, ...]
    arguments: dict[str, Any]
    output: bool
    freeze: bool
    rate: Any  # a number, or numbers by parameter
    decay: Any
    init: Any  # a name or table for the weights, or those by parameter
    share: Any  # a layer, or "layer.parameter" by parameter


def read_layers(records: Any) -> list[Layer]:
    """In an order in which every layer comes after its sources; raises NetError."""
    if not isinstance(records, list | tuple) or not records:
        raise UsageError(f"layers must be a list of at least one layer, got {shown(records)}")
    names = [record.get("name") if isinstance(record, Mapping) else None for record in records]
    for check in (_wrong_records, _wrong_types, _wrong_keys, _wrong_sources):
        _refuse(check(records), names)
    layers = [
        Layer(
            place=place,
            name=record["name"],
            type=find_type(record["type"]),
            sources=sources,
            arguments={key: value for key, value in record.items() if key not in OWN},
            output=record.get("output", False),
            freeze=record.get("freeze", False),
            rate=record.get("rate", 1.0),
            decay=record.get("decay", 1.0),
            init=record.get("init"),
            share=record.get("share"),
        )
        for place, (record, sources) in enumerate(zip(records, _sources(records), strict=True))
    ]
    _refuse(_wrong_counts(layers), names)
    by_name = {layer.name: layer for layer in layers}
    try:
        order = [*TopologicalSorter({layer.name: layer.sources for layer in layers}).static_order()]
    except CycleError as error:
        raise NetError([_cycle(error.args[1], by_name)], names) from None
    _refuse(_unused(layers), names)
    return [by_name[name] for name in order]


def _refuse(problems: Iterable[Problem], names: Sequence[Any]) -> None:
    if found := [*islice(problems, MOST_NAMED)]:
        raise NetError(found, names)


# -- single records --------------------------------------------------------------------------------------------


def _wrong_records(records: Sequence[Any]) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for place, record in enumerate(records):
        if not isinstance(record, Mapping):
            yield place, None, f"expected a table with name and type, got {shown(record)}"
            continue
        name = record.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            words = "missing" if name is None else f"got {shown(name)}"
            yield place, "name", f"name: expected letters, digits, _ and -, {words}"
        elif name in seen:
            yield place, "name", f"name: layer {seen[name] + 1} is called so already"
        elif name in TAKEN:
            yield place, "name", f"name: {name!r} is a word of nn.Module or Net; choose another"
        else:
            seen[name] = place


def _wrong_types(records: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    for place, record in enumerate(records):
        if "type" not in record:
            yield place, "type", f"type: missing{nearest('type', [key for key in record if key not in OWN])}"
            continue
        try:
            find_type(record["type"])
        except UsageError as error:
            yield place, "type", f"type: {error}"


def _wrong_keys(records: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    for place, record in enumerate(records):
        found = find_type(record["type"])
        given = {key: value for key, value in record.items() if key not in OWN}
        wanted = 1 if found.wants else 0
        wrong = [*wrong_arguments(found.make, wanted, given, OWN), *wrong_values(found.make, given)]
        for key, words in wrong:
            yield place, key, f"{key}: {words}" if key else f"{found.name} {words}"
        for key, words in _wrong_own(record):
            yield place, key, f"{key}: {words}"


def _wrong_own(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("output", "freeze"):
        if key in record and (words := FLAG.wrong(record[key])):
            yield key, words
    for key in ("rate", "decay"):
        for value in _each(record.get(key, 1.0)):
            if words := NOT_NEGATIVE.wrong(value):
                yield key, words
    if "init" in record:
        given = record["init"]
        table = isinstance(given, Mapping) and "name" not in given
        for each in given.values() if table else [given]:
            yield from (("init", words) for words in wrong_initialiser(each))
    if "share" in record and not all(isinstance(each, str) for each in _each(record["share"])):
        wanted = "a layer, or a table of parameters such as {weight = 'fc1.weight'}"
        yield "share", f"expected {wanted}, got {shown(record['share'])}"


def _each(value: Any) -> list[Any]:
    """One for all, or one for each parameter."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


# -- the graph -------------------------------------------------------------------------------------------------


def _wrong_sources(records: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    by_name = {record["name"]: record for record in records}
    for place, record in enumerate(records):
        given = _given_sources(record)
        if given is None:
            continue
        if not all(isinstance(each, str) for each in given):
            words = f"expected a layer or a list of layers, got {shown(record['sources'])}"
            yield place, "sources", f"sources: {words}"
            continue
        if find_type(record["type"]).role == "input" and given:
            yield place, "sources", f"sources: {record['type']} takes the batch and has none"
            continue
        for each in given:
            if each not in by_name:
                words = f"there is no layer {each!r}{nearest(each, by_name)}; there are: {_list([*by_name])}"
                yield place, "sources", f"sources: {words}"
            elif find_type(by_name[each]["type"]).role == "loss":
                yield place, "sources", f"sources: {each!r} is a loss, which nothing can take"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:12])}, …"


def _given_sources(record: Mapping[str, Any]) -> list[Any] | None:
    given = record.get("sources")
    if given is None or isinstance(given, list):
        return given
    return list(given) if isinstance(given, tuple) else [given]


def _sources(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield each layer's sources: as given, else the layer written above. A loss takes the only label beside its output."""
    labels = [record["name"] for record in records if record["type"] == "label"]
    above: list[str] = []  # the last layer that another can take
    for record in records:
        found, given = find_type(record["type"]), _given_sources(record)
        if found.role == "input":
            given = []
        elif given is None:
            given = above
        if found.role == "loss" and found.wants == "shapes" and len(given) == 1 == len(labels):
            given = [*given, *labels]
        if record["type"] != "label" and found.role != "loss":
            above = [record["name"]]
        yield tuple(given)


def _wrong_counts(layers: Sequence[Layer]) -> Iterator[Problem]:
    for layer in layers:
        count = len(layer.sources)
        if layer.type.role == "input":
            continue
        if count == 0:
            yield layer.place, "sources", "sources: there is no layer above to take; begin with an input"
        elif layer.type.wants == "shape" and count > 1:
            yield layer.place, "sources", f"sources: {layer.type.name} takes one, got {_list(layer.sources)}"
        elif layer.type.role == "loss" and layer.type.wants == "shapes" and count != 2:
            words = f"a loss is of an output and its target, got {_list(layer.sources)}"
            yield layer.place, "sources", f"sources: {words}"
    if not any(layer.type.role == "input" for layer in layers):
        words = "a net begins with an input; write one first, as {name = 'data', type = 'input'}"
        yield 0, "type", f"type: {words}"


def _cycle(backwards: Sequence[str], layers: Mapping[str, Layer]) -> Problem:
    """At the first layer of it, in the order of the list."""
    *around, _ = reversed(backwards)  # each takes the next
    first = min(range(len(around)), key=lambda at: layers[around[at]].place)
    words = " takes ".join(repr(name) for name in (*around[first:], *around[: first + 1]))
    return layers[around[first]].place, "sources", f"sources: a cycle: {words}"


def _unused(layers: Sequence[Layer]) -> Iterator[Problem]:
    """Layers that lead neither to a loss nor to an output; without losses the last layer is one."""
    for layer in layers:
        if layer.output and layer.type.role != "layer":
            yield layer.place, "output", f"output: {layer.type.name} cannot be an output of the net"
    ends = [layer.name for layer in layers if layer.type.role == "loss"] or [layers[-1].name]
    used = leading_to([*ends, *(layer.name for layer in layers if layer.output)], layers)
    words = "unused: it leads to no loss or output; take it away, connect it, or write output = true"
    for layer in layers:
        if layer.name not in used:
            yield layer.place, "name", f"name: {words}"


def leading_to(ends: Iterable[str], layers: Sequence[Layer]) -> set[str]:
    """These layers and all that they take, in turn."""
    by_name = {layer.name: layer for layer in layers}
    found, waiting = set[str](), list(ends)
    while waiting:
        found.add(name := waiting.pop())
        waiting += [source for source in by_name[name].sources if source not in found]
    return found


def by_parameter(value: Any, name: str) -> float:
    """A multiplier: one for all, or those of some parameters."""
    return float(value.get(name, 1.0) if isinstance(value, Mapping) else value)
