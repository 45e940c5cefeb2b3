"""The built-in digits: what they are, their fixed split, and that they come with their licence."""

from __future__ import annotations

import pickle
from importlib import resources

import pytest
import torch

from syncline.data import DATASETS, digits
from syncline.errors import UsageError


def test_the_split_is_fixed_and_complete() -> None:
    train, test = digits("train"), digits("test")
    assert (len(train), len(test)) == (1442, 355)
    images, labels = (torch.cat([a, b]) for a, b in zip(train.tensors, test.tensors, strict=True))
    assert images.shape == (1797, 1, 8, 8) and images.dtype == torch.float32
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert test.tensors[1].bincount().tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    assert float(images.min()) == 0.0 and float(images.max()) == 1.0
    assert images.mul(16).frac().count_nonzero() == 0, "pixels are sixteenths"


def test_the_first_image_is_a_zero() -> None:
    image, label = digits()[0]
    assert label == 0
    assert image[0, 0].mul(16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_it_is_small_and_has_its_licence_beside_it() -> None:
    folder = resources.files("syncline.data")
    assert len(folder.joinpath("digits.npz").read_bytes()) < 60_000
    note = folder.joinpath("digits.LICENCE.txt").read_text()
    assert "CC BY 4.0" in note and "UCI" in note


def test_travels() -> None:
    data = digits("test")
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again.tensors[0], data.tensors[0])


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"split must be one of 'train', 'test', got 'tets', did you mean 'test'"
    ):
        digits("tets")


def test_the_registry_has_every_reader() -> None:
    assert list(DATASETS) == ["digits", "mnist", "fashion_mnist", "cifar10", "arrays"]
