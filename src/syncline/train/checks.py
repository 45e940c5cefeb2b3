"""What `train` and `launch` refuse before a process starts; `train`'s model and optimizer, built. Not responsible for what every
run needs (spec.py).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import cloudpickle
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from syncline.dial import Course, nearest
from syncline.engines.local import forkserver
from syncline.engines.run import Callback
from syncline.errors import LayoutError, UsageError
from syncline.learn.model_factories import Model, ModelFactory, refuse_unready
from syncline.learn.server_session import (
    batch_of_each,
    check_batches,
    check_joint,
    check_whole,
    refuse_weighted,
)
from syncline.learn.session import as_data, check_function, check_policy, make_optimizer, refuse_sparse
from syncline.topologies import AllReduce, parse_topology
from syncline.train.spec import Dial

SEEDS = 1 << 63  # torch takes no larger ones
F = TypeVar("F", bound=Callable[..., Any])


def check_import(called: str) -> None:
    """Refuse a run that a learner's import would start; have modules that the caller is importing travel by value.

    The functions and classes of such a module pickle by reference otherwise: each learner would import the module, reach this
    call and start another run. They travel by value from here on, since later messages of the run may hold them, too.
    """
    frame = inspect.currentframe()
    while frame is not None:
        body = frame.f_globals if frame.f_code.co_name == "<module>" else {}
        name, frame = body.get("__name__", "__main__"), frame.f_back
        if name == "__main__" or getattr(sys.modules.get(name), "__dict__", None) is not body:
            continue
        if forkserver.is_child and getattr(body.get("__spec__"), "_initializing", False):
            raise UsageError(
                f"{called} is called by the body of module {name!r}, which a process of a run imports: every process that imports "
                f"it would start a further run. Move the call into a function, or below 'if __name__ == \"__main__\":'"
            )
        cloudpickle.register_pickle_by_value(sys.modules[name])


def batches_of(
    batch_size: int, joint: int | None, learners: int, sync: Dial, topology: str
) -> tuple[int, int | None]:
    """(the largest batch of a learner, the batch of all together where it was given and need not divide)"""
    check_whole("learners", learners)
    if joint is None:
        return batch_size, None
    if isinstance(parse_topology(topology), AllReduce):
        check_joint(None, joint, learners)
        return -(-joint // learners), joint
    for _, dial in Course.of(sync).dials:  # all in lockstep, or refused: the same for each
        batch_size = batch_of_each(None, joint, learners, dial)
    return batch_size, None


def check_loop(
    loss: Any, objective: Any, epochs: int | None, steps: int | None, policy: str, collate: Any
) -> None:
    """What `train`'s loop consists of."""
    if epochs is not None and steps is not None:
        raise UsageError(f"give either epochs= or steps=, got epochs={epochs} and steps={steps}")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            check_whole(name, value)
    check_policy(policy)
    for name, function in (("loss", loss), ("objective", objective), ("collate", collate)):
        check_function(name, function)


def check_data(data: Any, batch_size: int) -> Dataset[Any]:
    """As a data set that has a batch."""
    found: Dataset[Any] = as_data("data", data)
    if isinstance(found, IterableDataset):
        check_whole("batch_size", batch_size)
    else:
        check_batches(len(found), batch_size)  # type: ignore[arg-type]
    return found


def check_evaluate(given: Any) -> Any:
    """A data set with something in it, or a function."""
    if given is None or (callable(given) and not isinstance(given, (Dataset, type))):
        return given
    try:
        found = as_data("evaluate", given)
    except UsageError as error:
        raise UsageError(
            str(error).replace("a torch Dataset", "a data set or a function of the model")
        ) from None
    if not isinstance(found, IterableDataset) and len(found) == 0:
        raise UsageError("evaluate: the data set is empty")
    return found


def check_callbacks(given: Any) -> tuple[Callback, ...]:
    """One function, several, or none."""
    if given is None:
        return ()
    found = [given] if callable(given) else list(given) if isinstance(given, Iterable) else None
    if found is None or not all(map(callable, found)):
        raise UsageError(f"callbacks must be functions of an epoch's record, got {given!r}")
    return tuple(found)


def check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not -SEEDS <= seed < SEEDS:
        raise UsageError(f"seed must be a whole number of at most 63 bits, got {seed!r}")


