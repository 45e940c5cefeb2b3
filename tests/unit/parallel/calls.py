"""Calls without a group: every rank's windows of a layer or function, computed one after the other from slices of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.parallel.move import Group
from syncline.parallel.rules import Call, Local, Ref, Rule, Spread, whole
from syncline.parallel.trace import Array
from syncline.parallel.windows import Box, cut, even

PARTS = 3


def arrays(tensors: Sequence[Tensor], batch: int | None = 0) -> list[Array]:
    return [Array(tuple(tensor.shape), batch, 1, tensor.dtype) for tensor in tensors]


def lying(array: Array, dim: int | None, way: str = "model") -> Spread:
    """Cut along this dimension over all ranks."""
    if dim is None:
        return whole(array, PARTS)
    return Spread(cut(array.shape, dim, even(array.shape[dim], PARTS)), way)


def call_of(
    target: Any,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    *,
    spreads: Sequence[Spread] = (),
    args: Sequence[Any] | None = None,
    module: nn.Module | None = None,
    **changes: Any,
) -> Call:
    """Of all inputs in their order, unless `args` say it otherwise."""
    return Call(
        name="it",
        target=target,
        module=module,
        args=tuple(args) if args is not None else tuple(map(Ref, range(len(inputs)))),
        inputs=list(inputs),
        spreads=list(spreads) or [whole(array, PARTS) for array in inputs],
        outputs=list(outputs),
        **{"kwargs": {}, "parts": PARTS, "batch": inputs[0].shape[0], "grid": (3, 1), "way": None, **changes},
    )


def local_of(call: Call, spread: Spread, rank: int, wanted: list[Box], module: Any) -> Local:
    group = Group()
    group.rank, group.size = rank, PARTS
    sums = spread.sums
    return Local(
        module=module, call=call, group=group, boxes=spread.boxes, wanted=wanted, way=spread.way, sums=sums
    )


def put_together(rule: Rule, call: Call, inputs: Sequence[Tensor], result: Tensor, module: Any) -> Tensor:
    """What all ranks compute from what they want, at its places in the result; parts are added."""
    (spread,) = rule.place(call)
    found = torch.full_like(result, 0.0 if spread.sums else float("nan"))
    for rank in range(PARTS):
        wants = [want.box for want in rule.wants(call, [spread], rank)]
        own = [x[box.inside(Box.whole(x.shape))] for x, box in zip(inputs, wants, strict=True)]
        args = torch.utils._pytree.tree_map_only(Ref, lambda ref, own=own: own[ref.index], call.args)
        part = rule.run(local_of(call, spread, rank, wants, module), *args, **call.kwargs)
        place = spread.boxes[rank].inside(Box.whole(result.shape))
        found[place] = found[place] + part if spread.sums else part
    return found
