"""The objective by autograd against the fused updates, in float32 and bfloat16."""

import copy

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.kernels.block_local import batch_last
from syncline.nn import FusedStack, Stack, StackShape, TiedAutoencoder, build_stacks, joint_update

SHAPES = [
    StackShape(field=4, step=2, block=(2, 2, 3), window=3),
    StackShape(field=3, step=1, block=(1, 1, 4), window=3, padding="valid"),
]


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    return build_stacks(1, (12, 11), SHAPES)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(6, 1, 12, 11, generator=torch.Generator().manual_seed(1))


def test_the_objective_is_its_formula(network: nn.Sequential, images: Tensor) -> None:
    stack = network[0]
    objective = TiedAutoencoder(stack, sparsity=0.1)
    filters = stack.filter.weight / stack.filter.weight.norm(dim=2, keepdim=True)
    matrix = torch.zeros(
        stack.filter.geometry.neurons, 12 * 11
    )  # W, dense, with rows in the order of to_rows
    for block, rows in enumerate(filters):
        p, q = divmod(block, stack.filter.geometry.grid[1])
        places = torch.arange(12 * 11).view(12, 11)[p * 2 : p * 2 + 4, q * 2 : q * 2 + 4].flatten()
        matrix[block * 12 : block * 12 + 12, places] = rows
    flat = images.flatten(1)
    rest = objective.gain * flat @ matrix.T @ matrix - flat
    pooled = stack.pool(stack.filter(images))
    expected = (rest.square().sum() + 0.1 * pooled.sum()) / 6
    torch.testing.assert_close(objective(images).loss, expected)


def test_the_best_gain_minimises_the_reconstruction(network: nn.Sequential, images: Tensor) -> None:
    objective = TiedAutoencoder(network[0])
    objective.fit_gain(images)
    best, gain = objective(images).reconstruction, objective.gain.item()
    for other in (gain * 0.9, gain * 1.1):
        objective.gain.data.fill_(other)
        assert objective(images).reconstruction > best


def test_fused_updates_are_autograd_and_momentum(network: nn.Sequential, images: Tensor) -> None:
    stack: Stack = network[0]
    fused = FusedStack(copy.deepcopy(stack), gain_rate=0.0)
    objective = TiedAutoencoder(stack)
    optimizer = torch.optim.SGD([stack.filter.weight], lr=0.01, momentum=0.9)
    for _ in range(5):
        value = objective(images)
        optimizer.zero_grad()
        value.loss.backward()
        optimizer.step()
        step = fused.update(batch_last(images), rate=0.01, decay=0.9)
        torch.testing.assert_close(step.loss, value.loss.detach())
        torch.testing.assert_close(step.reconstruction, value.reconstruction.detach())
        torch.testing.assert_close(fused.weight, stack.filter.weight.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fused.scale, stack.filter.scale().detach())


def test_a_joint_update_is_autograd_through_all_stacks(network: nn.Sequential, images: Tensor) -> None:
    fused = [FusedStack(stack, gain_rate=0.0) for stack in copy.deepcopy(network)]
    objectives = [TiedAutoencoder(stack) for stack in network]
    weights = [stack.filter.weight for stack in network]
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9)
    for _ in range(3):
        below, above = objectives[0](images), objectives[1](network[0](images))
        optimizer.zero_grad()
        (below.loss + above.loss).backward()
        optimizer.step()
        steps = joint_update(fused, batch_last(images), rate=0.01, decay=0.9)
        torch.testing.assert_close(steps[0].loss, below.loss.detach())
        torch.testing.assert_close(steps[1].loss, above.loss.detach())
        for mine, theirs in zip(fused, weights, strict=True):
            torch.testing.assert_close(mine.weight, theirs.detach(), atol=1e-5, rtol=1e-4)


def losses(dtype: torch.dtype, steps: int) -> list[float]:
    torch.manual_seed(0)
    stack = build_stacks(1, 12, SHAPES[:1], dtype=dtype)[0]
    fused = FusedStack(stack)
    generator = torch.Generator().manual_seed(2)
    basis = torch.randn(6, 144, generator=generator)
    found = []
    for _ in range(steps):
        images = (torch.randn(16, 6, generator=generator) @ basis).view(16, 1, 12, 12)
        found.append(float(fused.update(batch_last(images), rate=2e-4, decay=0.9).loss))
    return found


def test_bfloat16_with_stochastic_rounding_learns_as_float32_does() -> None:
    wide, narrow = losses(torch.float32, 150), losses(torch.bfloat16, 150)
    last = [sum(values[-20:]) / 20 for values in (wide, narrow)]
    assert last[0] < 0.75 * sum(wide[:5]) / 5  # it learns at all
    assert last[1] == pytest.approx(last[0], rel=0.02)


def test_other_dtypes_are_sent_to_autograd() -> None:
    stack = build_stacks(1, 12, SHAPES[:1], dtype=torch.float64)[0]
    with pytest.raises(UsageError, match=r"torch.float64: use TiedAutoencoder"):
        FusedStack(stack)
