"""The partitioned model: an nn.Module with the names of the whole one, its slices of the parameters, and its program.

Every process of a group makes one from the same model and plan, and calls it with the same whole batch. Results are
whole in every process, so that any loss is that of the whole batch. Not responsible for updating parameters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.errors import RunError, UsageError
from syncline.nn.layers import Noise
from syncline.parallel import layer_slicing, recurrent  # noqa: F401 (their rules)
from syncline.parallel.functions import name_of
from syncline.parallel.move import Group, Move, joined
from syncline.parallel.program import Program
from syncline.parallel.rules import rule_of
from syncline.parallel.trace import Inputs, flattened, skeleton, trace
from syncline.parallel.windows import Box, Shape

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
DIGITS = 1e3  # rounding errors of a type that may add up


@dataclass(frozen=True, slots=True)
class Part:
    """Which boxes of a whole model's tensor each rank holds, one after the other."""

    shape: Shape
    boxes: tuple[tuple[Box, ...], ...]

    @property
    def replicated(self) -> bool:
        """Every rank holds all of it; gradients are then parts of a sum."""
        return all(boxes == (Box.whole(self.shape),) for boxes in self.boxes)

    def take(self, rank: int, tensor: Tensor) -> Tensor:
        """A rank's part of the whole tensor, as a copy."""
        base = Box.whole(self.shape)
        parts = [tensor[box.inside(base)] for box in self.boxes[rank]]
        return torch.cat(parts, self._dim(rank)) if len(parts) > 1 else parts[0].clone()

    def own(self, rank: int, value: Any) -> Any:
        """A rank's part of a tensor of the whole shape, as of an optimizer's state; everything else as it is."""
        cut = isinstance(value, Tensor) and tuple(value.shape) == self.shape
        return self.take(rank, value) if cut else value.clone() if isinstance(value, Tensor) else value

    def pairs(self, rank: int, tensor: Tensor, local: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of the whole tensor, and those of a rank's part that belong there."""
        base, parts = Box.whole(self.shape), self.split(rank, local)
        return [(tensor[box.inside(base)], part) for box, part in zip(self.boxes[rank], parts, strict=True)]

    def split(self, rank: int, local: Tensor) -> tuple[Tensor, ...]:
        """A rank's part, box by box."""
        boxes, dim = self.boxes[rank], self._dim(rank)
        return local.split([box.shape[dim] for box in boxes], dim) if len(boxes) > 1 else (local,)

    def local_shape(self, rank: int) -> Shape:
        boxes, dim = self.boxes[rank], self._dim(rank)
        if len(boxes) == 1:
            return boxes[0].shape
        return boxes[0].replaced(dim, (0, sum(box.shape[dim] for box in boxes))).shape

    def _dim(self, rank: int) -> int:
        """Where boxes lie one after the other: the dimension in which they differ."""
        boxes = self.boxes[rank]
        spans = [{box.spans[dim] for box in boxes} for dim in range(len(self.shape))]
        return next((dim for dim, found in enumerate(spans) if len(found) > 1), 0)


def is_layer(module: nn.Module) -> bool:
    """Whether the tracer looks inside no further."""
    torchs = type(module).__module__.startswith("torch.nn") and not isinstance(module, CONTAINERS)
    return rule_of(module) is not None or torchs


class Partitioned(nn.Module):
    """This process's part of a model.

    `plan` maps layers, or patterns of their names, to "data", "model", "spatial" or "rows"; layers without parameters
    go on as what they read was cut, others are data-parallel. `example` is an input, or a tuple of several; only shapes
    matter, and other batch sizes may follow. `grid` are rows and columns of processes for "spatial". With `check` the
    first call compares results and gradients with the whole model's. Dropout draws by window, from `seed`; with `as_one`
    it draws what one process would, from torch's generator, which has to be in the same state in every process.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Any,
        example: Any,
        group: Any = None,
        *,
        grid: tuple[int, int] | None = None,
        batch_dim: int = 0,
        seed: int = 0,
        check: bool = False,
        as_one: bool = False,
    ) -> None:
        super().__init__()
        self.group = group if isinstance(group, Group) else Group(group)
        self.choices = choices_of(plan, model, self.group.size)
        self._grid, self._batch_dim, self._seed, self._step = grid, batch_dim, seed, 0
        self._as_one = as_one
        self._skeleton = (skeleton(model),)  # in a tuple, so that it is no part of this module
        self._whole = (model,) if check else None
        self._programs: dict[Any, Program] = {}
        self.training = model.training
        program = self._program(Inputs(model, *arguments_of(example)))
        program.check_examples()
        self.parts = self._parts_of(model, program)
        self._take_over(model)

    # -- parameters ----------------------------------------------------------------------------------------

    def _parts_of(self, model: nn.Module, program: Program) -> dict[str, Part]:
        """By the whole model's names, parameters and buffers."""
        by_rank = [program.slices(rank) for rank in range(self.group.size)]
        found: dict[str, Part] = {}
        holders: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for name, tensor in own:
                full = f"{path}.{name}" if path else name
                boxes = tuple(_slices_for(slices, full) or (Box.whole(tensor.shape),) for slices in by_rank)
                found[full] = Part(tuple(tensor.shape), boxes)
                other = holders.setdefault(id(tensor), full)
                if found[other] != found[full]:
                    paths = tuple(f"{s.path}." for s in program.steps if s.path is not None)
                    if full.startswith(paths) and other.startswith(paths):
                        raise UsageError(
                            f"{full!r} and {other!r} are one tensor, but cut in different ways: give their layers one way"
                        )
                    found[full] = found[other] = found[full] if full.startswith(paths) else found[other]
        return found

    def _take_over(self, model: nn.Module) -> None:
        """The model's structure with this process's slices; tensors that were shared stay shared."""
        memo: dict[int, Any] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            part = self.parts[name]
            if tensor.is_meta:
                local = torch.empty(part.local_shape(self.group.rank), dtype=tensor.dtype)
            else:
                local = part.take(self.group.rank, tensor.detach())
            learned = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(local, tensor.requires_grad) if learned else local
        mine = copy.deepcopy(model, memo)
        for held in ("_modules", "_parameters", "_buffers"):
            for name, value in getattr(mine, held).items():
                if hasattr(self, name):
                    raise UsageError(
                        f"the model has a {name!r}, as a partitioned model has: give it another name"
                    )
                getattr(self, held)[name] = value
        self._non_persistent_buffers_set |= mine._non_persistent_buffers_set

    def memory(self, rank: int) -> int:
        """Bytes that a rank needs at least: its weights and their gradients, and what backward needs of a batch like the example."""
        program = next(iter(self._programs.values()))
        sizes = (
            sum(box.size for box in self.parts[name].boxes[rank]) * p.element_size() * (1 + p.requires_grad)
            for name, p in self.named_parameters()
        )
        return sum(sizes) + program.kept(rank)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's slices of a whole model's state."""
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        if missing := sorted(own.keys() - state.keys()):
            raise UsageError(
                f"the state lacks {missing[0]!r}{' and others' if len(missing) > 1 else ''}: it is of another model"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self.parts[name].take(self.group.rank, state[name]))

    def gather(self, *, gradients: bool = False) -> dict[str, Tensor]:
        """The whole model's tensors by name, or their (reduced) gradients, in every process; all of the group call it."""
        buffers = () if gradients else self.named_buffers()
        named = dict((*self.named_parameters(), *buffers))
        if gradients:
            named = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
        return {name: self.whole(name, tensor) for name, tensor in named.items()}

    @torch.no_grad()
    def whole(self, name: str, local: Tensor) -> Tensor:
        """A tensor of a parameter's or buffer's whole shape, from every process's part; all of the group call it."""
        part = self.parts[name]
        if part.replicated:
            return local.detach().clone()
        everywhere = [(Box.whole(part.shape),)] * self.group.size
        owned = part.split(self.group.rank, local.detach().contiguous())
        return Move(self.group, part.shape, part.boxes, everywhere)(*owned)[0]

    def reduce_gradients(self) -> None:
        """Add up the gradients of what every process holds; those of slices are whole already."""
        shared = [p for name, p in self.named_parameters() if self.parts[name].replicated and p.requires_grad]
        for dtype in {p.dtype for p in shared}:
            some = [p for p in shared if p.dtype == dtype]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in some])
            for p, piece in zip(some, self.group.add(flat).split([p.numel() for p in some]), strict=True):
                p.grad = piece.view_as(p).clone()

    # -- computing -----------------------------------------------------------------------------------------

    def _program(self, inputs: Inputs) -> Program:
        whole = self.skeleton
        modes = {name: module.training for name, module in self.named_modules()} if self._programs else {}
        for name, module in whole.named_modules():
            module.training = modes.get(name, module.training)
        key = (inputs.key, tuple(module.training for module in whole.modules()))
        if key not in self._programs:
            traced = trace(whole, inputs, leaf=is_layer, batch_dim=self._batch_dim)
            program = Program(traced, whole, self.choices, self.group, self._grid)
            if self._programs:
                self._check_slices(program)
            self._programs[key] = program
        return self._programs[key]

    def _check_slices(self, program: Program) -> None:
        for path, slices in program.slices(self.group.rank).items():
            for name, boxes in slices.items():
                part = self.parts.get(f"{path}.{name}")
                if part is not None and part.boxes[self.group.rank] != boxes:
                    raise UsageError(
                        f"layer {path!r} needs other slices of {name!r} than it was made with: partition the model in the mode, and "
                        "for the sizes, in which it is used"
                    )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._whole is not None:
            (model,), self._whole = self._whole, None
            compare(self, model, args, kwargs)
        self._step += self.training
        return self.run(args, kwargs)

    def run(self, args: Any, kwargs: Any) -> Any:
        """`forward` without a check, as part of the same step."""
        inputs = Inputs(self.skeleton, args, kwargs)
        program = self._program(inputs)
        values: dict[str, Any] = {f"placeholder {name}": tensor for name, tensor in inputs.tensors.items()}
        for name, _ in program.inputs:
            kind, _, target = name.partition(" ")
            if kind == "get_attr":
                values[name] = _found(self, self.skeleton, target)
        return program.run(self, values, seed=self._seed, step=self._step, as_one=self._as_one)

    @property
    def skeleton(self) -> nn.Module:
        """The whole model with its parameters and buffers on meta."""
        return self._skeleton[0]


