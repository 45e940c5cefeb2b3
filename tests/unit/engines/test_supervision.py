"""What a run's lifecycle decides is carried out in its order: on the crew, the coordinator, the record, the checkpoints."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.engines.checkpoint_writer import write_part
from syncline.engines.run import RunSpec, Storage
from syncline.engines.supervision import BatchCrew, BatchSupervision, Crew, Supervision, last_good
from syncline.errors import LostError
from syncline.messages import Checkpointed, Saved
from syncline.protocols.lifecycle import MOST, Fail, Faults, Grace, Lifecycle
from syncline.roles.checkpoint_manifest import Restored
from syncline.table.checkpoints import CheckpointError, Folder
from tests.unit.engines.recorded_runs import NotedRun, spec_of

START = Restored(name="start", seed=0)


@dataclass
class Coordinator:
    """Notes what it is told; `stale` are learners that have not met the present shards."""

    said: list[Any]
    stale: set[int] = field(default_factory=set)

    def join(self, learner: int, rank: int) -> None:
        self.said.append(("join", learner, rank))

    def leave(self, learner: int, *, lost: bool) -> None:
        self.said.append(("leave", learner, lost))

    def begin_anew(self, learners: Any) -> None:
        self.said.append(("begin anew", dict(learners)))

    def recover(self, last: Restored | None, learners: Any) -> None:
        self.said.append(("recover", last.name if last else None, dict(learners)))

    def stop(self) -> None:
        self.said.append("prepare stop")


class NotedCrew(Crew):
    def __init__(self, spec: RunSpec, folder: Folder | None) -> None:
        self.said: list[Any] = []
        self.there: dict[int, int] = {}  # learner -> rank
        self.errors: list[BaseException] = []
        self.run = NotedRun(spec)
        self.spec, self.recorder, self.folder = self.run.spec, self.run.recorder, folder
        self.coordinator = cast(Any, Coordinator(self.said))

    def start_learner(self, learner: int, rank: int) -> None:
        assert learner not in self.there
        self.there[learner] = rank
        self.said.append(("start", learner, rank))

    def end_learner(self, learner: int) -> None:
        self.said.append(("end", learner))

    def forget_learner(self, learner: int) -> None:
        del self.there[learner]
        self.said.append(("forget", learner))

    def kill_learner(self, learner: int, why: str) -> None:
        self.said.append(("kill", learner))

    def tell_stop(self) -> None:
        self.said.append("stop")

    def renew_shards(self) -> None:
        self.said.append("renew")

    def finish(self) -> None:
        self.said.append("finish")

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


def supervised(
    faults: Faults | None = None,
    folder: Folder | None = None,
    *,
    start: Restored | None = None,
    **options: Any,
) -> tuple[Supervision, NotedCrew]:
    """Of two learners, 1 and 2, of ranks 0 and 1."""
    crew = NotedCrew(spec_of(faults=faults, restored=start), folder)
    options = {"recovers": folder is not None, "saved": start is not None, **options}
    lifecycle = Lifecycle(faults or Faults(), 2, **options)
    crew.there = dict(lifecycle.live)
    return Supervision(lifecycle, crew, lambda: crew.run.clock), crew


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(tmp_path / "checkpoints")
    found.prepare()
    return found


def kinds(crew: NotedCrew) -> list[str]:
    return [event.kind for event in crew.recorder.outcome.events]


def test_one_that_is_lost_is_replaced_at_its_rank() -> None:
    supervision, crew = supervised(Faults(replace=True))
    with pytest.warns(Warning, match="another takes its place"):
        supervision.lost(2, "ended with SIGKILL", stepped=True, pid=7)
    assert crew.said == [("leave", 2, True), ("forget", 2), ("join", 3, 1), ("start", 3, 1)]
    assert kinds(crew) == ["lost", "replaced"]
    assert crew.recorder.outcome.events[0].details == {"learner": 2, "pid": 7}


def test_the_run_finishes_when_the_last_has_returned() -> None:
    supervision, crew = supervised()
    supervision.returned(1)
    assert "finish" not in crew.said
    supervision.add(1)
    supervision.returned(2)
    supervision.returned(3)
    assert crew.said[-1] == "finish" and crew.there == {}


def test_a_learner_s_error_ends_the_run_and_nothing_is_decided_any_more() -> None:
    supervision, crew = supervised()
    error = ValueError("no luck")
    supervision.raised(1, error)
    for later in (lambda: supervision.raised(2, error), supervision.ask_stop, lambda: supervision.add(1)):
        later()
    assert crew.errors == [error] and crew.said == []


def test_a_stop_has_its_time_and_then_learners_are_killed() -> None:
    supervision, crew = supervised(grace=Grace(cut=2.0, step=5.0))
    supervision.ask_stop()
    for crew.run.clock in (1.0, 2.0):
        supervision.tick()
    assert crew.said == ["prepare stop"]
    crew.run.clock = 2.5
    supervision.tick()
    supervision.stop()
    assert crew.said[1:] == ["stop"]
    crew.run.clock = 8.0
    supervision.tick()
    assert crew.said[2:] == [("kill", 1), ("kill", 2)]


def test_lost_shards_go_back_to_the_start_and_everybody_begins_anew(folder: Folder) -> None:
    supervision, crew = supervised(folder=folder)
    crew.run.epoch(0, tables=0)
    crew.run.clock = 3.0
    supervision.shard_lost("shard 0 is lost")
    ends = [each for n in (1, 2) for each in (("end", n), ("leave", n, False), ("forget", n))]
    begin = {3: 0, 4: 1}
    assert crew.said == [*ends, "renew", ("recover", None, begin), ("start", 3, 0), ("start", 4, 1)]
    assert crew.recorder.outcome.history == [] and kinds(crew) == ["shard lost", "recovered"]
    assert "back at version 0, and all learners begin anew" in crew.recorder.outcome.events[-1].what


def test_learners_outlive_shards_that_go_back_to_a_checkpoint(folder: Folder) -> None:
    supervision, crew = supervised(folder=folder, start=START)
    supervision.shard_lost("shard 0 is lost")
    assert crew.said == ["renew", ("recover", "start", {})] and crew.there == {1: 0, 2: 1}


def test_shards_that_are_lost_without_checkpoints_end_the_run() -> None:
    supervision, crew = supervised()
    supervision.shard_lost("shard 0 is lost")
    assert "renew" not in crew.said and "give run_dir=" in str(crew.errors[0])


def test_a_checkpoint_that_cannot_be_read_any_more_ends_the_run(folder: Folder) -> None:
    supervision, crew = supervised(folder=folder)
    supervision.last = folder.root / "000000007"
    supervision.lifecycle.checkpointed()
    supervision.shard_lost("shard 0 is lost")
    assert "shard 0 is lost, and the last checkpoint cannot be read" in str(crew.errors[0])
    assert kinds(crew) == ["shard lost"] and crew.recorder.outcome.history == []


def committed(supervision: Supervision, folder: Folder, number: int, *, good: bool = True) -> Path | None:
    saved = write_part(folder, (number, "a.safetensors", {"x": torch.ones(1)}, {}))
    assert saved.written is not None
    file = saved.written if good else replace(saved.written, nbytes=0)
    return supervision.commit(number, {"seed": 0}, [file], prune=False)


def test_only_a_checkpoint_that_is_there_is_gone_back_to(folder: Folder) -> None:
    supervision, crew = supervised(folder=folder, start=START)
    for _ in range(MOST):
        supervision.shard_lost("shard 0 is lost")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert committed(supervision, folder, 3, good=False) is None
    assert supervision.last is None
    (folder.join(4) / "part").touch()
    assert supervision.commit(4, None, [], prune=False) is None and not folder.all(), "nothing was cut"
    assert committed(supervision, folder, 5) == supervision.last == folder.root / "000000005"
    assert crew.recorder.outcome.events[-1].details["path"] == str(supervision.last)
    again = supervision.lifecycle.shard_lost("shard 0 is lost again", 0.0)
    assert not any(isinstance(each, Fail) for each in again), "losses count from the last checkpoint"


def test_what_was_being_written_is_removed_before_anybody_goes_back(folder: Folder) -> None:
    (folder.join(9) / "part").touch()
    assert last_good("x", folder, None, START) is START
    assert [path.name for path in folder.root.iterdir()] == []
    with pytest.raises(LostError, match="x, and the last checkpoint cannot be read: no checkpoint"):
        last_good("x", folder, folder.root / "000000001", START)


EVENTS = ("returned", "lost", "raised", "shard lost", "add", "ask stop", "stop", "checkpointed", "tick")


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 8)), max_size=25),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_the_crew_is_always_those_that_the_lifecycle_counts(
    events: list[tuple[str, int]], replaces: bool, saved: bool, rejoins: bool
) -> None:
    faults = Faults(replace=replaces, on_error="continue")
    options = {"recovers": True, "saved": saved, "rejoins": rejoins, "grace": Grace(1.0, 2.0)}
    made = supervised(faults, cast(Any, NoFolder()), **options)
    supervision, crew = made
    crew.recorder.warn = lambda *_, **__: None  # type: ignore[method-assign]
    for what, learner in events:
        crew.run.clock += 0.7
        match what:
            case "returned":
                supervision.returned(learner)
            case "lost":
                supervision.lost(learner, "gone", stepped=learner % 2 == 0)
            case "raised":
                supervision.raised(learner, ValueError("no luck"))
            case "shard lost":
                supervision.shard_lost("shard 0 is lost")
            case "add":
                supervision.add(learner % 3)
            case "ask stop":
                supervision.ask_stop()
            case "stop":
                supervision.stop()
            case "checkpointed":
                supervision.lifecycle.checkpointed()
            case _:
                supervision.tick()
        if crew.errors:
            return  # the engine ends them all
        assert crew.there == supervision.lifecycle.live
        assert crew.there or "finish" in crew.said
        assert len(set(crew.there.values())) == len(crew.there), "a rank is one learner's"


class NoFolder:
    def remove_unfinished(self) -> None:
        pass


# -- where a batch method trains -----------------------------------------------------------------------------


class NotedBatchCrew(BatchCrew):
    def __init__(self, said: list[Any]) -> None:
        self.said = said

    def start_learner(self, learner: int, rank: int) -> None:
        self.said.append(("start", learner, rank))

    def renew_shards(self, restored: Restored | None) -> None:
        self.said.append(("renew", restored.name if restored else None))

    def grow(self, slots: int) -> None:
        self.said.append(("room", slots))

    def do(self, actions: Any) -> None:
        self.said.append(("do", *actions))

    def fail(self, error: BaseException) -> None:
        self.said.append(("fail", str(error)))


class BatchCoordinator:
    def __init__(self, said: list[Any]) -> None:
        self.said, self.stopping = said, False

    def grow(self, slots: int) -> None:
        self.said.append(("slots", slots))

    def leave(self, learner: int) -> list[Any]:
        return [f"give away {learner}"]

    def stop(self) -> None:
        self.stopping = True

    def go_back(self, state: Any, iteration: int) -> None:
        self.said.append(("state", state, iteration))


class Record:
    """In place of a batch method's."""

    def __init__(self, folder: Folder | None, start: Restored | None, said: list[Any]) -> None:
        self.said, self.folder = said, folder
        run = NotedRun(spec_of(storage=Storage(keep=1), restored=start))
        self.spec, self.recorder, self.coordinator = run.spec, run.recorder, BatchCoordinator(said)

    def saved(self, message: Saved) -> Checkpointed | None:
        return Checkpointed(message.number, message.name, message.problem) if message.name else None

    def go_back(self, last: Restored | None) -> None:
        self.said.append(("record", last.name if last else None))