def built(model: Any, seed: int) -> tuple[nn.Module, Model]:
    """The model, and what learners get: a function makes it there anew, so it need not travel."""
    check_seed(seed)
    sent = model if isinstance(model, nn.Module) or not callable(model) else ModelFactory(model, seed)
    made = isinstance(sent, ModelFactory)
    found = attempt("the function that makes the model", sent) if made else sent
    if not isinstance(found, nn.Module):
        raise UsageError(
            f"model must be an nn.Module or a callable that makes one, got {type(found).__name__}"
        )
    refuse_unready(found)
    refuse_sparse(found)
    return found, sent


def check_optimizer(model: nn.Module, optimizer: Any, sync: Dial) -> torch.optim.Optimizer:
    """As it will be made in the learners."""
    made: torch.optim.Optimizer = attempt("the optimizer's factory", make_optimizer, model, optimizer)
    own = {id(parameter) for parameter in model.parameters()}
    trained = [parameter for group in made.param_groups for parameter in group["params"]]
    if not any(id(parameter) in own for parameter in trained):
        raise LayoutError(
            f"the optimizer's factory made {type(made).__name__} of parameters that are not {type(model).__name__}'s: it gets "
            "the parameters as its argument, or the model where that is named so"
        )
    if not any(parameter.requires_grad for parameter in trained):
        raise LayoutError(
            f"all {len(trained)} parameters that the optimizer has of {type(model).__name__} are frozen "
            "(requires_grad=False): there is nothing to train"
        )
    for _, dial in Course.of(sync).dials:
        refuse_weighted(dial, made)
    return made


def check_schedule(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
    """It is made once, of an optimizer that nobody steps."""
    if schedule is None:
        return
    instead = "give a callable that makes one of the optimizer, such as partial(StepLR, step_size=1)"
    if not callable(schedule):
        raise UsageError(f"schedule must not be a {type(schedule).__name__} itself: {instead}")
    made = attempt("the schedule's factory", schedule, optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau needs a metric, which learners do not have: use a schedule by epochs, or launch"
        )
    if not all(callable(getattr(made, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise UsageError(f"the schedule's factory returned {type(made).__name__}, no LR scheduler: {instead}")


def attempt(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The user's code runs here."""
    try:
        return function(*arguments)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what} failed: {type(error).__name__}: {error}") from error


def only_known(function: F) -> F:
    """Have a call with an unknown keyword name the nearest one."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                raise UsageError(f"{function.__name__} has no option {name!r}{nearest(name, known)}")
        return function(*arguments, **keywords)

    return cast(F, checked)


def check_call(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], options: Iterable[str]
) -> None:
    """Refuse a call of `launch`'s function that its signature refuses; `options` are those of `launch`."""
    if not callable(function):
        raise UsageError(f"launch takes a function of (session, ...), got {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in: nobody knows
        return
    name = getattr(function, "__name__", type(function).__name__)
    parameters = signature.parameters.values()
    takes = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    if all(each.kind is not each.VAR_KEYWORD for each in parameters):
        for keyword in (each for each in keywords if each not in takes):
            near = nearest(keyword, [*takes, *options])
            raise UsageError(
                f"{keyword!r} is no option of launch, and no argument of {name}{signature}{near}"
            )
    try:
        signature.bind(None, *arguments, **keywords)
    except TypeError as error:
        raise UsageError(
            f"{name}{signature} cannot be called with a session and what launch was given: {error}"
        ) from None


def check_data_device(given: Any, device: Any, data: Any, collate: Any) -> None:
    """Data that can lie on the learners' GPUs."""
    if given is None:
        return
    devices = [device] if isinstance(device, str) or device is None else list(device)
    if given != "cuda" or not all(str(each).startswith("cuda") for each in devices):
        raise UsageError(
            f'data_device={given!r} with device={device!r}: it is "cuda", and keeps the data on the GPUs of learners with device="cuda"'
        )
    if not isinstance(data, TensorDataset) or collate is not None:
        what = f"a {type(data).__name__}" if collate is None else "an own collate="
        raise UsageError(
            f'data_device="cuda" keeps tensors: give a TensorDataset or a tuple of tensors, without collate=, got {what}'
        )
