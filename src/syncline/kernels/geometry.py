"""Where the blocks of a block-local layer lie, and how its rows, fields and maps are numbered (C1).

Plain arithmetic on one frozen record; nothing here touches a device. Legend, used by all block-local files:

    C H W   channels, height and width of the images      N   images in the batch
    B       blocks, nH · nW                               R   rows (neurons) of a block, bh · bw · depth
    K       weights of one neuron, C · field · field

A block at (p, q) sees the pixels from (p·step, q·step) on. Row (i·bw + j)·depth + k of the block is the neuron at
depth k, (p·bh + i, q·bw + j) of the output. Where the step does not divide H − field, the last rows and columns of
the image are seen by nobody: they add nothing to the responses, and their gradient is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from syncline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of one block-local layer."""

    channels: int
    height: int
    width: int
    field: int
    step: int
    block: tuple[int, int, int] = (4, 4, 8)

    def __post_init__(self) -> None:
        if len(self.block) != 3:
            raise UsageError(f"block is (height, width, depth), got {self.block}: three numbers are needed")
        object.__setattr__(self, "block", tuple(self.block))
        names = ("in_channels", "image height", "image width", "field", "step")
        values = (self.channels, self.height, self.width, self.field, self.step, *self.block)
        for name, value in zip((*names, "block height", "block width", "block depth"), values, strict=True):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.field > min(self.height, self.width):
            raise UsageError(
                f"a field of {self.field} x {self.field} does not fit into images of {self.height} x {self.width}: "
                f"use field <= {min(self.height, self.width)}, or larger images"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """(nH, nW), blocks over the height and over the width."""
        return (self.height - self.field) // self.step + 1, (self.width - self.field) // self.step + 1

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def rows(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def fan_in(self) -> int:
        return self.channels * self.field * self.field

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        return self.blocks, self.rows, self.fan_in

    @property
    def parameters(self) -> int:
        return self.blocks * self.rows * self.fan_in

    @property
    def neurons(self) -> int:
        return self.blocks * self.rows

    @property
    def depth(self) -> int:
        return self.block[2]

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output maps."""
        return self.grid[0] * self.block[0], self.grid[1] * self.block[1]

    def images_shape(self, count: int) -> tuple[int, int, int, int]:
        return self.channels, self.height, self.width, count

    def maps_shape(self, count: int) -> tuple[int, int, int, int]:
        return self.depth, *self.output_size, count

    def to_maps(self, rows: Tensor) -> Tensor:
        """(B, R, ...) → (depth, nH·bh, nW·bw, ...): values per neuron, moved to where the neurons lie."""
        (high, wide), (bh, bw, depth), rest = self.grid, self.block, rows.shape[2:]
        split = rows.reshape(high, wide, bh, bw, depth, *rest)
        moved = split.permute(4, 0, 2, 1, 3, *range(5, split.dim()))  # (depth, nH, bh, nW, bw, ...)
        return moved.reshape(depth, *self.output_size, *rest)

    def to_rows(self, maps: Tensor) -> Tensor:
        """(depth, nH·bh, nW·bw, ...) → (B, R, ...), the inverse of `to_maps`."""
        (high, wide), (bh, bw, depth), rest = self.grid, self.block, maps.shape[3:]
        split = maps.reshape(depth, high, bh, wide, bw, *rest)
        moved = split.permute(1, 3, 2, 4, 0, *range(5, split.dim()))  # (nH, nW, bh, bw, depth, ...)
        return moved.reshape(self.blocks, self.rows, *rest)

    def check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape, in words."""
        if tuple(tensor.shape) != shape:
            raise UsageError(f"{name} must have shape {list(shape)} for {self}, got {list(tensor.shape)}")

    def __str__(self) -> str:
        return (
            f"images {self.channels} x {self.height} x {self.width}, field {self.field}, step {self.step}, "
            f"block {'x'.join(map(str, self.block))}"
        )
