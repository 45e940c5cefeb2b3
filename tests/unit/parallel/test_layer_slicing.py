"""Every layer type, cut in every way over 2, 3 and 4 processes: results and gradients of one process, to 1e-10."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncline.nn import BlockLocal2d, L2Pool2d, LocalContrastNorm2d
from syncline.nn.layers import Dense
from syncline.parallel import Partitioned, partition
from syncline.parallel.move import Group
from tests.unit.parallel.seats import Seats

seats = Seats()
TOLERANCE = 1e-10
SIZES = (pytest.param(2, marks=pytest.mark.long), 3, 4)  # uneven cuts, and a grid, always
IMAGE = (5, 6, 9, 8)  # uneven over 2, 3 and 4 processes


@pytest.fixture(autouse=True, scope="module")
def _groups_end() -> Iterator[None]:
    yield
    seats.close()


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(result: Any) -> Tensor:
    """Every place with a weight of its own."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return torch.stack([(t * numbers(*t.shape, seed=i)).sum() for i, t in enumerate(tensors)]).sum()


def computed(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, list[Tensor]]:
    inputs = tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    result = model(*inputs)
    loss_of(result).backward()
    return result, [x.grad for x in inputs if x.grad is not None]


def check_same(
    make: Callable[[], nn.Module], plan: Any, inputs: tuple[Tensor, ...], size: int, **options: Any
) -> list[Partitioned]:
    """Forward, gradients by inputs and parameters, and buffers, against one process."""
    torch.manual_seed(0)
    model = make().double()
    given = copy.deepcopy(model)
    result, by_inputs = computed(model, inputs)
    flat = torch.utils._pytree.tree_leaves(result)

    def work(group: Group) -> Any:
        mine = partition(given, plan, inputs, group, **options)
        found, gradients = computed(mine, inputs)
        mine.reduce_gradients()
        return mine, found, [group.add(g) for g in gradients], mine.gather(), mine.gather(gradients=True)

    made = seats.run(size, work)
    for _, found, gradients, state, by_parameters in made:
        for a, b in zip(torch.utils._pytree.tree_leaves(found), flat, strict=True):
            torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(gradients, by_inputs, strict=True):
            torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(by_parameters[name], parameter.grad, rtol=TOLERANCE, atol=TOLERANCE)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(state[name], buffer, rtol=TOLERANCE, atol=TOLERANCE)
    return [each[0] for each in made]


class Model(nn.Module):
    """The layer under test as `layer`, between two that make its inputs depend on parameters."""

    def __init__(self, layer: nn.Module, channels: int | None = None) -> None:
        super().__init__()
        self.before = nn.Identity() if channels is None else nn.Conv2d(channels, channels, 1)
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        first, *rest = inputs
        return self.layer(self.before(first), *rest)


ALL = ("data", "model", "spatial")
IMAGES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "conv": (lambda: nn.Conv2d(6, 7, 3, padding=1), ALL),
    "conv-strided": (lambda: nn.Conv2d(6, 7, (3, 2), stride=(2, 1), padding=(2, 0)), ALL),
    "conv-wide": (lambda: nn.Conv2d(6, 4, 7, padding=3), ALL),  # fields span several processes
    "conv-dilated": (lambda: nn.Conv2d(6, 5, 3, padding=2, dilation=2, bias=False), ALL),
    "conv-same": (lambda: nn.Conv2d(6, 5, 4, padding="same"), ALL),
    "conv-groups": (lambda: nn.Conv2d(6, 8, 3, padding=1, groups=2), ALL),
    "conv-depthwise": (lambda: nn.Conv2d(6, 12, 3, groups=6), ALL),
    "max-pool": (lambda: nn.MaxPool2d(3, 2, padding=1), ALL),
    "max-pool-ceil": (lambda: nn.MaxPool2d(3, 2, ceil_mode=True), ALL),
    "max-pool-dilated": (lambda: nn.MaxPool2d(2, 1, dilation=2), ALL),
    "mean-pool": (lambda: nn.AvgPool2d(3, 2, padding=1), ALL),
    "mean-pool-ceil": (lambda: nn.AvgPool2d(3, 2, padding=1, ceil_mode=True), ALL),
    "mean-pool-inner": (lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), ALL),
    "adaptive-pool": (lambda: nn.AdaptiveAvgPool2d((5, 4)), ALL[:2]),
    "adaptive-max-pool": (lambda: nn.AdaptiveMaxPool2d(1), ALL[:2]),
    "lrn": (lambda: nn.LocalResponseNorm(5, alpha=0.5), ALL),
    "lrn-even": (lambda: nn.LocalResponseNorm(4, alpha=0.5), ALL),
    "batch-norm": (lambda: nn.BatchNorm2d(6), ALL),
    "batch-norm-plain": (lambda: nn.BatchNorm2d(6, affine=False, momentum=None), ALL),
    "batch-norm-eval": (lambda: nn.BatchNorm2d(6).eval(), ALL),
    "relu": (nn.ReLU, ALL),
    "relu-in-place": (lambda: nn.ReLU(inplace=True), ALL),
    "softmax": (lambda: nn.Softmax(1), ("data", "spatial")),
    "group-norm": (lambda: nn.GroupNorm(2, 6), ("data",)),
    "conv-transpose": (lambda: nn.ConvTranspose2d(6, 4, 3, stride=2), ("data",)),
    "block-local": (lambda: BlockLocal2d(6, (9, 8), field=3, step=1, block=(2, 1, 5)), ALL),
    "block-local-norm": (
        lambda: BlockLocal2d(6, (9, 8), field=2, step=2, block=(1, 3, 4), unit_norm=True),
        ALL,
    ),
    "l2-pool": (lambda: L2Pool2d(5), ALL),
    "l2-pool-valid": (lambda: L2Pool2d(3, stride=2, padding="valid"), ALL),
    "contrast": (lambda: LocalContrastNorm2d(5), ALL),
    "contrast-valid": (lambda: LocalContrastNorm2d(3, padding="valid"), ALL),
}


