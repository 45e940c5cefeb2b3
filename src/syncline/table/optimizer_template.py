"""A user's optimizer, cut for the shards and put together again (M5).

The factory runs once on the real parameters; `OptimizerTemplate` is that object without its tensors: class,
options, attributes, state. `build` makes a shard's optimizer over its pieces, `merge` and `split` turn the shards' states
into plain PyTorch's `state_dict` and back.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import LayoutError
from syncline.table.layout import Layout, Part, Piece
from syncline.table.nested_optimizers import Kept, attributes, look, packed, parameters_of, take_up, unpacked

ELEMENTWISE: tuple[type, ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
)
SCALE_INVARIANT = tuple(kind for kind in ELEMENTWISE if kind is not torch.optim.SGD)

TENSOR = "tensor"  # marks an option that is one, with its type
Options = list[dict[str, Any]]
PieceState = dict[tuple[int, int, int], dict[str, Any]]  # (entry, start, stop) -> state


@dataclass(frozen=True)
class OptimizerTemplate:
    """All of an optimizer but its tensors; state by entry."""

    kind: type[torch.optim.Optimizer]
    attributes: dict[str, Any]
    options: Options
    state: dict[int, dict[str, Any]]
    own: Options = field(default_factory=list)  # options that its steps have changed, where it goes on
    whole: bytes | None = None  # where it holds parameters or optimizers: all of it
    kept: Kept | None = None  # and its state, where it goes on

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerTemplate:
        held = look(optimizer)
        held.refuse(optimizer)
        for each in (optimizer, *held.optimizers):
            refuse_unsupported(each)
        if held.wraps:
            return cls(type(optimizer), {}, group_options(optimizer), {}, whole=packed(optimizer))
        index = {id(parameter): i for i, parameter in enumerate(parameters_of(optimizer))}
        if other := homeless(optimizer):
            raise LayoutError(
                f"{type(optimizer).__name__} begins with a state under {other!r}, which is no parameter of its groups and "
                "belongs to no shard; keep it in a parameter's state, in a group, or use topology='allreduce'"
            )
        state = {
            index[id(p)]: {key: to_host(value) for key, value in entry.items()}
            for p, entry in optimizer.state.items()
            if entry
        }
        return cls(type(optimizer), attributes(optimizer), group_options(optimizer), state)

    @property
    def cuttable(self) -> bool:
        return self.kind in ELEMENTWISE

    def build(
        self, part: Part, layout: Layout, views: Sequence[Tensor]
    ) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        """An optimizer of the same kind over a shard's pieces, and its parameters in their order."""
        parameters = [
            nn.Parameter(view.detach(), requires_grad=view.is_floating_point() or view.is_complex())
            for view in views
        ]
        if self.whole is not None:  # one shard has all its parameters, each in one piece
            optimizer = unpacked(self.whole, dict(enumerate(parameters)))
            if self.kept is not None:
                take_up(optimizer, self.kept, parameters)
                owns = self.own or [{} for _ in self.options]
                for group, option, own in zip(optimizer.param_groups, self.options, owns, strict=True):
                    told = {key: value for key, value in option.items() if key not in own}
                    group.update(own_options(told, group["params"]))
            return optimizer, parameters
        by_entry: dict[int, list[nn.Parameter]] = defaultdict(list)
        state: dict[nn.Parameter, Any] = defaultdict(dict)
        for piece, parameter in zip(part.pieces, parameters, strict=True):
            by_entry[piece.entry].append(parameter)
            if piece.entry in self.state:
                state[parameter] = beside(parameter, cut_state(self.state[piece.entry], piece, layout))
        groups = [
            {"params": [p for i in indices for p in by_entry[i]], **options}
            for indices, options in zip(layout.groups, self.options, strict=True)
        ]
        for group, own in zip(groups, self.own, strict=False):
            group.update(own)
        groups = [own_options(group, parameters) | {"params": group["params"]} for group in groups]
        optimizer = self.kind.__new__(self.kind)
        own = copy.deepcopy(self.attributes)  # shards of one process share nothing
        optimizer.__setstate__({**own, "state": state, "param_groups": groups})
        return optimizer, parameters


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's step; for torch's own without the wrappers that profile it and switch gradients off.

    They take half of a small step's time. `no_grad` is entered here instead; the arithmetic is the same.
    """
    if not is_torchs(optimizer):
        return optimizer.step
    inner = inspect.unwrap(type(optimizer).step)

    def step() -> None:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            inner(optimizer)
        finally:
            torch._C._set_grad_enabled(before)

    return step


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """One of PyTorch's own, each of which works on every parameter by itself."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def homeless(optimizer: torch.optim.Optimizer) -> Any:
    """A key of its state that is no parameter, if there is one."""
    return next((key for key in optimizer.state if not isinstance(key, Tensor)), None)


