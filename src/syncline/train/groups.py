"""Groups of seats, before the start: whether they can be, what the model reads, how it is cut over them (M15)."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from syncline.cluster import Cluster, Compute
from syncline.dial import Course
from syncline.engines.batch_method_record import available_memory, readable
from syncline.engines.run import Engine
from syncline.engines.torchrun.engine import Torchrun
from syncline.engines.torchrun.rank_and_store import TorchrunPlace
from syncline.errors import NotYetError, UsageError
from syncline.learn.loader import reader
from syncline.learn.server_session import check_whole
from syncline.learn.train_and_evaluate import Objective
from syncline.parallel.module import Partitioned, partition
from syncline.parallel.move import Group
from syncline.parallel.trace import skeleton
from syncline.plan import Plan, step_seconds
from syncline.plan import plan as cheapest
from syncline.roles.run_plan import RunPlan
from syncline.sim.engine import Sim
from syncline.sim.group_times import groups_of, seats_of
from syncline.table.optimizer_template import ELEMENTWISE
from syncline.table.store import PLACES, places_for
from syncline.topologies import AllReduce, parse_topology


def check_group(group: Any, plan: Any, engine: Engine, topology: str) -> None:
    check_whole("group", group)
    if group == 1:
        if plan is not None:
            raise UsageError(
                "plan= says how a model is cut over the seats of a group: give group= of at least 2"
            )
        return
    if isinstance(engine, Torchrun):
        return
    if isinstance(parse_topology(topology), AllReduce):
        raise UsageError(
            f"group={group} over all-reduce: groups publish to servers; use topology='servers', or sl.partition in your own loop"
        )


def under_torchrun(
    engine: Engine, group: int, sync: Any, topology: str, *, local_update: bool = True
) -> tuple[Any, str]:
    """The dial and the topology of a run. The processes of torchrun's are one group: no servers, and nobody to wait for."""
    if group == 1 or not isinstance(engine, Torchrun):
        return sync, topology
    if topology == "servers":
        topology = "allreduce:layerwise"
    found = parse_topology(topology)
    if not isinstance(found, AllReduce) or found.apply != "end" or not local_update:
        asked = f"topology={topology!r}" if local_update else "local_update=False"
        raise UsageError(
            f"group={group} under torchrun with {asked}: one group has no servers, its seats add up gradients among "
            "themselves; leave that out"
        )
    course, lockstep = Course.of(sync), Course.of("hardsync").first
    if any(dial.local or dial.delay for _, dial in course.dials):
        raise NotYetError(
            f"group={group} under torchrun with sync={course}: a step takes its own gradient; use hardsync"
        )
    for _, dial in course.dials:
        if not dial.lockstep:
            dial.check(1)  # among one learner they are all the same (M2)
    return Course(tuple((at, dial if dial.lockstep else lockstep) for at, dial in course.dials)), topology


class Grouped(NamedTuple):
    """What groups train, and what they read."""

    model: nn.Module
    objective: Objective | None
    data: Any
    collate: Any
    batch_size: int
    learners: int


def updates_locally(course: Course, made: torch.optim.Optimizer, trained: Grouped, *, plain: bool) -> bool:
    """Whether a group's seats can update what is cut over them (M16): it is alone, and a step takes its own gradient, as it is."""
    (_, dial), *more = course.dials
    same = not (more or dial.local or dial.delay) and dial.factor(1, trained.batch_size) == 1.0
    return plain and trained.learners == 1 and same and type(made) in ELEMENTWISE


def check_memory(
    mine: Partitioned, learners: int, devices: Sequence[str], place: TorchrunPlace | None = None
) -> None:
    """That seats and table fit into this machine's memory and its cards'; what is counted is needed at least."""
    seats = [mine.memory(rank) for rank in range(mine.group.size)]
    held = Counter[str]()
    for number in range(learners * len(seats)) if place is None else place.neighbours:
        held[devices[number % len(devices)]] += seats[number % len(seats)]
    size = sum(math.prod(mine.parts[name].shape) * p.element_size() for name, p in mine.named_parameters())
    table = size * (PLACES + learners) if place is None else 0
    held["cpu"] += table
    for device, needed in held.items():
        there = free_memory(device)
        if there is not None and needed > there:
            raise UsageError(
                f"group={len(seats)}: a seat needs at least {readable(max(seats))} (weights, gradients, what backward reads), the "
                f"table {readable(table)}, together {readable(needed)} on {device}, and {readable(there)} are free there: take "
                "more cards or fewer learners, a smaller batch_size, or plan=sl.plan(..., memory=bytes)"
            )


