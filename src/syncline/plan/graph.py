"""The layers of a model as a planner sees them: what they hold and make, how each can be cut, what passes between them.

Layers and functions that only go on as what they read was cut belong to the ways between; what joins several arrays is
a unit of its own. Not responsible for prices: `costs` is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncline.errors import UsageError
from syncline.nn.block_local import BlockLocal2d
from syncline.parallel.aligned import Aligned, Reshape
from syncline.parallel.module import is_layer
from syncline.parallel.move import Group
from syncline.parallel.program import Program, Slot, Step
from syncline.parallel.rules import Call, Slices, Spread, whole
from syncline.parallel.trace import Array, skeleton, trace
from syncline.parallel.windows import Box, Route, route


@dataclass(slots=True, kw_only=True)
class Unit:
    """One layer, or a function that joins arrays. A layer with parameters that is called several times is one unit."""

    name: str
    steps: list[Step]
    parameters: int
    features: int  # numbers of its results, for one example
    work: float  # multiplications for the whole batch, or numbers made, whichever is more
    beside: int = 0  # bytes of what follows it, for the whole batch
    ways: dict[str, list[list[Spread]]] = field(
        default_factory=dict
    )  # how its results lie, by call and result


@dataclass(frozen=True, slots=True)
class Link:
    """From a call's result over functions that follow to a call's input; -1 is the model's result."""

    source: tuple[int, int, int]  # unit, call, result
    chain: tuple[Step, ...]
    target: tuple[int, int, int]  # unit, call, input
    array: Array


