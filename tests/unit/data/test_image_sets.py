"""Readers of MNIST, Fashion-MNIST and CIFAR-10, on small files of the real formats, whole and damaged."""

from __future__ import annotations

import gzip
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from syncline.data import Images, cifar10, fashion_mnist, mnist
from syncline.errors import UsageError

RANDOM = np.random.default_rng(0)
TRAIN, TEST = 12, 6


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.tobytes()


def small(count: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    pixels = RANDOM.integers(0, 256, (count, *shape), dtype=np.uint8)
    return pixels, (np.arange(count) % 10).astype(np.uint8)


@pytest.fixture
def idx_folder(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    arrays = {}
    for part, split, count in (("train", "train", TRAIN), ("t10k", "test", TEST)):
        arrays[f"x_{split}"], arrays[f"y_{split}"] = small(count, 28, 28)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(arrays[f"x_{split}"]))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(arrays[f"y_{split}"]))
    return tmp_path, arrays


def check(data: Images | TensorDataset, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Item by item, in batches, and pickled."""
    assert len(data) == len(labels)
    for index in (0, len(labels) - 1):
        image, label = data[index]
        assert image.dtype == torch.float32 and label.dtype == torch.int64
        np.testing.assert_allclose(image.numpy(), pixels[index], rtol=1e-6, atol=1e-5)
        assert int(label) == labels[index]
    images, classes = next(iter(DataLoader(pickle.loads(pickle.dumps(data)), batch_size=len(labels))))
    np.testing.assert_allclose(images.numpy(), pixels, rtol=1e-6, atol=1e-5)
    assert classes.tolist() == labels.tolist()


@pytest.mark.parametrize("reader", [mnist, fashion_mnist])
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("floats", [False, True])
def test_idx(
    reader: Callable[..., Images], split: str, floats: bool, idx_folder: tuple[Path, dict[str, np.ndarray]]
) -> None:
    folder, arrays = idx_folder
    data = reader(folder, split, floats=floats)
    assert isinstance(data, TensorDataset if floats else Images)
    check(data, arrays[f"x_{split}"][:, None] / 255, arrays[f"y_{split}"])


def test_idx_compressed_with_a_dot_and_in_torchvisions_folder(
    idx_folder: tuple[Path, dict[str, np.ndarray]],
) -> None:
    folder, arrays = idx_folder
    inner = folder / "MNIST" / "raw"
    inner.mkdir(parents=True)
    for file in list(folder.glob("*ubyte")):
        name = file.name.replace("-idx", ".idx") + ".gz"
        (inner / name).write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    check(mnist(str(folder), "test"), arrays["x_test"][:, None] / 255, arrays["y_test"])


def test_centred_pixels_use_the_mean_of_the_training_set(
    idx_folder: tuple[Path, dict[str, np.ndarray]],
) -> None:
    folder, arrays = idx_folder
    mean = arrays["x_train"].mean(0)
    for split in ("train", "test"):
        check(
            mnist(folder, split, pixels="centred"),
            (arrays[f"x_{split}"] - mean)[:, None],
            arrays[f"y_{split}"],
        )


def test_npz_in_a_folder_and_by_name(tmp_path: Path) -> None:
    x, y = small(TRAIN, 28, 28)
    np.savez(tmp_path / "fashion-mnist.npz", x_train=x, y_train=y, x_test=x[:TEST], y_test=y[:TEST])
    for place in (tmp_path, tmp_path / "fashion-mnist.npz"):
        check(fashion_mnist(place, "test"), x[:TEST, None] / 255, y[:TEST])


def damaged_images(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "train-images-idx3-ubyte").write_bytes(content) and None


@pytest.mark.parametrize(
    "damage, words",
    [
        (damaged_images(b""), r"train-images-idx3-ubyte: not an IDX file .* 0x00000803, got 0x00000000"),
        (damaged_images(idx(small(3, 28)[0])), r"must begin with 0x00000803, got 0x00000802"),
        (
            damaged_images(idx(small(3, 28, 28)[0])[:-1]),
            r"truncated: \(3, 28, 28\) takes 2,368 bytes, .* has 2,367",
        ),
        (damaged_images(idx(small(3, 28, 28)[0])[:9]), r"truncated"),
        (damaged_images(idx(small(3, 28, 28)[0]) + b"x"), r"too long"),
        (damaged_images(idx(small(3, 9, 9)[0])), r"images are \(9, 9\), expected 28×28"),
        (damaged_images(idx(small(3, 28, 28)[0])), r"3 train images but 12 labels"),
        (
            lambda folder: (folder / "train-labels-idx1-ubyte").write_bytes(
                idx(np.full(TRAIN, 11, np.uint8))
            ),
            r"labels must lie in 0 to 9, found 11 to 11",
        ),
        (
            lambda folder: (folder / "train-labels-idx1-ubyte").unlink(),
            r"no mnist train labels in .*: looked for train-labels-idx1-ubyte, .*\.gz there and in raw.*mnist\.npz; put .* https",
        ),
    ],
)
def test_damaged_idx(
    damage: Callable[[Path], object], words: str, idx_folder: tuple[Path, dict[str, np.ndarray]]
) -> None:
    folder, _ = idx_folder
    damage(folder)
    with pytest.raises(UsageError, match=words) as caught:
        mnist(folder)
    assert "\n" not in str(caught.value)


def test_damaged_gzip(idx_folder: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, _ = idx_folder
    file = folder / "train-images-idx3-ubyte"
    whole = gzip.compress(file.read_bytes())
    file.unlink()
    for content in (whole[:-20], b"no gzip", whole[:30] + b"\0\0\0" + whole[33:]):
        (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
        with pytest.raises(UsageError, match=r"ubyte\.gz: cannot be read: "):
            mnist(folder)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"folder": "/no/such/place"}, r"no folder or file '/no/such/place' .*; .*https://"),
        ({"folder": 3}, r"folder must be a path, got 3"),
        ({"split": "valid"}, r"split must be one of"),
        (
            {"pixels": "center"},
            r"pixels must be one of 'unit', 'centred', got 'center', did you mean 'centred'",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], words: str, tmp_path: Path) -> None:
    for reader in (mnist, cifar10):
        with pytest.raises(UsageError, match=words):
            reader(**{"folder": tmp_path, **arguments})


# -- CIFAR-10 ------------------------------------------------------------------------------------------------


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 wrote it: protocol 2, byte strings as its 'str', numpy's old module name."""

    def text(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(4, "little") + value

    rows, columns = pixels.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01" + b"M" + rows.to_bytes(2, "little") + b"M" + columns.to_bytes(2, "little") + b"\x86"
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89" + text(pixels.tobytes()) + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


@pytest.fixture
def batches(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Five batches of two and a test batch, the first as Python 2 wrote them, the others by this Python."""
    pixels, labels = small(TRAIN, 3072)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        rows = slice(2 * number, 2 * number + 2)
        chosen, numbers = pixels[rows], [int(label) for label in labels[rows]]
        newer = pickle.dumps({"data": chosen, "labels": numbers}, protocol=2 + number % 3)
        (folder / name).write_bytes(newer if number else python2_pickle(chosen, numbers))
    return tmp_path, pixels.reshape(-1, 3, 32, 32), labels


def test_cifar10_batches(batches: tuple[Path, np.ndarray, np.ndarray]) -> None:
    folder, pixels, labels = batches
    check(cifar10(folder), pixels[:10] / 255, labels[:10])
    check(cifar10(folder / "cifar-10-batches-py", "test"), pixels[10:] / 255, labels[10:])
    check(cifar10(folder, "test", pixels="centred"), pixels[10:] - pixels[:10].mean(0), labels[10:])


def test_cifar10_npz_has_channels_last(batches: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    _, pixels, labels = batches
    last = pixels.transpose(0, 2, 3, 1)
    np.savez(tmp_path / "cifar10.npz", x_train=last, y_train=labels, x_test=last, y_test=labels)
    check(cifar10(tmp_path), pixels / 255, labels)


class Evil:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self._call = call, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def test_a_batch_cannot_call_anything(batches: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    folder = batches[0] / "cifar-10-batches-py"
    touched = tmp_path / "touched"
    for evil in (Evil(Path.touch, touched), Evil(eval, f"open({str(touched)!r}, 'w')"), Evil(np.load, "x")):
        (folder / "data_batch_3").write_bytes(pickle.dumps({"data": evil, "labels": []}))
        with pytest.raises(
            UsageError, match=r"data_batch_3: not an official .* batch: it asks for .*, which no batch needs"
        ):
            cifar10(folder)
    assert not touched.exists()


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "Ran out of input"),
        (b"\x80\x02}q", "not an official CIFAR-10 python batch"),
        (pickle.dumps([1, 2]), "it holds list, not a dict"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}), "labels"),
        (pickle.dumps({"data": np.zeros((2, 5), np.uint8), "labels": [1, 2]}), r"shape \(N, 3072\)"),
        (pickle.dumps({"data": np.zeros((2, 3072)), "labels": [1, 2]}), "it holds an array of 'f8'"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}), "2 images but 1 labels"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["1"]}), "list of whole numbers"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}), "labels must lie in 0 to 9"),
    ],
)
def test_damaged_batch(content: bytes, words: str, batches: tuple[Path, np.ndarray, np.ndarray]) -> None:
    folder = batches[0]
    (folder / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    with pytest.raises(UsageError, match=words) as caught:
        cifar10(folder, "test")
    assert "\n" not in str(caught.value)


def test_missing_batches_are_named(batches: tuple[Path, np.ndarray, np.ndarray]) -> None:
    folder = batches[0]
    (folder / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(
        UsageError, match=r"looked for data_batch_4 there and in cifar-10-batches-py.*unpack https"
    ):
        cifar10(folder)


@pytest.mark.parametrize(
    "arrays, words",
    [
        ({"x_train": np.zeros((2, 32, 32, 3), np.uint8)}, r"no array 'y_train'; it has x_train"),
        (
            {"x_train": np.zeros((2, 32, 32, 3)), "y_train": np.zeros(2, int)},
            r"x_train must be uint8 of shape",
        ),
        (
            {"x_train": np.zeros((2, 3, 32, 32), np.uint8), "y_train": np.zeros(2, int)},
            r"must be uint8 of shape",
        ),
        ({"x_train": np.zeros((2, 32, 32, 3), np.uint8), "y_train": np.zeros(3, int)}, r"2 whole numbers"),
        ({"x_train": np.array([{}], object), "y_train": np.zeros(1, int)}, r"not a readable npz"),
    ],
)
def test_damaged_npz(arrays: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", **arrays)
    with pytest.raises(UsageError, match=words):
        cifar10(tmp_path)


def test_a_truncated_npz(tmp_path: Path) -> None:
    file = tmp_path / "cifar10.npz"
    file.write_bytes(b"PK\3\4 nothing")
    with pytest.raises(UsageError, match=re.escape(str(file)) + ": not a readable npz archive"):
        cifar10(tmp_path)