def check_card(card: str, devices: Sequence[str], plan: RunPlan, model: nn.Module) -> None:
    """That a table fits on its card, with the learners there; what is counted is needed at least."""
    delay, learners = plan.delay, plan.learners
    weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    places, slots = places_for(delay), max(2, delay + 1)
    there = devices.count(card)
    needed = weights * (places + learners * (slots + 1) + 2 * there)
    free = free_memory(card)
    if free is not None and needed > free:
        raise UsageError(
            f"the table does not fit on {card}: {places} versions take {readable(places * weights)}, {slots} gradients and an "
            f"inbox for each of {learners} learners {readable(learners * (slots + 1) * weights)}, weights and gradients of "
            f"{there} learners there {readable(2 * there * weights)}, and {readable(free)} are free, without the optimizer's "
            'state; table_device="cpu" keeps it beside the card'
        )


def free_memory(device: str) -> int | None:
    """Bytes, where that is known."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else available_memory()


def cut_over(
    group: int,
    plan: Any,
    trained: Grouped,
    *,
    devices: Sequence[str] = (),
    cluster: Cluster | None = None,
    local: bool = False,
    place: TorchrunPlace | None = None,
) -> Plan | None:
    """How `train`'s model is cut over each group; refused here where it cannot be. Without devices no memory is looked at."""
    if group == 1:
        return None
    if trained.objective is None:
        raise UsageError(
            f"group={group}: gradients over seats are made by back-propagation of a loss or an objective, without a regulariser"
        )
    example = _model_inputs(trained)
    model, batch_size, learners = trained.model, trained.batch_size, trained.learners
    found = Plan.load(plan) if isinstance(plan, str) and plan.endswith(".json") else plan
    if plan is None or plan == "auto":
        joint = {name: _as_shape(tensor, batch_size, learners) for name, tensor in example.items()}
        found = cheapest(model, joint, cluster, group, workers=group * learners, local_update=local)
    planned = Group()
    planned.size = group
    mine = partition(skeleton(model), found, example, planned)
    if devices:
        check_memory(mine, learners, devices, place)
    inputs = tuple((name, tuple(t.shape), str(t.dtype).split(".")[1]) for name, t in example.items())
    if isinstance(found, Plan):
        return Plan(found.choices, found.rows, group, group * learners, batch_size, found.costs, inputs)
    choices = dict(found) if isinstance(found, Mapping) else {}
    return Plan(choices, (), group, group * learners, batch_size, "", inputs)


def simulated(engine: Sim, group: int, plan: Any, trained: Grouped) -> Sim:
    """The simulator with groups as its learners: a step takes what the plan says on its cluster, a gradient is that of the whole model."""
    seats = seats_of(engine.cluster, group)
    cut = cut_over(group, plan, trained, cluster=seats)
    if cut is None:
        return engine
    model, size = trained.model, trained.batch_size
    batches = ({name: _as_shape(t, size, n) for name, t in cut.example.items()} for n in (1, 2))
    once, twice = (step_seconds(model, batch, seats, group, cut.choices) for batch in batches)
    each = min(max(0.0, (twice - once) / size), once / size)
    made = copy.copy(engine)
    made.cluster = groups_of(
        engine.cluster, group, Compute(base=max(0.0, once - each * size), per_example=each)
    )
    return made


class _Caught(Exception):
    """What the model was called with."""


class _Spy(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Caught(args, kwargs)


def _model_inputs(trained: Grouped) -> Any:
    """Shapes of a batch as the model gets it, by name."""
    assert trained.objective is not None
    if isinstance(trained.data, IterableDataset):
        raise UsageError(
            "group= with a stream: there is no first batch to look at; use launch with sl.partition"
        )
    batch = reader(trained.data, trained.collate)(torch.arange(min(trained.batch_size, 2)))
    try:
        trained.objective(_Spy(), batch)
    except _Caught as caught:
        args, kwargs = caught.args
    except Exception as error:
        raise UsageError(
            f"group=: the objective has to call model(...) as a whole: {type(error).__name__}: {error}"
        ) from error
    else:
        raise UsageError("group=: the objective does not call model(...)")
    bound = inspect.signature(trained.model.forward).bind(*args, **kwargs).arguments
    if not all(isinstance(value, Tensor) for value in bound.values()):
        names = ", ".join(name for name, value in bound.items() if not isinstance(value, Tensor))
        raise UsageError(
            f"group=: the model reads something else than tensors ({names}); use launch with sl.partition"
        )
    return {name: _as_shape(value, trained.batch_size, 1) for name, value in bound.items()}


def _as_shape(tensor: Tensor, batch_size: int, times: int) -> Tensor:
    return torch.empty((batch_size * times, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
