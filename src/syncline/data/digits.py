"""The 1,797 handwritten digits that ship with the package (CC BY 4.0, see digits.LICENCE.txt)."""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from torch.utils.data import TensorDataset

from syncline.data.images import SPLITS, check_choice

EVERY = 5  # the fifth, tenth, … image of each class is for testing
HIGHEST = 16.0  # pixels count the black of 4×4


def digits(split: str = "train") -> TensorDataset:
    """8×8 digits as float32 (1, 8, 8) in 0…1 with their class: 1,442 for training, 355 for testing.

    The split is fixed: in the order of the file, every fifth image of each class is in the test set, so that the
    classes are as frequent in both. The same writers are in both.
    """
    check_choice("split", split, SPLITS)
    with resources.files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images, labels = archive["images"], archive["labels"]
    chosen = _testing(labels) if split == "test" else ~_testing(labels)
    return TensorDataset(
        torch.from_numpy(images[chosen]).unsqueeze(1).float().div_(HIGHEST),
        torch.from_numpy(labels[chosen]).long(),
    )


def _testing(labels: np.ndarray) -> np.ndarray:
    """Which images are for testing."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[EVERY - 1 :: EVERY]] = True
    return chosen
