"""How the Triton kernels of `block_local` are launched: tiles chosen from the shape, memory for the results.

Whoever measures can give tiles of his own. Importing this needs Triton; `block_local` decides whether to.
Not responsible for checking arguments: `block_local` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from syncline.errors import RunError, UsageError
from syncline.kernels.block_local import seeds
from syncline.kernels.block_local_triton import forward_kernel, input_gradient_kernel, weight_gradient_kernel
from syncline.kernels.geometry import Geometry

MOST_ELEMENTS = 2**31 - 1
PROGRAMS = 900  # about seven for each multiprocessor of a large GPU: the last ones to finish cost little
PLAIN = 32  # rows of a product that single warps compute
SHARED_MEMORY = 220_000  # bytes of a multiprocessor that tiles may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How one launch is cut: tile sizes, parts of the fields per block, warps and pipeline stages."""

    rows: tuple[int, int]
    images: tuple[int, int]
    columns: int
    split: int = 1
    warps: int = 8
    stages: int = 3
    copied: int = 0  # by the copy engine of Hopper and later: 1 weights are read so, 2 written so too


_shrunk: dict[tuple[object, ...], Tiles] = {}  # what a launch came down to on this GPU


def _fit(key: tuple[object, ...], tiles: Tiles, launch: Callable[[Tiles], object]) -> None:
    """Launch with these tiles, or with the largest smaller ones that this GPU's shared memory and registers hold."""
    cut = _shrunk.get((*key, tiles), tiles)
    while True:
        try:
            launch(cut)
        except OutOfResources:
            cut = _smaller(cut)
        else:
            _shrunk[(*key, tiles)] = cut
            return


