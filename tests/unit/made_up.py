"""JSON documents that are right but for one place, for readers of what lies on disk."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.table.checkpoints import CheckpointError

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    float("nan"),
    2**70,
    "",
    "1",
    "x",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
    {"0": {}},
]


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    keys = (
        document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    )
    for key in keys:
        yield (*path, key)
        yield from places(document[key], (*path, key))


@st.composite
def spoiled(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """Draw a copy in which one value is another, or is missing, or has a neighbour."""
    found = copy.deepcopy(document)
    *way, last = draw(st.sampled_from(list(places(document))))
    holder: Any = found
    for key in way:
        holder = holder[key]
    what = draw(st.sampled_from(["replace", "remove", "add"]))
    if what == "remove":
        del holder[last]
    elif what == "add" and isinstance(holder, dict):
        holder[draw(st.sampled_from(["x", "-1", "7", ""]))] = draw(st.sampled_from(ODD))
    else:
        holder[last] = draw(st.sampled_from(ODD))
    return found


def check_read_or_refused(read: Callable[[], object], name: str) -> None:
    """Fail where reading raises anything but one line of ours that names the file."""
    words = name
    try:
        read()
    except (CheckpointError, UsageError) as error:
        words = str(error)
    assert name in words
    assert "\n" not in words
