"""The hunt's command line: what is refused, what is played again, and what is said of a finding. Nothing is hunted here."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from syncline.cli import fault_hunt
from syncline.cli.app import app
from syncline.cli.fault_hunt import hunt_or_replay
from syncline.errors import UsageError
from syncline.testing.hunt import DIALS, Case, Failure, Found, random_case

NOTHING: dict[str, Any] = {
    "faults": "random",
    "seeds": None,
    "seed": None,
    "sync": None,
    "sizes": {"learners": None, "shards": None},
    "script": None,
    "sets": [],
    "jobs": 1,
    "of_jobs": {},
}


def hunted(**options: Any) -> tuple[int, str]:
    """The exit code, and what was printed."""
    out = io.StringIO()
    return hunt_or_replay(Console(file=out, width=400), **{**NOTHING, **options}), out.getvalue()


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "200"})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({}, "give --seeds N to hunt, or --seed N to play one case"),
    "both numbers": ({"seeds": 5, "seed": 1}, "give --seeds N to hunt, or --seed N to play one case"),
    "another word": ({"faults": "all", "seeds": 5}, "--faults is random or script, got 'all'"),
    "a script of a drawn case": (
        {"seed": 1, "script": "stop at 1 s"},
        "--faults script plays what --script says",
    ),
    "no script": ({"faults": "script", "seed": 1}, "--faults script plays what --script says"),
    "a script of many": ({"faults": "script", "script": "", "seeds": 5}, "are of one case: give --seed N"),
    "a setting of many": ({"seeds": 5, "sets": ["clip=true"]}, "are of one case: give --seed N"),
    "no seeds": ({"seeds": 0}, "--seeds and --jobs must be at least 1, got 0 and 1"),
    "no processes": ({"seeds": 5, "jobs": 0}, "--seeds and --jobs must be at least 1, got 5 and 0"),
    "no such dial": ({"seeds": 5, "sync": "softsnyc"}, "no preset is called 'softsnyc'"),
    "a job's option": (
        {"seeds": 5, "of_jobs": {"--steps": 0, "--epochs": None}},
        "its own jobs, --steps would be",
    ),
}


@pytest.mark.parametrize("options, words", BAD.values(), ids=BAD.keys())
def test_what_means_nothing_to_a_hunt_is_refused(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hunt", "play"):
        monkeypatch.delattr(fault_hunt, name)  # nothing is begun
    with pytest.raises(UsageError) as refused:
        hunted(**options)
    assert words in str(refused.value)


def test_what_a_hunt_would_ignore_is_refused() -> None:
    options = ["--cluster", "p775", "--epochs", "3", "--timing", "--topology", "servers:2"]
    result = simulate("--faults", "random", "--seeds", "2", *options)
    assert result.exit_code == 2, result.output
    assert "--cluster, --topology, --epochs, --timing would be ignored" in result.stderr


def test_a_failure_is_printed_with_what_the_hunt_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random_case(3, "ssp:1", learners=4, shards=2)
    found = Found(drawn=drawn, case=Case(seed=3, sync="ssp:1"), failure=Failure("broken", "broken here"))
    monkeypatch.setattr("syncline.cli.fault_hunt.hunt", lambda *_, **__: found)
    hunt = ("--faults", "random", "--sync", "ssp:1", "--learners", "4", "--shards", "2")
    result = simulate(*hunt, "--seeds", "9")
    assert result.exit_code == 1 and "broken here" in result.output and drawn.script
    (again,) = [line for line in result.output.splitlines() if line.startswith("as it was drawn: ")]
    played: list[Case] = []
    monkeypatch.setattr("syncline.cli.fault_hunt.play", played.append)
    assert simulate(*shlex.split(again.partition("syncline simulate ")[2])).exit_code == 0
    assert played == [drawn]


def played_as(failure: Failure | None, played: list[Case]) -> Callable[[Case], Failure | None]:
    def play(case: Case) -> Failure | None:
        played.append(case)
        return failure

    return play


@pytest.mark.parametrize("failure, code", [(None, 0), (Failure("kind", "shard 1 skips"), 1)])
def test_one_case_is_played_as_it_was_drawn_or_exactly_as_it_is_said(
    failure: Failure | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Case] = []
    monkeypatch.setattr(fault_hunt, "play", played_as(failure, played))
    sizes = {"learners": 4, "shards": None}
    drawn, said = (
        hunted(seed=3, sync="ssp:1", sizes=sizes, sets=["clip=true"]),
        hunted(faults="script", seed=3, sizes=sizes, script="stop at 1 s", sets=["epochs=5"]),
    )
    assert played[0] == random_case(3, "ssp:1", learners=4).changed(["clip=true"])
    assert played[1] == Case(seed=3, sync="hardsync", learners=4, script="stop at 1 s", epochs=5)
    assert (drawn[0], said[0]) == (code, code)
    assert said[1].strip() == (
        str(failure) if failure else "nothing is broken in seed 3: hardsync, script 'stop at 1 s'"
    )


@pytest.mark.parametrize("sync, dials", [(None, DIALS), ("all", DIALS), ("ssp:1", ("ssp:1",))])
def test_a_hunt_is_over_all_dials_or_one_and_nothing_found_is_no_failure(
    sync: str | None, dials: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def hunt(seeds: Any, dials: Any, *, progress: Any, **options: Any) -> None:
        asked.append((seeds, dials, options))
        progress(1, 7 * len(dials))

    monkeypatch.setattr(fault_hunt, "hunt", hunt)
    code, said = hunted(seeds=7, sync=sync, sizes={"learners": None, "shards": 2}, jobs=3)
    assert asked == [(range(7), dials, {"learners": None, "shards": 2, "jobs": 3})]
    assert code == 0 and said.startswith(f"nothing is broken: 7 seeds × {len(dials)} dials, ")
    monkeypatch.setattr(fault_hunt, "LINES", -1)
    assert hunted(seeds=7, sync=sync)[1].startswith(f"1 of {7 * len(dials)} cases\n"), "now and then"
