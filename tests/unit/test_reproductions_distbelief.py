"""Figures 4 and 5 of DistBelief in the smallest: features have the paper's shape, all methods run, and their points are kept."""

from pathlib import Path

import numpy as np
import pytest
import torch

from reproductions.distbelief import figures45, speech


def recordings(file: Path) -> None:
    """Two digits as tones, with noise."""
    random, rate = np.random.RandomState(0), 8000
    tones = [np.sin(2 * np.pi * (300 + 900 * (n % 2)) * np.arange(2000 + n) / rate) for n in range(12)]
    samples = [(8000 * (t + 0.1 * random.standard_normal(len(t)))).astype(np.int16) for t in tones]
    offsets = np.cumsum([0, *map(len, samples)])
    labels, indices = np.arange(12) % 2, np.arange(12)
    np.savez(file, samples=np.concatenate(samples), offsets=offsets, label=labels, index=indices, rate=rate)


def test_frames_are_eleven_times_forty_energies_and_no_recording_is_in_both_sets(tmp_path: Path) -> None:
    recordings(tmp_path / "tones.npz")
    train, test = speech.read(tmp_path / "tones.npz")
    assert train.tensors[0].shape[1] == test.tensors[0].shape[1] == 440
    assert len(train) + len(test) == sum((2000 + n - 200) // 80 + 1 - 10 for n in range(12))
    assert torch.allclose(train.tensors[0].mean(0), torch.zeros(440), atol=1e-3)


def test_all_methods_run_and_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--width 4 --examples 60 --epochs 1 --iterations 2 --warm 0 --workers 2 --target 0.01 --batch 20"
    files = ["--csv", str(tmp_path / "f.csv"), "--picture", str(tmp_path / "f.svg")]
    found = figures45.main([*small.split(), *files])
    assert [len(points) for points in found.values()] == [1, 1, 1, 2]
    assert "Sandblaster L-BFGS" in capsys.readouterr().out
    assert len((tmp_path / "f.csv").read_text().splitlines()) == 6
    assert "<svg" in (tmp_path / "f.svg").read_text()
