"""Data sets: the built-in digits, and readers of files that the user has.

Nothing here downloads. Every function gives a torch `Dataset` that travels to all learners and lies in memory once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from syncline.data.arrays import arrays
from syncline.data.image_sets import cifar10, digits, fashion_mnist, mnist
from syncline.data.images import Images

DATASETS: dict[str, Callable[..., Dataset[Any]]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "arrays": arrays,
}

__all__ = ["DATASETS", "Images", "arrays", "cifar10", "digits", "fashion_mnist", "mnist"]
