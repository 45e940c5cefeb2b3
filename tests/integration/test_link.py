"""Learners behind a slow link: two network namespaces, 100 Mbit/s between them. Results are asserted, no times.

Needs root and iproute2; skipped with the reason where namespaces cannot be made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import link
from tests.integration.linked_nodes import EPOCHS, EXAMPLES, NUMBERS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("linked_nodes.py")
MBIT = 100
LOCKSTEP, FREE = ("hardsync", "delayed:1"), ("softsync:1",)
LONGEST = 110.0  # seconds
pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What each job came to; one caller for all, since starting one takes longer than they do."""
    try:
        with link.Link(MBIT) as made:
            yield called(made)
    except link.LinkError as error:
        pytest.skip(f"no link between two namespaces: {error}")


def called(made: link.Link) -> dict[str, Any]:
    """By the caller in the first namespace."""
    first, second = made.namespaces
    jobs = [*(f"train {sync}" for sync in (*LOCKSTEP, *FREE)), "measure", f"cut {second}"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        ["nsenter", f"--net={link.NAMESPACES / first}", sys.executable, SCRIPT, second, *jobs],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {job.split(" syncline-")[0]: answer for each in answers for job, answer in each.items()}


@pytest.mark.parametrize("sync", LOCKSTEP)
def test_lockstep_over_a_slow_link_gives_the_bits_of_local(found: dict[str, Any], sync: str) -> None:
    told = found[f"train {sync}"]
    assert told["same"] and told["examples"] == EPOCHS * EXAMPLES
    elsewhere = told["gradients"] // 2  # of the two learners behind the link
    assert told["moved"] > elsewhere * NUMBERS * 4


@pytest.mark.parametrize("sync", FREE)
def test_free_dials_over_a_slow_link_fold_every_gradient_once(found: dict[str, Any], sync: str) -> None:
    told = found[f"train {sync}"]
    assert told["examples"] == EPOCHS * EXAMPLES and told["gradients"] == told["taken"]
    assert told["moved"] > NUMBERS * 4 and not told["events"]


def test_a_link_that_is_cut_loses_the_learners_behind_it_and_nothing_else(found: dict[str, Any]) -> None:
    assert found["cut"]["events"].count("lost") == 2
    assert found["cut"]["examples"] == 20 * EXAMPLES


def test_a_slow_link_is_measured_as_no_faster_than_it_is(found: dict[str, Any]) -> None:
    told = found["measure"]
    assert 0 < told["card"]["bandwidth"] < 1.1 * MBIT * 1e6 / 8
    assert (told["learners_per_machine"], told["cores"]) == (2, 2)
