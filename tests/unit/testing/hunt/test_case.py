"""A case as a record: what it refuses, how a seed draws it, and the command that plays it again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from syncline.engines.event_script import parse_script
from syncline.errors import UsageError
from syncline.testing.hunt.case import DIALS, LOOPS, POLICIES, Case, random_case


def test_all_loops_policies_and_faults_are_drawn() -> None:
    cases = [random_case(seed, dial) for seed in range(40) for dial in DIALS]
    assert {case.loop for case in cases} == set(LOOPS) and {case.policy for case in cases} == set(POLICIES)
    scripts = "; ".join(case.script for case in cases)
    for words in (
        "kill learner",
        "kill shard",
        "kill node",
        "pause learner",
        "pause shard",
        "add",
        "change to",
        "stop",
        "version",
        "kill node",
        "pause node",
        "cut link",
    ):
        assert words in scripts
    assert any("delay=0.3" in case.cluster for case in cases)
    assert any(case.warmstart for case in cases) and any(case.steps for case in cases)
    assert {case.fan_in for case in cases} == {0, 2, 3}


@pytest.mark.parametrize("dial", DIALS)
def test_a_case_is_drawn_the_same_way_every_time_and_its_command_says_all(dial: str) -> None:
    for seed in range(20):
        case = random_case(seed, dial)
        assert case == random_case(seed, dial) != random_case(seed + 1, dial)
        parse_script(case.script)
        words = shlex.split(case.command())
        assert words[:4] == ["syncline", "simulate", "--faults", "script"]
        said = list(zip(words[4::2], words[5::2], strict=True))
        sizes = {option.lstrip("-"): int(value) for option, value in said if value.isdigit()}
        texts = {option.lstrip("-"): value for option, value in said if option in ("--sync", "--script")}
        given: dict[str, Any] = {**sizes, **texts}
        assert Case(**given).changed([value for option, value in said if option == "--set"]) == case


def test_what_the_caller_gives_is_not_drawn_but_for_learners_that_the_dial_needs() -> None:
    drawn = random_case(4, "softsync:2", learners=7, shards=5)
    assert (drawn.learners, drawn.shards) == (7, 5)
    assert random_case(4, "softsync:2", learners=1).learners == 2


@pytest.mark.parametrize(
    "text, field, value",
    [
        ("loop=odd", "loop", "odd"),
        ("clip=true", "clip", True),
        ("late=false", "late", False),
        ("epochs=5", "epochs", 5),
        ("steps=7", "steps", 7),
        ("steps=", "steps", None),
        ("cluster=equal:latency=0.1,setup=2", "cluster", "equal:latency=0.1,setup=2"),
    ],
)
def test_a_setting_is_read_by_the_kind_of_its_field(text: str, field: str, value: Any) -> None:
    changed = Case(late=True).changed([text])
    assert getattr(changed, field) == value and type(getattr(changed, field)) is type(value)


def test_over_a_tree_only_what_sums_can_follow_is_drawn() -> None:
    cases = [random_case(seed, dial) for seed in range(40) for dial in DIALS]
    trees = [case for case in cases if case.fan_in]
    assert trees and all("rate=staleness" not in case.sync for case in trees)
    assert not [case for case in trees if "backup" in case.script or "backup" in case.sync]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="loop is one of train, own, odd, bare, got 'round'"):
        Case(loop="round")
    with pytest.raises(UsageError, match="--set depth=3: write key=value with one of batch_size"):
        Case().changed(["depth=3"])
    with pytest.raises(UsageError, match="replace is true or false"):
        Case().changed(["replace=perhaps"])
    for text in ("epochs=", "epochs=two", "steps=1.5"):
        with pytest.raises(UsageError, match="is a whole number"):
            Case().changed([text])
    with pytest.raises(UsageError, match="shards must be at least 1, got 0"):
        Case(shards=0)
    with pytest.raises(UsageError, match="softsync:4 needs n <= learners"):
        Case(sync="softsync:4", learners=2)
