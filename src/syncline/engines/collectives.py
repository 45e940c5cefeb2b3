"""The collectives of PyTorch behind the port: Gloo for tensors of CPUs and shared GPUs, NCCL where every learner has a GPU.

A group of its own for each run, never the global one, so that users may have theirs. Not responsible for who is alive:
engines watch processes, and a collective that breaks says only that somebody is gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.parallel.move import Group
from syncline.ports import PeerLost, Reduction

SLICE = timedelta(seconds=0.25)
LONG = timedelta(days=7)  # deaths are noticed elsewhere, a slow learner is no error
LEAVING = 3.0  # seconds that a group gets to end; less than a supervisor waits for its processes
BROKEN = 0.5  # the same, where somebody may never come


class DoneReduction(Reduction):
    """Nothing to wait for: there is one learner."""

    def wait(self, *, block: bool = True) -> bool:
        return True


class Running(Reduction):
    """A reduction of torch's. Gloo's are waited for in slices: nothing else gets a thread out of one."""

    def __init__(self, work: Any, group: CollectiveGroup) -> None:
        self._work, self._group = work, group

    def wait(self, *, block: bool = True) -> bool:
        if not block:
            return bool(self._work.is_completed())
        while True:
            try:
                self._work.wait(SLICE) if self._group.sliced else self._work.wait()
                return True
            except RuntimeError as error:
                if self._work.is_completed():
                    if self._work.exception() is not None:
                        raise PeerLost(str(error)) from error
                    return True
            if self._group.broken:
                raise PeerLost("the run has failed")


class CollectiveGroup:
    """The learners of one run, joined."""

    def __init__(self, store: Any, rank: int, learners: int, *, nccl: bool, host: str | None) -> None:
        self._alone = learners == 1 and not nccl
        self.sliced = not nccl
        self.broken = False  # nobody waits any more
        self._group: Any = None
        if nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = LONG
            self._group = dist.ProcessGroupNCCL(store, rank, learners, options)
        elif not self._alone:
            self._group = gloo_group(store, rank, learners, host)

    def reduce(self, buffer: Tensor) -> Reduction:
        if self._alone:
            return DoneReduction()
        try:
            return Running(self._group.allreduce([buffer]), self)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def broadcast(self, buffer: Tensor) -> None:
        if not self._alone and buffer.numel():
            whole = buffer if buffer.is_contiguous() else buffer.contiguous()
            try:
                Running(self._group.broadcast([whole]), self).wait()
            except RuntimeError as error:
                raise PeerLost(str(error)) from error
            if whole is not buffer:
                buffer.copy_(whole)

    def abort(self) -> None:
        """Whoever waits in a collective is thrown out of it; from any thread."""
        self.broken = True
        if self._group is not None and not self.sliced:
            self._group.abort()

    def close(self) -> None:
        """Leave. Torch may wait for a collective that never ends: on a thread that nobody waits for, or only a while."""
        if self._group is None:
            return
        held, self._group = [self._group], None
        flush = not self.sliced and not self.broken
        leaving = threading.Thread(target=_leave, args=(held, flush), name="syncline-group", daemon=True)
        leaving.start()
        leaving.join(BROKEN if self.broken else LEAVING)  # a program that ends meanwhile is aborted


class MovesOf(Group):
    """Such a group for the moves of a model that is cut over it: waiting ends when the run fails."""

    def __init__(self, joined: CollectiveGroup) -> None:
        super().__init__(joined._group)
        self._joined = joined

    def finish(self, work: Any) -> None:
        Running(work, self._joined).wait()

    def broken(self) -> None:
        raise PeerLost("a move between seats failed")


def _leave(held: list[Any], flush: bool) -> None:
    """Let the group go. NCCL's wants to be told before: its destructor complains otherwise."""
    if flush:
        with contextlib.suppress(RuntimeError):
            held[0].shutdown()
    held.clear()


def gloo_group(store: Any, rank: int, size: int, host: str | None) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = LONG
    options._devices = gloo_devices(kind, host)
    return kind(store, rank, size, options)


def gloo_devices(kind: Any, host: str | None) -> list[Any]:
    """Of this address, or of the interfaces that GLOO_SOCKET_IFNAME names, as everywhere in torch; else torch's choice."""
    if host:
        return [kind.create_device(hostname=host)]
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [kind.create_device(interface=name) for name in names] or [kind.create_default_device()]


def wants_nccl(devices: tuple[str, ...]) -> bool:
    """Every learner has a GPU of its own, and torch can join them."""
    cuda = all(torch.device(name).type == "cuda" for name in devices)
    return cuda and len(set(devices)) == len(devices) and dist.is_nccl_available()
