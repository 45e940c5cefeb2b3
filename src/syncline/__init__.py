"""Syncline trains PyTorch models on many workers, with synchrony as a dial.

Public names are imported when they are first used, because most of them import torch: `syncline --help` answers at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncline.batch.methods import LBFGS, ConjugateGradient, GradientDescent
    from syncline.cluster import Cluster
    from syncline.dial import Sync
    from syncline.engines.local.engine import Local
    from syncline.engines.ray.engine import Ray
    from syncline.engines.run import EpochRecord
    from syncline.errors import LearnerError, RunError, SynclineError, UsageError
    from syncline.learn.loader import epoch_order
    from syncline.learn.session import Session
    from syncline.parallel import layer, partition
    from syncline.plan import plan
    from syncline.sim.engine import Sim
    from syncline.train import Result, Run, launch, train

__all__ = [
    "LBFGS",
    "Cluster",
    "ConjugateGradient",
    "EpochRecord",
    "GradientDescent",
    "LearnerError",
    "Local",
    "Ray",
    "Result",
    "Run",
    "RunError",
    "Session",
    "Sim",
    "Sync",
    "SynclineError",
    "UsageError",
    "epoch_order",
    "launch",
    "layer",
    "partition",
    "plan",
    "train",
]
__version__ = "0.1.0"

_HOMES = {
    "syncline.batch.methods": ("LBFGS", "ConjugateGradient", "GradientDescent"),
    "syncline.cluster": ("Cluster",),
    "syncline.dial": ("Sync",),
    "syncline.engines.local.engine": ("Local",),
    "syncline.engines.ray.engine": ("Ray",),
    "syncline.engines.run": ("EpochRecord",),
    "syncline.errors": ("LearnerError", "RunError", "SynclineError", "UsageError"),
    "syncline.learn.loader": ("epoch_order",),
    "syncline.learn.session": ("Session",),
    "syncline.parallel": ("layer", "partition"),
    "syncline.plan": ("plan",),
    "syncline.sim.engine": ("Sim",),
    "syncline.train": ("Result", "Run", "launch", "train"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

logging.getLogger("syncline").addHandler(logging.NullHandler())


class _Package(ModuleType):
    """The package, in which `train` and `plan` are functions although rooms have the same names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):  # as an import of the room would bind it
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, as cloudpickle does with plain modules: functions that mention the package travel to learners."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package


if not TYPE_CHECKING:  # a type checker reports names that do not exist

    def __getattr__(name: str) -> Any:
        if home := _HOME_OF.get(name):
            found = getattr(importlib.import_module(home), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            found = importlib.import_module(f"{__name__}.{name}")  # a room, such as syncline.nn
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
