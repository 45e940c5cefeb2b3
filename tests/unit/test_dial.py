"""The dial: presets and their text, what contradicts itself, quorums and rate factors (R1, R3, M3, M4)."""

import math
import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.dial import LATER, PRESETS, Course, Preset, Sync, as_sync
from syncline.errors import DialError, LearnerError, NotYetError, RunError, SynclineError, UsageError

EXAMPLES = {
    "hardsync": Sync(one_from_each=True, lead=0),
    "hardsync:reference_batch=128": Sync(one_from_each=True, lead=0, reference_batch=128),
    "softsync:1": Sync(splits=1, rate="share"),
    "softsync:2": Sync(splits=2, rate="share"),
    "softsync:30,rate=given": Sync(splits=30),
    "async": Sync(rate="share"),
    "async:rate=given": Sync(),
    "async:rate=staleness": Sync(rate="staleness"),
    "downpour:push=5,fetch=4,local_lr=0.1": Sync(push=5, fetch=4, local_lr=0.1),
    "ssp:3": Sync(slack=3),
    "ssp:0,rate=share": Sync(slack=0, rate="share"),
    "backup:1": Sync(backup=1, lead=0, late="drop"),
    "delayed:2": Sync(one_from_each=True, lead=2),
    "delayed:1,reference_batch=64": Sync(one_from_each=True, lead=1, reference_batch=64),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_presets_text_and_its_record_are_the_same_thing(text: str) -> None:
    assert Sync.parse(text) == EXAMPLES[text]
    assert str(EXAMPLES[text]) == text


def test_other_ways_to_write_the_same() -> None:
    assert Sync.parse("softsync") == EXAMPLES["softsync:1"]
    assert Sync.parse(" softsync : 2 ") == EXAMPLES["softsync:2"]
    assert Sync.parse("async,rate=given") == Sync.parse("downpour") == Sync()
    assert Sync.parse("softsync:rate=given") == Sync(splits=1)
    assert as_sync("ssp:3") == as_sync(Sync(slack=3)) == Sync(slack=3)


WHOLE = st.integers(1, 10**6)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "reference_batch": WHOLE,
    "push": WHOLE,
    "fetch": WHOLE,
    "rate": st.sampled_from(["given", "share", "staleness"]),
    "local_lr": st.floats(1e-300, 1e300),
}


@st.composite
def preset_records(draw: st.DrawFn) -> Sync:
    preset: Preset = draw(st.sampled_from(PRESETS))
    changes = {name: draw(OPTIONS[name]) for name in preset.options if draw(st.booleans())}
    if preset.value:
        changes[preset.value] = draw(st.integers(preset.least, 10**6))
    return replace(preset.base, **changes)


@given(preset_records())
def test_every_preset_with_any_options_prints_as_text_that_parses_back(sync: Sync) -> None:
    assert not str(sync).startswith("Sync(")
    assert Sync.parse(str(sync)) == sync


def test_a_record_that_is_no_preset_prints_what_differs() -> None:
    assert str(Sync(splits=2, lead=0)) == "Sync(splits=2, lead=0)"
    assert str(Sync(lead=0, late="drop")) == "Sync(lead=0, late='drop')"  # not backup:0


def test_a_record_is_frozen_hashable_and_travels() -> None:
    sync = Sync.parse("softsync:2")
    with pytest.raises(FrozenInstanceError):
        sync.splits = 3  # type: ignore[misc]
    assert len({sync, Sync.parse("softsync:2")}) == 1
    assert pickle.loads(pickle.dumps(sync)) == sync


@pytest.mark.parametrize(
    "text, message",
    [
        ("hardsnc", "no preset is called 'hardsnc', did you mean 'hardsync'"),
        ("SoftSync:2", "did you mean 'softsync'"),
        ("zzz", "there are: hardsync, softsync:n, async"),
        ("", "no preset is called ''"),
        ("async:rat=given", "async has no option 'rat', did you mean 'rate'"),
        ("hardsync:rate=share", "its options are 'reference_batch'"),
        ("backup:1,rate=share", "it has no options"),
        ("async:rate=stalenes", "no rate is called 'stalenes', did you mean 'staleness'"),
        ("hardsync:3", "hardsync takes no number, got '3'"),
        ("softsync:two", "'two' is not a whole number"),
        ("softsync:", "'' is not a whole number"),
        ("softsync:0", "softsync:n needs n >= 1, got 0"),
        ("softsync:1.5", "'1.5' is not a whole number"),
        ("ssp", "lacks its number: write ssp:s"),
        ("ssp:-1", "ssp:s needs s >= 0, got -1"),
        ("delayed:0", "k = 0 means hardsync"),
        ("backup:0", "b = 0 means hardsync"),
        ("async:rate", "async takes no number"),
        ("softsync:2,3", "'3' is no option; write key=value"),
        ("downpour:push=", "'push=' is no option"),
        ("downpour:push=2,push=3", "gives push twice"),
        ("downpour:push=0", "push must be a whole number >= 1, got 0"),
        ("downpour:local_lr=fast", "'fast' is not a number"),
        ("downpour:local_lr=-1", "local_lr must be a finite number > 0, got -1"),
        ("downpour:local_lr=nan", "local_lr must be a finite number > 0, got nan"),
        ("hardsync:reference_batch=0", "reference_batch must be a whole number >= 1, got 0"),
    ],
)
def test_what_does_not_parse_says_why_and_what_there_is(text: str, message: str) -> None:
    with pytest.raises(DialError) as caught:
        Sync.parse(text)
    assert message in str(caught.value)


