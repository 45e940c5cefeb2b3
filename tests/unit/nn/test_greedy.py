"""Greedy training: losses fall, stacks below stay fixed, and a resumed run is the uninterrupted one."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn import Greedy, StackShape, build_stacks

SHAPES = [
    StackShape(field=4, step=2, block=(2, 2, 2), window=3),
    StackShape(field=3, step=2, block=(2, 2, 2), window=3),
]
OPTIONS = {"epochs": 2, "batch_size": 8, "rate": 1e-3, "seed": 3}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return build_stacks(1, 10, SHAPES, dtype=dtype)


@pytest.fixture
def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(4, 100, generator=generator)
    return (torch.randn(40, 4, generator=generator) @ basis).view(40, 1, 10, 10)


def weights(trained: nn.Sequential) -> list[Tensor]:
    return [stack.filter.weight.detach().clone() for stack in trained]


def test_losses_fall_and_lower_stacks_stay(images: Tensor) -> None:
    trained = network()
    greedy = Greedy(trained, **(OPTIONS | {"epochs": 4}))
    records, after_first = [], None
    for record in greedy.run(images):
        records.append(record)
        if record.stack == 0:
            after_first = weights(trained)[0]
    assert [(record.stack, record.epoch) for record in records] == [(s, e) for s in (0, 1) for e in range(4)]
    for stack in (0, 1):
        own = [record.loss for record in records if record.stack == stack]
        assert own[-1] < own[0]
    assert after_first is not None and torch.equal(weights(trained)[0], after_first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(
    images: Tensor, tmp_path: Path, after: int, dtype: torch.dtype
) -> None:
    whole = network(dtype)
    expected = list(Greedy(whole, **OPTIONS).run(images))
    first = Greedy(network(dtype), **OPTIONS)
    for _ in zip(range(after), first.run(images), strict=False):
        pass
    first.save(tmp_path)
    fresh = build_stacks(1, 10, SHAPES, dtype=dtype)
    second = Greedy(fresh, **OPTIONS)
    second.load(tmp_path)
    assert second.position == (after // 2, after % 2)
    assert [*second.records, *second.run(images)] == expected
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(fresh), strict=True))
    assert json.loads((tmp_path / "greedy.json").read_text())["settings"]["seed"] == 3


def test_what_does_not_fit_is_refused(images: Tensor, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="40 images do not fill one batch of 64"):
        next(Greedy(network(), epochs=1, batch_size=64).run(images))
    with pytest.raises(UsageError, match="found Linear: use build_stacks"):
        Greedy(nn.Sequential(nn.Linear(2, 2)), epochs=1)
    with pytest.raises(UsageError, match="nothing was saved there"):
        Greedy(network(), **OPTIONS).load(tmp_path)
    Greedy(network(), **OPTIONS).save(tmp_path)
    with pytest.raises(UsageError, match="saved with other settings"):
        Greedy(network(), **(OPTIONS | {"rate": 0.5})).load(tmp_path)
    other = build_stacks(1, 10, SHAPES[:1])
    with pytest.raises(UsageError, match="saved with other shapes"):
        Greedy(other, **OPTIONS).load(tmp_path)