def _slices_for(by_layer: Mapping[str, Mapping[str, tuple[Box, ...]]], name: str) -> tuple[Box, ...] | None:
    """A tensor's boxes, named by its own layer or by one above it."""
    parts = name.split(".")
    for cut in range(len(parts)):
        boxes = by_layer.get(".".join(parts[:cut]), {}).get(".".join(parts[cut:]))
        if boxes is not None:
            return boxes
    return None


def _found(module: nn.Module, other: nn.Module, path: str) -> Any:
    """A parameter or buffer of this process, or a constant of the trace."""
    for root in (module, other):
        value: Any = root
        for part in path.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor) and not value.is_meta:
            return value
    raise UsageError(f"{path!r} has no value in this process")


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An input, several in a tuple, or named ones in a mapping."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def choices_of(plan: Any, model: nn.Module, size: int) -> dict[str, str]:
    """Of a Plan, which has to be for this model and group, of a mapping, or of the word "data"."""
    choices = getattr(plan, "choices", plan)
    if getattr(plan, "group", size) != size:
        raise UsageError(f"the plan is for a group of {plan.group}, this one has {size}")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    counted: set[int] = set()  # shared parameters count with their first layer
    for name, count in getattr(plan, "layers", {}).items():
        module = modules.get(name.partition("#")[0])
        those = module.parameters() if module is not None else parameters.get(name, ())
        new = [p for p in ([those] if isinstance(those, Tensor) else those) if id(p) not in counted]
        counted.update(map(id, new))
        held = sum(parameter.numel() for parameter in new)
        if count != held:
            raise UsageError(
                f"the plan is for another model: its layer {name!r} has {count:,} parameters, here it has {held:,}"
            )
    if choices in (None, "data"):
        return {}
    if not isinstance(choices, Mapping):
        raise UsageError(f"a plan maps layers to ways, as {{'fc*': 'model'}}, or is 'data'; got {plan!r}")
    return dict(choices)


