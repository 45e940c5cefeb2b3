"""The layers of a model as a planner sees them: what they hold and make, how each can be cut, what passes between them.

Layers and functions that only go on as what they read was cut belong to the ways between; what joins several arrays is
a unit of its own. Not responsible for prices: `costs` is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from syncline.errors import UsageError
from syncline.nn.block_local import BlockLocal2d
from syncline.parallel.functions import Aligned, Reshape
from syncline.parallel.module import arguments_of, is_layer
from syncline.parallel.move import Group
from syncline.parallel.program import Program, Slot, Step
from syncline.parallel.rules import Call, Spread, Want, holds, whole
from syncline.parallel.trace import Array, Inputs, skeleton, trace
from syncline.parallel.windows import Box, Route, route


@dataclass(slots=True, kw_only=True)
class Unit:
    """One layer, or a function that joins arrays. A layer with parameters that is called several times is one unit."""

    name: str
    parameters: int  # without those of earlier units
    names: frozenset[str] = frozenset()  # of these parameters, within the layer
    steps: list[Step] = field(default_factory=list)
    features: int = 0  # numbers of its results, for one example
    work: float = 0.0  # multiplications for the whole batch, or numbers made, whichever is more
    beside: int = 0  # bytes of what follows it, for the whole batch
    # how its results lie, by call and result
    ways: dict[str, list[list[Spread]]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """True if the unit's layer has parameters, including those it shares with other layers."""
        return holds(self.steps[0].call.module)


@dataclass(frozen=True, slots=True)
class Link:
    """From a call's result over functions that follow to a call's input; unit -1 is the model's result."""

    source: tuple[int, int, int]  # unit, call, result
    made: Array
    chain: tuple[Step, ...]
    read: Array
    target: tuple[int, int, int]  # unit, call, input


