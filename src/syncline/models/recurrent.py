"""Recurrent networks as ready models: cells over sequences of vectors or of words, and a linear layer on top."""

from __future__ import annotations

from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.file_arguments import COUNT, FLAG, SHARE, check

CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Recurrent(nn.Module):
    """(N, T, inputs) → (N, outputs), after the last step; with `sequences` → (N, outputs, T), as `cross_entropy` takes it.

    With `tokens` it takes (N, T) word numbers below that, and `inputs` is the size of their vectors.
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        outputs: int,
        *,
        cell: str = "lstm",
        depth: int = 1,
        tokens: int | None = None,
        dropout: float = 0.0,
        sequences: bool = False,
    ) -> None:
        super().__init__()
        check(COUNT, inputs=inputs, units=units, outputs=outputs, depth=depth)
        check(SHARE, dropout=dropout)
        check(FLAG, sequences=sequences)
        if cell not in CELLS:
            raise UsageError(f"cell must be one of {', '.join(CELLS)}, got {cell!r}")
        if tokens is not None:
            check(COUNT, tokens=tokens)
        self.words = nn.Embedding(tokens, inputs) if tokens is not None else nn.Identity()
        between = dropout if depth > 1 else 0.0
        self.cell = CELLS[cell](inputs, units, num_layers=depth, dropout=between, batch_first=True)
        self.output = nn.Linear(units, outputs)
        self.sequences = sequences

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(self.words(x))
        return self.output(states).transpose(1, 2) if self.sequences else self.output(states[:, -1])