def partition(
    model: nn.Module, plan: Any = None, example: Any = None, group: Any = None, **options: Any
) -> Partitioned:
    """This process's part of a model, for training and inference; options as of `Partitioned`.

    A Plan knows the shapes of its example. Without a group: the one that this process has joined as a seat, else torch's default one if there is one.
    """
    own = joined()
    plan = own.plan if plan is None and own is not None else plan
    example = getattr(plan, "example", None) if example is None else example
    if example is None:
        raise UsageError("partition: give an example of the model's input, or a Plan, which knows its own")
    if group is None:
        group = own.group if own is not None else dist.group.WORLD if dist.is_initialized() else None
    if own is not None:
        options.setdefault("seed", own.seed)
    return Partitioned(model, plan, example, group, **options)


# -- the check -------------------------------------------------------------------------------------------------


def compare(mine: Partitioned, model: nn.Module, args: Any, kwargs: Any) -> None:
    """Results and gradients with those of the whole model, nothing dropped; raises where they differ, in all processes alike."""
    whole = copy.deepcopy(model)
    state = {name: tensor.clone() for name, tensor in mine.named_buffers()}
    modes = {name: module.training for name, module in mine.named_modules()}
    program = mine._program(Inputs(mine.skeleton, args, kwargs))
    if any(name_of(step.call.target) == "dropout" for step in program.steps):
        mine.eval()  # in which a function drops nothing
    for name, module in whole.named_modules():
        module.training = mine.get_submodule(name).training
    with _nothing_dropped(mine), _nothing_dropped(whole), torch.enable_grad():
        ours, theirs = _alike(mine.run(args, kwargs), whole(*args, **kwargs))
        gradients, expected = _gradients(mine, ours), _gradients(whole, theirs)
    for name, tensor in mine.named_buffers():
        tensor.copy_(state[name])
    for name, module in mine.named_modules():
        module.training = modes[name]
    results = zip(ours, theirs, strict=True)
    pairs = {f"result {i}": (a.detach(), b.detach()) for i, (a, b) in enumerate(results)}
    largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    for name, gradient in gradients.items():
        part = mine.parts[name]
        total = mine.group.add(gradient) if part.replicated else gradient
        pairs[f"the gradient of {name!r}"] = (total, part.take(mine.group.rank, expected[name]))
    off = torch.tensor([_off(a, b, 0.0 if "result" in name else largest) for name, (a, b) in pairs.items()])
    for name, found in zip(pairs, mine.group.add(off).tolist(), strict=True):
        if not found <= mine.group.size:
            raise RunError(
                f"check: {name} of the partitioned model is off by {found:.3g} times what rounding explains: "
                "a layer, or the rule of its type, is not what it is said to be"
            )