class Seats(Group):
    """A group that is only planned."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class LayerGraph:
    """Of a model for a batch like the example, over so many processes."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        group: int,
        *,
        grid: tuple[int, int] | None = None,
        batch_dim: int = 0,
    ) -> None:
        shape = skeleton(model)
        args, kwargs = (
            ((), example)
            if isinstance(example, Mapping)
            else (example if isinstance(example, tuple) else (example,), {})
        )
        traced = trace(shape, args, kwargs, leaf=is_layer, batch_dim=batch_dim)
        self.group, self.batch = group, traced.batch
        self._program = Program(traced, shape, {}, Seats(group), grid)
        self._made = {
            id(slot): (step, at) for step in self._program.steps for at, slot in enumerate(step.outs)
        }
        self.units: list[Unit] = []
        self._unit_of: dict[int, tuple[int, int]] = {}  # id of a step: unit, call
        for step in self._program.steps:
            if not _follows(step):
                self._add(step)
            elif (source := self._back(_main(step))[0]) is not None:
                made = (math.prod(slot.array.shape) * slot.array.dtype.itemsize for slot in step.outs)
                self.units[source[0]].beside += sum(made)
        self.links = [
            link for step in self._program.steps if id(step) in self._unit_of for link in self._links(step)
        ]
        self.links += self._ends()

    def _add(self, step: Step) -> None:
        module = step.call.module
        count = sum(p.numel() for p in module.parameters()) if module is not None else 0
        name = step.path if step.path is not None and count else step.call.name
        index = next((i for i, unit in enumerate(self.units) if unit.name == name and count), len(self.units))
        if index == len(self.units):
            self.units.append(Unit(name=name, steps=[], parameters=count, features=0, work=0.0))
        unit = self.units[index]
        self._unit_of[id(step)] = (index, len(unit.steps))
        unit.steps.append(step)
        unit.features += sum(math.prod(array.shape) for array in step.call.outputs) // self.batch
        unit.work += _work(step.call, count)

    def price_ways(self, ways: Sequence[str]) -> None:
        """Find out how each unit can be cut."""
        for unit in self.units:
            for way in ways:
                try:
                    found = [step.rule.place(replace(step.call, way=way)) for step in unit.steps]
                except UsageError as error:
                    if way == "data":
                        raise UsageError(str(error)) from error
                    continue
                if way == "data" or any(spread.way != "data" for each in found for spread in each):
                    unit.ways[way] = found
            if self.batch < self.group and len(unit.ways) > 1:
                del unit.ways["data"]
            elif self.batch < self.group and unit.parameters:
                raise UsageError(
                    f"layer {unit.name!r} is cut by examples alone: {self.batch} of them are less than a group of {self.group}"
                )

    def _links(self, step: Step) -> list[Link]:
        target = self._unit_of[id(step)]
        found = []
        for at, (slot, _) in enumerate(step.reads):
            source, chain, array = self._back(slot)
            if source is not None:
                found.append(Link(source, chain, (*target, at), array))
        return found

    def _ends(self) -> list[Link]:
        slots = {
            id(slot): slot for slot in pytree.tree_leaves(self._program._result) if isinstance(slot, Slot)
        }
        back = [self._back(slot) for slot in slots.values()]
        return [Link(source, chain, (-1, 0, 0), array) for source, chain, array in back if source is not None]

    def _back(self, slot: Slot) -> tuple[tuple[int, int, int] | None, tuple[Step, ...], Array]:
        """Where an array comes from, over what follows; None for inputs and parameters."""
        chain: list[Step] = []
        array = slot.array
        while id(slot) in self._made:
            step, at = self._made[id(slot)]
            if id(step) in self._unit_of:
                return (*self._unit_of[id(step)], at), tuple(reversed(chain)), array
            chain.append(step)
            slot = _main(step)
        return None, (), array

    # -- what moves ----------------------------------------------------------------------------------------

    def routes(self, link: Link, way: str, other: str) -> list[tuple[Route, int]]:
        """The moves of a link with its bytes a number, its ends being cut in these ways."""
        unit, call, result = link.source
        spread = self.units[unit].ways[way][call][result]
        array = self.units[unit].steps[call].outs[result].array
        found = []
        for step in link.chain:
            at = next(i for i, (slot, _) in enumerate(step.reads) if slot is _main(step))
            spreads = [spread if i == at else whole(a, self.group) for i, a in enumerate(step.call.inputs)]
            call_now = replace(step.call, spreads=spreads)
            outs = step.rule.place(call_now)
            wants = [step.rule.wants(call_now, outs, rank)[at].box for rank in range(self.group)]
            found.append((self._route(array, spread, wants), array.dtype.itemsize))
            spread, array = outs[0], step.outs[0].array
        found.append((self._route(array, spread, self._wanted(link, other)), array.dtype.itemsize))
        return found

    def _wanted(self, link: Link, way: str) -> list[Box]:
        unit, call, at = link.target
        if unit < 0:
            return [Box.whole(link.array.shape)] * self.group
        step, outs = self.units[unit].steps[call], self.units[unit].ways[way][call]
        return [step.rule.wants(step.call, outs, rank)[at].box for rank in range(self.group)]

    def _route(self, array: Array, spread: Spread, wants: Sequence[Box]) -> Route:
        return route(array.shape, [[box] for box in spread.boxes], [[box] for box in wants], sums=spread.sums)

    # -- what is held --------------------------------------------------------------------------------------

    def held(self, unit: Unit, way: str) -> tuple[int, int, bool]:
        """Bytes of parameters and of activations in the fullest process; whether parameters are on all of them."""
        parameters, activations, copies = 0, 0, True
        for number, (step, outs) in enumerate(zip(unit.steps, unit.ways[way], strict=True)):
            slices = [step.rule.slices(step.call, outs, rank) for rank in range(self.group)]
            named = dict(step.call.module.named_parameters()) if step.call.module is not None else {}
            boxes = [(named[name], found) for each in slices for name, found in each.items() if name in named]
            copies = copies and all(found == (Box.whole(p.shape),) for p, found in boxes)
            sizes = [self._parameter_bytes(step.call.module, each) for each in slices]
            parameters = max(sizes) if number == 0 else parameters
            pairs = [(slot.array, spread) for slot, spread in zip(step.outs, outs, strict=True)]
            activations += max(
                sum(s.boxes[r].size * a.dtype.itemsize for a, s in pairs) for r in range(self.group)
            )
            if way == "data":  # read where it lies
                continue
            wants = [step.rule.wants(step.call, outs, rank) for rank in range(self.group)]
            reads = [(i, slot.array) for i, (slot, _) in enumerate(step.reads)]
            activations += max(sum(each[i].box.size * a.dtype.itemsize for i, a in reads) for each in wants)
        return parameters, activations + unit.beside // self.group, copies

    def _parameter_bytes(self, module: nn.Module | None, slices: Slices) -> int:
        named = [] if module is None else list(module.named_parameters())
        return sum(
            p.element_size() * (sum(box.size for box in slices[name]) if name in slices else p.numel())
            for name, p in named
        )

    def share(self, unit: Unit, way: str) -> float:
        """Of a unit's work, what the busiest process does."""
        outs = [spread for each in unit.ways[way] for spread in each]
        if way == "rows" or any(spread.sums for spread in outs):
            return 1 / self.group
        largest = outs[0].boxes
        return max(box.size for box in largest) / max(1, math.prod(unit.steps[0].outs[0].array.shape))


def _follows(step: Step) -> bool:
    """It is cut as what it reads was, and holds nothing."""
    if step.call.module is not None:
        plain = isinstance(step.rule, Aligned | Reshape)
        return (
            plain
            and not any(True for _ in step.call.module.parameters())
            and not list(step.call.module.buffers())
        )
    return sum(slot.array.batch is not None for slot, _ in step.reads) <= 1


def _main(step: Step) -> Slot:
    """The input that a following step follows."""
    slots = [slot for slot, _ in step.reads]
    return next((slot for slot in slots if slot.array.batch is not None), slots[0])


def _work(call: Call, parameters: int) -> float:
    """Every weight is used once for each place of a result; those of blocks once for each example."""
    made = sum(math.prod(array.shape) for array in call.outputs)
    if not parameters or isinstance(call.module, nn.Embedding):
        return float(made)
    if isinstance(call.module, BlockLocal2d):
        return float(parameters * call.batch)
    first = call.outputs[0].shape
    channels = first[1] if len(first) == 4 else first[-1]
    weights = sum(p.numel() for p in _tensors(call.module) if p.dim() > 1)
    return float(max(made, weights * math.prod(first) // max(1, channels)))


def _tensors(module: nn.Module | None) -> list[Tensor]:
    return list(module.parameters()) if module is not None else []
