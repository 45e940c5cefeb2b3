"""Computations that are repeated with other inputs of the same shapes: as they are, or as a CUDA graph.

A captured one is launched in one call, whatever number of kernels it has. Not responsible for what is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UP = 2  # runs before the capture: libraries set themselves up in the first


@contextlib.contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """The same bits every time on a GPU, and no TensorFloat-32."""
    if device.type != "cuda":
        yield
        return
    library, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = library.deterministic, library.benchmark, library.allow_tf32, products.allow_tf32
    library.deterministic = True
    library.benchmark = library.allow_tf32 = products.allow_tf32 = False
    try:
        yield
    finally:
        library.deterministic, library.benchmark, library.allow_tf32, products.allow_tf32 = before


class RepeatedProgram:
    """A function of tensors, called for its effect on others; its inputs are copied to where it expects them."""

    def __init__(self, function: Callable[..., None], inputs: Sequence[Tensor]) -> None:
        """`inputs` lie on the device and stay the program's own; the first one says which it is."""
        self._function, self.inputs = function, list(inputs)

    def run(self) -> None:
        """With the inputs as they are now."""
        with repeatable(self.inputs[0].device):
            self._function(*self.inputs)


class Captured(RepeatedProgram):
    """The same, captured once; inputs must be harmless at first, for they are computed with then."""

    def __init__(self, function: Callable[..., None], inputs: Sequence[Tensor], pool: Any) -> None:
        super().__init__(function, inputs)
        side, run = torch.cuda.Stream(), super().run
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            run()

    def run(self) -> None:
        self._graph.replay()
