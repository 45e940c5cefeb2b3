"""Recurrent layers and cells cut by examples or units: results and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.parallel.rules import Ref, rule_of
from syncline.parallel.trace import Array
from tests.unit.parallel.calls import PARTS, arrays, call_of, local_of
from tests.unit.parallel.test_layer_slicing import SIZES, Model, check_same, numbers, seats


@pytest.fixture(autouse=True, scope="module")
def _groups_end() -> Iterator[None]:
    yield
    seats.close()


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 6, 2, batch_first=True),
    "gru": lambda: nn.GRU(4, 6, batch_first=True),
    "rnn": lambda: nn.RNN(4, 6, nonlinearity="relu", bias=False, batch_first=True),
}


CELLS: dict[str, Callable[[], nn.Module]] = {
    "lstm-cell": lambda: nn.LSTMCell(4, 6),
    "gru-cell": lambda: nn.GRUCell(4, 6),
    "rnn-cell": lambda: nn.RNNCell(4, 6),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["data", "model"])
@pytest.mark.parametrize("name", [*RECURRENT, *CELLS])
def test_recurrent_layers_equal_one_process(name: str, way: str, size: int) -> None:
    shape = (5, 3, 4) if name in RECURRENT else (5, 4)
    check_same(lambda: Model({**RECURRENT, **CELLS}[name]()), {"layer": way}, (numbers(*shape),), size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["data", "model"])
def test_sequences_with_their_examples_second_and_a_given_state_equal_one_process(
    way: str, size: int
) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.cell, self.out = nn.LSTM(4, 6, 2), nn.LSTMCell(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
            found, (h, c) = self.lstm(x, (h, c))
            state = self.cell(found[-1])
            state = self.cell(found[0], state)
            return self.out(state[0]), c

    inputs = (numbers(3, 5, 4), numbers(2, 5, 6, seed=2), numbers(2, 5, 6, seed=3))
    plan = {"lstm": way, "cell": way}
    check_same(Tagger, plan, inputs, size, batch_dim=1)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_units_gates_are_cut_with_it(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x, state = torch.randn(2, 4), torch.randn(2, 7)
    module: Any = kind(4, 7)
    given: Any = (state, 2 * state) if kind is nn.LSTMCell else state
    whole = torch.utils._pytree.tree_leaves(module(x, given))
    ins = arrays([x, *torch.utils._pytree.tree_leaves(given)])
    args = (Ref(0), (Ref(1), Ref(2)) if kind is nn.LSTMCell else Ref(1))
    call = call_of(kind, ins, arrays(whole), args=args, module=module, way="model")
    rule: Any = rule_of(module)
    outs = rule.place(call)
    for rank in range(PARTS):
        mine: Any = kind(4, 7)
        for name, boxes in rule.slices(call, outs, rank).items():
            value = getattr(module, name)
            setattr(
                mine,
                name,
                nn.Parameter(torch.cat([value[low:high] for (low, high), *_ in (b.spans for b in boxes)])),
            )
        low, high = outs[0].boxes[rank].spans[-1]
        wants = [want.box for want in rule.wants(call, outs, rank)]
        own: Any = (state, 2 * state[:, low:high]) if kind is nn.LSTMCell else state
        found = rule.run(local_of(call, outs[0], rank, wants, mine), x, own)
        for part, all_ in zip(torch.utils._pytree.tree_leaves(found), whole, strict=True):
            torch.testing.assert_close(part, all_[:, low:high])


@pytest.mark.parametrize("options", [{"bidirectional": True}, {"proj_size": 2}])
def test_units_that_see_others_are_not_cut(options: dict[str, Any]) -> None:
    module = nn.LSTM(4, 6, **options)
    array = Array((3, 2, 4), 1)
    call = call_of(nn.LSTM, [array], [array], module=module, way="model")
    with pytest.raises(UsageError, match="cannot be cut as 'model': it is bidirectional, projected"):
        rule_of(module).place(call)  # type: ignore[union-attr]
