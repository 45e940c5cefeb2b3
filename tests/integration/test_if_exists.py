"""A second run with the same run folder: refused, or with one word continued, replaced, or written to a new name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.errors import UsageError
from syncline.report.run_record import read_run
from syncline.table.checkpoints import Folder
from tests.integration.small_runs import points, same, start, train, until
from tests.ready_python import run_ready


def run(folder: Path, **options: Any) -> sl.Result:
    result = train(data=points(64), run_dir=folder, engine="sim", learners=2, **options)
    assert isinstance(result, sl.Result)
    return result


def epochs(folder: Path) -> list[int]:
    return [each["epoch"] + 1 for each in read_run(folder).epochs]


def test_the_refusal_names_the_words_and_the_next_free_folder(tmp_path: Path) -> None:
    run(tmp_path / "a", epochs=1)
    (tmp_path / "a-2").mkdir()
    with pytest.raises(UsageError) as refused:
        run(tmp_path / "a", epochs=1)
    text = str(refused.value)
    assert "\n" not in text and f"{tmp_path / 'a'} holds a run already" in text
    assert all(word in text for word in ("if_exists", "--if-exists", "'resume'", "'replace'", "'new'"))
    assert text.endswith(f"writes to {tmp_path / 'a-3'}")
    with pytest.raises(
        UsageError, match="if_exists is one of 'refuse', 'resume', 'replace', 'new', got 'yes'"
    ):
        run(tmp_path / "b", epochs=1, if_exists="yes")
    assert not (tmp_path / "b").exists()


def test_resume_starts_continues_and_finishes_with_the_same_call(tmp_path: Path) -> None:
    """A run in two halves has the weights of one that ran through; a third call has nothing left to do."""
    whole = run(tmp_path / "whole", epochs=4, sync="hardsync")
    half = run(tmp_path / "a", epochs=2, sync="hardsync", if_exists="resume")
    rest = run(tmp_path / "a", epochs=4, sync="hardsync", if_exists="resume")
    assert [len(each.history) for each in (half, rest)] == [2, 4]
    assert same(rest.state_dict(), whole.state_dict())
    again = run(tmp_path / "a", epochs=4, sync="hardsync", if_exists="resume")
    assert again.version == rest.version and same(again.state_dict(), rest.state_dict())
    assert epochs(tmp_path / "a") == [1, 2, 3, 4] and len(read_run(tmp_path / "a").starts) == 3


def test_resume_starts_over_where_the_run_left_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    run(folder, epochs=2)
    shutil.rmtree(folder / "checkpoints")
    assert len(run(folder, epochs=1, if_exists="resume").history) == 1
    assert epochs(folder) == [1] and len(read_run(folder).starts) == 1


def test_resume_prefers_the_folder_to_the_run_that_it_began_from(tmp_path: Path) -> None:
    """A job that is stopped and started again and again continues its own run, not the one it was started from."""
    run(tmp_path / "base", epochs=1)
    options: dict[str, Any] = {"resume": tmp_path / "base", "if_exists": "resume"}
    assert len(run(tmp_path / "a", epochs=2, **options).history) == 2
    assert len(run(tmp_path / "a", epochs=3, **options).history) == 3
    assert epochs(tmp_path / "a")[-1] == 3 and epochs(tmp_path / "base") == [1]


def test_replace_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    run(folder, epochs=3, evaluate=points(8), clocks=True)
    (folder / "notes.txt").write_text("mine")
    first = {path.name for path in folder.iterdir()}
    assert len(run(folder, epochs=1, if_exists="replace").history) == 1
    left = {path.name for path in folder.iterdir()}
    assert (folder / "notes.txt").read_text() == "mine"
    assert first - left == {"best.safetensors", "clocks.bin"}, "this run has neither"
    assert epochs(folder) == [1] and len(read_run(folder).starts) == 1


def test_new_takes_the_next_free_name(tmp_path: Path) -> None:
    for _ in range(3):
        run(tmp_path / "a", epochs=1, if_exists="new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a-2", "a-3"]
    assert all(epochs(path) == [1] for path in tmp_path.iterdir())


@pytest.mark.parametrize("word", ["resume", "replace"])
def test_a_run_that_is_alive_is_neither_resumed_nor_replaced(word: str, tmp_path: Path) -> None:
    with start(points(64), epochs=100_000, run_dir=tmp_path / "a", checkpoint_every=5) as alive:
        until(lambda: Folder(tmp_path / "a" / "checkpoints").all())
        with pytest.raises(UsageError, match="holds a run that is alive"):
            run(tmp_path / "a", epochs=1, if_exists=word)
        new = run(tmp_path / "a", epochs=1, if_exists="new")
        assert new.version > 0 and not alive.done
    assert alive.wait().version > 0 and torch.isfinite(alive.wait().state_dict()["weight"]).all()


def test_the_command_line_has_the_words(tmp_path: Path) -> None:
    command = ["-m", "syncline", "train", "--run-dir", "a", "--learners", "1", "--set", "engine=sim"]

    def train_again(*words: str) -> Any:
        return run_ready([*command, *words], timeout=110, cwd=tmp_path)

    assert train_again("--epochs", "1", "--if-exists", "resume").returncode == 0
    refused = train_again("--epochs", "2")
    assert refused.returncode == 2 and "--if-exists" in refused.stderr
    done = train_again("--epochs", "2", "--if-exists", "resume")
    assert done.returncode == 0, done.stderr
    assert "epoch 2/2" in done.stdout and "epoch 1/2" not in done.stdout
    assert train_again("--epochs", "1", "--if-exists", "new").returncode == 0
    assert epochs(tmp_path / "a") == [1, 2] and epochs(tmp_path / "a-2") == [1]
    wrong = train_again("--if-exists", "yes")
    assert wrong.returncode == 2 and "--if-exists yes" in wrong.stderr and "replace" in wrong.stderr
    resumed = run_ready(
        ["-m", "syncline", "train", "--resume", "a", "--epochs", "3"], timeout=110, cwd=tmp_path
    )
    assert resumed.returncode == 0, resumed.stderr
