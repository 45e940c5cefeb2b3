"""A traced model and a plan, made into steps for one process: what it reads, computes and sends, in order.

One move for each array, for all who read it: started when the array is there, awaited when the first reader needs it.
Not responsible for parameters: steps call the layers of whoever holds the slices.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from syncline.dial import nearest
from syncline.errors import UsageError
from syncline.parallel.functions import IN_PLACE, VIEWS, function_rule, name_of
from syncline.parallel.move import Group, Move, Moving
from syncline.parallel.rules import WAYS, Call, Local, Ref, Rule, Slices, Spread, Want, holds, rule_of, whole
from syncline.parallel.trace import Array, Traced, is_array
from syncline.parallel.windows import Box, near_square

Windows = tuple[Want, ...]  # by rank


@dataclass(slots=True)
class Slot:
    """An array on its way through the program."""

    array: Array
    spread: Spread
    readers: list[Windows] = field(default_factory=list)  # distinct ones
    move: Move | None = None

    def port(self, windows: Windows) -> int:
        """The number under which a reader finds its window; -1 is what the process owns already."""
        if not self.spread.sums and tuple(want.box for want in windows) == self.spread.boxes:
            return -1
        if windows not in self.readers:
            self.readers.append(windows)
        return self.readers.index(windows)


@dataclass(slots=True)
class Step:
    """One layer or function. Reads are (slot, port)."""

    call: Call
    rule: Rule
    path: str | None  # of the layer
    reads: list[tuple[Slot, int]]
    outs: list[Slot]
    wanted: list[Box]


def layer_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Layers by their path, a second call of one as path#2; functions by the graph's names."""
    seen: Counter[str] = Counter()
    names = {}
    for node in graph.nodes:
        if node.op == "call_module":
            path = str(node.target)
            seen[path] += 1
            names[node] = path if seen[path] == 1 else f"{path}#{seen[path]}"
        elif node.op in ("call_function", "call_method"):
            names[node] = node.name
    return names


def chosen(plan: Mapping[str, str], names: Sequence[str], layers: Sequence[str]) -> dict[str, str]:
    """What a plan says for each name: its own entry, its layer's (without #2), or for layers the last pattern that fits."""
    for key, way in plan.items():
        if way not in WAYS:
            raise UsageError(
                f"plan: {key!r} is to be cut as {way!r}{nearest(str(way), WAYS)}; the ways are {', '.join(WAYS)}"
            )
        if key not in names and not any(fnmatch.fnmatchcase(name, key) for name in layers):
            few = ", ".join(layers[:12]) + (", …" if len(layers) > 12 else "")
            raise UsageError(f"plan: no layer is called {key!r}{nearest(key, names)}; the model has {few}")
    found: dict[str, str] = {}
    known, patterns = set(layers), [key for key in plan if set(key) & set("*?[")]
    for name in names:
        exact = [key for key in (name, name.partition("#")[0]) if key in plan]
        fits = [key for key in patterns if not exact and name in known and fnmatch.fnmatchcase(name, key)]
        if exact or fits:
            found[name] = plan[exact[0] if exact else fits[-1]]
    return found