def test_only_texts_and_records_are_dials() -> None:
    with pytest.raises(DialError, match="got int 3"):
        as_sync(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"one_from_each": True, "lead": 0, "splits": 2}, "splits a part of them"),
        ({"one_from_each": True, "lead": 0, "backup": 1}, "backup leaves some out"),
        ({"one_from_each": True}, "one_from_each needs a lead"),
        ({"one_from_each": True, "lead": 0, "slack": 1}, "leave slack out"),
        ({"one_from_each": True, "lead": 0, "late": "drop"}, "no gradient is late"),
        ({"one_from_each": True, "lead": 1, "rate": "staleness"}, "have the same staleness"),
        ({"one_from_each": True, "lead": 0, "push": 2}, "local steps wait for no fold"),
        ({"splits": 2, "backup": 1, "lead": 0}, "both set the quorum"),
        ({"lead": 1}, "lead > 0 needs one_from_each"),
        ({"backup": 1}, "backup needs lead=0"),
        ({"backup": 1, "lead": 0, "rate": "share"}, "backup folds fresh gradients only"),
        ({"late": "drop"}, "late='drop' needs lead=0"),
        ({"fetch": 3, "lead": 0}, "local steps wait for no fold"),
        ({"reference_batch": 128}, "reference_batch needs one_from_each"),
        ({"splits": 0}, "splits must be a whole number >= 1, got 0"),
        ({"splits": True}, "splits must be a whole number >= 1, got True"),
        ({"slack": -1}, "slack must be a whole number >= 0, got -1"),
        ({"push": 1.5}, "push must be a whole number >= 1, got 1.5"),
        ({"local_lr": "0.1"}, "local_lr must be a finite number > 0, got '0.1'"),
        ({"late": "never"}, "late must be one of 'fold', 'drop', got 'never'"),
        ({"rate": "half"}, "rate must be one of 'given', 'share', 'staleness', got 'half'"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_with_the_reason(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DialError) as caught:
        Sync(**fields)
    assert message in str(caught.value)


# -- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, live, initial, quorum",
    [
        ("hardsync", 30, 30, 30),
        ("delayed:2", 7, 8, 7),
        ("softsync:1", 30, None, 30),
        ("softsync:4", 30, None, 7),
        ("softsync:30", 30, None, 1),
        ("softsync:30", 20, 30, 1),  # R1's floor, of those alive
        ("async", 30, None, 1),
        ("ssp:3", 4, 4, 1),
        ("backup:2", 10, 10, 8),
        ("backup:2", 7, 10, 7),
        ("backup:2", 9, None, 7),
        ("backup:2", 1, 10, 1),
        ("hardsync", 0, 4, 1),
    ],
)
def test_quorums(text: str, live: int, initial: int | None, quorum: int) -> None:
    assert Sync.parse(text).quorum(live, initial) == quorum


@pytest.mark.parametrize(
    "text, live, batch_size, factor",
    [
        ("hardsync", 30, 4, 1.0),
        ("hardsync:reference_batch=128", 30, 4, math.sqrt(120 / 128)),  # R3
        ("softsync:3", 30, None, 1 / 3),
        ("softsync:4", 30, None, 7 / 30),  # c/λ where n does not divide λ
        ("softsync:30", 30, None, 1 / 30),
        ("softsync:30,rate=given", 30, None, 1.0),
        ("async", 30, None, 1 / 30),
        ("async", 1, None, 1.0),
        ("async:rate=given", 30, None, 1.0),
        ("async:rate=staleness", 30, None, 1.0),
        ("ssp:3", 30, None, 1.0),
        ("backup:1", 30, None, 1.0),
        ("delayed:2", 30, None, 1.0),
    ],
)
def test_rate_factors(text: str, live: int, batch_size: int | None, factor: float) -> None:
    assert Sync.parse(text).factor(live, batch_size) == pytest.approx(factor)


