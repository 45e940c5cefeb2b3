"""Arrays by memory map: files, folders and archives, all layouts; they travel as their place."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from syncline.data import arrays
from syncline.engines.local import shared_pickle as cargo
from syncline.errors import UsageError

X = np.arange(7 * 3 * 2, dtype=np.float32).reshape(7, 3, 2)
Y = np.arange(7, dtype=np.uint8)


def as_folder(path: Path, x: np.ndarray) -> Path:
    np.save(path / "x_train.npy", x)
    np.save(path / "y_train.npy", Y)
    return path


def as_archive(path: Path, x: np.ndarray) -> Path:
    np.savez(path / "some.npz", x_train=x, y_train=Y)
    return path / "some.npz"


def as_folder_of_one(path: Path, x: np.ndarray) -> Path:
    return as_archive(path, x).parent


@pytest.mark.parametrize("store", [as_folder, as_archive, as_folder_of_one])
@pytest.mark.parametrize("x", [X, np.asfortranarray(X), X.astype(">f8"), X.astype(np.int32)])
def test_mapped_items_and_batches(
    store: Callable[[Path, np.ndarray], Path], x: np.ndarray, tmp_path: Path
) -> None:
    data = arrays(store(tmp_path, x))
    assert all(isinstance(part.array, np.memmap) for part in data.parts)
    assert len(data) == 7
    item, label = data[-1]
    np.testing.assert_array_equal(item.numpy(), X[-1])
    assert label.dtype == torch.int64 and label == 6
    batch, labels = next(iter(DataLoader(data, batch_size=7)))
    np.testing.assert_array_equal(batch.numpy(), X)
    assert labels.tolist() == Y.tolist()
    with pytest.raises(IndexError):
        data[7]


def test_scale_and_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "faces.npz", images=np.full((4, 2), 51, np.uint8), more=np.ones(4), other=np.ones(3))
    data = arrays(tmp_path, names=["images", "more"], scale=255)
    assert torch.equal(data[0][0], torch.full((2,), 0.2)) and data[0][1].dtype == torch.float64
    assert len(arrays(tmp_path, names=["images"])[0]) == 1


def test_a_single_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    (item,) = arrays(tmp_path / "x.npy")[3]
    np.testing.assert_array_equal(item.numpy(), X[3])


def test_compressed_members_are_read_with_a_note(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "some.npz", x_train=X, y_train=Y)
    with pytest.warns(
        UserWarning, match=r"x_train.npy, y_train.npy compressed, so read into memory .* np.savez"
    ):
        data = arrays(tmp_path)
    assert not any(isinstance(part.array, np.memmap) for part in data.parts)
    np.testing.assert_array_equal(data[2][0].numpy(), X[2])


def test_travels_as_its_place(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1000, 1000)))
    data = arrays(tmp_path / "x.npy")
    parcel = cargo.pack(data)
    assert parcel.bulk == -1 and len(parcel.pickled) < 2000, "eight megabytes stay in their file"
    assert len(cargo.unpack(parcel)) == 1000


def test_another_file_by_now_is_noticed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    packed = pickle.dumps(arrays(tmp_path / "x.npy"))
    np.save(tmp_path / "x.npy", X[:3])
    with pytest.raises(UsageError, match=r"x.npy has changed since the data set was opened"):
        pickle.loads(packed)


def broken(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def npy(array: np.ndarray) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / "x_train.npy", array)


@pytest.mark.parametrize(
    "damage, words",
    [
        (broken("x_train.npy", b""), r"x_train.npy: not a .npy array"),
        (broken("x_train.npy", b"\x93NUMPY\x01\x00\x09\x00{'descr': "), r"x_train.npy: not a .npy array"),
        (npy(np.array(["a", "b"])), r"x_train.npy: arrays must hold numbers, got <U1"),
        (npy(np.array(3.0)), r"an array is a single number"),
        (npy(X[:5]), r"equally long: x_train 5, y_train 7"),
        (
            lambda folder: (folder / "x_train.npy").unlink(),
            r"no x_train.npy, and not exactly one .npz; .* y_train.npy",
        ),
    ],
)
def test_damaged(damage: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    folder = as_folder(tmp_path, X)
    damage(folder)
    with pytest.raises(UsageError, match=words) as caught:
        arrays(folder)
    assert "\n" not in str(caught.value)


def test_truncated(tmp_path: Path) -> None:
    file = as_folder(tmp_path, X) / "x_train.npy"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(
        UsageError, match=r"truncated: \(7, 3, 2\) of float32 ends at byte 296, the data at 292"
    ):
        arrays(tmp_path)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"split": "test"}, r"no array 'x_test'; it has x_train, y_train"),
        ({"split": "dev"}, r"split must be one of"),
        ({"names": "x_train"}, r"names must be a list of texts"),
        ({"names": []}, r"names must be a list of texts"),
        ({"scale": 0}, r"scale must be a number > 0"),
        ({"folder": "/no/such/place"}, r"no folder"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], words: str, tmp_path: Path) -> None:
    as_archive(tmp_path, X)
    with pytest.raises(UsageError, match=words):
        arrays(**{"folder": tmp_path, **arguments})


def test_a_file_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"x.npz: not a readable npz archive"):
        arrays(tmp_path / "x.npz")