class Program:
    """The steps of one process, for inputs of these shapes."""

    def __init__(
        self,
        traced: Traced,
        model: nn.Module,
        plan: Mapping[str, str],
        group: Group,
        grid: tuple[int, int] | None = None,
    ) -> None:
        self.group, self._model, self._batch = group, model, traced.batch
        self._grid = grid or near_square(group.size)
        if self._grid[0] * self._grid[1] != group.size:
            raise UsageError(
                f"a grid of {self._grid[0]} × {self._grid[1]} needs {self._grid[0] * self._grid[1]} processes, the group has {group.size}"
            )
        names = layer_names(traced.graph)
        layers = [name for node, name in names.items() if node.op == "call_module"]
        self.ways = chosen(plan, list(names.values()), layers)
        self.steps: list[Step] = []
        self.inputs: list[tuple[str, Any]] = []  # placeholders and parameters: what, slots
        self._ends: dict[int, Move] = {}  # of the results, by id of their slots
        self._values: dict[fx.Node, Any] = {}  # slots of every node's tensors, in the node's own structure
        for node in traced.graph.nodes:
            if node.op != "output":
                self._add(node, names.get(node, ""))
        (output,) = traced.graph.find_nodes(op="output")
        arrays = iter(fx.node.map_arg(output.args[0], lambda used: self._values[used]))
        self.result = [next(arrays) if is_array(leaf) else leaf for leaf in traced.leaves]
        self._spec = traced.spec
        self._finish_moves()

    # -- building ------------------------------------------------------------------------------------------

    def _add(self, node: fx.Node, name: str) -> None:
        if node.op in ("placeholder", "get_attr"):
            found = (leaf for leaf in pytree.tree_leaves(node.meta["array"]) if isinstance(leaf, Array))
            slots = iter([Slot(array, whole(array, self.group.size)) for array in found])
            self._values[node] = pytree.tree_map_only(Tensor, lambda _: next(slots), node.meta["value"])
            if any(isinstance(leaf, Slot) for leaf in pytree.tree_leaves(self._values[node])):
                self.inputs.append((f"{node.op} {node.target}", self._values[node]))
        elif (alias := self._structure(node)) is not None:
            self._values[node] = alias[0]
        else:
            self._values[node] = self._step(node, name)

    def _structure(self, node: fx.Node) -> tuple[Any] | None:
        """The value of a node that computes nothing: a number, a part of a tuple, a tuple that is made."""
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(node.meta["value"])):
            return (node.meta["value"],)
        args: Any = fx.node.map_arg(node.args, lambda used: self._values[used])
        if name_of(node.target) == "getitem" and not isinstance(args[0], Slot):
            return (args[0][args[1]],)
        if isinstance(node.target, type) and issubclass(node.target, tuple):
            return (node.target(*args, **fx.node.map_arg(node.kwargs, lambda used: self._values[used])),)
        return None

    def _step(self, node: fx.Node, name: str) -> Any:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: self._values[used])
        slots = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Slot)]
        numbers = iter(range(len(slots)))
        args, kwargs = pytree.tree_map_only(Slot, lambda _: Ref(next(numbers)), (args, kwargs))
        module = self._model.get_submodule(str(node.target)) if node.op == "call_module" else None
        _check_in_place(node, module)
        arrays = pytree.tree_leaves(node.meta["array"])
        call = Call(
            name=name,
            target=type(module) if module is not None else node.target,
            module=module,
            args=tuple(args),
            kwargs=kwargs,
            inputs=[slot.array for slot in slots],
            spreads=[slot.spread for slot in slots],
            outputs=[array for array in arrays if isinstance(array, Array)],
            parts=self.group.size,
            batch=self._batch,
            grid=self._grid,
            way=self.ways.get(name),
        )
        rule = (rule_of(module) or Rule()) if module is not None else function_rule(call)
        spreads = rule.place(call)
        wants = [rule.wants(call, spreads, rank) for rank in range(self.group.size)]
        reads = [(slot, slot.port(tuple(each[i] for each in wants))) for i, slot in enumerate(slots)]
        outs = [Slot(array, spread) for array, spread in zip(call.outputs, spreads, strict=True)]
        path = str(node.target) if module is not None else None
        self.steps.append(Step(call, rule, path, reads, outs, [want.box for want in wants[self.group.rank]]))
        found = iter(outs)
        return pytree.tree_map_only(Tensor, lambda _: next(found), node.meta["value"])

    def _finish_moves(self) -> None:
        for slot in self._slots():
            if slot.readers:
                wants = [[windows[rank].box for windows in slot.readers] for rank in range(self.group.size)]
                pads = [windows[self.group.rank].pad for windows in slot.readers]
                slot.move = self._move(slot, wants, pads=pads)
        ends = {id(leaf): leaf for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, Slot)}
        for name, slot in ends.items():  # whole to all; its gradient is the same everywhere and counts once
            wants = [[Box.whole(slot.array.shape)]] * self.group.size
            self._ends[name] = self._move(slot, wants, shared=True)

    def _move(self, slot: Slot, wants: Sequence[Sequence[Box]], **how: Any) -> Move:
        owns = [[box] for box in slot.spread.boxes]
        return Move(self.group, slot.array.shape, owns, wants, sums=slot.spread.sums, **how)

    def slices(self, rank: int) -> dict[str, Slices]:
        """Of every layer's parameters, by its path, what a rank needs; what is not named it needs whole."""
        found: dict[str, Slices] = {}
        for step in self.steps:
            if step.path is not None:
                mine = step.rule.slices(step.call, [slot.spread for slot in step.outs], rank)
                if found.setdefault(step.path, mine) != mine:
                    raise UsageError(
                        f"layer {step.path!r} is called several times with other slices of its parameters: cut it by 'data'"
                    )
        return found

    def check_examples(self) -> None:
        """Later batches may be smaller, but nobody is there to be idle always."""
        for step in self.steps:
            idle = step.outs[0].spread.way == "data" and self._batch < self.group.size
            if idle and holds(step.call.module):
                raise UsageError(
                    f"layer {step.call.name!r} is cut by examples, and {self._batch} of them are less than a group of {self.group.size}: "
                    "give it another way, a larger batch, or the group fewer seats"
                )

    @property
    def moved(self) -> int:
        """Numbers that change the process on the way up, all moves together, the results' apart."""
        return sum(slot.move.route.moved for slot in self._slots() if slot.move is not None)

    def kept(self, rank: int) -> int:
        """Bytes that backward needs at least: what layers with parameters have read."""
        found: dict[tuple[int, int], int] = {}
        for step in self.steps:
            for slot, port in step.reads if holds(step.call.module) else ():
                box = slot.spread.boxes[rank] if port < 0 else slot.readers[port][rank].box
                found[id(slot), port] = box.size * slot.array.dtype.itemsize
        return sum(found.values())

    def _slots(self) -> list[Slot]:
        given = [
            leaf for _, value in self.inputs for leaf in pytree.tree_leaves(value) if isinstance(leaf, Slot)
        ]
        return given + [slot for step in self.steps for slot in step.outs]

    # -- running -------------------------------------------------------------------------------------------

    def run(
        self, layers: nn.Module, inputs: Mapping[str, Any], *, seed: int, step: int, as_one: bool = False
    ) -> Any:
        """With the layers of this process, whole inputs by the names of `self.inputs`; everybody's results, whole."""
        held: dict[int, _Held] = {}
        unread = Counter(id(slot) for each in self.steps for slot, _ in each.reads)
        for name, slots in self.inputs:
            pairs = zip(pytree.tree_leaves(slots), pytree.tree_leaves(inputs[name]), strict=True)
            held |= {id(slot): _Held(slot, value) for slot, value in pairs if isinstance(slot, Slot)}
        for each in self.steps:
            values = [held[id(slot)].read(port) for slot, port in each.reads]
            args, kwargs = _filled(each.call, values)
            spread, path = each.outs[0].spread, each.path
            local = Local(
                module=layers.get_submodule(path) if path is not None else _callable(each.call.target),
                call=each.call,
                group=self.group,
                boxes=spread.boxes,
                wanted=each.wanted,
                way=spread.way,
                sums=spread.sums,
                seed=seed,
                step=step,
                as_one=as_one,
            )
            found = each.rule.run(local, *args, **kwargs)
            tensors = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
            held |= {id(slot): _Held(slot, value) for slot, value in zip(each.outs, tensors, strict=True)}
            unread.subtract(id(slot) for slot, _ in each.reads)
            for slot, _ in each.reads:
                if not unread[id(slot)] and id(slot) not in self._ends:
                    held.pop(id(slot), None)
        ends = self._ends
        leaves = pytree.tree_map_only(Slot, lambda slot: ends[id(slot)](held[id(slot)].own)[0], self.result)
        return pytree.tree_unflatten(leaves, self._spec)


