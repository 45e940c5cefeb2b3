"""A stack of the network: filtering, pooling, local contrast normalisation; and several of them (C2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from syncline.nn.block_local import BlockLocal2d
from syncline.nn.local_contrast_norm import LocalContrastNorm2d
from syncline.nn.pooling import L2Pool2d, Padding


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """What a stack is made of; sizes of images come from the stack below."""

    field: int
    step: int
    block: tuple[int, int, int] = (4, 4, 8)
    window: int = 5
    padding: Padding = "same"


class Stack(nn.Module):
    """Filters of unit norm, then `L2Pool2d`, then `LocalContrastNorm2d`; only the filters are learned."""

    def __init__(
        self,
        in_channels: int,
        image_size: int | tuple[int, int],
        shape: StackShape,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.filter = BlockLocal2d(
            in_channels,
            image_size,
            field=shape.field,
            step=shape.step,
            block=shape.block,
            unit_norm=True,
            device=device,
            dtype=dtype,
        )
        self.pool = L2Pool2d(shape.window, padding=shape.padding)
        self.norm = LocalContrastNorm2d(shape.window, padding=shape.padding)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.norm(self.pool(self.filter(images)))
        return result

    @property
    def out_channels(self) -> int:
        return self.filter.geometry.depth

    @property
    def output_size(self) -> tuple[int, int]:
        return self.norm.output_size(*self.pool.output_size(*self.filter.geometry.output_size))


def build_stacks(
    in_channels: int,
    image_size: int | tuple[int, int],
    shapes: Sequence[StackShape],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """Stacks on top of each other, each made for the maps of the one below."""
    stacks: list[Stack] = []
    for shape in shapes:
        stacks.append(Stack(in_channels, image_size, shape, device=device, dtype=dtype))
        in_channels, image_size = stacks[-1].out_channels, stacks[-1].output_size
    return nn.Sequential(*stacks)