def _off(ours: Tensor, theirs: Tensor, scale: float) -> float:
    """The largest difference, in what rounding explains."""
    if not theirs.numel():
        return 0.0
    scale = max(scale, float(theirs.abs().max()), 1e-30)
    rounding = DIGITS * torch.finfo(ours.dtype).eps * scale if ours.is_floating_point() else 0.5
    return float((ours.to(theirs.device) - theirs).abs().max()) / rounding


def _alike(ours: Any, theirs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of two results. Raise unless structures, shapes, types and plain values agree."""
    (mine, own), (found, other) = flattened("the result", ours), flattened("the result", theirs)
    for at, (one, two) in enumerate(zip(mine, found, strict=False)):
        if _shown(one) != _shown(two):
            words = f"result {at} of the partitioned model is {_shown(one)}, the model's is {_shown(two)}"
            raise RunError(f"check: {words}")
    if own != other:
        words = f"the partitioned model returns {own}, the model {other}"
        raise RunError(f"check: {' '.join(words.split())}")
    return [x for x in mine if isinstance(x, Tensor)], [x for x in found if isinstance(x, Tensor)]


def _shown(leaf: Any) -> str:
    """Describe a leaf: shape and type of a tensor, a plain value, or the type of an object."""
    if isinstance(leaf, Tensor):
        return f"a {leaf.dtype} of shape {list(leaf.shape)}"
    return (
        repr(leaf)
        if leaf is None or isinstance(leaf, bool | int | float | str)
        else f"a {type(leaf).__name__}"
    )


def _gradients(module: nn.Module, results: Sequence[Tensor]) -> dict[str, Tensor]:
    """Of the sum of all results, each place with a weight of its own."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    floats = [result for result in results if result.requires_grad]
    if not floats or not named:
        return {}
    weights = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view_as(t) for t in floats]
    found = torch.autograd.grad(floats, list(named.values()), weights, allow_unused=True)
    pairs = zip(named.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


@contextlib.contextmanager
def _nothing_dropped(module: nn.Module) -> Iterator[None]:
    named = [(part, name) for part in module.modules() for name in ("p", "dropout")]
    named += [(part, "amount") for part in module.modules() if isinstance(part, Noise)]
    given = [(part, name, getattr(part, name, None)) for part, name in named]
    kept = [(part, name, value) for part, name, value in given if isinstance(value, float)]
    for part, name, _ in kept:
        setattr(part, name, 0.0)
    try:
        yield
    finally:
        for part, name, value in kept:
            setattr(part, name, value)
