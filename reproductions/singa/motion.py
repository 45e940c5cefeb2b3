"""A conditional RBM on a motion-like series: joint angles of a walk, made of harmonics with noise; then it walks on by itself.

    python -m reproductions.singa.motion [--epochs 100] [--picture FILE]

Prints the error of the mean prediction of the next frame beside that of "as the last frame" and of a linear model, on
a part of the series that was not trained on. No data is needed.
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.nn import CRBM, windows

JOINTS, ORDER, HIDDEN = 10, 6, 60
FRAMES, HELD_OUT = 6000, 1000


def walk(frames: int = FRAMES, seed: int = 0) -> Tensor:
    """(frames, JOINTS), each of mean 0 and deviation 1: two harmonics of a stride whose speed wanders."""
    generator = torch.Generator().manual_seed(seed)
    steps = 0.15 + 0.02 * torch.randn(frames, generator=generator)
    phase = steps.cumsum(0)[:, None]
    sizes, shifts = (
        torch.rand(2, JOINTS, generator=generator) + 0.3,
        2 * math.pi * torch.rand(2, JOINTS, generator=generator),
    )
    angles = sizes[0] * torch.sin(phase + shifts[0]) + 0.4 * sizes[1] * torch.sin(2 * phase + shifts[1])
    angles += 0.05 * torch.randn(frames, JOINTS, generator=generator)
    return (angles - angles.mean(0)) / angles.std(0)


def train(series: Tensor, epochs: int, engine: str = "local") -> CRBM:
    torch.manual_seed(0)
    result = sl.train(
        CRBM(JOINTS, HIDDEN, order=ORDER, decay=2e-4),
        TensorDataset(windows(series, ORDER)),
        gradient="cd:1",
        optimizer=partial(SGD, lr=1e-3, momentum=0.9),
        sync="hardsync",
        engine=engine,
        learners=2,
        batch_size=50,
        epochs=epochs,
        threads=1,
    )
    assert isinstance(result.model, CRBM)
    return result.model


@torch.no_grad()
def errors(crbm: CRBM, series: Tensor, before: Tensor) -> dict[str, float]:
    """Mean squared errors of the next frame on `series`; `before` is what the linear model is fitted on."""
    past, present = crbm.parts(windows(series, ORDER))
    guess = past[:, -JOINTS:]
    for _ in range(30):
        guess = crbm.visible(crbm.hidden(guess, past), past)
    known, wanted = crbm.parts(windows(before, ORDER))
    linear = torch.linalg.lstsq(known, wanted).solution
    predictions = {"conditional RBM": guess, "linear": past @ linear, "as the last frame": past[:, -JOINTS:]}
    return {name: float((value - present).square().mean()) for name, value in predictions.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(arguments)
    series = walk()
    trained, held_out = series[:-HELD_OUT], series[-HELD_OUT:]
    crbm = train(trained, given.epochs)
    for name, error in errors(crbm, held_out, trained).items():
        print(f"{name}: squared error of the next frame {error:.4f}")
    if given.picture:
        from reproductions.singa.pictures import motion

        torch.manual_seed(0)
        motion(held_out[:200], crbm.generate(held_out[:ORDER], 200 - ORDER), ORDER, given.picture)


if __name__ == "__main__":
    main(sys.argv[1:])
