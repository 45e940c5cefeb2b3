"""Whose random states the process holds: each learner has its own of torch, numpy, random and the GPUs.

The generators are the process's globals: whoever runs next finds its own states in them. What shards draw (no optimizer of
torch's does) comes from the learner that ran last.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

OUTSIDE = -1  # the caller: evaluation, callbacks, listeners


class Random:
    """The states of all random generators, as they are when it is made."""

    def __init__(self, *, gpus: bool = False) -> None:
        self._with_gpus = gpus
        self.save()

    def save(self) -> None:
        """Those of now instead."""
        self._states: tuple[Any, ...] = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        self._gpus = torch.cuda.get_rng_state_all() if self._with_gpus else None

    @property
    def torch_state(self) -> torch.Tensor:
        return self._states[0]

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        np.random.set_state(self._states[1])
        random.setstate(self._states[2])
        if self._gpus is not None:
            torch.cuda.set_rng_state_all(self._gpus)


class Streams:
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
