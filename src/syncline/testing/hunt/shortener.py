"""Shortens a case that fails: fewer faults, smaller sizes, a plainer cluster, as long as it fails in the same way.

Pure, but for the function that says whether a case fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from syncline.errors import UsageError
from syncline.testing.hunt.case import Case

Fails = Callable[[Case], bool]
TRIES = 300
PLAIN: dict[str, Any] = {
    "cluster": "equal",
    "clip": False,
    "warmstart": 0,
    "policy": "ledger",
    "replace": False,
    "checkpoint_every": None,
    "steps": None,
    "loop": "own",
    "shards": 1,
    "fan_in": 0,
}
SIZES = {"epochs": 1, "learners": 1, "examples": 1, "batch_size": 1, "shards": 1, "warmstart": 0}


def shorten(case: Case, fails: Fails, tries: int = TRIES) -> Case:
    """The shortest that was found with so many runs."""
    left = tries
    shorter = True
    while shorter and left > 0:
        shorter = False
        for candidate in _candidates(case):
            left -= 1
            if left < 0:
                break
            if fails(candidate):
                case, shorter = candidate, True
                break
    return case


def _candidates(case: Case) -> Iterator[Case]:
    """Shorter ones, the boldest first."""
    makers = (*_scripts(case), *_plainer(case), *_smaller(case), *_clusters(case), *_moments(case))
    for changes in makers:
        try:
            candidate = replace(case, **changes)
        except UsageError:  # too few learners for its dial, say
            continue
        if candidate != case:
            yield candidate


def _lines(case: Case) -> list[str]:
    return [line.strip() for line in case.script.split(";") if line.strip()]


def _scripts(case: Case) -> Iterator[dict[str, Any]]:
    """Without halves, quarters … of the lines, then without single ones (delta debugging)."""
    lines = _lines(case)
    size = len(lines)
    while size >= 1:
        for start in range(0, len(lines), size):
            yield {"script": "; ".join(lines[:start] + lines[start + size :])}
        size //= 2


def _plainer(case: Case) -> Iterator[dict[str, Any]]:
    for name, value in PLAIN.items():
        if getattr(case, name) != value:
            yield {name: value}


def _smaller(case: Case) -> Iterator[dict[str, Any]]:
    for name, least in SIZES.items():
        value = getattr(case, name)
        for smaller in dict.fromkeys((least, (least + value) // 2, value - 1)):
            if least <= smaller < value:
                yield {name: smaller}


def _clusters(case: Case) -> Iterator[dict[str, Any]]:
    name, _, rest = case.cluster.partition(":")
    parts = [part for part in rest.split(",") if part]
    for index in range(len(parts)):
        kept = parts[:index] + parts[index + 1 :]
        yield {"cluster": f"{name}:{','.join(kept)}" if kept else name}


def _moments(case: Case) -> Iterator[dict[str, Any]]:
    """Rounder times, smaller counts."""
    lines = _lines(case)
    for index, line in enumerate(lines):
        found = re.search(r"at (\d+\.\d{3,}) s$", line)
        if found:
            for digits in (0, 1, 2):
                rounder = f"{line[: found.start(1)]}{round(float(found[1]), digits):g} s"
                yield {"script": "; ".join([*lines[:index], rounder, *lines[index + 1 :]])}
