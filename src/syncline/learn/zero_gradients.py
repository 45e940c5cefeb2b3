"""Silent gradients: while a learner among equals computes on a repeated batch, backward makes zeros.

So that what such a batch would add to an accumulated gradient is nothing. Not responsible for the gradient's weight in the mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class ZeroGradients:
    """The parameters of one learner's tables, and whether they are silent. There are hooks only while they are."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._handles: list[Any] = []
        self._fresh: int | None = None  # the loader of the last batch that counts

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters += parameters

    def handed_out(self, loader: int, *, repeated: bool) -> None:
        """A batch goes to the loop. A repeated one beside another loader's new one belongs to a gradient that counts."""
        silent = repeated and self._fresh in (None, loader)
        if not repeated:
            self._fresh = loader
        elif silent:
            self._fresh = None
        self._set(silent)

    def end(self) -> None:
        """No batch is being computed on."""
        self._set(False)

    def _set(self, silent: bool) -> None:
        for handle in self._handles:
            handle.remove()
        able = [parameter for parameter in self._parameters if silent and parameter.requires_grad]
        self._handles = [parameter.register_hook(torch.zeros_like) for parameter in able]