def batch(folder: Folder | None = None, start: Restored | None = None) -> tuple[BatchSupervision, list[Any]]:
    said: list[Any] = []
    return BatchSupervision(NotedBatchCrew(said), cast(Any, Record(folder, start, said))), said


def test_of_a_batch_method_s_learners_only_their_work_goes_on() -> None:
    supervision, said = batch()
    supervision.begin()
    with pytest.warns(Warning, match="1 other learner goes on"):
        supervision.lost(1, "gone", stepped=True)
    assert said == [("start", 1, 0), ("start", 2, 1), ("do", "give away 1")]
    supervision.add(2)
    assert said[3:] == [("room", 4), ("slots", 4), ("start", 3, 2), ("start", 4, 3)]
    supervision.ask_stop()
    supervision.add(1)
    assert len(said) == 7, "the run is ending"


def test_a_batch_method_s_shards_come_back_with_the_vectors_before_anything_moves(folder: Folder) -> None:
    start = Restored(name="start", seed=0, batch=cast(Any, SimpleNamespace(state={"method": "x"})))
    supervision, said = batch(folder, start)
    supervision.shard_lost("shard 1 is lost")
    assert said == [("record", "start"), ("state", {"method": "x"}, 0), ("renew", "start")]
    supervision.saved(Saved(3, "", None))
    supervision.saved(Saved(3, "nowhere", None, "the disk is full"))
    del said[:]
    supervision.shard_lost("shard 1 is lost")
    assert said[0] == ("record", "start"), "there is no other"
    supervision.saved(Saved(6, str(folder.root / "000000006"), None))
    supervision.shard_lost("shard 1 is lost")
    assert "cannot be read" in said[-1][1] and said[-1][0] == "fail"


def test_an_unreadable_checkpoint_is_known_before_anything_is_touched(folder: Folder) -> None:
    def read(checkpoint: Any) -> Restored:
        raise CheckpointError("of another version")

    file = write_part(folder, (1, "a.safetensors", {}, {})).written
    assert file is not None
    last = folder.commit(1, {}, [file])
    with pytest.raises(LostError, match="cannot be read: of another version"):
        last_good("x", folder, last, None, read)
