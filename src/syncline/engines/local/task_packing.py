"""A run's task on its way to processes; what cannot travel is named, before one starts. Not responsible for how (packing.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from syncline.engines.local.packing import Parcel, pack
from syncline.engines.run import RunSpec
from syncline.errors import UsageError
from syncline.learn.gradient_ways import Supervised


def pack_task(spec: RunSpec) -> tuple[Parcel, Parcel | None]:
    """What learners run, and the evaluator."""
    task = _packed(spec.task, list(_parts(spec)))
    if spec.evaluate is None:
        return task, None
    return task, _packed(spec.evaluate, [("evaluate", spec.evaluate)])


def _packed(whole: Any, parts: list[tuple[str, Any]]) -> Parcel:
    try:
        return pack(whole, mapped=True)
    except Exception as error:  # whatever the user's objects raise when they are pickled
        name = next((name for name, part in parts if not _travels(part)), "something")
        raise UsageError(
            f"{name} cannot travel to the learners' processes: {' '.join(str(error).split())}; what cannot be pickled has to be "
            "made there, inside the function that learners run (launch) or that makes the model (model=)"
        ) from error


def _parts(spec: RunSpec) -> Iterator[tuple[str, Any]]:
    for index, argument in enumerate(spec.task.arguments):
        if dataclasses.is_dataclass(argument):
            for part in dataclasses.fields(argument):
                value = getattr(argument, part.name)
                yield ("loss" if isinstance(value, Supervised) else part.name), value
        yield f"argument {index + 1}", argument
    yield from spec.task.keywords.items()
    yield getattr(spec.task.function, "__name__", "the function"), spec.task.function


def _travels(part: Any) -> bool:
    try:
        pack(part).close()
    except Exception:
        return False
    return True
