"""Whose random states the process holds: each learner has its own of torch, numpy, random and the GPUs.

The generators are the process's globals: whoever runs next finds its own states in them. What shards draw (no optimizer of
torch's does) comes from the learner that ran last.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

OUTSIDE = -1  # the caller: evaluation, callbacks, listeners
WORDS = 625  # 32-bit words of a Mersenne Twister's memory: 624, and the position


class _Numpy(NamedTuple):
    """A state of numpy's global generator: its words as they lie in memory, and all of it."""

    words: bytes
    state: dict[str, Any]  # as `get_state` gives it

    @property
    def simple(self) -> bool:
        """The words are all: no second normal number is kept back."""
        return self.state["bit_generator"] == "MT19937" and not self.state["has_gauss"]


class _NumpyStates:
    """Reads and writes that state by its words where that is all: numpy's own way takes a hundred times as long."""

    def __init__(self) -> None:
        self._loaded: _Numpy | None = None  # what was last read or written

    def _address(self) -> int:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        return generator.ctypes.state_address if type(generator) is np.random.MT19937 else 0

    def read(self) -> _Numpy:
        address, known = self._address(), self._loaded
        words = ctypes.string_at(address, 4 * WORDS) if address else b""
        if known is None or not address or known.words != words or not known.simple:
            known = self._loaded = _Numpy(words, np.random.get_state(legacy=False))  # type: ignore[arg-type]
        return known

    def write(self, state: _Numpy) -> None:
        """After `read`: what is there is known then."""
        known, address = self.read(), self._address()
        if known is state:
            return
        if address and state.words and known.simple and state.simple:
            ctypes.memmove(address, state.words, 4 * WORDS)
        else:
            np.random.set_state(state.state)
        self._loaded = state


_numpy = _NumpyStates()


class Random:
    """The states of all random generators, as they are when it is made."""

    def __init__(self, *, gpus: bool = False) -> None:
        self._with_gpus = gpus
        self.save()

    def save(self) -> None:
        """Those of now instead."""
        self.torch, self._numpy, self._python = torch.get_rng_state(), _numpy.read(), random.getstate()
        self._gpus = torch.cuda.get_rng_state_all() if self._with_gpus else None

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        _numpy.write(self._numpy)
        random.setstate(self._python)
        if self._gpus is not None:
            torch.cuda.set_rng_state_all(self._gpus)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """What is drawn inside comes from these states, which go on; those outside are as they were."""
        outside = Random(gpus=self._with_gpus)
        self.restore()
        try:
            yield
        finally:
            self.save()
            outside.restore()


class RandomStreams:
    """Random states by owner; they change hands only when another owner runs."""

    def __init__(self, *, gpus: bool = False) -> None:
        self._gpus, self._owner = gpus, OUTSIDE
        self._kept: dict[int, Random] = {}

    def enter(self, owner: int) -> None:
        """From here on the draws are this owner's; one that never ran begins with what it finds."""
        if owner == self._owner:
            return
        self._kept[self._owner] = Random(gpus=self._gpus)
        self._owner = owner
        if owner in self._kept:
            self._kept.pop(owner).restore()

    def forget(self, owner: int) -> None:
        self._kept.pop(owner, None)
