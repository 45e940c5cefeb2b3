"""Where a process stands among torchrun's, what cannot be there, and why ranks cannot begin together."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from syncline.engines.torchrun import rank_and_store
from syncline.engines.torchrun.rank_and_store import NEEDED, Arrival, TorchrunPlace, difference, next_store
from syncline.errors import UsageError

PLACE = TorchrunPlace(rank=5, learners=8, local_rank=1, local=4, master="host")
FINE: dict[str, Any] = {"topology": "allreduce", "learners": 1, "default": 1, "wait": True, "group": 1}
ARRIVAL = Arrival("a", "cpu", "", (7, 99))


def test_torchruns_words_say_where_a_process_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    for name, value in {**said, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert TorchrunPlace.here() == PLACE
    assert PLACE.neighbours == range(4, 8)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert TorchrunPlace.here() == replace(PLACE, local_rank=5, local=8)


@pytest.mark.parametrize("missing", NEEDED)
def test_without_one_of_them_nobody_has_started_this_process(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in NEEDED:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(missing)
    assert TorchrunPlace.here() is None


@pytest.mark.parametrize(
    "changes, learners",
    [
        ({}, 8),
        ({"learners": 8}, 8),
        ({"topology": "allreduce:ring"}, 8),
        ({"group": 8}, 1),
        ({"group": 8, "default": 2, "learners": 2}, 1),
    ],
)
def test_learners_are_the_processes_or_one_of_them_all(changes: dict[str, Any], learners: int) -> None:
    assert PLACE.check(**{**FINE, **changes}) == learners


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"topology": "servers:2"}, "topology='servers:2' cannot be"),
        ({"wait": False}, "wait=False cannot be under torchrun"),
        ({"learners": 4}, "learners=4, but torchrun has started 8 processes; leave learners= out"),
        ({"group": 4}, "learners=1, group=4, but torchrun has started 8 .*give learners=1, group=8"),
        ({"group": 8, "learners": 3}, "learners=3, group=8"),
    ],
)
def test_what_cannot_be_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        PLACE.check(**{**FINE, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "second, words",
    [
        (ARRIVAL, ""),
        (replace(ARRIVAL, device="cuda"), ""),
        (
            replace(ARRIVAL, host="b", refused="no folder"),
            "rank 1 on b: no folder; every rank must see the folder",
        ),
        (
            replace(ARRIVAL, host="b", checkpoint=(6, 1)),
            r"rank 1 on b reads .* \(of version 6\) than rank 0 on a \(of version 7\)",
        ),
        (replace(ARRIVAL, checkpoint=(7, 98)), "another checkpoint"),
        (replace(ARRIVAL, checkpoint=None), r"\(of version None\)"),
    ],
)
def test_ranks_that_differ_cannot_begin_together(second: Arrival, words: str) -> None:
    found = difference([ARRIVAL, second])
    assert re.search(words, found) and bool(found) == bool(words)


def test_rank_0s_own_trouble_is_not_its_view_of_the_folder() -> None:
    assert difference([replace(ARRIVAL, refused="taken"), ARRIVAL]) == "rank 0 on a: taken"


def test_runs_of_a_process_have_each_their_part_of_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = dist.HashStore(), list[str]()
    monkeypatch.setattr(rank_and_store, "_store", None)
    monkeypatch.setattr(rank_and_store, "_runs", 0)
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([asked.append(url) or (store, 0, 1)]))
    for number in (b"first", b"second"):
        next_store().set("rank 0", number)
    assert asked == ["env://"]
    assert [store.get(f"syncline/{run}/rank 0") for run in (1, 2)] == [b"first", b"second"]
