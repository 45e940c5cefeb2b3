"""Names of job files to callables: the built-in ones, and `"package.module:callable"`.

Not responsible for calling anything.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler

from syncline import models
from syncline.batch.methods import LBFGS, ConjugateGradient, GradientDescent
from syncline.data import DATASETS
from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.learn.gradient_ways import REGULARISERS
from syncline.nn.layers import LOSSES
from syncline.train.spec import ENGINES

Names = Mapping[str, Callable[..., Any]]

METHODS: Names = {
    "lbfgs": LBFGS,
    "conjugate_gradient": ConjugateGradient,
    "gradient_descent": GradientDescent,
}
OPTIMIZERS: Names = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    **models.OPTIMIZERS,
}
SCHEDULES: Names = {
    "step": lr_scheduler.StepLR,
    "multistep": lr_scheduler.MultiStepLR,
    "exponential": lr_scheduler.ExponentialLR,
    "cosine": lr_scheduler.CosineAnnealingLR,
    "linear": lr_scheduler.LinearLR,
    "constant": lr_scheduler.ConstantLR,
    "polynomial": lr_scheduler.PolynomialLR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a name stands for under one key: the built-in names, and the arguments that the library gives itself."""

    what: str
    names: Names
    given: int  # positional arguments that come from the library


NAMES: dict[str, Role] = {
    "model": Role(what="model", names=models.MODELS, given=0),
    "data": Role(what="data set", names=DATASETS, given=0),
    "evaluate": Role(what="data set", names=DATASETS, given=0),
    "loss": Role(what="loss", names=LOSSES, given=2),
    "objective": Role(what="objective", names=models.OBJECTIVES, given=2),
    "gradient": Role(what="way to a gradient", names={}, given=2),
    "regulariser": Role(what="regulariser", names=REGULARISERS, given=1),
    "optimizer": Role(what="optimizer", names={**OPTIMIZERS, **METHODS}, given=1),
    "schedule": Role(what="schedule", names=SCHEDULES, given=1),
    "collate": Role(what="collate function", names={}, given=1),
    "callbacks": Role(what="callback", names={}, given=1),
    "engine": Role(what="engine", names=ENGINES, given=0),
}


def one_line(error: BaseException) -> str:
    """What an exception says, on one line; with its kind where that is not one of ours."""
    words = " ".join(str(error).split())
    if isinstance(error, UsageError):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def resolve(name: str, role: Role, folder: str | None = None) -> Any:
    """The object that a name stands for; modules are also looked for beside the job file and in the current folder."""
    if ":" in name:
        return _imported(name, folder)
    if name in role.names:
        return role.names[name]
    if "." in name:
        raise UsageError(f"{name!r} is no {role.what}; write 'package.module:callable' with a colon")
    own = "'package.module:callable'"
    known = f"{', '.join(role.names)}, or {own}" if role.names else f"only {own}"
    raise UsageError(f"no {role.what} is called {name!r}{nearest(name, role.names)}; there are: {known}")


def _imported(name: str, folder: str | None) -> Any:
    module, _, path = name.partition(":")
    parts = path.split(".")
    if not all(part.isidentifier() for part in (*module.split("."), *parts)):
        raise UsageError(f"{name!r} is no 'package.module:callable'")
    for place in (folder, os.getcwd()):  # they stay on the path: the learners' processes get a copy of it
        if place is not None and place not in sys.path:
            sys.path.append(place)
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the module's own code runs here
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise UsageError(
                f"no module {missing!r}; it is looked for on Python's path, beside the job file and in the current folder"
            ) from error
        raise UsageError(f"importing {module!r} failed: {one_line(error)}") from error
    for part in parts:
        try:
            found = getattr(found, part)
        except Exception as error:  # a module's own __getattr__ may raise anything
            hint = nearest(part, [known for known in dir(found) if not known.startswith("_")])
            raise UsageError(f"{name!r}: {module} has no {path!r}{hint}") from error
    return found


def takes_model(function: Any) -> bool:
    """Its first argument is called `model`: it is a function of the model (as with optimizers, M5)."""
    try:
        return next(iter(inspect.signature(function).parameters), None) == "model"
    except (TypeError, ValueError):
        return False
