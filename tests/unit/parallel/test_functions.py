"""Functions on slices: what each rank computes of its windows is, put together, the function of the whole."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncline.errors import UsageError
from syncline.parallel.functions import function_rule, name_of
from syncline.parallel.rules import Ref, model_dim
from tests.unit.parallel.calls import PARTS, arrays, call_of, lying, put_together

X = Ref(0)
# name -> (function, arguments, shapes, dimension of the first input that is cut, way that the result lies in)
CASES: dict[str, tuple[Callable[..., Tensor], list[Any], list[tuple[int, ...]], int, str]] = {
    "add broadcast": (torch.add, [X, Ref(1)], [(4, 6, 5), (6, 1)], 1, "model"),
    "softmax beside": (torch.softmax, [X, 2], [(4, 6, 5)], 1, "model"),
    "softmax along": (torch.softmax, [X, 1], [(4, 6, 5)], 1, "data"),
    "sum along": (torch.sum, [X, 1], [(4, 6, 5)], 1, "whole"),
    "sum of all": (torch.sum, [X], [(4, 6)], 1, "whole"),
    "mean along": (torch.mean, [X, 1], [(4, 7, 5)], 1, "whole"),
    "mean beside": (torch.mean, [X, 2], [(4, 7, 5)], 1, "model"),
    "permute": (torch.permute, [X, (2, 0, 1)], [(4, 6, 5)], 1, "model"),
    "transpose": (torch.transpose, [X, 1, 2], [(4, 6, 5)], 1, "model"),
    "matmul rows": (torch.matmul, [X, Ref(1)], [(2, 7, 5), (5, 3)], 1, "model"),
    "matmul along": (torch.matmul, [X, Ref(1)], [(4, 6), (6, 3)], 1, "data"),
    "linear": (F.linear, [X, Ref(1)], [(4, 6, 5), (7, 5)], 1, "model"),
    "stack": (torch.stack, [[X, Ref(1)], 1], [(4, 6), (4, 6)], 1, "model"),
    "cat along": (torch.cat, [[X, Ref(1)], 1], [(4, 6), (4, 5)], 1, "model"),
    "cat beside": (torch.cat, [[X, Ref(1)], 2], [(4, 6, 2), (4, 6, 3)], 1, "model"),
    "flatten": (torch.flatten, [X, 1], [(4, 6, 5)], 1, "model"),
    "getitem": (operator.getitem, [X, (slice(None), slice(None), 2)], [(4, 6, 5)], 1, "model"),
    "getitem along": (operator.getitem, [X, (slice(None), slice(1, 4))], [(4, 6, 5)], 1, "data"),
    "layer_norm": (F.layer_norm, [X, (5,)], [(4, 6, 5)], 1, "model"),
    "einsum": (torch.einsum, ["bij,bjk->bik", X, Ref(1)], [(2, 6, 5), (2, 5, 4)], 1, "model"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_of_slices_is_a_slice_of_the_function(name: str) -> None:
    function, args, shapes, dim, way = CASES[name]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    filled = torch.utils._pytree.tree_map_only(Ref, lambda ref: inputs[ref.index], args)
    result = function(*filled)
    ins = arrays(inputs)
    if name in ("add broadcast", "linear", "matmul rows", "matmul along"):
        ins[1:] = arrays(inputs[1:], None)  # a weight has no examples
    batch = {"sum of all": None, "permute": 1}.get(name, 0)
    spreads = [lying(ins[0], dim), *(lying(each, None) for each in ins[1:])]
    call = call_of(function, ins, arrays([result], batch), spreads=spreads, args=args)
    rule = function_rule(call)
    assert rule.place(call)[0].way == way
    torch.testing.assert_close(put_together(rule, call, inputs, result, function), result)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
def test_a_window_of_a_reshaped_array_comes_from_the_input_that_covers_it(
    factors: list[int], data: st.DataObject
) -> None:
    shape = (3, *factors)
    cuts = data.draw(st.sets(st.integers(1, len(factors))))
    new, product = [3], 1
    for at, factor in enumerate(data.draw(st.permutations(factors)), 1):
        product *= factor
        if at in cuts or at == len(factors):
            new.append(product)
            product = 1
    dim = data.draw(st.integers(0, len(shape) - 1))
    x = torch.randn(shape)
    result = x.reshape(new)
    (array,), (out,) = arrays([x]), arrays([result])
    big = new[model_dim(tuple(new))] >= PARTS
    way = data.draw(st.sampled_from([None, "model"] if big else [None]))  # as a plan cuts the result
    spreads = [lying(array, None if way else dim)]
    call = call_of("reshape", [array], [out], spreads=spreads, args=[Ref(0), *new], way=way)
    assert torch.equal(put_together(function_rule(call), call, [x], result, None), result)


@pytest.mark.parametrize(
    "target, words",
    [
        (torch.bernoulli, r"'it' \(function\) draws random numbers \(bernoulli\), others in every process"),
        ("normal_", r"draws random numbers \(normal_\)"),
        (F.batch_norm, "normalises by the examples at hand, and changes buffers"),
    ],
)
def test_what_is_wrong_on_a_slice_is_refused_by_name(target: Any, words: str) -> None:
    (array,) = arrays([torch.zeros(4, 6)])
    with pytest.raises(UsageError, match=words):
        function_rule(call_of(target, [array], [array]))


def test_what_nobody_knows_is_computed_whole_and_not_cut() -> None:
    def sum(x: Tensor) -> Tensor:
        return x

    assert name_of(sum) is None and name_of(torch.sum) == "sum" and name_of("view") == "view"
    (array,) = arrays([torch.zeros(6, 6)])
    call = call_of(sum, [array], [array], spreads=[lying(array, 1)])
    assert function_rule(call).place(call)[0].way == "whole"
    call.way = "model"
    with pytest.raises(UsageError, match="cannot be cut as 'model': it is not known what it does"):
        function_rule(call).place(call)


def test_an_operation_along_what_a_plan_cuts_is_refused() -> None:
    (array,) = arrays([torch.zeros(4, 6)])
    call = call_of(torch.softmax, [array], [array], args=[Ref(0), 1], way="model")
    with pytest.raises(UsageError, match="works along a dimension that 'model' cuts: give it another way"):
        function_rule(call).place(call)


@pytest.mark.parametrize(
    "old, new", [((3, 2, 3, 2), (3, 3, 2, 2)), ((2, 4, 6), (2, 6, 4, 1)), ((2, 3, 5), (2, 5, 3, 1))]
)
def test_a_cut_that_falls_between_places_of_the_input_reads_a_whole_piece_more(
    old: tuple[int, ...], new: tuple[int, ...]
) -> None:
    x = torch.randn(old)
    result = x.reshape(new)
    call = call_of("reshape", arrays([x]), arrays([result]), args=[Ref(0), *new], way="model")
    assert torch.equal(put_together(function_rule(call), call, [x], result, None), result)
