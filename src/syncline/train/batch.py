"""`train` with sync="sandblaster" (M18): what is refused, and the run's specification. Not responsible for running it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import Dataset, IterableDataset

from syncline.batch.commands import is_method
from syncline.batch.portions import Samples
from syncline.dial import SANDBLASTER, Course
from syncline.engines.batch_method_record import check_memory, check_restored, read_batch
from syncline.engines.run import Engine, RunSpec, Task
from syncline.engines.torchrun.engine import Torchrun
from syncline.errors import LayoutError, SynclineWarning, UsageError
from syncline.learn.gradient_ways import Backprop, regularised, way_of
from syncline.learn.model_factories import Model
from syncline.learn.portion_worker import BatchPlan, batch_layout, trained
from syncline.learn.server_session import check_whole
from syncline.learn.train_and_evaluate import evaluation_of
from syncline.roles.checkpoint_manifest import Restored
from syncline.roles.run_plan import RunPlan
from syncline.table.checkpoints import Checkpoint
from syncline.topologies import MOST_SHARDS, SHARD_BYTES, Servers, parse_topology
from syncline.train.checks import attempt, built, check_callbacks, check_data, check_evaluate, check_loop
from syncline.train.spec import cores_here, run_spec

EXAMPLE = 'sync="sandblaster", optimizer=sl.LBFGS(history=10)'


def wants_batch(sync: Any, optimizer: Any) -> bool:
    """Whether a batch method trains; refused where only one of the two says so."""
    named = isinstance(sync, str) and sync.strip().partition(":")[0] == SANDBLASTER
    own = isinstance(optimizer, type) and optimizer.__module__.startswith("syncline.batch.")
    if named and sync.strip() != SANDBLASTER:
        raise UsageError(f"{sync!r}: sandblaster itself has no options, they are the method's: {EXAMPLE}")
    if named and not is_method(optimizer):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        instead = f"give an instance, sl.{optimizer.__name__}(...)" if own else f"write {EXAMPLE}"
        raise UsageError(f"sandblaster needs a batch method as optimizer=, got {got}; {instead}")
    if not named and (own or is_method(optimizer)):
        name = optimizer.__name__ if own else type(optimizer).__name__
        raise UsageError(f'{name} is a batch method and folds no gradients: give sync="sandblaster" with it')
    return named


REFUSED: dict[str, tuple[Any, str]] = {  # options of `train` by name: the default, and what to do instead
    "epochs": (None, "give steps=, which counts iterations"),
    "clip_norm": (None, "the method chooses its step; leave it out"),
    "warmstart": (0, "train another run first, and give its model"),
    "policy": ("ledger", "portions go to whoever is free; leave it out"),
    "clocks": (False, "no gradient is stale; leave it out"),
    "group": (1, "every learner holds the whole model while it evaluates"),
    "plan": (None, "every learner holds the whole model while it evaluates"),
    "check": (False, "it compares a model that is cut over seats; leave it out"),
    "stop": (None, "the method's tolerance= ends it, or a callback"),
    "table_device": (None, "vectors lie in the shards' own memory; leave it out"),
    "data_device": (None, "portions are read ahead; leave it out"),
}


def check_options(given: Mapping[str, Any]) -> None:
    """What means nothing for a batch method is refused, not passed over."""
    for name, (default, instead) in REFUSED.items():
        if given[name] != default:
            raise UsageError(f"sandblaster does not go with {name}={given[name]!r}: {instead}")
    if given["steps"] is None:
        raise UsageError("sandblaster needs steps=, the largest number of iterations, for example steps=100")
    if not isinstance(parse_topology(given["topology"]), Servers):
        raise UsageError(
            f"sandblaster keeps its vectors on servers, got topology={given['topology']!r}; use 'servers' or 'servers:S'"
        )
    if isinstance(given["data"], IterableDataset):
        raise UsageError(
            "sandblaster reads portions by number: give a data set with a length, no iterable one"
        )
    for name in ("learners", "batch_size"):
        check_whole(name, given[name])
    check_loop(*(given[name] for name in ("loss", "objective", "epochs", "steps", "policy", "collate")))


def check_model(model: nn.Module) -> None:
    """A batch's objective must not depend on how it is cut, nor on chance."""
    dropped = []
    for name, module in model.named_modules():
        if isinstance(module, _NormBase):
            seen = module.num_batches_tracked  # none where a running mean is given without
            if module.running_mean is None or (seen is not None and not int(seen)):
                raise UsageError(
                    f"'{name}' ({type(module).__name__}) normalises by the statistics of a portion, so the objective would depend on "
                    "how a batch is cut, and it has none of its own; use GroupNorm or LayerNorm, or a model whose statistics "
                    "are there (they stay as they are)"
                )
        rate = getattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            dropped.append(f"'{name}' ({type(module).__name__})")
    if dropped:
        warnings.warn(
            f"sandblaster runs the model in eval mode, since every evaluation of a point must give the same: dropout is off in "
            f"{', '.join(dropped)}",
            SynclineWarning,
            stacklevel=4,
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise LayoutError(f"'{name}' is {parameter.dtype}: a batch method moves real numbers only")
    if not trained(model):
        raise LayoutError(f"{type(model).__name__} has no parameter that is trained (requires_grad)")


def sample_sizes(schedule: Any, joint: int | None) -> Callable[[int], int] | int | None:
    """How many examples an iteration takes; None: all."""
    if schedule is not None and joint is not None:
        raise UsageError(
            "give either global_batch_size=, the examples of an iteration, or schedule=, a function of it"
        )
    if schedule is not None and not callable(schedule):
        raise UsageError(
            f"with sandblaster schedule= is a function: iteration -> examples of its sample, got {schedule!r}"
        )
    if joint is not None:
        check_whole("global_batch_size", joint)
    found: Callable[[int], int] | int | None = schedule or joint
    return found


def shards_of(topology: str, nbytes: int) -> int:
    """As many as were asked for, or as the weights are worth."""
    found = parse_topology(topology)
    if isinstance(found, Servers) and found.fixed:
        return found.shards
    return max(1, min(MOST_SHARDS, cores_here(), nbytes // SHARD_BYTES))


def batch_spec(runner: Engine, **given: Any) -> tuple[RunSpec, nn.Module]:
    """Of what `train` was given; and the model."""
    if isinstance(runner, Torchrun):
        raise UsageError(
            "sandblaster runs on engine='local' and 'sim', not under torchrun: start the script by itself"
        )
    check_options(given)
    data, evaluate = check_data(given["data"], 1), check_evaluate(given["evaluate"])
    whole, sent = built(given["model"], given["seed"])
    way = way_of(given["gradient"], whole, given["loss"], given["objective"])
    objective = regularised(way, given["regulariser"])
    if not isinstance(objective, Backprop):
        raise UsageError(f"sandblaster evaluates an objective: gradient={given['gradient']!r} has none")
    batch = _plan(whole, sent, data, objective, given)
    check_memory(batch, given["learners"])

    def read(checkpoint: Checkpoint) -> Restored:
        found = read_batch(checkpoint)
        check_restored(batch, found)
        return found

    tested = (sent, evaluate, way, batch.samples.portion, given["collate"])
    plan = RunPlan(
        course=Course.of("hardsync"),
        learners=given["learners"],
        topology=Servers(batch.layout.shards, True),
        seed=given["seed"],
        batch_size=batch.samples.portion,
        limit=given["steps"],
    )
    spec = run_spec(
        runner,
        Task(evaluates_portions, (batch.sent(),)),
        plan,
        given,
        evaluate=evaluation_of(*tested),
        callbacks=check_callbacks(given["callbacks"]),
        read=read,
    )
    return dataclasses.replace(spec, batch=batch), whole


def _frozen(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _plan(
    whole: nn.Module, sent: Model, data: Dataset[Any], way: Backprop, given: Mapping[str, Any]
) -> BatchPlan:
    check_model(whole)
    size = len(data)  # type: ignore[arg-type]
    sizes = sample_sizes(given["schedule"], given["global_batch_size"])
    samples = Samples(size, min(given["batch_size"], size), sizes)
    attempt("schedule", samples.at, 0)
    shards = shards_of(given["topology"], batch_layout(whole, 1).parameters.nbytes)
    return BatchPlan(
        model=sent,
        data=data,
        objective=way.objective,
        collate=given["collate"],
        samples=samples,
        seed=given["seed"],
        layout=batch_layout(whole, shards),
        method=given["optimizer"],
        deterministic=bool(getattr(given["optimizer"], "deterministic", False)),
        fixed={name: each.detach().cpu().clone() for name, each in (*whole.named_buffers(), *_frozen(whole))},
    )


def evaluates_portions(plan: BatchPlan) -> None:
    """The name of what learners do, for records; engines do it by themselves."""
