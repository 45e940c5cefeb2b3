"""Files of checkpoints: written in their order, failures reported, the oldest removed, first values while they are needed."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline import messages as m
from syncline.engines import checkpoint_writer
from syncline.engines.checkpoint_writer import Writer, commit, with_content, write_part
from syncline.protocols.sequence import Account
from syncline.table.checkpoint_content import Source, table_file
from syncline.table.checkpoints import FIRST, Folder, Written, find, piece_tensors
from tests.unit.engines.recorded_runs import LAYOUT, SHARDS


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(tmp_path / "checkpoints")
    found.prepare()
    return found


def written(folder: Folder, number: int, name: str = "a.safetensors") -> list[Written]:
    saved = write_part(folder, (number, name, {"x": torch.full((3,), float(number))}, {}))
    assert saved.written is not None, saved.problem
    return [saved.written]


def names(folder: Folder) -> list[str]:
    return sorted(path.name for path in folder.root.iterdir())


def test_a_file_with_its_notes_is_part_of_the_checkpoint(folder: Folder) -> None:
    saved = write_part(folder, (7, "a.safetensors", {"x": torch.ones(3)}, {"0/0": {"seen": 4}}))
    assert saved.written is not None and not saved.problem
    assert commit(folder, 7, {"seed": 1}, [saved.written], 2).path == str(folder.root / "000000007")
    found = find(folder.root)
    assert (found.number, found.manifest) == (7, {"seed": 1})
    assert torch.equal(found.tensors("a.safetensors")["x"], torch.ones(3))
    assert found.notes("a.safetensors") == {"0/0": {"seen": 4}}


@pytest.mark.parametrize(
    "tensors, notes, words",
    [
        ({"x": torch.ones(2).to_sparse()}, {}, "takes no tensor 'x'"),
        ({"x": torch.ones(2)}, {"0/0": {"seen": object()}}, "not JSON serializable"),
    ],
)
def test_whatever_goes_wrong_is_told_and_not_raised(
    tensors: dict[str, Tensor], notes: dict[str, Any], words: str, folder: Folder
) -> None:
    saved = write_part(folder, (7, "a.safetensors", tensors, notes))
    assert saved.written is None and words in saved.problem
    assert (saved.number, saved.name) == (7, "a.safetensors")


def test_the_oldest_beyond_those_to_keep_go_and_none_without_a_number(folder: Folder) -> None:
    for number in (1, 2, 3):
        commit(folder, number, {}, written(folder, number), None)
    assert [path.name for path in folder.all()] == ["000000001", "000000002", "000000003"]
    commit(folder, 4, {}, written(folder, 4), 2)
    assert [path.name for path in folder.all()] == ["000000003", "000000004"]


def test_a_checkpoint_of_a_run_that_went_back_takes_the_later_ones_along(folder: Folder) -> None:
    for number in (1, 8, 9):
        commit(folder, number, {}, written(folder, number), 9)
    commit(folder, 3, {}, written(folder, 3), 9)
    assert [path.name for path in folder.all()] == ["000000001", "000000003"]


def test_a_checkpoint_that_fails_leaves_nothing_and_the_older_ones_stay(folder: Folder) -> None:
    commit(folder, 1, {}, written(folder, 1), 1)
    (file,) = written(folder, 2)
    done = commit(folder, 2, {}, [replace(file, nbytes=file.nbytes + 1)], 1)
    assert done.path == "" and done.number == 2 and "bytes, not" in done.problem
    assert names(folder) == ["000000001"]


def test_first_values_stay_until_a_checkpoint_has_them(folder: Folder) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write_part(folder, (FIRST, name, {"x": torch.ones(1)}, {}))
    commit(folder, 1, {}, written(folder, 1), 1)
    assert [path.name for path in folder.first.iterdir()] == ["b.safetensors"], "of a table opened since"
    commit(folder, 2, {}, written(folder, 2, "b.safetensors"), 1)
    assert not folder.first.exists()


# -- what shards go on with ----------------------------------------------------------------------------------


def make_of(source: Source | None) -> m.MakeTable:
    nothing: Any = None  # is looked at
    return m.MakeTable(
        table=0,
        layout=LAYOUT,
        template=nothing,
        dial=0,
        initial={},
        learners=2,
        warm=0,
        batch_size=None,
        limit=None,
        clip_norm=None,
        source=source,
        account=Account(),
    )


def table(folder: Folder, number: int) -> None:
    """All shards' pieces, counting up."""
    flat = LAYOUT.parameters
    segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
    for start, view in enumerate(flat.views(segments)):
        view.copy_(torch.arange(view.numel()).view(view.shape) + 1000 * start)
    for shard, part in enumerate(LAYOUT.parts):
        tensors, notes = piece_tensors(part, part.views(part.segments(segments), flat.entries), {})
        assert write_part(folder, (number, table_file(0, shard), tensors, notes)).written is not None


