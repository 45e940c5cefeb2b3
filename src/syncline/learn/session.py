"""What a learner's loop sees of a run, whatever the topology: `syncline.Session`.

`ServerSession` (learn/server_session.py) publishes to servers, `AllReduceSession` (learn/allreduce_session.py) reduces with its equals.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from syncline.errors import LayoutError
from syncline.learn.usage_warnings import Watch

Factory = Callable[..., torch.optim.Optimizer]
UNSAID = float("nan")  # this very object: a loss that is not a number is another


class Session(ABC):
    """One learner's view of the run."""

    rank: int
    learners: int
    device: torch.device
    seat: int = 0  # of this process, among those of the learner
    seats: int = 1
    watch: Watch
    loss: float | Tensor = UNSAID  # of the gradient that is being made, for the record

    @property
    @abstractmethod
    def ending(self) -> bool:
        """The run is to end: loaders end, steps do not return."""

    @abstractmethod
    def optimizer(self, model: nn.Module, factory: Factory) -> torch.optim.Optimizer:
        """The shared state of this model's parameters, as a torch optimizer."""

    @abstractmethod
    def loader(
        self,
        data: Dataset[Any],
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        policy: str = "ledger",
        collate: Callable[[list[Any]], Any] | None = None,
        ahead: int | None = None,
    ) -> Any:
        """This learner's batches; iterate once per epoch. The same call again gives the same loader, another `collate` another.

        `ahead` batches are read by a thread, and copied to a GPU, before they are needed: none of tensors that lie on the
        learner's device, else two. Given again it holds from the next epoch on. `len` is the batches of an epoch that one loop sees: the same number in every learner,
        exact in lockstep and over all-reduce; elsewhere the mean over the learners, of which a fast one gets more.
        `global_batch_size` is that of all learners together, each takes its share.
        """

    @abstractmethod
    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside only add to `p.grad`: nothing is communicated before the one after it."""

    @abstractmethod
    def put(self, model: nn.Module) -> None:
        """Make this learner's present values of the model global (M6)."""

    @abstractmethod
    def log(self, **metrics: float) -> None:
        """Metrics of this learner, for the run's record."""

    @abstractmethod
    def mean(self, value: float | Tensor) -> Any:
        """The mean of a number or tensor over all live learners; every learner must call it."""

    @abstractmethod
    def close(self) -> None:
        """The learner's function is over."""


def sparse_gradient() -> LayoutError:
    return LayoutError(
        "a parameter has a sparse gradient, which does not travel; make its layer with sparse=False"
    )
