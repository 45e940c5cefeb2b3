"""A group of learners: which network interfaces it speaks through, and how it is left."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.engines import collectives
from syncline.engines.collectives import CollectiveGroup, gloo_devices


class Kind:
    """In place of torch's: says what it was asked for."""

    @staticmethod
    def create_device(**words: str) -> dict[str, str]:
        return words

    @staticmethod
    def create_default_device() -> str:
        return "default"


@pytest.mark.parametrize(
    "host, named, expected",
    [
        (None, "", ["default"]),
        (None, "eth1", [{"interface": "eth1"}]),
        (None, "eth1,eth2", [{"interface": "eth1"}, {"interface": "eth2"}]),
        ("127.0.0.1", "eth1", [{"hostname": "127.0.0.1"}]),
    ],
)
def test_interfaces_that_the_user_names_are_used(
    host: str | None, named: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    assert gloo_devices(Kind, host) == expected


def pair() -> list[CollectiveGroup]:
    """Two learners, in one process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(CollectiveGroup, store, rank, 2, nccl=False, host="127.0.0.1")  # type: ignore[arg-type]
            for rank in range(2)
        ]
        return [each.result() for each in made]


def test_a_group_is_left_once_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "LEAVING", 60)
    groups = pair()
    for reduction in [group.reduce(torch.ones(3)) for group in groups]:
        reduction.wait()
    for group in groups * 2:
        group.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "syncline-group"]


def test_leaving_does_not_wait_for_a_collective_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "LEAVING", 0.05)
    first, second = pair()
    first.reduce(torch.ones(3))
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < 60
    assert [thread for thread in threading.enumerate() if thread.name == "syncline-group"]
    second.close()  # which also ends the collective
    for thread in threading.enumerate():
        if thread.name == "syncline-group":
            thread.join()


class Told:
    """In place of NCCL's group."""

    def __init__(self, ends: threading.Event) -> None:
        self.said: list[str] = []
        self._ends = ends

    def shutdown(self) -> None:
        self.said.append("shutdown")
        self._ends.wait(60)
        raise RuntimeError("it was not complete")

    def abort(self) -> None:
        self.said.append("abort")


def nccl_like(group: Told) -> CollectiveGroup:
    made = CollectiveGroup(None, 0, 1, nccl=False, host=None)
    made.sliced, made._group = False, group
    return made


@pytest.mark.parametrize("hangs", [False, True])
def test_nccl_is_shut_down_before_it_goes(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor warns otherwise; one that hangs or fails is left alone."""
    monkeypatch.setattr(collectives, "LEAVING", 0.05 if hangs else 60)
    ends = threading.Event()
    if not hangs:
        ends.set()
    told = Told(ends)
    nccl_like(told).close()
    assert told.said == ["shutdown"]
    ends.set()


def test_a_broken_nccl_is_aborted_only() -> None:
    told = Told(threading.Event())
    group = nccl_like(told)
    group.abort()
    group.close()
    assert told.said == ["abort"]