def _smaller(tiles: Tiles) -> Tiles:
    """First fewer stages, then fewer columns; the rest decides what is computed where, and stays."""
    if tiles.stages > 1:
        return replace(tiles, stages=tiles.stages - 1)
    if tiles.columns > 16:
        return replace(tiles, columns=tiles.columns // 2)
    raise RunError(f"no tiles of {tiles} fit into this GPU: use blocks of fewer neurons or smaller batches")


def _power(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()


def _two_tiles(size: int, most: int, least: int) -> tuple[int, int]:
    """A large tile and a small one, or 0, that cover `size` with little waste: 288 → 256 + 64, 96 → 64 + 32."""
    large = min(most, max(least, _power(size)))
    if size > large:
        rest = size - large
        return large, max(least, _power(rest)) if rest <= large // 2 else 0
    half = large // 2
    if half >= least and size - half <= half // 2:
        return half, max(least, _power(size - half))
    return large, 0


def _shape(geometry: Geometry, count: int) -> dict[str, int]:
    for name, shape in (("images", geometry.images_shape(count)), ("responses", geometry.maps_shape(count))):
        elements = shape[0] * shape[1] * shape[2] * shape[3]
        if elements > MOST_ELEMENTS:
            raise UsageError(
                f"{name} of shape {list(shape)} have {elements} elements, more than the {MOST_ELEMENTS} that the "
                f"kernels index: use batches of at most {count * MOST_ELEMENTS // elements} images"
            )
    sizes = {"HEIGHT": geometry.height, "WIDTH": geometry.width, "COUNT": count, "FAN_IN": geometry.fan_in}
    fields = {"FIELD": geometry.field, "STEP": geometry.step, "ACROSS": geometry.grid[1]}
    blocks = dict(zip(("BLOCK_H", "BLOCK_W", "DEPTH"), geometry.block, strict=True))
    out = dict(zip(("OUT_H", "OUT_W"), geometry.output_size, strict=True))
    return {**sizes, **fields, **blocks, **out, "ROWS": geometry.rows}


def forward_tiles(geometry: Geometry, count: int, dtype: torch.dtype) -> Tiles:
    """For W x: as many rows and images in one program as the registers hold, so that pixels are fetched seldom."""
    narrow = dtype == torch.bfloat16
    large, small = _two_tiles(geometry.rows, 256 if narrow else 128, 16)
    rows = (large, max(small, 64) if small and large >= 128 else small)  # 64 rows fill a warp group's product
    if not _streams(geometry, dtype):
        rows = (min(large, PLAIN), 0)
    images, columns = _images(count, geometry, dtype), 64 if narrow else 32
    stage = (sum(rows) + sum(images)) * columns * dtype.itemsize
    split = max(1, min(geometry.fan_in // (8 * columns), PROGRAMS // geometry.blocks))
    return Tiles(
        rows=rows,
        images=images,
        columns=columns,
        split=split,
        warps=8 if sum(rows) > 128 else 4,
        stages=_stages(stage, 4),
        copied=_copied(geometry, dtype, most=1),
    )


def input_tiles(geometry: Geometry, count: int, dtype: torch.dtype) -> Tiles:
    """For Wᵀ δ: many columns, the rows a few at a time."""
    narrow = dtype == torch.bfloat16
    rows = 64 if narrow and geometry.rows % 64 == 0 else 32
    images = _images(count, geometry, dtype)
    span = geometry.channels * geometry.field * min(geometry.field, geometry.step)
    columns = max(16, min(128, _power(span)))
    if not _streams(geometry, dtype):
        columns = min(columns, PLAIN)
    stage = rows * (columns + sum(images)) * dtype.itemsize
    stages = _stages(stage, 4 if rows == 64 else 5)
    return Tiles(rows=(rows, 0), images=images, columns=columns, warps=4, stages=stages)


def gradient_tiles(geometry: Geometry, count: int, dtype: torch.dtype, *, updates: bool, pairs: int) -> Tiles:
    """For δ xᵀ and its update: tiles of a few rows, several programs to a multiprocessor."""
    images = _images(count, geometry, dtype)
    if dtype != torch.bfloat16 or not _streams(geometry, dtype):
        kept = count <= sum(images)
        return Tiles(rows=(PLAIN, 0), images=images, columns=64, warps=4, stages=2 if kept else 1)
    odd = geometry.rows % 64 != 0
    if odd and (geometry.rows % 144 == 0 and (pairs == 2 or not updates)):
        columns, warps = (64, 8) if updates else (128, 4)
        copied = _copied(geometry, dtype, most=1 if updates else 2)
        tiles = Tiles(rows=(128, 16), images=images, columns=columns, warps=warps, stages=3, copied=copied)
    elif odd:
        most = 2 if geometry.rows % 32 == 0 else 1
        copied = _copied(geometry, dtype, most=most if updates else 0)
        tiles = Tiles(rows=(32, 0), images=images, columns=128, warps=4, stages=2, copied=copied)
    else:
        rows = 128 if pairs == 2 and geometry.rows % 128 == 0 else 64
        warps = 8 if rows == 128 else 4
        copied = _copied(geometry, dtype, most=int(updates))
        tiles = Tiles(rows=(rows, 0), images=images, columns=64, warps=warps, stages=3, copied=copied)
    programs = geometry.blocks * -(-geometry.rows // sum(tiles.rows))
    # small programs pay where no second pair is to be kept
    wanted = (8 if updates and pairs == 1 else 2) * PROGRAMS
    split = max(1, min(geometry.fan_in // (8 * tiles.columns), round(wanted / programs), 4))
    kept = count <= sum(images)  # else deltas are fetched for every tile anew, and leave no room for stages
    return replace(tiles, split=split, stages=tiles.stages if kept else 1)


def _images(count: int, geometry: Geometry, dtype: torch.dtype) -> tuple[int, int]:
    """Tiles of images: two for fields that stream, else one."""
    most, least = (128, 32) if dtype == torch.bfloat16 else (64, 16)
    if _streams(geometry, dtype):
        return _two_tiles(count, most, least)
    return min(most, max(least, _power(count))), 0


def _streams(geometry: Geometry, dtype: torch.dtype) -> bool:
    """Fields of several tiles of columns, whose rows of weights start at multiples of 16 bytes.

    Other fields get plain tiles, too small for a warp group's products, and no copy engine: with those, products
    that share a tile came out wrong and copies failed (Triton 3.6 on an H200). They are small: little is lost.
    """
    return geometry.fan_in >= 256 and geometry.fan_in * dtype.itemsize % 16 == 0


def _whole(maps: Tensor) -> Tensor:
    """(..., N) in one piece, N padded with zeros to a multiple of 16 bytes.

    Lines that start anywhere could not be fetched 16 bytes at a time.
    """
    rest = -maps.shape[-1] * maps.element_size() % 16 // maps.element_size()
    return F.pad(maps, (0, rest)) if rest else maps.contiguous()


def _stages(bytes_each: int, wanted: int) -> int:
    return max(1, min(wanted, SHARED_MEMORY // bytes_each))


def _copied(geometry: Geometry, dtype: torch.dtype, *, most: int) -> int:
    """The copy engine wants Hopper or later, and fields that stream."""
    return most if _streams(geometry, dtype) and _capability() >= 9 else 0


@cache
def _capability() -> int:
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def _cut(tiles: Tiles, precision: str) -> dict[str, Any]:
    images = dict(zip(("NA", "NB"), tiles.images, strict=True))
    return {**images, "BK": tiles.columns, "PRECISION": precision, "num_warps": tiles.warps}


def _descriptors(weight: Tensor, tiles: Tiles) -> tuple[Any, Any]:
    """What the copy engine has to know of the weights, for either tile of rows."""
    if not tiles.copied:
        return weight, weight
    flat = weight.view(-1, weight.shape[2])
    large, small = (TensorDescriptor.from_tensor(flat, [rows or 16, tiles.columns]) for rows in tiles.rows)
    return large, small


def forward(
    images: Tensor,
    weight: Tensor,
    geometry: Geometry,
    *,
    scale: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
    precision: str = "tf32",
) -> Tensor:
    given, images = images.shape[-1], _whole(images)
    count = images.shape[-1]
    tiles = tiles or forward_tiles(geometry, count, weight.dtype)
    maps = geometry.maps_shape(count)
    if tiles.split > 1:
        out = torch.zeros(maps, dtype=torch.float32, device=images.device)
    else:
        out = torch.empty(maps, dtype=dtype, device=images.device)

    def launch(cut: Tiles) -> None:
        groups = triton.cdiv(geometry.rows, sum(cut.rows)), triton.cdiv(count, sum(cut.images))
        forward_kernel[(geometry.blocks * cut.split, *groups)](
            images,
            weight,
            *_descriptors(weight, cut),
            weight if scale is None else scale,
            out,
            **_shape(geometry, count),
            SCALED=scale is not None,
            COPIED=cut.copied,
            RA=cut.rows[0],
            RB=cut.rows[1],
            SPLIT=cut.split,
            num_stages=cut.stages,
            **_cut(cut, precision),
        )

    _fit(("forward", geometry, count, weight.dtype), tiles, launch)
    return out[..., :given].to(dtype).contiguous()


def input_gradient(
    delta: Tensor,
    weight: Tensor,
    geometry: Geometry,
    *,
    scale: Tensor | None,
    tiles: Tiles | None = None,
    precision: str = "tf32",
) -> Tensor:
    if scale is not None:
        delta = delta * geometry.to_maps(scale).unsqueeze(3)
    given, delta = delta.shape[-1], _whole(delta.to(weight.dtype))
    count = delta.shape[-1]
    tiles = tiles or input_tiles(geometry, count, weight.dtype)
    out = torch.zeros(geometry.images_shape(count), dtype=torch.float32, device=delta.device)
    field, step = geometry.field, geometry.step
    span = geometry.channels * field * min(field, step)
    bands = geometry.grid[0] + triton.cdiv(field, step) - 1

    def launch(cut: Tiles) -> None:
        chunks = triton.cdiv(span, cut.columns)
        input_gradient_kernel[(geometry.grid[1] * bands * chunks, triton.cdiv(count, sum(cut.images)))](
            delta,
            weight,
            out,
            **_shape(geometry, count),
            RT=cut.rows[0],
            num_stages=cut.stages,
            **_cut(cut, precision),
        )

    _fit(("input", geometry, count, weight.dtype), tiles, launch)
    return out[..., :given].contiguous()


def weight_gradient(
    delta: Tensor,
    images: Tensor,
    geometry: Geometry,
    *,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
    precision: str = "tf32",
) -> Tensor:
    out = torch.empty(geometry.weight_shape, dtype=dtype, device=images.device)
    none: dict[str, Any] = {"rate": 0.0, "decay": 0.0, "scale": None, "radial": None, "seed": 0}
    update_(out, out, [(delta, images)], geometry, **none, tiles=tiles, precision=precision, update=False)
    return out


def update_(
    weight: Tensor,
    momentum: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor]],
    geometry: Geometry,
    *,
    rate: float,
    decay: float,
    scale: Tensor | None,
    radial: Tensor | None,
    seed: int,
    tiles: Tiles | None = None,
    precision: str = "tf32",
    update: bool = True,  # else the gradient itself is written to `weight`
) -> Tensor:
    pairs = [(_whole(delta), _whole(images)) for delta, images in pairs]
    count = pairs[0][0].shape[-1]
    tiles = tiles or gradient_tiles(geometry, count, pairs[0][1].dtype, updates=update, pairs=len(pairs))
    (delta, images), (delta2, images2) = pairs[0], pairs[-1]
    sums = (tiles.split, geometry.blocks, geometry.rows) if update else (1,)
    squares = torch.empty(sums, dtype=torch.float32, device=images.device)
    grid = (geometry.blocks * tiles.split * triton.cdiv(geometry.rows, sum(tiles.rows)),)

    def launch(cut: Tiles) -> None:
        weight_gradient_kernel[grid](
            delta,
            images,
            delta2,
            images2,
            weight,
            momentum,
            *_descriptors(weight, cut),
            *_descriptors(momentum, cut),
            squares if scale is None else scale,
            squares if radial is None else radial,
            squares,
            rate,
            decay,
            *seeds(seed),
            **_shape(geometry, count),
            SCALED=scale is not None,
            TWO=len(pairs) == 2,
            UPDATE=update,
            STOCHASTIC=update and weight.dtype == torch.bfloat16,
            COPIED=cut.copied,
            RA=cut.rows[0],
            RB=cut.rows[1],
            SPLIT=cut.split,
            STAGES=cut.stages,
            **_cut(cut, precision),
        )

    _fit(("weight", geometry, count, weight.dtype, len(pairs), update), tiles, launch)
    return squares[0] if tiles.split == 1 else squares.sum(0)
