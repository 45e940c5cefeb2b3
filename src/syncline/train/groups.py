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
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from syncline.cluster import Cluster, Compute
from syncline.dial import Course
from syncline.engines.batch_method_record import available_memory, readable
from syncline.engines.run import Engine
from syncline.engines.torchrun.engine import Torchrun
from syncline.engines.torchrun.rank_and_store import TorchrunPlace
from syncline.errors import NotYetError, UsageError
from syncline.learn.batch_to_device import to_device
from syncline.learn.gradient_ways import Backprop, Supervised, Way
from syncline.learn.loader import reader
from syncline.learn.server_session import check_whole
from syncline.nn.net import Net
from syncline.parallel.module import Partitioned, partition
from syncline.parallel.move import Group
from syncline.parallel.trace import skeleton
from syncline.plan import Plan, shapes_of, step_seconds
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
    way: Way  # without a regulariser
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
    try:
        trained.way.check_seats()
        example = _example(trained)
    except UsageError as error:
        raise UsageError(f"group={group}: {error}") from error
    model, batch_size, learners = trained.model, trained.batch_size, trained.learners
    found = Plan.load(plan) if isinstance(plan, str) and plan.endswith(".json") else plan
    if plan is None or plan == "auto":
        joint = _times(example, learners)
        found = cheapest(model, joint, cluster, group, workers=group * learners, local_update=local)
    planned = Group()
    planned.size = group
    mine = partition(skeleton(model), found, example, planned)
    if devices:
        check_memory(mine, learners, devices, place)
    inputs = shapes_of(example)
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
    batches = (_times(cut.example, times) for times in (1, 2))
    once, twice = (step_seconds(model, batch, seats, group, cut.choices) for batch in batches)
    each = min(max(0.0, (twice - once) / size), once / size)
    made = copy.copy(engine)
    made.cluster = groups_of(
        engine.cluster, group, Compute(base=max(0.0, once - each * size), per_example=each)
    )
    return made


class _Calling(nn.Module):
    """Module that only calls the model and records the arguments: it has none of the model's attributes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held, self.called = (model,), list[tuple[tuple[Any, ...], dict[str, Any]]]()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.called.append((args, kwargs))
        return self._held[0](*args, **kwargs)


def _example(trained: Grouped) -> Any:
    """Return the shapes of a batch that the model is called with, by place or by name."""
    if isinstance(trained.data, IterableDataset):
        raise UsageError("there is no first batch to look at in a stream; use launch with sl.partition")
    batch = reader(trained.data, trained.collate)(torch.arange(min(trained.batch_size, 2)))
    found = model_inputs(trained.model, trained.way, batch)
    return pytree.tree_map(lambda tensor: _as_shape(tensor, trained.batch_size), found)


def model_inputs(model: nn.Module, way: Way, batch: Any) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Return the tensors that the model is called with for a batch, by place or by name."""
    args, kwargs = _called_with(model, way, batch)
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs)
    named = bound.kwargs
    if named and bound.args:
        kinds = signature.parameters.values()
        if any(each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY) for each in kinds):
            raise UsageError(
                f"{type(model).__name__}.forward is called with arguments by place and by name, and cannot get them all by "
                "name; use launch with sl.partition"
            )
        named = dict(zip(signature.parameters, bound.args, strict=False)) | named
    places = [*signature.parameters, *(f"argument {place}" for place in range(len(bound.args)))]
    pairs = named.items() or zip(places, bound.args, strict=False)
    if other := [name for name, value in pairs if not isinstance(value, Tensor)]:
        raise UsageError(
            f"the model reads something else than tensors ({', '.join(other)}); use launch with sl.partition"
        )
    return named or bound.args


def _called_with(model: nn.Module, way: Way, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert isinstance(way, Backprop)
    if isinstance(way.objective, Supervised) and way.objective.inside:
        assert isinstance(model, Net)
        return (), model.inputs_of(batch)
    calling = _Calling(model)
    held = to_device(batch, next(model.parameters()).device)
    try:
        found = _tried(way.objective, calling, model, held)
    except Exception as error:
        if calling.called and _fails(way.objective, model, held):
            return calling.called[0]  # the same error comes with its traceback from a learner
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"the objective has to call model(...) as a whole: {words}") from error
    if not calling.called:
        raise UsageError("the objective does not call model(...)")
    expected = _tried(way.objective, model, model, held)
    if not torch.equal(expected, found) and not (expected.isnan() and found.isnan()):
        raise UsageError(
            f"the objective is {float(expected):.6g} for the model and {float(found):.6g} for a module that only calls it: it "
            "looks at the model's type or attributes, of which seats have slices; compute that in forward, or use group=1"
        )
    return calling.called[0]


def _fails(objective: Any, model: nn.Module, batch: Any) -> bool:
    try:
        _tried(objective, model, model, batch)
    except Exception:  # the user's code runs here
        return True
    return False


def _tried(objective: Any, called: nn.Module, model: nn.Module, batch: Any) -> Tensor:
    """Return the objective's value in training mode. Restore modes, buffers and random generators."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            model.train()
            value: Tensor = objective(called, batch)
            return torch.as_tensor(value)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _as_shape(tensor: Tensor, batch_size: int) -> Tensor:
    shape = (batch_size, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _times(example: Any, times: int) -> Any:
    """Return shapes of `times` batches in one."""
    return pytree.tree_map(
        lambda tensor: _as_shape(tensor, tensor.shape[0] * times) if tensor.dim() else tensor, example
    )
