"""How near to the memory's limit do the block-local products run on one GPU, and how long is an update of a whole net?

    python -m benchmarks.bench_block_local [--parts products,networks,sizes,jax] [--json FILE] [--commit ID]

One table per part. The floor of a product is the time to move its weights once at the copy bandwidth measured in the
same run; of the fused update, to read and write weights and momentum. `bmm` works on inputs gathered beforehand;
`unfold` is F.unfold (F.fold for Wᵀδ) alone. Times are medians over events, after warm-up, on random data. Leave the GPU
alone meanwhile. JAX's conv_general_dilated_local is the second peer, in a process of its own.
"""

import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import machine
from reproductions.cots.networks import cots_network
from syncline.kernels import block_local
from syncline.kernels.block_local import batch_first
from syncline.kernels.geometry import Geometry
from syncline.nn import FusedStack, StackShape, build_stacks, joint_update

IMAGES = 96
SIZES = {
    "325 M": Geometry(channels=3, height=200, width=200, field=20, step=4, block=(4, 4, 8)),
    "1.19 G": Geometry(channels=18, height=90, width=90, field=32, step=4, block=(4, 4, 18)),
}
WIDTHS = (
    (64, 4),
    (96, 8),
    (128, 8),
    (160, 8),
    (200, 8),
    (200, 12),
    (200, 18),
)  # image size and depth of blocks
PAPER_SECONDS = 0.6  # one update of the third stack of the 11-billion net, on 64 GPUs


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        work()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def ceilings() -> dict[str, float]:
    """Copy bandwidth, bytes read and written, in TB/s; dense bfloat16 product in TFLOP/s."""
    source = torch.empty(2**31, device="cuda", dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dense = milliseconds(lambda: a @ b)
    return {"copy TB/s": source.numel() * 4 / copy / 1e9, "bf16 TFLOP/s": 2 * 8192**3 / dense / 1e9}


def tensors(geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.empty(geometry.weight_shape, device="cuda", dtype=torch.bfloat16)
    weight.normal_(std=geometry.fan_in**-0.5)
    images = torch.randn(geometry.images_shape(IMAGES), device="cuda", dtype=torch.bfloat16)
    maps = torch.randn(geometry.maps_shape(IMAGES), device="cuda", dtype=torch.bfloat16)
    return weight, images, maps


def gathered(geometry: Geometry, images: Tensor) -> Tensor:
    """(B, K, N) in one piece: what bmm is given for free."""
    columns = F.unfold(batch_first(images).contiguous(), geometry.field, stride=geometry.step)
    return columns.permute(2, 1, 0).contiguous()


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def product_rows(name: str, geometry: Geometry, floor: float) -> list[dict[str, Any]]:
    """Ours, bmm and unfold for the three products of one size."""
    weight, images, maps = tensors(geometry)
    columns, rows = gathered(geometry, images), geometry.to_rows(maps).contiguous()
    batch, folded = batch_first(images).contiguous(), columns.permute(2, 1, 0).contiguous()
    size, field, step = (geometry.height, geometry.width), geometry.field, geometry.step
    unfold = milliseconds(lambda: F.unfold(batch, field, stride=step))
    fold = milliseconds(lambda: F.fold(folded, size, field, stride=step))
    sums = F.fold((weight.transpose(1, 2) @ rows).permute(2, 1, 0).float(), size, field, stride=step)
    made: list[tuple[str, Callable[[], Tensor], Callable[[], Tensor], float, Callable[[], Tensor]]] = [
        (
            "W x",
            lambda: block_local.forward(images, weight, geometry),
            lambda: weight @ columns,
            unfold,
            lambda: geometry.to_maps(weight @ columns),
        ),
        (
            "Wᵀ δ",
            lambda: block_local.input_gradient(maps, weight, geometry),
            lambda: weight.transpose(1, 2) @ rows,
            fold,
            lambda: sums.permute(1, 2, 3, 0),
        ),
        (
            "δ xᵀ",
            lambda: block_local.weight_gradient(maps, images, geometry),
            lambda: rows @ columns.transpose(1, 2),
            unfold,
            lambda: rows @ columns.transpose(1, 2),
        ),
    ]
    result = []
    for product, ours, peer, gather, truth in made:
        error = difference(ours(), truth())
        mine, bmm = milliseconds(ours), milliseconds(peer)
        result.append(
            {
                "weights": name,
                "product": product,
                "ours ms": mine,
                "floor ms": floor,
                "of floor": floor / mine,
                "bmm ms": bmm,
                "bmm / ours": bmm / mine,
                "unfold ms": gather,
                "(unfold + bmm) / ours": (gather + bmm) / mine,
                "TFLOP/s": 2 * geometry.parameters * IMAGES / mine / 1e9,
                "difference from bmm": error,
            }
        )
    return result


def update_rows(name: str, geometry: Geometry, floor: float) -> list[dict[str, Any]]:
    """δ xᵀ fused with momentum and norms, for one pair and for the two of the autoencoder."""
    weight, images, maps = tensors(geometry)
    momentum = torch.zeros_like(weight)
    scale = torch.ones(geometry.blocks, geometry.rows, device="cuda")
    result = []
    for pairs in (1, 2):

        def work(pairs: int = pairs) -> Tensor:
            given = [(maps, images)] * pairs
            options = {"rate": 1e-9, "decay": 0.9, "scale": scale, "radial": scale, "seed": 1}
            return block_local.update_(weight, momentum, given, geometry, **options)

        mine = milliseconds(work)
        result.append(
            {
                "weights": name,
                "product": f"δ xᵀ{' twice' * (pairs == 2)}, momentum, norm",
                "ours ms": mine,
                "floor ms": 4 * floor,
                "of floor": 4 * floor / mine,
                "TFLOP/s": 2 * geometry.parameters * IMAGES * pairs / mine / 1e9,
            }
        )
    return result


def products(limits: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for name, geometry in SIZES.items():
        floor = geometry.parameters * 2 / limits["copy TB/s"] / 1e9
        rows += product_rows(name, geometry, floor)
        release()
        rows += update_rows(name, geometry, floor)
        release()
    return rows


def timed_update(name: str, stacks: list[FusedStack], size: int, limits: dict[str, float]) -> dict[str, Any]:
    """One joint update: up through all stacks, objectives, down again, momentum and norms."""
    count = sum(stack.geometry.parameters for stack in stacks)
    images = torch.randn(stacks[0].geometry.channels, size, size, IMAGES, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    work = milliseconds(lambda: joint_update(stacks, images, rate=1e-6, decay=0.9), repeats=10)
    # W x, Wᵀ y, W r and the update's four; Wᵀ δ too but for the lowest stack
    moved = sum(2 * stack.geometry.parameters * (7 + (index > 0)) for index, stack in enumerate(stacks))
    return {
        "network": name,
        "weights": count,
        "blocks": [stack.geometry.blocks for stack in stacks],
        "update ms": work,
        "of the memory's limit": moved / limits["copy TB/s"] / 1e9 / work,
        "weight bytes moved": moved,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def networks(limits: dict[str, float]) -> list[dict[str, Any]]:
    """The paper's two nets, whole; and the third stack of each alone, as it is trained greedily."""
    rows = []
    for name in ("1.8b", "11b"):
        stacks = [FusedStack(stack) for stack in cots_network(name, device="cuda")]
        row = timed_update(name, stacks, 200, limits)
        third = stacks[-1]
        shown = torch.randn(third.geometry.images_shape(IMAGES), device="cuda")
        alone = milliseconds(
            lambda third=third, shown=shown: third.update(shown, rate=1e-6, decay=0.9), repeats=10
        )
        row["third stack alone ms"] = alone
        if name == "11b":
            row["paper's 64 GPUs / ours, third stack"] = PAPER_SECONDS * 1e3 / alone
        rows.append(row)
        del stacks, third, shown
        release()
    return rows


def sizes(limits: dict[str, float]) -> list[dict[str, Any]]:
    """Fig. 5's question on one GPU: a joint update by the size of the net; fields 20, step 4, blocks 4 x 4 x depth."""
    rows = []
    for size, depth in WIDTHS:
        shape = StackShape(field=20, step=4, block=(4, 4, depth))
        network = build_stacks(3, size, [shape] * 3, device="cuda", dtype=torch.bfloat16)
        stacks = [FusedStack(stack) for stack in network]
        rows.append(timed_update(f"{size} x {size}, depth {depth}", stacks, size, limits))
        del network, stacks
        release()
    return rows


def jax_rows() -> Iterator[dict[str, Any]]:
    """JAX's locally connected convolution and its gradients, same shapes and dtype."""
    import jax
    import jax.numpy as jnp

    for name, geometry in SIZES.items():
        key = jax.random.PRNGKey(0)
        size = (IMAGES, geometry.height, geometry.width, geometry.channels)
        images = jax.random.normal(key, size, jnp.bfloat16)
        weight = jax.random.normal(key, (*geometry.grid, geometry.fan_in, geometry.rows), jnp.bfloat16)
        delta = jax.random.normal(key, (IMAGES, *geometry.grid, geometry.rows), jnp.bfloat16)

        def apply(x: Any, w: Any, geometry: Geometry = geometry) -> Any:
            strides, window = (geometry.step,) * 2, (geometry.field,) * 2
            layout = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated_local(
                x, w, strides, "VALID", filter_shape=window, dimension_numbers=layout
            )

        calls = {
            "W x": jax.jit(lambda x, w, d, f=apply: f(x, w)),
            "δ xᵀ": jax.jit(lambda x, w, d, f=apply: jax.vjp(lambda w: f(x, w), w)[1](d)[0]),
            "Wᵀ δ": jax.jit(lambda x, w, d, f=apply: jax.vjp(lambda x: f(x, w), x)[1](d)[0]),
        }
        for product, call in calls.items():
            took = jax_milliseconds(call, (images, weight, delta))
            yield {"weights": name, "product": product, "jax ms": took}


def jax_milliseconds(call: Callable[..., Any], given: tuple[Any, ...]) -> float:
    import time

    call(*given).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        call(*given).block_until_ready()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def jax_in_a_process(seconds: float = 120) -> list[dict[str, Any]]:
    """JAX takes the GPU's memory at its start, so it gets a process to itself, and so much time."""
    command = [sys.executable, "-m", "benchmarks.bench_block_local", "--parts", "jax-here"]
    process = subprocess.Popen(
        command, cwd=machine.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        print(f"jax was stopped after {seconds:.0f} s; what it had measured stays")
    if process.returncode > 0:
        print(f"jax failed: {errors.strip().splitlines()[-1:]}")
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n")
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(names, *cells, strict=True)]
    for line in (names, ["-" * width for width in widths], *cells):
        print("| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |")


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.005 else f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def describe(commit: str | None) -> dict[str, str]:
    import triton

    about = machine.describe() | {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__}
    return about | ({"commit": commit} if commit else {})


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--parts", default="products,networks,sizes,jax")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="where the tree is a copy without its repository")
    chosen = parser.parse_args()
    if chosen.parts == "jax-here":
        for row in jax_rows():
            print(json.dumps(row), flush=True)
        return
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    result: dict[str, Any] = {"machine": describe(chosen.commit), "ceilings": ceilings()}
    release()
    for name, value in (result["machine"] | result["ceilings"]).items():
        print(f"{name:14} {value}")
    made = {
        "products": lambda: products(result["ceilings"]),
        "networks": lambda: networks(result["ceilings"]),
        "sizes": lambda: sizes(result["ceilings"]),
        "jax": jax_in_a_process,
    }
    for part in chosen.parts.split(","):
        result[part] = made[part]()
        show(f"{part}, {IMAGES} images, bfloat16", result[part])
        machine.keep(chosen.json, result)


if __name__ == "__main__":
    main()
