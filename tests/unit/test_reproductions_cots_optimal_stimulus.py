"""The best stimulus: known answers, and unit norm always."""

import pytest
import torch
from torch import Tensor

from reproductions.cots.optimal_stimulus import best_stimulus
from syncline.errors import UsageError
from syncline.nn import BlockLocal2d, Stack, StackShape


def test_a_linear_neuron_likes_its_own_filter() -> None:
    torch.manual_seed(0)
    layer = BlockLocal2d(1, 8, field=4, step=2, block=(1, 1, 2), unit_norm=True)
    image, response = best_stimulus(lambda x: layer(x)[:, 1, 1, 2], (1, 8, 8))
    own = torch.zeros(1, 8, 8)
    own[0, 2:6, 4:8] = layer.weight.detach()[1 * 3 + 2, 1].view(4, 4)
    torch.testing.assert_close(image, own / own.norm(), atol=1e-3, rtol=0)
    assert response == pytest.approx(1.0, abs=1e-5)


def test_a_quadratic_neuron_likes_its_first_eigenvector() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(9, 9)
    matrix = matrix @ matrix.T
    image, response = best_stimulus(lambda x: (x.flatten(1) @ matrix * x.flatten(1)).sum(1), (1, 3, 3))
    values, vectors = torch.linalg.eigh(matrix)
    assert response == pytest.approx(values[-1].item(), rel=1e-3)
    assert abs(image.flatten() @ vectors[:, -1]).item() == pytest.approx(1.0, abs=1e-3)


def test_a_neuron_deep_in_a_stack_answers_better_than_to_random_images() -> None:
    torch.manual_seed(0)
    stack = Stack(1, 10, StackShape(field=4, step=2, block=(2, 2, 2), window=3))

    def neuron(images: Tensor) -> Tensor:
        return stack(images)[:, 1, 3, 3]

    image, response = best_stimulus(neuron, (1, 10, 10), steps=100)
    assert image.norm().item() == pytest.approx(1.0, abs=1e-5)
    random = torch.randn(200, 1, 10, 10)
    with torch.no_grad():
        assert response > neuron(random / random.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).max()


def test_several_responses_per_image_are_refused() -> None:
    with pytest.raises(UsageError, match=r"one response per image, \[8\], got \[8, 4\]"):
        best_stimulus(lambda x: x.flatten(1), (1, 2, 2))
