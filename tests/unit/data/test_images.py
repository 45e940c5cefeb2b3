"""Labelled images held as bytes: what an item is, and what all readers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from syncline.data.images import Arrays, Images, as_folder, check_choice, find, make
from syncline.errors import UsageError

PIXELS = torch.arange(2 * 3 * 2 * 2, dtype=torch.uint8).reshape(3, 2, 2, 2)
LABELS = torch.tensor([4, 5, 6])


def test_items_are_floats_one_by_one_and_together() -> None:
    data = Images(PIXELS, LABELS, scale=2.0, mean=torch.ones(2, 2, 2))
    image, label = data[-1]
    assert torch.equal(image, (PIXELS[2].float() - 1) / 2) and int(label) == 6
    together = data.__getitems__([2, 0])
    assert torch.equal(together[0][0], image) and [int(label) for _, label in together] == [6, 4]
    once = data.floats()
    assert all(torch.equal(once[number][0], data[number][0]) for number in range(3))
    assert PIXELS.dtype == torch.uint8 and int(PIXELS[2, 1, 1, 1]) == 23, "what is held stays as it was"
    for outside in (3, -4):
        with pytest.raises(IndexError, match=f"index {outside} of 3 images"):
            data[outside]
    with pytest.raises(UsageError, match="3 images but 2 labels"):
        Images(PIXELS, LABELS[:2])


def read(place: Path, split: str) -> Arrays:
    count = {"train": 4, "test": 2}[split]
    images = np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2)
    return {"images": images, "labels": np.arange(count)}


def made(place: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "split": "test",
        "pixels": "unit",
        "floats": False,
        "hint": "put it there",
        **changes,
    }
    return make(place, given.pop("split"), given.pop("read", read), **given)


def test_pixels_are_parts_of_one_or_centred_by_the_training_set(tmp_path: Path) -> None:
    unit, centred = made(tmp_path), made(tmp_path, pixels="centred")
    assert unit[1][0].shape == (1, 2, 2) and float(unit[1][0].max()) == pytest.approx(7 / 255)
    assert torch.equal(centred[0][0], torch.full((1, 2, 2), -6.0)), (
        "the training set's mean, also for testing"
    )
    own = made(tmp_path, pixels="centred", split="train", floats=True)
    assert isinstance(own, TensorDataset) and float(own.tensors[0].sum()) == 0.0


@pytest.mark.parametrize("changes, words", [
    ({"split": "tests"}, "split must be one of 'train', 'test', got 'tests', did you mean 'test'"),
    ({"pixels": 3}, "pixels must be one of 'unit', 'centred', got 3"),
    ({"read": lambda place, split: {"images": np.zeros((1, 2, 2), np.uint8), "labels": np.array([10])}}, "labels must lie in 0 to 9, found 10 to 10"),
])  # fmt: skip
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        made(tmp_path, **changes)


def test_a_folder_is_a_path_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_folder("~", "hint") == tmp_path
    with pytest.raises(
        UsageError, match=r"no folder or file 'nowhere' \(looked for /.*nowhere\); put it there"
    ):
        as_folder("nowhere", "put it there")
    with pytest.raises(UsageError, match="folder must be a path, got 3"):
        as_folder(3, "hint")
    check_choice("way", "a", ("a", "b"))


def test_the_first_name_in_the_nearest_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for name in ("raw/a", "raw/b", "b"):
        (tmp_path / name).write_text("")
    assert find(tmp_path, ("raw",), ("a", "b")) == tmp_path / "b"
    assert find(tmp_path, ("raw",), ("a",)) == tmp_path / "raw" / "a"
    assert find(tmp_path, (), ("a", "raw")) is None, "a folder is no file"
