"""AGD's Table 1 and Fig. 1 in small: when it is tested, what is kept in files, and that the columns run and learn."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from reproductions.agd import pictures, table1
from reproductions.agd.table1 import PAPER, Plan, Score, batches_of, means, read_csv, run, write_csv


def bright_halves(count: int, seed: int) -> TensorDataset:
    """Images whose upper or lower half is bright: easy to tell."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    images = 0.1 * torch.rand(count, 1, 28, 28, generator=generator)
    for image, label in zip(images, labels, strict=True):
        image[:, 14 * int(label) : 14 * int(label) + 14] += 0.9
    return TensorDataset(images, labels)


def plan(**changes: int) -> Plan:
    settings = {"every": 2, "tests": 2, "cut": 6, "end": 8, "seed": 0} | changes
    return Plan(train=bright_halves(256, 0), test=bright_halves(64, 1), **settings)


def test_it_is_tested_as_often_as_the_paper_and_at_the_end() -> None:
    assert plan(every=100, tests=5, end=1500).marks() == [100, 200, 300, 400, 500, 1500]
    assert plan(every=2, tests=2, end=4).marks() == [2, 4]
    assert all(len(figures) == table1.TESTS for figures in PAPER.values())


def test_batches_cover_an_epoch_once() -> None:
    stream = batches_of(200, seed=3)
    epochs = [torch.cat([next(stream) for _ in range(3)]) for _ in range(2)]
    assert all(len(set(epoch.tolist())) == 192 for epoch in epochs)
    assert not torch.equal(*epochs)


@pytest.mark.parametrize("column", ["serial", "SGD", "AGD-2"])
def test_columns_run_and_learn(column: str) -> None:
    tests = run(column, plan(end=24, cut=20))
    assert [test.batches for test in tests] == [2, 4, 24]
    assert tests[-1].accuracy > (0.9 if column != "AGD-2" else 0.3)  # which has hardly begun by then


def test_figures_survive_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = {
        "serial": {0: [Score(100, 0.5), Score(200, 0.75)], 1: [Score(100, 0.25), Score(200, 0.5)]},
        "AGD-1": {0: [Score(100, 0.125), Score(200, 0.25)]},
    }
    file = tmp_path / "table1.csv"
    write_csv(file, {"cpu": "a, b"}, measured)
    assert read_csv(file) == ({"cpu": "a, b"}, measured)
    assert means(measured["serial"]) == [0.375, 0.625]
    table1.show(measured)
    assert "| serial | 0.375 | 0.625 | 0.0124" in capsys.readouterr().out


def test_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"cpu": "a", "cores": "2", "torch": "2", "commit": "c", "date": "d"}
    row = {"machine": head, "model": "alexnet", "parameters": 10, "mbit": 100.0, "batch_size": 1, "steps": 5}
    row |= {name: {"none": [0.1], "ddp": [0.2], "delayed:1": [0.12]} for name in ("wall", "core")}
    source = tmp_path / "rows.json"
    source.write_text(json.dumps([row, {"machine": head, "rates": {}}]))
    table = tmp_path / "table1.csv"
    write_csv(table, head, {"serial": {0: [Score(100, 0.5), Score(5000, 0.75)]}})
    for kind, file in (("fig1", source), ("table1", table)):
        monkeypatch.setattr(sys, "argv", ["pictures", kind, str(file), str(tmp_path / f"{kind}.png")])
        pictures.main()
        assert (tmp_path / f"{kind}.png").stat().st_size > 1000