@pytest.mark.sweep(60)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name, way", [(name, way) for name, (_, ways) in IMAGES.items() for way in ways])
def test_layers_of_images_equal_one_process(name: str, way: str, size: int) -> None:
    make, _ = IMAGES[name]
    small = size == 4 and way == "spatial" and name in ("contrast-valid",)
    check_same(
        lambda: Model(make(), 6), {"layer": way}, (numbers(*IMAGE),), size, grid=(2, 2) if small else None
    )


FEATURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "linear": (lambda: nn.Linear(7, 9), (5, 7), ("data", "model", "rows")),
    "linear-sequence": (lambda: nn.Linear(7, 9, bias=False), (5, 3, 7), ("data", "model", "rows")),
    "dense-of-images": (lambda: Dense(6 * 12, 9), (5, 6, 4, 3), ("data", "model", "rows")),
    "dense-of-sequences": (lambda: Dense(4 * 7, 5, bias=False), (5, 4, 7), ("data", "model", "rows")),
    "layer-norm": (lambda: nn.LayerNorm(7), (5, 3, 7), ("data", "model")),
    "layer-norm-two": (lambda: nn.LayerNorm((3, 7)), (5, 3, 7), ("data", "model")),
    "layer-norm-plain": (lambda: nn.LayerNorm(7, elementwise_affine=False), (5, 7), ("data", "model")),
    "batch-norm-1d": (lambda: nn.BatchNorm1d(7), (5, 7), ("data", "model")),
    "softmax-last": (lambda: nn.Softmax(-1), (5, 7), ("data",)),
    "gelu": (nn.GELU, (5, 7), ("data", "model")),
    "conv-1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (5, 4, 9), ALL),
    "max-pool-1d": (lambda: nn.MaxPool1d(3, 2), (5, 4, 19), ALL),
    "mean-pool-1d": (lambda: nn.AvgPool1d(3, 2, padding=1), (5, 4, 19), ALL),
    "adaptive-pool-1d": (lambda: nn.AdaptiveAvgPool1d(3), (5, 4, 19), ALL[:2]),
    "batch-norm-sequence": (lambda: nn.BatchNorm1d(4), (5, 4, 9), ALL),
    "conv-3d": (lambda: nn.Conv3d(4, 6, (3, 2, 2), stride=2), (5, 4, 9, 8, 4), ALL),
    "max-pool-3d": (lambda: nn.MaxPool3d(2, 1, padding=1), (5, 4, 6, 5, 4), ALL),
    "mean-pool-3d": (lambda: nn.AvgPool3d(2, 1, padding=1), (5, 4, 6, 5, 4), ALL),
    "batch-norm-3d": (lambda: nn.BatchNorm3d(4), (5, 4, 6, 5, 4), ALL),
    "attention-layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (5, 3, 8), ("data",)
    ),
}  # fmt: skip


@pytest.mark.sweep(40)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name, way", [(name, way) for name, (_, _, ways) in FEATURES.items() for way in ways]
)
def test_layers_of_features_equal_one_process(name: str, way: str, size: int) -> None:
    make, shape, _ = FEATURES[name]
    check_same(lambda: Model(make()), {"layer": way}, (numbers(*shape),), size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["data", "model"])
def test_embeddings_equal_one_process(way: str, size: int) -> None:
    tokens = torch.randint(11, (5, 4), generator=torch.Generator().manual_seed(0))
    check_same(lambda: Model(nn.Embedding(11, 6, padding_idx=2)), {"layer": way}, (tokens,), size)


@pytest.mark.parametrize("size", SIZES)
def test_what_has_its_examples_second_is_cut_there(size: int) -> None:
    class Words(nn.Module):
        """(time, examples) all the way."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm, self.lstm, self.out = (
                nn.Embedding(11, 6),
                nn.LayerNorm(6),
                nn.LSTM(6, 4),
                nn.Linear(4, 3),
            )

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.lstm(self.norm(self.words(tokens)))[0])

    tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))
    (mine, *_) = check_same(Words, {}, (tokens,), size, batch_dim=1)
    (program,) = mine._programs.values()
    assert {step.outs[0].spread.way for step in program.steps} == {"data"} and program.moved == 0