@given(st.integers(1, 60), st.integers(1, 60))
def test_softsync_folds_at_most_all_and_slows_down_by_its_share(n: int, live: int) -> None:
    sync = Sync(splits=n, rate="share")
    quorum = sync.quorum(live)
    assert 1 <= quorum <= live
    assert quorum * n <= live or quorum == 1
    assert sync.factor(live, None) * live == pytest.approx(quorum)


def test_lockstep_and_delay() -> None:
    assert [
        (sync.lockstep, sync.delay)
        for sync in map(Sync.parse, ("hardsync", "delayed:3", "backup:1", "async"))
    ] == [
        (True, 0),
        (True, 3),
        (False, 0),
        (False, 0),
    ]


@pytest.mark.parametrize(
    "text, learners, message",
    [
        ("softsync:40", 30, "softsync:40 needs n <= learners, got n = 40 with 30 learners"),
        ("softsync:40", 30, "use softsync:30"),
        (
            "backup:4",
            4,
            "backup:4 needs b < learners, got b = 4 with 4 learners: the quorum would be 4 − 4 = 0; use backup:3",
        ),
        ("backup:1", 1, "use hardsync, or at least 2 learners"),
        ("hardsync:reference_batch=128", 4, "√(learners × batch_size / 128), but batch_size is not known"),
        ("downpour:push=5,fetch=2", 4, "needs local_lr"),
        ("async", 0, "async needs at least 1 learner, got 0"),
    ],
)
def test_what_cannot_work_with_so_many_learners_is_refused_with_the_arithmetic(
    text: str, learners: int, message: str
) -> None:
    with pytest.raises(DialError) as caught:
        Sync.parse(text).check(learners)
    assert message in str(caught.value)


def test_what_can_work_passes() -> None:
    Sync.parse("softsync:30").check(30)
    Sync.parse("backup:3").check(4)
    Sync.parse("hardsync:reference_batch=128").check(1, 32)
    Sync.parse("downpour:push=5,fetch=5,local_lr=0.1").check(2)
    with pytest.raises(DialError, match="batch_size of at least 1, got 0"):
        Sync.parse("hardsync").check(2, 0)
    with pytest.raises(DialError, match="batch_size is not known"):
        Sync.parse("hardsync:reference_batch=128").factor(4, None)


# -- dials that change --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 10**6), preset_records()), max_size=5), preset_records())
def test_a_course_prints_as_text_that_parses_back(later: list[tuple[int, Sync]], first: Sync) -> None:
    by_epoch = {0: first, **dict(later)}
    course = Course.of(by_epoch)
    assert Course.of(str(course)) == course == Course.of(course)
    assert course == Course.of({epoch: str(sync) for epoch, sync in reversed(by_epoch.items())})
    assert course.first == by_epoch[0] and course.dials == tuple(sorted(by_epoch.items()))
    for epoch in {
        0,
        *by_epoch,
        *(epoch + 1 for epoch in by_epoch),
        *(epoch - 1 for epoch in by_epoch if epoch),
    }:
        begin, sync = course.dials[course.at(epoch)]
        assert begin == max(b for b in by_epoch if b <= epoch) and sync == by_epoch[begin]


def test_a_course_of_one_dial_is_that_dial() -> None:
    assert Course.of("ssp:3").dials == ((0, Sync(slack=3)),)
    assert Course.of(Sync(slack=3)) == Course.of({0: "ssp:3"}) == Course.of("ssp:3")
    assert str(Course.of("softsync:2")) == "softsync:2"


def test_rudras_table_4() -> None:
    course = Course.of(" hardsync   until 1  then softsync:1 ")
    assert course.dials == ((0, Sync.parse("hardsync")), (1, Sync.parse("softsync:1")))
    assert str(course) == "hardsync until 1 then softsync:1"
    assert [course.at(epoch) for epoch in range(4)] == [0, 1, 1, 1]
    three = Course.of("hardsync until 2 then softsync:1 until 5 then async")
    assert [course_epoch for course_epoch, _ in three.dials] == [0, 2, 5]


