"""A small crowd for tests: threads of this process, joined by real Gloo groups that are kept for a test module."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from syncline.parallel.move import Group


class Seats:
    """Runs a function as every rank of a group, at the same time."""

    def __init__(self) -> None:
        self._groups: dict[int, list[Group]] = {}

    def run(self, size: int, work: Callable[[Group], Any]) -> list[Any]:
        if size not in self._groups:
            store = dist.HashStore()
            self._groups[size] = self._each(size, lambda rank: _join(store, rank, size))
        groups = self._groups[size]
        try:
            return self._each(size, lambda rank: work(groups[rank]))
        except BaseException:
            del self._groups[size]  # somebody may still wait in it
            raise

    def _each(self, size: int, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(size) as pool:
            return [future.result() for future in [pool.submit(work, rank) for rank in range(size)]]

    def close(self) -> None:
        self._groups.clear()


def _join(store: Any, rank: int, size: int) -> Group:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=30)  # one that fails leaves the others waiting
    options._devices = [kind.create_default_device()]
    return Group(kind(store, rank, size, options))
