"""Nets that a job lists as layers: their problems with the places of the list, own types by `"package.module:Class"`, the net.

Not responsible for what layers are (nn/layer_records.py, nn/net.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from syncline.errors import UsageError
from syncline.jobs.names import Role, one_line, resolve
from syncline.nn.layer_records import NetError, read_layers
from syncline.nn.net import Net
from syncline.nn.registry import TYPES, layer

Problem = tuple[tuple[str, ...], str]
OWN = Role(what="layer type", names={}, given=0)


def problems(layers: Sequence[Any], folder: str | None) -> Iterator[Problem]:
    """What is wrong with the layers before they are made."""
    if not layers:
        return
    wrong = [*_import_types(layers, folder)]
    if wrong:
        yield from wrong
        return
    try:
        read_layers(layers)
    except NetError as error:
        yield from located(error)


def _import_types(layers: Sequence[Any], folder: str | None) -> Iterator[Problem]:
    """Types that name a module are imported and registered, as other names of a job are."""
    for place, record in enumerate(layers):
        name = record.get("type") if isinstance(record, Mapping) else None
        if not isinstance(name, str) or ":" not in name or name in TYPES:
            continue
        try:
            layer(name)(resolve(name, OWN, folder))
        except UsageError as error:
            yield ("layers", str(place), "type"), f"layer {record.get('name')!r}: type: {one_line(error)}"


def located(error: NetError) -> Iterator[Problem]:
    for place, key, words in error.problems:
        yield ("layers", str(place), *([key] if key else [])), words


def has_losses(layers: Sequence[Any]) -> bool:
    types = [record.get("type") for record in layers if isinstance(record, Mapping)]
    return any(isinstance(name, str) and name in TYPES and TYPES[name].role == "loss" for name in types)


def make_net(layers: Sequence[Mapping[str, Any]], seed: int, example: Any) -> Net:
    """As a plain script would after `torch.manual_seed(seed)`; raises NetError."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(layers, example=example)