@pytest.mark.parametrize(
    "value, message",
    [
        ("hardsync until 1", "'hardsync until 1': write 'DIAL until EPOCH then DIAL'"),
        ("hardsync until one then async", "write 'DIAL until EPOCH then DIAL'"),
        ("hardsync until -1 then async", "write 'DIAL until EPOCH then DIAL'"),
        ("hardsync until 1.5 then async", "write 'DIAL until EPOCH then DIAL'"),
        (
            "hardsync until 2 then async until 2 then ssp:1",
            "begin with epoch 0, then rise: got epochs [0, 2, 2]",
        ),
        ("hardsync until 3 then async until 2 then ssp:1", "got epochs [0, 3, 2]"),
        ("hardsync until 0 then async", "got epochs [0, 0]"),
        ("hardsnyc until 1 then async", "did you mean 'hardsync'?"),
        ("hardsync until 1 then backup", "'backup' lacks its number"),
        (" until 1 then async", "no preset is called 'until 1 then async'"),
        ({}, "got epochs []"),
        ({1: "async"}, "got epochs [1]"),
        ({0: "async", -1: "ssp:1"}, "must be a whole number >= 0, got -1"),
        ({0: "async", "1": "ssp:1"}, "must be a whole number >= 0, got '1'"),
        ({0: 3}, "got int 3"),
        (None, "got NoneType None"),
    ],
)
def test_a_wrong_course_says_what_to_write(value: Any, message: str) -> None:
    with pytest.raises(DialError) as caught:
        Course.of(value)
    assert message in str(caught.value)


# -- what follows from a record ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, waits, local, weighs",
    [
        ("hardsync", True, False, False),
        ("delayed:1", True, False, False),
        ("ssp:0", True, False, False),
        ("backup:1", True, False, False),
        ("async", False, False, False),
        ("async:rate=staleness", False, False, False),
        ("softsync:2", False, False, False),
        ("softsync:2,rate=staleness", False, False, True),
        ("downpour", False, False, False),
        ("downpour:push=2,local_lr=1", False, True, False),
        ("downpour:fetch=2,local_lr=1", False, True, False),
    ],
)
def test_who_waits_who_steps_alone_and_whose_gradients_weigh(
    text: str, waits: bool, local: bool, weighs: bool
) -> None:
    sync = Sync.parse(text)
    assert (sync.waits, sync.local, sync.weighs) == (waits, local, weighs)


@given(st.integers(2, 30), st.integers(0, 30), st.data())
def test_the_quorum_of_backup_is_of_the_learners_that_started(
    initial: int, live: int, data: st.DataObject
) -> None:
    """M3: min(λ₀ − b, λ), at least 1."""
    b = data.draw(st.integers(1, initial - 1))
    assert Sync.parse(f"backup:{b}").quorum(live, initial) == max(1, min(initial - b, live))


# -- what is built ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*LATER, "diloco:10,inner=3"])
def test_later_presets_are_known_by_name(text: str) -> None:
    with pytest.raises(NotYetError, match="understood but not built yet; working now: hardsync"):
        Sync.parse(text)


def test_the_table_of_presets_has_all_its_words() -> None:
    for preset in PRESETS:
        assert all([preset.meaning, preset.quorum, preset.rate, preset.paper])
        assert preset.syntax.startswith(preset.name)


# -- errors -------------------------------------------------------------------------------------------------


def test_the_tree_of_errors() -> None:
    assert issubclass(DialError, UsageError) and issubclass(NotYetError, UsageError)
    assert issubclass(UsageError, SynclineError) and issubclass(UsageError, ValueError)
    assert issubclass(LearnerError, RunError) and issubclass(RunError, RuntimeError)


def test_a_learners_error_keeps_rank_and_traceback_across_processes() -> None:
    error = pickle.loads(pickle.dumps(LearnerError(3, "Traceback …\nKeyError: 'x'\n")))
    assert (error.rank, error.traceback) == (3, "Traceback …\nKeyError: 'x'\n")
    assert "learner 3" in str(error) and "KeyError: 'x'" in str(error)


def test_a_delay_that_adapts() -> None:
    dial = Sync.parse("delayed:auto<=3")
    assert dial == Sync(one_from_each=True, lead=3, auto=True) and str(dial) == "delayed:auto<=3"
    assert dial.delay == 3 and Sync(**asdict(dial)) == dial
    assert str(Sync.parse("delayed:auto<=2,reference_batch=8")) == "delayed:auto<=2,reference_batch=8"
    for text in ("delayed:auto<=0", "delayed:auto<=x", "softsync:auto<=2", "delayed:auto"):
        with pytest.raises(DialError):
            Sync.parse(text)
    with pytest.raises(DialError, match="auto adapts the lead"):
        Sync(auto=True)