def refuse_unsupported(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise LayoutError(
            "LBFGS calls its closure several times in one step and cannot run on a server's shard; "
            "use a first-order optimizer such as SGD, Adam or Adagrad"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise LayoutError(
            "SparseAdam needs sparse gradients, which do not travel; use Adam with sparse=False"
        )


def group_options(optimizer: torch.optim.Optimizer) -> Options:
    """Return the options of every group without its parameters; tensors are copied to the host."""
    return _options(optimizer.param_groups)


def _options(groups: Iterable[dict[str, Any]]) -> Options:
    return [
        {key: own_option(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
    ]


def own_option(value: Any, device: torch.device | str = "cpu") -> Any:
    """Copy the tensors of an option to the device: schedulers and optimizers write into them."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if type(value) in (list, tuple):
        return type(value)(own_option(each, device) for each in value)
    return value


def own_options(options: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Copy options for a group of these parameters; a capturable optimizer has its tensors beside them."""
    beside_them = options.get("capturable") and len(parameters) > 0
    device: torch.device | str = parameters[0].device if beside_them else "cpu"
    return {key: own_option(value, device) for key, value in options.items()}


def to_plain(value: Any) -> Any:
    """Return JSON's form of an option; a tensor of one element keeps its type and shape."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return {
            TENSOR: str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "value": value.item(),
        }
    return [to_plain(each) for each in value] if isinstance(value, list | tuple) else value


def from_plain(value: Any) -> Any:
    """Return the option of JSON's form."""
    if isinstance(value, dict) and TENSOR in value:
        return torch.full(value["shape"], value["value"], dtype=getattr(torch, value[TENSOR]))
    return [from_plain(each) for each in value] if isinstance(value, list) else value


def to_host(value: Any) -> Any:
    """A copy there, of a tensor."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def cut_state(state: dict[str, Any], piece: Piece, layout: Layout) -> dict[str, Any]:
    """The part of an entry's state that belongs to a piece; what is not parameter-shaped is copied."""
    entry = layout.parameters.entries[piece.entry]
    cut = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            shaped = tuple(value.shape) == entry.shape and not piece.whole
            value = value.reshape(-1)[piece.start : piece.stop].clone() if shaped else value.clone()
        cut[key] = value
    return cut


def beside(parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """State shaped like the parameter on its device; the rest, such as counts of steps, where it is."""
    return {
        key: value.to(parameter.device)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def piece_states(
    optimizer: torch.optim.Optimizer, part: Part, parameters: Sequence[nn.Parameter]
) -> PieceState:
    """A shard's optimizer state by piece; no tensor is copied."""
    return {
        (piece.entry, piece.start, piece.stop): dict(state)
        for piece, parameter in zip(part.pieces, parameters, strict=True)
        if (state := optimizer.state.get(parameter))
    }


def merge(layout: Layout, options: Options, shards: Sequence[PieceState]) -> dict[str, Any]:
    """Plain PyTorch's `state_dict` from the states of all shards."""
    by_entry: dict[int, list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    for pieces in shards:
        for (entry, start, stop), state in pieces.items():
            by_entry[entry].append((start, stop, state))
    numbers = {entry: number for number, entry in enumerate(i for group in layout.groups for i in group)}
    joined: dict[int, dict[str, Any]] = {}
    for entry, parts in sorted(by_entry.items()):
        parts.sort(key=lambda part: part[0])
        lengths, states = [stop - start for start, stop, _ in parts], [state for *_, state in parts]
        joined[numbers[entry]] = join_states(layout.parameters.entries[entry].shape, lengths, states)
    groups = []
    for indices, option in zip(layout.groups, options, strict=True):
        groups.append({**option, "params": [numbers[index] for index in indices]})
    return {"state": joined, "param_groups": groups}


def join_states(
    shape: Sequence[int], lengths: Sequence[int], states: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """An entry's state from that of its pieces, in order: what has the pieces' lengths is joined, other state is the first's."""
    joined = dict(states[0])
    for key in joined if len(states) > 1 else ():
        values = [state[key] for state in states]
        if [v.shape if isinstance(v, Tensor) else None for v in values] == [(n,) for n in lengths]:
            joined[key] = torch.cat(values).view(*shape)
    return joined


def split(layout: Layout, state_dict: dict[str, Any]) -> tuple[Options, dict[int, dict[str, Any]]]:
    """Options and state by entry from a plain `state_dict` (the inverse of `merge`)."""
    groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    mine = [len(group) for group in layout.groups]
    if sizes != mine:
        raise LayoutError(f"the state_dict has parameter groups of sizes {sizes}, this optimizer has {mine}")
    state = {}
    for indices, group in zip(layout.groups, groups, strict=True):
        for index, number in zip(indices, group["params"], strict=True):
            if entry := state_dict["state"].get(number):
                state[index] = {key: to_host(value) for key, value in entry.items()}
    return _options(groups), state