class _Held:
    """An array's part in this process, and what was asked for of others'."""

    def __init__(self, slot: Slot, own: Tensor) -> None:
        self.own = own
        self._moving: Moving | None = slot.move.start(own) if slot.move is not None else None
        self._windows: tuple[Tensor, ...] = ()

    def read(self, port: int) -> Tensor:
        if port < 0:
            return self.own
        if self._moving is not None:
            self._windows, self._moving = self._moving.finish(), None
        return self._windows[port]


def _filled(call: Call, values: Sequence[Tensor]) -> Any:
    return pytree.tree_map_only(Ref, lambda ref: values[ref.index], (call.args, call.kwargs))


def _callable(target: Any) -> Any:
    if not isinstance(target, str):
        return target
    return lambda tensor, *args, **kwargs: getattr(tensor, target)(*args, **kwargs)


def _check_in_place(node: fx.Node, module: nn.Module | None) -> None:
    """An operation in place may change only what nobody else reads: there is more than one copy of it."""
    name = name_of(node.target) or ""
    changes = getattr(module, "inplace", False) or node.kwargs.get("inplace") or name in IN_PLACE
    if not changes and not (isinstance(node.target, str) and name.endswith("_") and not name.endswith("__")):
        return
    source: Any = node.args[0]
    while isinstance(source, fx.Node):
        if len(source.users) > 1:
            raise UsageError(
                f"{node.name!r} changes {source.name!r} in place, which others read too: use the plain operation"
            )
        source = source.args[0] if source.args and name_of(source.target) in VIEWS else None
