"""What learners are given in files: each maps it from there, in real processes (M11)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import syncline as sl
from tests.integration.small_runs import launched, train
from tests.unit.engines.local.test_shared_pickle import mapping_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[mapping_of.__module__])

both = pytest.mark.parametrize("topology", ["servers", "allreduce"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.ones(1 << 22, np.float32).tofile(tmp_path / "ones.bin")
    return tmp_path / "ones.bin"


def look(session: sl.Session, data: np.memmap, tensor: Tensor, board: np.memmap, shared: Tensor) -> Any:
    board[session.rank] = shared[session.rank] = session.rank + 1
    sums = float(data.sum()), float(tensor.sum())
    pages = [mapping_of(data.ctypes.data), mapping_of(tensor.data_ptr())]
    return sums, [line.split()[-1] for line, _ in pages], [sizes["Anonymous"] for _, sizes in pages]


@both
def test_learners_read_from_the_callers_files_and_write_to_them(topology: str, file: Path) -> None:
    data = np.memmap(file, np.float32, mode="r")
    tensor = torch.from_numpy(np.memmap(file, np.float32, mode="c"))[1 << 21 :]
    board = np.memmap(file.with_suffix(".board"), np.int64, mode="w+", shape=(2,))
    shared = torch.zeros(2).share_memory_()
    result = launched(look, data, tensor, board, shared, learners=2, topology=topology)
    expected = (float(1 << 22), float(1 << 21)), [str(file)] * 2, [0, 0]  # no memory of their own
    assert result.returned == [expected] * 2
    assert board.tolist() == shared.tolist() == [1, 2]


@both
def test_training_on_a_map_gives_the_bits_of_training_on_a_copy(topology: str, tmp_path: Path) -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    x.numpy().tofile(tmp_path / "x.bin")
    mapped = torch.from_file(str(tmp_path / "x.bin"), shared=False, size=256).view(64, 4)
    labels = (x.sum(1) > 0).long()
    found = [
        train(data=data, evaluate=data, sync="hardsync", learners=2, epochs=2, topology=topology)
        for data in (TensorDataset(x, labels), TensorDataset(mapped, labels))
    ]
    assert torch.equal(found[0].state_dict()["weight"], found[1].state_dict()["weight"])
    assert found[0].history[-1].metrics == found[1].history[-1].metrics


def lose(session: sl.Session, data: np.memmap) -> None:
    if session.rank == 0 and Path(data.filename).exists():  # type: ignore[arg-type]
        os.unlink(data.filename)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_learner_in_anothers_place_that_misses_the_file_says_so(file: Path) -> None:
    data = np.memmap(file, np.float32, mode="r")
    with pytest.raises(sl.SynclineError, match=r"ones.bin, mapped by the caller: No such file or directory"):
        launched(lose, data, learners=2, replace=True)
