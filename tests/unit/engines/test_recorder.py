"""The record of a run: epochs in order whatever comes first, what is forgotten when it goes back, what is said once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import messages as m
from syncline.engines.recorder import learner_error, said
from syncline.engines.run import EpochRecord, Event, Logged, Snapshot
from syncline.errors import LostError, LostWarning, RunError, SynclineWarning, UsageError
from syncline.protocols import lifecycle as life
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.sequence import Account
from syncline.roles.checkpoint_manifest import LoaderState, Restored, TableState
from tests.unit.engines.recorded_runs import LAYOUT, SHARDS, NotedRun, spec_of

EPOCHS = 3


def at_epoch(done: int, history: list[EpochRecord] | None = None) -> Restored:
    loader = LoaderState(size=8, policy="ledger", parts=1, standing=Standing.before(done))
    table = TableState(layout=LAYOUT, optimizer="SGD", account=Account(version=10 * done))
    return Restored(name="c", seed=0, tables={0: table}, loaders={0: loader}, history=history or [])


def epochs(run: NotedRun) -> list[tuple[int, dict[str, float]]]:
    return [(record.epoch, record.metrics) for record in run.recorder.outcome.history]


# -- epochs --------------------------------------------------------------------------------------------------


@given(
    st.permutations(
        [("end", n, 0) for n in range(EPOCHS)]
        + [("part", n, s) for n in range(EPOCHS) for s in range(SHARDS)]
    ),
    st.randoms(use_true_random=False),
)
def test_epochs_are_whole_and_in_order_whatever_comes_first(
    order: list[tuple[str, int, int]], draw: Any
) -> None:
    run = NotedRun()
    answered = 0
    for what, number, shard in order:
        if what == "end":
            run.epoch(number)
        else:
            run.part(f"epoch:{number}", shard, value=number)
        if answered < len(run.evaluations) and draw.random() < 0.5:
            epoch, _ = run.evaluations[answered]
            run.recorder.evaluated(epoch, {"accuracy": epoch / 8})
            answered += 1
        assert [epoch for epoch, _ in epochs(run)] == sorted(epoch for epoch, _ in epochs(run))
    for epoch, _ in run.evaluations[answered:]:
        run.recorder.evaluated(epoch, {"accuracy": epoch / 8})
    assert epochs(run) == [(number, {"accuracy": number / 8}) for number in range(EPOCHS)]
    assert sorted(epoch for epoch, _ in run.evaluations) == [*range(EPOCHS)], "each once"
    assert all((state["weight"] == epoch).all() for epoch, state in run.evaluations)
    assert not run.recorder.evaluating


def test_an_epoch_is_told_with_its_metrics_and_then_with_its_weights() -> None:
    called: list[EpochRecord] = []
    run = NotedRun(spec_of(callbacks=(called.append,)))
    run.epoch(0)
    run.part("epoch:0", 0)
    run.part("epoch:0", 1)
    assert called == [] and run.recorder.evaluating
    run.recorder.evaluated(0, {"loss": 0.25})
    assert [record.metrics for record in called] == [{"loss": 0.25}]
    assert [type(each) for each in run.heard[1:]] == [EpochRecord, Snapshot]
    run.epoch(1, tables=0)  # nobody wants its metrics
    run.epoch(0, tables=0, loader=1)  # of a second loader
    assert [record.epoch for record in called] == [0, 1] and len(run.evaluations) == 1


def test_a_callback_stops_the_run_and_one_that_fails_is_its_first_error() -> None:
    def fails(record: EpochRecord) -> bool:
        raise ValueError(f"no luck in epoch {record.epoch}")

    run = NotedRun(spec_of(callbacks=(fails, lambda record: record.epoch == 1)))
    for number in range(2):
        run.epoch(number, tables=0)
    assert run.stops == 1
    assert str(run.recorder.error).startswith(
        "a callback failed: ValueError: no luck in epoch 0\n\nTraceback"
    )


def test_an_evaluation_that_fails_is_the_run_s_error() -> None:
    run = NotedRun()
    run.epoch(0)
    run.recorder.test(0, {}, lambda state: {"accuracy": 1.0})
    assert epochs(run) == [(0, {"accuracy": 1.0})] and run.recorder.error is None
    run.epoch(1)
    run.recorder.test(1, {}, lambda state: {"accuracy": state["missing"].item()})
    assert "evaluation failed: KeyError: 'missing'" in str(run.recorder.error)


def test_a_run_that_goes_on_has_the_history_of_before() -> None:
    run = NotedRun()
    run.epoch(0, tables=0)
    again = NotedRun(spec_of(restored=at_epoch(1, list(run.recorder.outcome.history))))
    assert again.recorder.outcome.history == run.recorder.outcome.history


# -- going back ----------------------------------------------------------------------------------------------


def test_what_came_after_the_checkpoint_is_forgotten_and_made_again() -> None:
    run = NotedRun()
    for number in range(3):
        run.epoch(number, tables=0)
    run.recorder.go_back(at_epoch(1))
    assert [epoch for epoch, _ in epochs(run)] == [0]
    run.epoch(1, tables=0)
    run.recorder.go_back(None)
    assert epochs(run) == []


def test_an_evaluation_of_a_version_that_was_lost_is_not_taken_for_the_new_one_s() -> None:
    run = NotedRun()
    run.epoch(0)
    for shard in range(SHARDS):
        run.part("epoch:0", shard)
    run.recorder.go_back(None)
    assert not run.recorder.evaluating
    run.epoch(0)
    for shard in range(SHARDS):
        run.part("epoch:0", shard)
    run.recorder.evaluated(0, {"accuracy": 0.0})
    assert epochs(run) == [] and run.recorder.evaluating, "it was the old one's"
    run.recorder.evaluated(0, {"accuracy": 1.0})
    assert epochs(run) == [(0, {"accuracy": 1.0})]


def test_an_epoch_before_the_checkpoint_stays_without_the_snapshot_that_is_lost() -> None:
    run = NotedRun()
    run.epoch(0)
    run.part("epoch:0", 0)
    run.recorder.go_back(at_epoch(1))
    assert epochs(run) == [(0, {})] and not run.recorder.evaluating


def test_an_epoch_before_the_checkpoint_that_is_being_evaluated_is_told_with_its_weights() -> None:
    run = NotedRun()
    run.epoch(0)
    for shard in range(SHARDS):
        run.part("epoch:0", shard, value=2.0)
    run.recorder.go_back(at_epoch(1))
    run.recorder.evaluated(0, {"accuracy": 1.0})
    (snapshot,) = run.told(Snapshot)
    assert snapshot.record.metrics == {"accuracy": 1.0} and bool((snapshot.state["bias"] == 2.0).all())


# -- the end -------------------------------------------------------------------------------------------------


def test_a_run_is_complete_with_its_end_its_weights_and_its_last_evaluation() -> None:
    run = NotedRun()
    run.epoch(0)
    for shard in range(SHARDS):
        run.part("epoch:0", shard)
        run.part("final", shard, value=3.0)
    assert not run.recorder.complete()
    run.recorder.emit(m.Finished(m.Statistics(5)))
    assert not run.recorder.complete(), "an epoch is being evaluated"
    run.recorder.evaluated(0, {})
    assert run.recorder.complete() and run.recorder.complete()
    version, state = run.recorder.outcome.tables[0]
    assert version == 7 and bool((state["bias"] == 3.0).all()) and run.recorder.outcome.statistics.number == 5


@pytest.mark.parametrize("parts, kept", [(SHARDS, True), (1, False)])
def test_an_error_of_the_run_brings_the_last_weights_if_all_are_there(parts: int, kept: bool) -> None:
    run = NotedRun()
    for shard in range(parts):
        run.part("final", shard)
    run.recorder.emit(m.Finished(m.Statistics(5)))
    run.clock = 4.0
    refused, lost = UsageError("no"), LostError("a shard is gone")
    run.recorder.keep_weights(refused)
    run.recorder.keep_weights(lost)
    assert not hasattr(refused, "outcome") and (lost.outcome is not None) is kept
    assert run.recorder.outcome.seconds == (4.0 if kept else 0.0)


# -- what is said --------------------------------------------------------------------------------------------


def test_a_warning_comes_once_for_each_cause_and_always_without_one() -> None:
    run = NotedRun()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for text, cause in (("a", "loss"), ("b", "loss"), ("c", ""), ("c", ""), ("d", "shards")):
            run.recorder.emit(m.Warned(text, cause))
        run.recorder.warn("e", said=True)
    assert [str(each.message) for each in caught] == ["a", "c", "c", "d", "e"]
    assert [event.what for event in run.told(Event)] == ["a", "c", "c", "d"], "the last an event has said"


def test_a_lost_learner_is_warned_of_with_those_that_go_on() -> None:
    run = NotedRun()
    for others, then, words in (
        (2, "", "2 other learners go on"),
        (1, "", "1 other learner goes on"),
        (0, "", "no other"),
        (1, "x", "1 lost; x"),
    ):
        with pytest.warns(LostWarning, match=words):
            run.recorder.say(life.WarnLost(1, "lost", others, then))
    run.clock = 2.5
    run.recorder.say(life.Say("joined", 3, "joined", {"learner": 4}))
    assert run.told(Event) == [
        Event(seconds=2.5, what="joined", rank=3, kind="joined", details={"learner": 4})
    ]


def test_what_was_lost_with_a_learner_belongs_to_its_loss() -> None:
    run = NotedRun()
    for learner in (7, 8):
        run.recorder.event("lost", 1, kind="lost", learner=learner)
    run.recorder.emit(m.Left(7, 1, back=3, pending=2))
    run.recorder.emit(m.Left(9, 1, back=1, pending=0))  # of whom nothing is known
    first, second = run.recorder.outcome.events
    assert first.details == {"learner": 7, "handed_out_again": 3, "in_unfolded_gradients": 2}
    assert second.details == {"learner": 8}
    heard = run.told(Event)
    assert heard[0].details == {"learner": 7}, "what listeners have does not change under them"
    assert [event.kind for event in heard] == ["lost", "lost", "left"]


def test_a_checkpoint_that_fails_names_the_last_good_one_and_each_problem_once() -> None:
    run = NotedRun()
    full = m.Checkpointed(6, "", "the disk is full")
    with pytest.warns(
        SynclineWarning, match=r"version 6 failed: the disk is full; there is none yet\. The run goes on"
    ):
        run.recorder.emit(full)
    run.recorder.emit(m.Checkpointed(8, "c/8"))
    run.recorder.emit(full)
    with pytest.warns(SynclineWarning, match=r"version 9 failed: no; the last good one is c/8\."):
        run.recorder.emit(m.Checkpointed(9, "", "no"))
    kinds = [(event.kind, event.details["version"]) for event in run.recorder.outcome.events]
    assert kinds == [
        ("checkpoint failed", 6),
        ("checkpoint", 8),
        ("checkpoint failed", 6),
        ("checkpoint failed", 9),
    ]


def test_a_listener_that_fails_is_said_once_and_the_others_hear_all() -> None:
    def fails(record: Any) -> None:
        raise OSError("the disk is full")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = NotedRun(spec_of(listeners=(fails,)))
        run.epoch(0, tables=0)
        run.recorder.emit((1, m.Log({"x": 1})))
    (only,) = caught
    assert "a listener failed, the run goes on" in str(only.message) and len(run.told(EpochRecord)) == 1
    assert run.told(Logged) == [Logged(1, 0.0, {"x": 1})]
    assert run.recorder.outcome.logs == [(1, 0.0, {"x": 1})]


def test_shards_whose_optimizers_come_to_differ_are_named_once() -> None:
    run = NotedRun()
    run.part("epoch:0", 0, own=[{"lr": 0.1, "seen": 3}])
    run.part("epoch:0", 1, own=[{"lr": 0.1, "seen": 3}])
    run.part("epoch:1", 0, own=[{"lr": 0.1, "seen": 4}])
    with pytest.warns(SynclineWarning, match="table 0 has other values of 'lr', 'seen' on shard 1"):
        run.part("epoch:1", 1, own=[{"lr": 0.2}])
    run.part("epoch:2", 0, own=[{"lr": 0.1}])
    run.part("epoch:2", 1, own=[{"lr": 0.3}])


def test_what_a_learner_returned_and_could_not_travel_is_warned_of() -> None:
    run = NotedRun()
    run.recorder.returned(0, m.Returned(5))
    with pytest.warns(SynclineWarning, match=r"result\.returned\[1\] is None: no pickle"):
        run.recorder.returned(1, m.Returned(None, "no pickle"))
    assert run.recorder.outcome.returned == {0: 5, 1: None}


def test_errors_in_words() -> None:
    error = ValueError("no luck")
    text = "Traceback (most recent call last):\nValueError: no luck\n"
    told = learner_error(3, error, text)
    assert (told.rank, told.what, told.__cause__) == (3, "ValueError: no luck", error)
    assert str(told).startswith("learner 3 raised ValueError: no luck\n\nTraceback")
    assert str(learner_error(3, None, text)) == str(told), "from another process"
    assert said(error) == "ValueError: no luck" and said(RunError("ours")) == "ours"