@pytest.mark.parametrize("first", [True, False])
def test_a_shard_reads_its_own_entries_and_a_learner_among_equals_all(first: bool, folder: Folder) -> None:
    table(folder, FIRST if first else 5)
    make = make_of(Source(None if first else str(folder.join(5)), 0, SHARDS))
    whole = with_content(make, folder).content
    assert whole is not None and sorted(whole.values) == [0, 1]
    assert torch.equal(whole.values[0].flatten(), torch.arange(140.0)) and whole.values[1].tolist() == [
        1000,
        1001,
    ]
    for shard in range(SHARDS):
        content = with_content(make, folder, shard).content
        assert content is not None
        assert set(content.values) == {piece.entry for piece in LAYOUT.parts[shard].pieces}


def test_where_there_is_nothing_to_read_nothing_is_read(folder: Folder) -> None:
    assert with_content(make_of(None), folder).content is None
    beyond = make_of(Source("nowhere", 0, SHARDS))
    assert with_content(beyond, folder, SHARDS) is beyond


# -- the thread ----------------------------------------------------------------------------------------------


def test_files_are_written_in_their_order_and_all_before_it_closes(folder: Folder) -> None:
    saved: list[m.Saved] = []
    writer = Writer(folder.root, saved.append)  # type: ignore[arg-type]
    for number in range(1, 6):
        writer.write(number, "a.safetensors", {"x": torch.ones(number)}, {})
    writer.close()
    assert [each.number for each in saved] == [1, 2, 3, 4, 5] and not any(each.problem for each in saved)


def test_first_values_are_there_at_once_and_a_checkpoint_waits_for_the_one_before(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    class Queue(queue.Queue[Any]):
        def join(self) -> None:
            goes_on.set()  # whoever waits for it lets it go on
            super().join()

    def slow(folder: Folder, job: checkpoint_writer.Job) -> m.Saved:
        if job[0] != FIRST:
            goes_on.wait(20)
        return m.Saved(job[0], job[1], None)

    monkeypatch.setattr(checkpoint_writer.queue, "Queue", Queue)
    monkeypatch.setattr(checkpoint_writer, "write_part", slow)
    saved: list[tuple[int, str]] = []
    writer = Writer(folder.root, lambda each: saved.append((each.number, each.name)))  # type: ignore[arg-type]
    writer.write_after(1, "a", {}, {})
    goes_on.clear()
    writer.write_after(1, "b", {}, {})  # of the same checkpoint
    assert not goes_on.is_set(), "nobody waited"
    writer.write(FIRST, "first", {}, {})
    assert (FIRST, "first") in saved
    writer.write_after(2, "a", {}, {})
    saved.remove((FIRST, "first"))
    assert saved[:2] == [(1, "a"), (1, "b")]
    writer.close()
    assert saved == [(1, "a"), (1, "b"), (2, "a")]
