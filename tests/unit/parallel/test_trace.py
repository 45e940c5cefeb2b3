"""Traces: one pass without values, whose results have the shapes and strides of torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.errors import UsageError
from syncline.parallel.module import is_layer
from syncline.parallel.trace import Inputs, skeleton, trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_traced_results_are_like_torchs_own(dtype: torch.dtype) -> None:
    kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU)
    model = nn.Sequential(nn.Linear(6, 8), *(kind() for kind in kinds), nn.Linear(8, 3, bias=False)).to(dtype)
    x = torch.empty(4, 5, 6, dtype=dtype, device="meta")
    traced = trace(skeleton(model), Inputs(model, (x,), {}), leaf=is_layer)
    values = [node.meta["value"] for node in traced.graph.nodes if node.op == "call_module"]
    for layer, value in zip(skeleton(model), values, strict=True):
        x = layer(x)
        assert (value.shape, value.dtype, value.stride()) == (x.shape, x.dtype, x.stride())
    with pytest.raises(UsageError, match="cannot be traced"):
        trace(skeleton(model), Inputs(model, (torch.empty(4, 7, dtype=dtype),), {}), leaf=is_layer)
