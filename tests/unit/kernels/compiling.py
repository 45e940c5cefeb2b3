"""Compile every Triton kernel of the package for graphics cards, on a machine without one.

    python -m tests.unit.kernels.compiling 90 [most]    compile for compute capability 9.0; `most` bounds the geometries

The launch functions choose tiles and arguments as on a card, but on tensors without memory; the kernel's launch is replaced by
Triton's compiler with the card as its target. A kernel that does not compile raises here as it would on the card. Each card
needs a separate process, since `torch.cuda` has to report the card's capability.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from syncline.kernels import block_local_launch, l2_pool_triton
from syncline.kernels.geometry import Geometry

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes that one program may take, by capability
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
GEOMETRIES = [  # two tiles of images, two of rows, sizes that nothing divides, one image, images in turns
    (Geometry(channels=3, height=40, width=44, field=20, step=4, block=(4, 4, 8)), 96),
    (Geometry(channels=18, height=40, width=36, field=32, step=4, block=(4, 4, 18)), 96),
    (Geometry(channels=5, height=23, width=19, field=7, step=3, block=(3, 1, 5)), 33),
    (Geometry(channels=1, height=9, width=11, field=4, step=5, block=(1, 1, 1)), 1),
    (Geometry(channels=4, height=16, width=16, field=16, step=1, block=(2, 2, 16)), 300),
]


def argument_type(value: object) -> str:
    """Return Triton's name for the type of a launch argument that is no constant."""
    match value:
        case TensorDescriptor():
            sizes = ", ".join(str(size) for size in value.block_shape)
            return f"tensordesc<{TYPES[value.base.dtype]}[{sizes}]>"
        case torch.Tensor():
            return f"*{TYPES[value.dtype]}"
        case float():
            return "fp32"
        case int():
            return "u32" if value >= 2**31 else "i32"
    raise TypeError(f"no type for {value!r}")


class Compiled:
    """Stand in for a jitted kernel: `kernel[grid](…)` compiles for the target and launches nothing."""

    def __init__(self, kernel: Any, target: GPUTarget, counts: Counter[str]) -> None:
        self._kernel, self._target, self._counts = kernel, target, counts

    def __getitem__(self, grid: tuple[int, ...]) -> Compiled:
        return self

    def __call__(self, *positional: object, **named: Any) -> None:
        options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
        parameters = self._kernel.params
        values = dict(zip((each.name for each in parameters), positional, strict=False)) | named
        constants = {each.name: values[each.name] for each in parameters if each.is_constexpr}
        signature = {
            name: "constexpr" if name in constants else argument_type(values[name]) for name in values
        }
        aligned = {
            (each.num,): [["tt.divisibility", 16]]
            for each in parameters
            if isinstance(values[each.name], torch.Tensor)
        }
        source = ASTSource(self._kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=self._target, options=options)
        most = SHARED_MEMORY[self._target.arch]
        if compiled.metadata.shared > most:
            raise OutOfResources(compiled.metadata.shared, most, "shared memory")
        assert compiled.asm["cubin"]
        self._counts[self._kernel.__name__] += 1


def compile_products(geometry: Geometry, count: int, dtype: torch.dtype) -> None:
    """Compile the four block-local products of one geometry, in every variant that a layer launches."""
    launch = block_local_launch
    with torch.device("meta"):
        images = torch.empty(geometry.images_shape(count), dtype=dtype)
        maps = torch.empty(geometry.maps_shape(count), dtype=dtype)
        weight = torch.empty(geometry.weight_shape, dtype=dtype)
        scale = torch.empty(geometry.blocks, geometry.rows)
    for factor in (None, scale):
        launch.forward(images, weight, geometry, scale=factor, dtype=torch.float32)
    launch.input_gradient(maps, weight, geometry, scale=None)
    launch.weight_gradient(maps, images, geometry, dtype=torch.float32)
    step: dict[str, Any] = {"rate": 0.1, "decay": 0.9, "seed": 1}
    for pairs in ([(maps, images)], [(maps, images)] * 2):
        for factor in (None, scale):
            launch.update_(weight, weight, pairs, geometry, **step, scale=factor, radial=factor)


def main(capability: int, most: int) -> None:
    target, counts = GPUTarget("cuda", capability, 32), Counter[str]()
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    for module, names in (
        (block_local_launch, ("forward_kernel", "input_gradient_kernel", "weight_gradient_kernel")),
        (l2_pool_triton, ("window_kernel",)),
    ):
        for name in names:
            setattr(module, name, Compiled(getattr(module, name), target, counts))
    for geometry, count in GEOMETRIES[:most]:
        for dtype in TYPES:
            compile_products(geometry, count, dtype)
    maps = torch.empty(2, 7, 6, 4, device="meta")
    pooled = l2_pool_triton.forward(maps, 5, pad=2, eps=0.01)
    l2_pool_triton.backward(pooled, pooled, maps, 5, pad=2)
    print(f"triton {triton.__version__}, capability {capability}:", dict(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else len(GEOMETRIES))
