"""Stochastic rounding of float32 to bfloat16, from bits that depend on seed, row and column alone.

The Triton kernels compute the same bits, so that they and the reference round alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
Bits = TypeVar("Bits", int, Tensor)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16: up with the probability of the part that is cut off. `bits` are uniform in 0…65535.

    The expectation is the value itself, so that steps far below bfloat16's resolution still move the weights.
    """
    cut = (values.view(torch.int32) + bits.to(torch.int32)) & -65536
    return cut.view(torch.float32).to(torch.bfloat16)


def rounding_bits(seed: int, first_block: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """32 random bits, as int64, for each weight of `shape` (blocks, R, K) from block `first_block` on."""
    blocks, rows, columns = shape
    row_seed, column_seed = seeds(seed)
    first = first_block * rows
    by_row = _hash(torch.arange(first, first + blocks * rows, device=device) ^ row_seed)
    by_column = _hash(torch.arange(columns, device=device) ^ column_seed)
    mixed = ((by_row.unsqueeze(1) ^ by_column) * 0x9E3779B1) & MASK
    return mixed.view(blocks, rows, columns)


def seeds(seed: int) -> tuple[int, int]:
    """One seed for rows and one for columns, 31 bits each."""
    return _hash(seed & MASK) >> 1, _hash((seed + 0x9E3779B9) & MASK) >> 1


def _hash(value: Bits) -> Bits:
    """A mixing function of 32 bits, of an int or of a tensor of int64."""
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & MASK
    value = ((value ^ (value >> 15)) * 0x846CA68B) & MASK
    return value ^ (value >> 16)