class LayerGraph:
    """Units and links of a model for a batch like the example, over a group of processes.

    `rest` holds the parameters of no unit, because functions or nothing reads them: every process holds them whole.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        group: int,
        *,
        grid: tuple[int, int] | None = None,
        batch_dim: int = 0,
    ) -> None:
        shapes, (args, kwargs) = skeleton(model), arguments_of(example)
        traced = trace(shapes, Inputs(shapes, args, kwargs), leaf=is_layer, batch_dim=batch_dim)
        self.group, self.batch = group, traced.batch
        planned = Group()
        planned.size = group
        program = Program(traced, shapes, {}, planned, grid)
        self._makers = {id(slot): (step, at) for step in program.steps for at, slot in enumerate(step.outs)}
        self.units: list[Unit] = []
        self._numbers: dict[str, int] = {}  # of units by name
        self._calls: dict[int, tuple[int, int]] = {}  # by id of a step: unit, call
        self.links: list[Link] = []
        self._holders: dict[int, int] = {}  # the first unit of each parameter, by identity
        self._shared: set[int] = set()  # units that hold a parameter which another one holds too
        self._wanted: dict[tuple[str, str], list[list[list[Want]]]] = {}
        self._routes: dict[Any, Route] = {}
        for step in program.steps:
            if not _follows(step):
                self._add(step)
            elif (source := self._back(_main(step))[0]) is not None:
                kept = sum(_bytes(slot.array, slot.array.shape) for slot in step.outs)
                self.units[source[0]].beside += kept
        results = {id(slot): slot for slot in pytree.tree_leaves(program.result) if isinstance(slot, Slot)}
        for slot in results.values():
            self._connect(slot, (-1, 0, 0))
        self.rest = {
            name: parameter
            for name, parameter in shapes.named_parameters()
            if id(parameter) not in self._holders
        }

    def _add(self, step: Step) -> None:
        held = dict(step.call.module.named_parameters()) if step.call.module is not None else {}
        count = sum(parameter.numel() for parameter in held.values())
        name = step.path if step.path is not None and count else step.call.name
        index = self._numbers.setdefault(name, len(self.units))
        if index == len(self.units):
            new = {each: p for each, p in held.items() if id(p) not in self._holders}
            own = sum(parameter.numel() for parameter in new.values())
            self.units.append(Unit(name=name, parameters=own, names=frozenset(new)))
        for parameter in held.values():
            if (first := self._holders.setdefault(id(parameter), index)) != index:
                self._shared |= {first, index}
        unit = self.units[index]
        for at, (slot, _) in enumerate(step.reads):
            self._connect(slot, (index, len(unit.steps), at))
        self._calls[id(step)] = (index, len(unit.steps))
        unit.steps.append(step)
        unit.features += sum(math.prod(array.shape) for array in step.call.outputs) // self.batch
        unit.work += _work(step.call, count)

    def _connect(self, slot: Slot, target: tuple[int, int, int]) -> None:
        source, made, chain = self._back(slot)
        if source is not None:
            self.links.append(Link(source, made, chain, slot.array, target))

    def _back(self, slot: Slot) -> tuple[tuple[int, int, int] | None, Array, tuple[Step, ...]]:
        """Where an array comes from, over what follows; None for inputs and parameters."""
        chain: list[Step] = []
        while id(slot) in self._makers:
            step, at = self._makers[id(slot)]
            if id(step) in self._calls:
                return (*self._calls[id(step)], at), slot.array, tuple(reversed(chain))
            chain.append(step)
            slot = _main(step)
        return None, slot.array, ()

    def find_ways(self, ways: Sequence[str]) -> None:
        """How each unit can be cut."""
        for unit in self.units:
            for way in ways:
                try:
                    found = [step.rule.place(replace(step.call, way=way)) for step in unit.steps]
                except UsageError:
                    continue
                if way == "data" or any(spread.way != "data" for each in found for spread in each):
                    unit.ways[way] = found
            if self.batch < self.group and len(unit.ways) > 1:
                del unit.ways["data"]
            elif self.batch < self.group and unit.holds:
                raise UsageError(
                    f"layer {unit.name!r} is cut by examples alone: {self.batch} of them are less than a group of {self.group}"
                )

    def settle_shared(self) -> None:
        """Cut layers that share a parameter by examples, unless their choice is given: other choices mostly need different slices."""
        for index in self._shared:
            unit = self.units[index]
            if "data" in unit.ways and len(unit.ways) > 1:
                unit.ways = {"data": unit.ways["data"]}

    # -- what moves ----------------------------------------------------------------------------------------

    def routes(self, link: Link, way: str, other: str) -> list[tuple[Route, int]]:
        """The moves of a link and its bytes a number, its ends being cut in these ways."""
        unit, call, result = link.source
        spread, array, found = self.units[unit].ways[way][call][result], link.made, []
        for step in link.chain:
            at = next(i for i, (slot, _) in enumerate(step.reads) if slot is _main(step))
            spreads = [spread if i == at else whole(a, self.group) for i, a in enumerate(step.call.inputs)]
            now = replace(step.call, spreads=spreads)
            outs = step.rule.place(now)
            wants = [step.rule.wants(now, outs, rank)[at].box for rank in range(self.group)]
            found.append(self._route(array, spread, wants))
            spread, array = outs[0], step.outs[0].array
        unit, call, at = link.target
        wants = [Box.whole(link.read.shape)] * self.group
        if unit >= 0:
            wants = [each[at].box for each in self._wants(self.units[unit], other)[call]]
        return [*found, self._route(array, spread, wants)]

    def _wants(self, unit: Unit, way: str) -> list[list[list[Want]]]:
        """What a unit reads, by call, rank and input."""
        key = unit.name, way
        if key not in self._wanted:
            self._wanted[key] = [
                [step.rule.wants(step.call, outs, rank) for rank in range(self.group)]
                for step, outs in zip(unit.steps, unit.ways[way], strict=True)
            ]
        return self._wanted[key]

    def _route(self, array: Array, spread: Spread, wants: Sequence[Box]) -> tuple[Route, int]:
        """Of moves that are alike, one and the same."""
        key = array.shape, spread.boxes, spread.sums, tuple(wants)
        if key not in self._routes:
            owns = [[box] for box in spread.boxes]
            self._routes[key] = route(array.shape, owns, [[box] for box in wants], sums=spread.sums)
        return self._routes[key], array.dtype.itemsize

    # -- what is held --------------------------------------------------------------------------------------

    def held(self, unit: Unit, way: str) -> tuple[int, int, bool]:
        """Bytes of parameters and of activations in the fullest process; whether all of them hold all parameters."""
        module, ranks = unit.steps[0].call.module, range(self.group)
        named = list(module.named_parameters()) if module is not None else []
        sizes = {name: (p.numel(), p.element_size()) for name, p in named if name in unit.names}
        first, spreads = unit.steps[0], unit.ways[way]
        parameters = [0] * self.group
        for rank in ranks if sizes else ():
            slices = first.rule.slices(first.call, spreads[0], rank)
            for name, (count, size) in sizes.items():
                held = sum(box.size for box in slices[name]) if name in slices else count
                parameters[rank] += held * size
        activations = unit.beside // self.group
        for call, outs in enumerate(spreads):
            activations += max(self._kept(unit, way, call, outs, rank) for rank in ranks)
        whole_size = sum(count * size for count, size in sizes.values())
        return max(parameters), activations, min(parameters) == whole_size

    def _kept(self, unit: Unit, way: str, call: int, outs: Sequence[Spread], rank: int) -> int:
        """Bytes of a call's results and, where that is not cut by examples and lies there anyway, of what it reads."""
        step = unit.steps[call]
        kept = sum(_bytes(slot.array, s.boxes[rank].shape) for slot, s in zip(step.outs, outs, strict=True))
        if way != "data":
            pairs = zip(step.call.inputs, self._wants(unit, way)[call][rank], strict=True)
            kept += sum(_bytes(array, want.box.shape) for array, want in pairs)
        return kept

    def memory(self, unit: Unit, way: str, states: int) -> float:
        """Bytes in the fullest process: weights, gradients, the optimizer's states, and what backward needs."""
        parameters, activations, _ = self.held(unit, way)
        return float((2 + states) * parameters + activations)

    def share(self, unit: Unit, way: str) -> float:
        """Of a unit's work, what the busiest process does."""
        first = unit.ways[way][0][0]
        if first.sums:
            return 1 / self.group
        return max(box.size for box in first.boxes) / max(1, math.prod(unit.steps[0].outs[0].array.shape))


def _follows(step: Step) -> bool:
    """It is cut as what it reads was, and holds nothing."""
    module = step.call.module
    if module is None:
        return sum(slot.array.batch is not None for slot, _ in step.reads) <= 1
    return isinstance(step.rule, Aligned | Reshape) and not holds(module) and not list(module.buffers())


def _main(step: Step) -> Slot:
    """The input that a following step follows."""
    slots = [slot for slot, _ in step.reads]
    return next((slot for slot in slots if slot.array.batch is not None), slots[0])


def _bytes(array: Array, shape: Sequence[int]) -> int:
    return math.prod(shape) * array.dtype.itemsize


def _work(call: Call, parameters: int) -> float:
    """Every weight is used once for each place of a result; those of blocks once for each example."""
    made = sum(math.prod(array.shape) for array in call.outputs)
    if not parameters or call.module is None or isinstance(call.module, nn.Embedding):
        return float(made)
    if isinstance(call.module, BlockLocal2d):
        return float(parameters * call.batch)
    first = call.outputs[0].shape
    weights = sum(p.numel() for p in call.module.parameters() if p.dim() > 1)
    return float(max(made, weights * math.prod(first) // max(1, first[1] if len(first) == 4 else first[-1])))
