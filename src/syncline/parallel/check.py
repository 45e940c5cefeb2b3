"""The check of a partitioned model: once, its results and gradients against those of the whole model.

All processes decide alike, so that none waits for one that has raised. Not responsible for what to do about it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncline.errors import RunError

DIGITS = 1e3  # rounding errors of a type that may add up


def compare(mine: Any, model: nn.Module, args: Any, kwargs: Any) -> None:
    """Of a Partitioned, with nothing dropped; raises where they differ."""
    whole = copy.deepcopy(model)
    state = {name: tensor.clone() for name, tensor in mine.named_buffers()}
    modes = {name: module.training for name, module in mine.named_modules()}
    if mine.drops(args, kwargs):  # by a function: in evaluation it does not
        mine.eval()
    for name, module in whole.named_modules():
        module.training = mine.get_submodule(name).training
    with _nothing_dropped(mine), _nothing_dropped(whole), torch.enable_grad():
        ours, theirs = _tensors(mine.run(args, kwargs)), _tensors(whole(*args, **kwargs))
        gradients, expected = _gradients(mine, ours), _gradients(whole, theirs)
    for name, tensor in mine.named_buffers():
        tensor.copy_(state[name])
    for name, module in mine.named_modules():
        module.training = modes[name]
    pairs = {
        f"result {i}": (a.detach(), b.detach()) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
    }
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


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


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
    named = [
        (part, name, getattr(part, name, None)) for part in module.modules() for name in ("p", "dropout")
    ]
    kept = [(part, name, value) for part, name, value in named if isinstance(value, float)]
    for part, name, _ in kept:
        setattr(part, name, 0.0)
    try:
        yield
    finally:
        for part, name, value in kept:
            setattr(part, name, value)
