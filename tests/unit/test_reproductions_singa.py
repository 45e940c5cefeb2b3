"""SINGA's models in small: the scripts run from end to end, draw their pictures, and pre-training is what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks import bench_cd
from reproductions.singa import autoencoder, dbn, motion
from syncline.nn import CRBM


def images(count: int) -> TensorDataset:
    """Two kinds: the upper or the lower half is bright."""
    kind = torch.arange(count) % 2
    image = torch.zeros(count, 1, 28, 28)
    image[kind == 0, :, :14] = 1.0
    image[kind == 1, :, 14:] = 1.0
    return TensorDataset(image, kind)


def plan(**changes: object) -> dbn.Plan:
    given = {"epochs": 1, "tune": 2, "sizes": (784, 6, 5), "engine": "sim", **changes}
    return dbn.Plan(train=images(200), test=images(40), **given)  # type: ignore[arg-type]


def test_the_dbn_is_compared_with_random_starts() -> None:
    rows, trained = dbn.run(plan())
    assert [(row.way, row.epochs, len(row.errors)) for row in rows] == [
        ("pre-trained", 2, 2),
        ("random start", 2, 2),
        ("random start, as many epochs in all", 4, 4),
    ]
    assert all(0 <= row.test_error <= 100 for row in rows)
    assert trained.rbms[0].weight.std() > 0.011  # type: ignore[operator,union-attr]


def test_the_autoencoder_is_unrolled_and_tuned(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from reproductions.singa import pictures

    errors, tuned = autoencoder.run(plan(sizes=(784, 8, 3), tune=8))
    assert errors["unrolled and fine-tuned"] < errors["unrolled"]
    pictures.reconstructions(tuned, images(40).tensors[0], tmp_path / "made.png")
    pictures.filters(torch.randn(30, 784), tmp_path / "filters.png")
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in tmp_path.iterdir())


def test_a_folder_of_data_is_all_that_the_script_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = images(60).tensors
    arrays = {"x": (255 * x[:, 0]).to(torch.uint8).numpy(), "y": y.to(torch.uint8).numpy()}
    np.savez(
        tmp_path / "mnist.npz",
        **{f"{key}_{split}": arrays[key] for key in "xy" for split in ("train", "test")},
    )
    read = dbn.read(str(tmp_path), "train", 50)
    assert len(read) == 50 and torch.equal(read.tensors[0], x[:50])


def test_the_motion_is_predicted_better_than_by_the_last_frame() -> None:
    series = motion.walk(1000)
    crbm = motion.train(series[:800], 6, engine="sim")
    assert isinstance(crbm, CRBM)
    errors = motion.errors(crbm, series[800:], series[:800])
    assert errors["conditional RBM"] < errors["as the last frame"]


def test_the_plain_loop_of_the_benchmark_runs() -> None:
    assert bench_cd.plain(bench_cd.images(1200)) > 0
