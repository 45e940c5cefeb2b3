"""One case is played: what counts as a failure, that it leaves nothing behind, and the same bits every time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from syncline.engines.run import Outcome
from syncline.errors import InvariantError, LostError
from syncline.testing.hunt import Case, case_player, play, random_case
from syncline.testing.hunt.case_player import digest, scratch, sweep
from tests.ready_python import ReadyPython


@pytest.mark.parametrize("loop", ["train", "own"])
def test_pushes_of_learners_that_have_not_heard_of_lockstep_yet(loop: str) -> None:
    """Promises leave their slots when they are taken, real gradients lie in them until their fold."""
    case = Case(
        seed=939,
        sync="downpour:push=1,fetch=6,local_lr=0.1",
        script="change to hardsync at 2 s",
        loop=loop,
        examples=7,
        batch_size=1,
        epochs=1,
        cluster="equal:setup=1.5,beside=true,learners_per_machine=2",
        late=True,
    )
    assert play(case) is None


def fails_with(error: Exception, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str] | None:
    def run(case: Case) -> Outcome:
        raise error

    monkeypatch.setattr(case_player, "run", run)
    failure = play(case)
    return (failure.kind, str(failure)) if failure is not None else None


def test_two_failures_are_of_one_kind_whatever_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    kinds = set()
    for number in (3, 41):
        error = InvariantError(f"at {number} s: shard {number} skips version {number}\nlog {number}")
        found = fails_with(error, case, monkeypatch)
        assert found is not None and found[1] == str(error)
        kinds.add(found[0])
    assert kinds == {"shard skips version"}
    found = fails_with(KeyError("lost 7 words"), case, monkeypatch)
    assert found is not None and "Traceback" in found[1] and found[0] != "shard skips version"


ENDS = {
    "everybody is killed": (Case(learners=1, script="kill learner 0 at 1 s"), "all learners are lost", True),
    "one of two": (Case(learners=2, script="kill learner 0 at 1 s"), "all learners are lost", False),
    "nobody": (Case(learners=1, script="pause learner 0 for 2 s at 1 s"), "all learners are lost", False),
    "a node with all": (
        Case(learners=2, script="kill node 0 at 1 s", cluster="equal:learners_per_machine=2"),
        "all learners are lost",
        True,
    ),
    "a node with half": (
        Case(learners=4, script="kill node 0 at 1 s", cluster="equal:learners_per_machine=2"),
        "all learners are lost",
        False,
    ),
    "four shards": (
        Case(script="; ".join(["kill shard 0 at 1 s"] * 4)),
        "4 times without a checkpoint in between",
        True,
    ),
    "three shards": (
        Case(script="; ".join(["kill shard 0 at 1 s"] * 3)),
        "4 times without a checkpoint in between",
        False,
    ),
    "leaves": (Case(fan_in=2, script="kill node 0 at 1 s"), "the last leaf of the tree was killed", True),
    "leaves with checkpoints": (
        Case(fan_in=2, script="kill node 0 at 1 s", checkpoint_every=2),
        "the last leaf of the tree was killed",
        False,
    ),
    "for no reason": (Case(learners=1, script="kill learner 0 at 1 s"), "nothing is known of it", False),
}


@pytest.mark.parametrize("case, words, asked_for", ENDS.values(), ids=ENDS.keys())
def test_an_end_that_the_script_brings_about_is_no_failure(
    case: Case, words: str, asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fails_with(LostError(f"learner 0 is gone, {words}"), case, monkeypatch)
    assert (found is None) is asked_for


def test_a_digest_sees_every_bit_of_what_is_left() -> None:
    def of(weight: float = 1.0, name: str = "a", version: int = 3, seconds: float = 2.0) -> str:
        tables = {0: (version, {name: torch.tensor([0.0, weight])})}
        return digest(Outcome(tables=tables, seconds=seconds))

    others = [of(weight=1.0 + 2**-23), of(name="b"), of(version=4), of(seconds=2.5)]
    assert of() == of() and len({of(), *others}) == 5


def test_torch_is_left_as_it_was() -> None:
    before = torch.get_rng_state()
    play(random_case(0, "async"))
    assert torch.equal(torch.get_rng_state(), before)


# -- nothing stays behind ----------------------------------------------------------------------------------

LEAVES = """
import os, signal, sys
from syncline.testing.hunt.case_player import scratch
with scratch(sys.argv[1]) as folder:
    open(folder + "/part", "w").close()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_hunt_left_is_removed_by_the_next(how: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES, str(tmp_path)]
    with ReadyPython(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        assert sweep(str(tmp_path)) == [] and (left / "part").exists()  # its process lives
        process.send_signal(how)
        process.wait(20)
    assert (left / "part").exists()
    with scratch(str(tmp_path)) as folder:
        assert [str(each) for each in tmp_path.iterdir()] == [folder]
        assert sweep(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
