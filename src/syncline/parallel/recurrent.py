"""Recurrent layers and cells with their hidden units cut: every step gathers the state, gates are sliced alike.

Not responsible for cutting sequences by examples: that needs nothing special.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.parallel.functions import drop
from syncline.parallel.move import Move
from syncline.parallel.rules import Call, Local, Rule, Slices, Spread, Want, along, own_code, register
from syncline.parallel.windows import Box, cut


def _gates(module: nn.Module) -> int:
    lstm, gru = isinstance(module, nn.LSTM | nn.LSTMCell), isinstance(module, nn.GRU | nn.GRUCell)
    return 4 if lstm else 3 if gru else 1


def _advance(
    module: Any, gates: Tensor, recurrent: Tensor, own: Tensor, cell: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """One step of these units: from the inputs' and the state's part of the gates; `own` are their former states."""
    count = _gates(module)
    if count == 4:
        into, forget, new, out = (gates + recurrent).chunk(4, -1)
        assert cell is not None
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
        return torch.sigmoid(out) * torch.tanh(cell), cell
    if count == 3:
        (ri, zi, ni), (rh, zh, nh) = gates.chunk(3, -1), recurrent.chunk(3, -1)
        new, keep = torch.tanh(ni + torch.sigmoid(ri + rh) * nh), torch.sigmoid(zi + zh)
        return (1 - keep) * new + keep * own, None
    return (torch.relu if module.nonlinearity == "relu" else torch.tanh)(gates + recurrent), None


class _Cell(Rule):
    """A step: the whole input and state are read, the own units of an LSTM's cell."""

    ways = ("data", "model")

    def place(self, call: Call) -> list[Spread]:
        self.check_way(call)
        if call.way != "model":
            return self.data(call)
        return [along(call, array, len(array.shape) - 1) for array in call.outputs]

    def wants(self, call: Call, outs: Sequence[Spread], rank: int) -> list[Want]:
        if outs[0].way != "model":
            return super().wants(call, outs, rank)
        units, boxes = outs[0].boxes[rank].spans[-1], [Box.whole(array.shape) for array in call.inputs]
        return [Want(box) for box in boxes[:2]] + [Want(box.replaced(-1, units)) for box in boxes[2:]]

    def slices(self, call: Call, outs: Sequence[Spread], rank: int) -> Slices:
        """The same units of every gate; gates lie one after the other."""
        if outs[0].way != "model":
            return {}
        module: Any = call.module
        low, high = outs[0].boxes[rank].spans[-1]
        starts = [gate * module.hidden_size for gate in range(_gates(module))]
        return {
            name: tuple(Box.whole(tensor.shape).replaced(0, (at + low, at + high)) for at in starts)
            for name, tensor in module.named_parameters()
        }

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        if local.way != "model":
            return super().run(local, *args, **kwargs)
        module, x, (low, high) = local.module, args[0], local.window.spans[-1]
        state = args[1] if len(args) > 1 else kwargs.get("hx")
        if state is None:
            hidden, cell = x.new_zeros(len(x), module.hidden_size), x.new_zeros(len(x), high - low)
        else:
            hidden, cell = state if isinstance(state, tuple) else (state, None)
        gates = F.linear(x, module.weight_ih, module.bias_ih)
        recurrent = F.linear(hidden, module.weight_hh, module.bias_hh)
        hidden, cell = _advance(module, gates, recurrent, hidden[..., low:high], cell)
        return (hidden, cell) if isinstance(module, nn.LSTMCell) else hidden


class _Recurrent(_Cell):
    """A whole sequence. The inputs' part of the gates is one product; states are gathered once a step."""

    def place(self, call: Call) -> list[Spread]:
        module: Any = call.module
        special = module.bidirectional or module.proj_size or len(call.inputs[0].shape) != 3
        if call.way == "model" and special:
            raise call.refuse(
                "cannot be cut as 'model': it is bidirectional, projected or without examples; use 'data'"
            )
        return super().place(call)

    def run(self, local: Local, *args: Any, **kwargs: Any) -> Any:
        if local.way != "model":
            return own_code(local, *args, **kwargs)
        module, x = local.module, args[0]
        x = x.transpose(0, 1) if module.batch_first else x  # (T, N, F)
        state = args[1] if len(args) > 1 else kwargs.get("hx")
        layers, units = module.num_layers, local.window.shape[-1]
        hidden, cell = state if isinstance(state, tuple) else (state, None)
        hidden = x.new_zeros(layers, x.shape[1], module.hidden_size) if hidden is None else hidden
        cell = x.new_zeros(layers, x.shape[1], units) if cell is None else cell
        ends = []
        for number in range(layers):
            out, x, end = self._layer(local, number, x, hidden[number], cell[number])
            ends.append(end)
            if module.training and number + 1 < layers:
                shape = tuple(x.shape)
                x = drop(local, x, module.dropout, Box.whole(shape), shape, number=number)
        out = out.transpose(0, 1) if module.batch_first else out
        states = tuple(torch.stack(each) for each in zip(*ends, strict=True))
        return out, states if isinstance(module, nn.LSTM) else states[0]

    def _layer(
        self, local: Local, number: int, x: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Own units of all steps, all units of all steps, own units of the last hidden and cell states."""
        module, (low, high) = local.module, local.window.spans[-1]
        names = [f"{name}_l{number}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        weight_ih, weight_hh, bias_ih, bias_hh = (getattr(module, name, None) for name in names)
        assert weight_ih is not None and weight_hh is not None
        gates, shape = F.linear(x, weight_ih, bias_ih), tuple(hidden.shape)
        units = [box.spans[-1] for box in along(local.call, local.call.outputs[0], 2).boxes]
        owns = [[box] for box in cut(shape, 1, units)]
        gather = Move(local.group, shape, owns, [[Box.whole(shape)]] * len(units))
        mine, own, everyone = hidden[:, low:high], [], []
        state: Tensor | None = cell
        for step in range(len(x)):
            mine, state = _advance(module, gates[step], F.linear(hidden, weight_hh, bias_hh), mine, state)
            own.append(mine)
            if step + 1 < len(x) or number + 1 < module.num_layers:
                (hidden,) = gather(mine)
            everyone.append(hidden)
        return torch.stack(own), torch.stack(everyone), (mine, mine if state is None else state)


register(_Cell(), nn.LSTMCell, nn.GRUCell, nn.RNNCell)
register(_Recurrent(), nn.LSTM, nn.GRU, nn.RNN)
