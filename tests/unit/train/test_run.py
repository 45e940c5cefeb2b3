"""A run's handle: its result, what errors and signals become, who may still join or change the dial."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset

import syncline as sl
from syncline.engines.checkpoint_options import LOCK
from syncline.engines.run import Event, Outcome
from syncline.errors import DialError, LostError, RunError, Terminated, UsageError
from syncline.messages import Statistics, TableStatistics
from syncline.protocols.staleness import Staleness
from syncline.train.run import Interrupts
from tests.unit.train.still_engine import StillEngine, StillHandle, good

FRESH = Staleness(gradients=9, mean=0.0, max=0, histogram={})
TABLE = TableStatistics(
    version=7, gradients=9, dropped=2, examples=40, staleness=FRESH, waiting={}, missing=[], pending=0
)
STATE = {"weight": torch.full((1, 3), 2.0), "bias": torch.ones(1)}


def outcome(**changes: Any) -> Outcome:
    plain: dict[str, Any] = {"tables": {0: (7, STATE)}, "statistics": Statistics(1, {0: TABLE})}
    return Outcome(**{**plain, **changes})


def run_of(ends: Outcome | BaseException, **changes: Any) -> tuple[sl.Run, StillHandle]:
    engine = StillEngine(ends)
    arguments = good(**{"sync": "hardsync", **changes})
    run = sl.train(arguments.pop("model"), arguments.pop("data"), engine=engine, wait=False, **arguments)
    return run, engine.handle


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


# -- what is left of it ----------------------------------------------------------------------------------------


def test_the_result_has_the_weights_in_a_copy_and_rates_since_the_run_went_on() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    ends = outcome(
        seconds=30.0, began=10.0, returned={0: "a", 2: "c"}, events=[Event(seconds=1.0, what="gone", rank=4)]
    )
    result = run_of(ends, model=model)[0].wait()
    assert (result.version, result.updates, result.gradients, result.dropped) == (7, 7, 9, 2)
    assert result.throughput == 40 / 20 and result.seconds == 30.0
    assert result.returned == ["a", None, "c", None, None] and result.staleness is FRESH
    assert result.model is not model and torch.equal(model.weight, before)
    assert result.model is not None and torch.equal(result.model.state_dict()["weight"], STATE["weight"])
    assert result.state_dict() is STATE
    with pytest.raises(UsageError, match=r"the run has tables \[0\], not 1"):
        result.state_dict(1)


def test_a_run_without_a_table_leaves_nothing() -> None:
    result = run_of(Outcome())[0].wait()
    assert (result.version, result.throughput, result.model, result.returned) == (0, 0.0, None, [])


def test_weights_that_fit_no_model_come_with_the_error() -> None:
    other = {"weight": torch.zeros(5, 5)}
    with pytest.raises(RunError, match="no model could be made of its weights") as told:
        run_of(outcome(tables={0: (7, other)}))[0].wait()
    assert told.value.result.state_dict() is other and told.value.result.model is None


def test_a_lost_run_carries_what_its_engine_still_has() -> None:
    lost = LostError("gone")
    lost.outcome = outcome()
    with pytest.raises(LostError) as told:
        run_of(lost)[0].wait()
    assert told.value.result.version == 7 and told.value.result.model is not None
    bare = LostError("gone")
    with pytest.raises(LostError):
        run_of(bare)[0].wait()
    assert bare.result is None


def test_a_wait_that_takes_too_long_ends_nothing() -> None:
    run, handle = run_of(TimeoutError())
    with pytest.raises(TimeoutError):
        run.wait(0)
    assert handle.heard == [] and not run.done
    handle.ends = outcome()
    assert run.wait().version == 7 and run.done


# -- blocks and handles ----------------------------------------------------------------------------------------


def test_a_block_stops_what_was_not_waited_for_and_what_it_raises_itself_comes_first() -> None:
    run, handle = run_of(outcome())
    with run:
        pass
    assert handle.heard == ["stop"] and run.done
    failing, heard = run_of(LostError("gone"))
    with pytest.raises(ZeroDivisionError), failing:
        raise ZeroDivisionError
    assert heard.heard == ["stop"]
    with pytest.raises(LostError), run_of(LostError("gone"))[0]:
        pass


def test_a_run_whose_handle_is_gone_is_stopped_with_a_warning() -> None:
    run, handle = run_of(outcome())
    with pytest.warns(RuntimeWarning, match="a run goes on whose handle is gone"):
        del run
    assert handle.heard == ["stop"]


def test_a_run_that_cannot_start_holds_its_folder_no_longer(tmp_path: Path) -> None:
    engine = StillEngine()
    engine.refuses = True
    with pytest.raises(UsageError, match="nothing can be started"):
        sl.train(**good(engine=engine, run_dir=tmp_path))
    assert not (tmp_path / LOCK).exists()


# -- more learners, other dials -----------------------------------------------------------------------------------


def test_learners_join_while_it_goes_on() -> None:
    run, handle = run_of(outcome())
    run.add_learners(2)
    assert handle.heard == [("add", 2)]
    with pytest.raises(UsageError, match="count must be a whole number"):
        run.add_learners(0)
    stream, _ = run_of(outcome(), data=Stream(), steps=3)
    with pytest.raises(UsageError, match="is split over the 2 learners of the start"):
        stream.add_learners()
    run.stop()
    run.wait()
    stream.wait()
    for late in (run.add_learners, lambda: run.change("async")):
        with pytest.raises(UsageError, match=r"the run has ended: .* comes too late"):
            late()
    run.stop()
    assert handle.heard == [("add", 2), "stop"]


@pytest.mark.parametrize("sync, dial, words", [
    ("hardsync", "softsync:3", "n <= learners"),
    ("hardsync", "delayed:2", r"keeps 3 versions, this run was started to keep 1: .*'hardsync until 100 then delayed:2'"),
    ("hardsync", "sandblaster", "a batch method's, whole and from the start"),
])  # fmt: skip
def test_a_dial_that_the_run_cannot_take_is_refused(sync: str, dial: str, words: str) -> None:
    run, handle = run_of(outcome(), sync=sync)
    with pytest.raises(DialError, match=words):
        run.change(dial)
    run.wait()
    assert handle.heard == []


def test_a_run_has_64_dials_and_no_more() -> None:
    run, handle = run_of(outcome(), sync="hardsync until 1 then async")
    for _ in range(62):
        run.change("softsync:2")
    assert handle.heard == [("change", "softsync:2")] * 62
    with pytest.raises(DialError, match="a run may have 64 dials"):
        run.change("async")
    run.wait()


# -- signals ---------------------------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that the user's own handler got."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def signalled(handle: StillHandle, *numbers: int) -> None:
    """The signals come while the run is waited for."""
    wait = handle.wait

    def hears(timeout: float | None = None) -> Outcome:
        for number in numbers:
            signal.raise_signal(number)
        return wait(timeout)

    handle.wait = hears  # type: ignore[method-assign]


def test_sigterm_stops_the_run_and_is_raised_with_its_result(heard: list[int]) -> None:
    own = signal.getsignal(signal.SIGTERM)
    run, handle = run_of(outcome())
    signalled(handle, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(Terminated) as told:
        run.wait()
    assert told.value.code == 143 and told.value.result.version == 7
    assert handle.heard == ["stop"] and heard == [signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is own


def test_one_ctrl_c_stops_a_second_does_not_wait() -> None:
    run, handle = run_of(outcome())
    signalled(handle, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as told:
        run.wait()
    assert told.value.result.version == 7 and handle.heard == ["stop"]  # type: ignore[attr-defined]
    run, handle = run_of(outcome())
    signalled(handle, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as told:
        run.wait()
    assert not hasattr(told.value, "result") and handle.heard == ["stop", ("end", 0)]


def test_a_signal_that_another_process_heard_is_raised_here() -> None:
    with pytest.raises(Terminated) as told:
        run_of(outcome(signal=signal.SIGTERM))[0].wait()
    assert told.value.result.version == 7


def test_a_run_that_fails_because_of_a_signal_raises_the_signal(heard: list[int]) -> None:
    run, handle = run_of(LostError("gone"))
    signalled(handle, signal.SIGTERM)
    with pytest.raises(Terminated) as told:
        run.wait()
    assert isinstance(told.value.__cause__, LostError) and told.value.result is None


@given(st.lists(st.sampled_from(["enter", "leave", "signal"]), max_size=12))
def test_handlers_are_there_exactly_while_somebody_waits(moves: list[str]) -> None:
    """Also inside itself; the user's own handler gets every signal, the run only its first."""
    heard: list[int] = []
    stopped: list[int] = []

    def own(number: int, frame: Any) -> None:
        heard.append(number)

    ignored, before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, own)
    interrupts, depth, sent, inside = Interrupts(stopped.append), 0, 0, False
    try:
        for move in moves:
            if move == "enter":
                interrupts.__enter__()
                depth += 1
            elif move == "leave" and depth:
                interrupts.__exit__()
                depth -= 1
            elif move == "signal":
                signal.raise_signal(signal.SIGTERM)
                sent += 1
                inside = inside or depth > 0
            assert (signal.getsignal(signal.SIGTERM) is own) == (depth == 0)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # ignored signals stay so
            assert len(heard) == sent and stopped == [signal.SIGTERM] * inside
    finally:
        signal.signal(signal.SIGINT, ignored)
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number, kind", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_what_is_told_is_the_first_signal_heard_here_before_that_of_others(
    number: int, kind: type[BaseException]
) -> None:
    nothing: Callable[[int], None] = lambda number: None  # noqa: E731
    assert Interrupts(nothing).told(None, 0) is None
    assert isinstance(Interrupts(nothing).told(None, number), kind)
    both = Interrupts(nothing)
    both.number = number
    assert isinstance(both.told(None, signal.SIGTERM), kind)
