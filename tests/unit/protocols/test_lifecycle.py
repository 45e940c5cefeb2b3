"""A run's life, decided: units for each rule, and a model run of random events whose decisions are carried out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import LostError, UsageError
from syncline.protocols.lifecycle import (
    MOST,
    AskCopy,
    BeginAnew,
    Decision,
    EvaluatorLosses,
    Fail,
    Faults,
    Finish,
    GoBack,
    Grace,
    Hangs,
    Kill,
    LastCopy,
    Leave,
    Lifecycle,
    PrepareStop,
    SaveFailed,
    Say,
    SkipEvaluation,
    StartEvaluator,
    StartLearner,
    StopLearners,
    Warn,
    WarnLost,
    Watchdog,
)

GRACE = Grace(cut=1.0, step=5.0)


def life(learners: int = 2, faults: Faults | None = None, **options: Any) -> Lifecycle:
    return Lifecycle(faults or Faults(), learners, **{"recovers": True, **options})


def acts(decisions: list[Decision]) -> list[Decision]:
    """Without what is only said."""
    return [each for each in decisions if not isinstance(each, Say | Warn | WarnLost)]


def said(decisions: list[Decision]) -> list[str]:
    return [each.kind for each in decisions if isinstance(each, Say)]


def failure(decisions: list[Decision]) -> str:
    (error,) = [each.error for each in decisions if isinstance(each, Fail)]
    return str(error)


# -- learners ------------------------------------------------------------------------------------------------


def test_the_last_to_return_finishes_the_run() -> None:
    run = life()
    assert acts(run.returned(1)) == [Leave(1, lost=False)]
    assert acts(run.returned(2)) == [Leave(2, lost=False), Finish()]


def test_who_has_left_is_not_heard_again() -> None:
    run = life(faults=Faults(on_error="continue"))
    run.returned(1)
    assert run.returned(1) == run.lost(1, "killed", stepped=True) == run.raised(1, ValueError()) == []


def test_a_lost_learner_is_missed_and_the_others_go_on() -> None:
    run = life()
    decided = run.lost(1, "killed", stepped=True, details={"pid": 7})
    assert decided == [
        Say("lost: killed", 0, "lost", {"learner": 1, "pid": 7}),
        Leave(1, lost=True),
        WarnLost(0, "lost: killed", 1),
    ]


def test_the_run_fails_when_all_are_lost_and_nobody_returned() -> None:
    run = life()
    run.lost(1, "killed", stepped=True)
    assert (
        failure(run.lost(2, "killed", stepped=True)) == "all learners are lost, the last was rank 1: killed"
    )
    other = life()
    other.returned(1)
    assert acts(other.lost(2, "killed", stepped=True)) == [Leave(2, lost=True), Finish()]


def test_an_exception_ends_the_run_or_only_its_learner() -> None:
    assert (
        acts(life().raised(1, ValueError("no"))) != [] and failure(life().raised(1, ValueError("no"))) == "no"
    )
    run = life(faults=Faults(on_error="continue"))
    assert acts(run.raised(1, ValueError("no"))) == [Leave(1, lost=True)]
    assert failure(run.raised(2, ValueError("no more"))) == "no more"


def test_a_lost_learner_is_replaced_under_its_rank_with_a_new_id() -> None:
    run = life(faults=Faults(replace=True))
    assert acts(run.lost(2, "killed", stepped=True)) == [Leave(2, lost=True), StartLearner(3, 1)]


def test_a_rank_is_given_up_after_losses_in_a_row_without_a_step() -> None:
    run = life(faults=Faults(replace=True))
    learner = 2
    for stepped in (False, True, *[False] * (MOST - 1)):  # a step counts anew
        (learner,) = [
            each.learner
            for each in run.lost(learner, "killed", stepped=stepped)
            if isinstance(each, StartLearner)
        ]
    decided = run.lost(learner, "killed", stepped=False)
    assert said(decided) == ["lost", "given up"] and acts(decided) == [Leave(learner, lost=True)]


def test_nobody_is_replaced_or_added_in_a_run_that_ends() -> None:
    run = life(faults=Faults(replace=True))
    run.ask_stop(0.0)
    assert said(run.add(2)) == ["refused"]
    run.stop(0.0)
    assert acts(run.lost(1, "killed", stepped=True)) == [Leave(1, lost=True)]


def test_joiners_get_ranks_that_nobody_had() -> None:
    run = life()
    run.returned(2)
    assert acts(run.add(2)) == [StartLearner(3, 2), StartLearner(4, 3)]


# -- shards --------------------------------------------------------------------------------------------------


def test_without_checkpoints_a_lost_shard_ends_the_run() -> None:
    assert "give run_dir= and checkpoint_every=" in failure(life(recovers=False).shard_lost("shard 1 died"))


def test_at_a_checkpoint_learners_rejoin() -> None:
    run = life()
    run.checkpointed()
    assert acts(run.shard_lost("gone")) == [GoBack("gone", False, (), {})] and run.live == {1: 0, 2: 1}


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("stopping", [False, True])
def test_a_learner_that_holds_a_part_of_the_table_is_lost_as_a_shard_is(
    replace: bool, stopping: bool
) -> None:
    run = life(1, Faults(replace=replace), hold=True, saved=True, grace=GRACE)
    if stopping:
        run.stop(0.0)
    leave, back, *_ = acts(run.lost(1, "killed", stepped=True, now=1.0))
    assert leave == Leave(1, lost=True)
    assert isinstance(back, GoBack) and not back.start and back.learners == {2: 0} and not back.ended
    alone = life(1, Faults(replace=replace), hold=True, recovers=False)
    assert "learner 0 is lost with its part of the table (killed), and there is no checkpoint" in failure(
        alone.lost(1, "killed", stepped=True)
    )


def test_learners_that_keep_nothing_begin_with_the_new_shards() -> None:
    run = life(rejoins=False, saved=True)
    run.returned(1)
    assert acts(run.shard_lost("gone")) == [GoBack("gone", False, (2,), {3: 1})]


def test_before_the_first_checkpoint_all_learners_begin_again_as_in_the_beginning() -> None:
    run = life(3)
    run.returned(1)
    run.lost(2, "killed", stepped=True)
    run.add(1)
    decided = acts(run.shard_lost("gone"))
    assert decided == [GoBack("gone", True, (3, 4), {5: 0, 6: 1, 7: 2, 8: 3})]
    assert acts(run.returned(3)) == []  # the old ones' last words


def test_shards_come_back_so_often_between_two_checkpoints() -> None:
    run = life()
    for _ in range(MOST):
        run.shard_lost("gone")
    run.checkpointed()
    for _ in range(MOST):
        assert said(run.shard_lost("gone")) == ["shard lost"]
    assert f"{MOST + 1} times without a checkpoint in between" in failure(run.shard_lost("gone"))


def test_a_learner_that_a_stop_has_taken_out_of_its_loop_has_its_time() -> None:
    run = life(grace=GRACE)
    run.ask_stop(0.0)
    run.stop(0.5)
    run.left_loop(1, again=False)
    (kill,) = run.tick(9.0)
    assert isinstance(kill, Kill) and kill.number == 2
    assert acts(run.lost(2, "killed", stepped=True)) == [Leave(2, lost=True)] and run.tick(10.0) == []
    run.left_loop(1, again=True)  # it swallows the end of its loop and goes on
    (kill,) = run.tick(99.0)
    assert isinstance(kill, Kill) and kill.number == 1
    assert run.lost(1, "killed", stepped=True) == [Leave(1, lost=True), Finish()]


@pytest.mark.parametrize("stopping", [False, True])
def test_a_stop_is_not_forgotten_when_a_shard_is_lost(stopping: bool) -> None:
    run = life(saved=True, grace=GRACE)
    run.ask_stop(0.0)
    if stopping:
        run.stop(0.5)
    decided = acts(run.shard_lost("gone", now=3.0))
    assert (PrepareStop() in decided) is not stopping
    assert run.tick(3.5) == [] and run.tick(9.0) != []


def test_who_begins_anew() -> None:
    """Only the last one to go, if it never met the new shards; a loss only where somebody had returned before."""
    anew = [BeginAnew({3: 0, 4: 1})]

    def last(
        how: str, first: str, *, unaware: bool = True, stop: bool = False, **faults: Any
    ) -> list[Decision]:
        run = life(faults=Faults(on_error="continue", **faults))
        run.returned(1) if first == "returned" else run.raised(1, ValueError())
        if stop:
            run.stop(0.0)
        if how == "returned":
            decided = run.returned(2, unaware=unaware)
        else:
            decided = run.lost(2, "killed", stepped=True, unaware=unaware)
        return [each for each in decided if isinstance(each, BeginAnew)]

    assert last("returned", "returned") == last("returned", "raised") == last("lost", "returned") == anew
    assert last("returned", "returned", unaware=False) == last("returned", "returned", stop=True) == []
    assert last("lost", "raised") == last("lost", "returned", replace=True) == []
    run = life()
    assert acts(run.returned(1, unaware=True)) == [Leave(1, lost=False)]  # another is left


# -- the end -------------------------------------------------------------------------------------------------


def test_a_stop_waits_for_a_checkpoint_then_for_steps_then_for_nothing() -> None:
    run = life(grace=GRACE)
    assert run.ask_stop(10.0) == [PrepareStop()]
    assert run.tick(11.0) == [] and run.tick(11.1) == [StopLearners()]
    assert run.stop(11.2) == []  # the checkpoint comes late
    run.returned(1)
    assert run.tick(16.0) == []
    (kill,) = run.tick(16.2)
    assert kill == Kill(2, "did not finish its step within 5 s of the stop") and run.tick(30.0) == []


def test_after_a_failure_nothing_is_decided() -> None:
    run = life(grace=GRACE)
    run.fail(LostError("first"))
    assert run.fail(LostError("second")) == run.returned(1) == run.shard_lost("gone") == run.add(1) == []
    assert run.ask_stop(0.0) == run.stop(0.0) == run.tick(99.0) == []


# -- who hangs -----------------------------------------------------------------------------------------------


def test_who_hangs_is_named_and_killed_only_on_request() -> None:
    named, warned = Hangs(2.0, kill=False).decide(4, "learner 1", 1, 2.5, pid=7)
    assert named == Say("hangs: not heard of for 2.5 s (pid 7)", 1, "hangs", {"pid": 7})
    assert isinstance(warned, Warn) and "learner 1 hangs" in warned.text and "kill_hung=True" in warned.text
    said_of_shard, killed = Hangs(2.0, kill=True).decide(1, "shard 1", None, 2.5)
    assert isinstance(said_of_shard, Say) and said_of_shard.what.startswith("shard 1 hangs")
    assert killed == Kill(1, "patience of 2 s is over")


@pytest.mark.parametrize(
    "options",
    [{"on_error": "ignore"}, {"patience": 0}, {"patience": True}, {"kill_hung": True, "patience": None}],
)
def test_faults_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Faults(**options)


# -- all together --------------------------------------------------------------------------------------------


class Model:
    """Carries decisions out on sets; asserts what must hold at every decision."""

    def __init__(self, run: Lifecycle, learners: int) -> None:
        self.run, self.live = run, dict(run.live)
        self.given = set(self.live)
        self.finished = self.failed = self.stopping = False
        assert sorted(self.live.values()) == list(range(learners))

    def do(self, decisions: list[Decision]) -> None:
        assert not (self.failed and decisions)
        for decision in decisions:
            self._do(decision)
        assert self.live == self.run.live or self.failed
        assert len(set(self.live.values())) == len(self.live)  # one of each rank
        assert self.failed or self.finished is not bool(self.live)

    def _do(self, decision: Decision) -> None:
        match decision:
            case StartLearner(learner, rank):
                assert not self.stopping
                self._start({learner: rank})
            case BeginAnew(learners):
                assert not self.live and not self.stopping
                self._start(dict(learners))
            case Leave(learner, _):
                del self.live[learner]
            case GoBack(_, _, ended, learners):
                for learner in ended:
                    del self.live[learner]
                self._start(dict(learners))
            case Kill(learner, _):
                assert learner in self.live
            case StopLearners():
                assert not self.stopping
                self.stopping = True
            case Finish():
                assert not self.live and not self.finished
                self.finished = True
            case Fail(_):
                self.failed = True

    def _start(self, learners: dict[int, int]) -> None:
        assert not learners.keys() & self.given
        self.given |= learners.keys()
        self.live.update(learners)
        self.finished &= not learners


EVENTS = ["returned", "raised", "lost", "shard", "checkpoint", "add", "ask", "stop", "tick"]


@given(
    st.data(),
    st.integers(1, 4),
    st.builds(Faults, on_error=st.sampled_from(["raise", "continue"]), replace=st.booleans()),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(EVENTS), max_size=40),
)
def test_any_order_of_events_keeps_one_of_each_rank_and_finishes_once(
    data: st.DataObject, learners: int, faults: Faults, rejoins: bool, recovers: bool, events: list[str]
) -> None:
    run = Lifecycle(faults, learners, recovers=recovers, rejoins=rejoins, grace=GRACE)
    model = Model(run, learners)
    flag = st.booleans()
    for now, event in enumerate(events):
        one = data.draw(st.sampled_from(sorted(model.given)))
        if event == "returned":
            model.do(run.returned(one, unaware=data.draw(flag)))
        elif event == "raised":
            model.do(run.raised(one, ValueError(), unaware=data.draw(flag)))
        elif event == "lost":
            model.do(run.lost(one, "killed", stepped=data.draw(flag), unaware=data.draw(flag)))
        elif event == "shard":
            model.do(run.shard_lost("gone", float(now)))
        elif event == "checkpoint":
            run.checkpointed()
        elif event == "add":
            model.do(run.add(data.draw(st.integers(1, 2))))
        else:
            decide = {"ask": run.ask_stop, "stop": run.stop, "tick": run.tick}[event]
            model.do(decide(float(now)))


@given(st.lists(st.booleans(), max_size=30))
def test_replacements_are_bounded_between_steps(stepped: list[bool]) -> None:
    run = life(faults=Faults(replace=True))
    learner, row = 1, 0
    for each in stepped:
        row = 0 if each else row + 1
        new = [
            one.learner for one in run.lost(learner, "killed", stepped=each) if isinstance(one, StartLearner)
        ]
        assert bool(new) is (row < MOST)
        if not new:
            return
        (learner,) = new


# -- patience ------------------------------------------------------------------------------------------------


def test_who_is_not_heard_of_is_named_once() -> None:
    patience = Watchdog(2.0)
    assert patience.look(0.0, {1: 5, 2: 5}, set()) == []
    assert patience.look(1.9, {1: 5, 2: 6}, set()) == []
    assert patience.look(2.1, {1: 5, 2: 7}, set()) == [1]
    assert patience.silence(1, 2.1) == pytest.approx(2.1)
    assert patience.look(9.0, {1: 5, 2: 8}, set()) == []


def test_who_waits_for_others_is_not_to_blame() -> None:
    patience = Watchdog(2.0)
    for now in range(10):
        assert patience.look(float(now), {1: 5}, {1}) == []
    assert patience.look(11.0, {1: 5}, set()) == []  # since 9 it could compute
    assert patience.look(11.2, {1: 5}, set()) == [1]


def test_who_goes_on_may_hang_again() -> None:
    patience = Watchdog(1.0)
    patience.look(0.0, {1: 0}, set())
    assert patience.look(2.0, {1: 0}, set()) == [1]
    assert patience.look(2.5, {1: 1}, set()) == []
    assert patience.look(4.0, {1: 1}, set()) == [1]


def test_who_has_left_is_forgotten() -> None:
    patience = Watchdog(1.0)
    patience.look(0.0, {1: 0, 2: 0}, set())
    assert patience.look(5.0, {2: 1}, set()) == []
    assert patience.silence(1, 5.0) == 0.0


def test_a_run_that_fails_is_saved_once_if_that_begins_in_time() -> None:
    run = life(grace=GRACE)
    assert run.save_failed(100.0) == [SaveFailed()]
    assert run.lost(1, "it died", stepped=True) == [] and run.shard_lost("shard 0 ended") == []
    assert run.waits_to_save(100.0 + GRACE.save, begun=False)
    assert not run.waits_to_save(100.5 + GRACE.save, begun=False)
    assert run.waits_to_save(900.0, begun=True), "until it is written"


@pytest.mark.parametrize("options", [{"recovers": False}, {"hold": True}])
def test_what_cannot_be_saved_is_not(options: dict[str, Any]) -> None:
    run = life(grace=GRACE, **options)
    assert run.save_failed(100.0) == [] and run.raised(1, ValueError()) == []


def test_learners_among_equals_are_asked_for_their_copy_one_after_the_other() -> None:
    copy = LastCopy(100.0, 10.0)
    assert copy.look([], saved=False) == [] and copy.waits(110.0, begun=False)
    assert copy.look([3, 1], saved=False) == [AskCopy(1)] and copy.look([1, 3], saved=False) == []
    copy.refused(1, whole=False)
    assert copy.look([1, 3], saved=False) == [AskCopy(3)], "none is asked twice"
    assert copy.look([1, 5], saved=False) == [AskCopy(5)], "3 has ended without an answer"
    assert not copy.waits(111.0, begun=False) and copy.waits(111.0, begun=True)
    assert copy.look([1, 5], saved=True) == [] and not copy.waits(101.0, begun=False)


def test_a_learner_whose_copy_is_whole_and_saved_speaks_for_all() -> None:
    copy = LastCopy(100.0, 10.0)
    copy.look([0], saved=False)
    copy.refused(0, whole=True)
    assert not copy.waits(100.0, begun=False) and copy.look([0, 1], saved=False) == []


# -- the evaluator -------------------------------------------------------------------------------------------


def kinds_of(decisions: list[Decision]) -> list[type]:
    return [type(each) for each in decisions]


def test_an_evaluator_is_replaced_until_too_many_were_lost_in_a_row() -> None:
    losses = EvaluatorLosses()
    assert kinds_of(losses.lost("SIGKILL", 7, [])) == [Say], "nothing waits"
    for _ in range(MOST - 1):
        assert kinds_of(losses.lost("SIGKILL", 7, [(0, 12)])) == [Say, StartEvaluator]
    losses.evaluated()
    for _ in range(MOST - 1):
        assert kinds_of(losses.lost("SIGKILL", 7, [(1, 24), (2, 36)])) == [Say, StartEvaluator]
    _, skip, said, warned, again = losses.lost("SIGKILL", 7, [(1, 24), (2, 36)])
    assert (skip, again) == (SkipEvaluation(1), StartEvaluator()) and isinstance(said, Say)
    assert isinstance(warned, Warn) and "version 24 is not evaluated: 3 evaluators in a row" in warned.text
    last = losses.lost("SIGKILL", 7, [(2, 36)])
    assert kinds_of(last) == [Say, SkipEvaluation, Say, Warn], "no further try before one has finished"
