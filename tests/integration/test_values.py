"""Weights as they must be: every dial over every topology, against a sequential reference that steps by the same gradients.

The cells of docs/exact/matrix.md run in tests/unit/test_matrix.py, by the same reference.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, AdamW

import syncline as sl
from syncline.cluster import Cluster, Link
from syncline.testing import Nodes
from tests.integration.value_runs import DIALS, WHOLE, check, loop

TREES = ["tree:2,servers=2", "tree:4,servers=1", "tree:2,broadcast,servers=1"]
BUSY = Cluster(card=Link(latency=1.0), speeds=(1.0, 0.9, 0.8, 0.7))  # sums grow while others are under way


@pytest.mark.parametrize("topology", ["servers:2", *TREES])
@pytest.mark.parametrize("dial", DIALS)
def test_simulated(dial: str, topology: str) -> None:
    result = check(dial, topology, sl.Sim(BUSY, check=True), loop(dial), learners=4)
    if "tree:4" in topology and dial in ("async", *WHOLE):
        assert result.updates < result.gradients, "some sums hold several gradients"


@pytest.mark.parametrize("topology", ["servers:2", "tree:2,servers=1"])
def test_an_optimizer_with_state_makes_one_step_of_a_sum(topology: str) -> None:
    for factory in (partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01), partial(AdamW, lr=0.1)):
        for dial in ("async:rate=given", "softsync:2", "hardsync"):
            check(
                dial,
                topology,
                sl.Sim(BUSY, check=True),
                loop(dial, factory=factory),
                learners=4,
            )


@pytest.mark.parametrize("topology", ["servers:2", *TREES])
@pytest.mark.parametrize("dial", DIALS)
def test_in_processes(dial: str, topology: str) -> None:
    check(dial, topology, "local", loop(dial), learners=4)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("topology", ["servers:1", "tree:2,servers=1", "tree:2,broadcast,servers=2"])
@pytest.mark.parametrize("dial", DIALS)
def test_on_machines(dial: str, topology: str) -> None:
    check(dial, topology, Nodes(2, 2), loop(dial), learners=4)


@pytest.mark.parametrize("topology", ["servers:1", *TREES])
@pytest.mark.parametrize("dial", WHOLE)
@pytest.mark.parametrize("engine", ["sim", "local"])
def test_a_learner_that_leaves_takes_no_step_of_others_with_it(dial: str, topology: str, engine: str) -> None:
    chosen: Any = sl.Sim(BUSY, check=True) if engine == "sim" else engine
    check(dial, topology, chosen, loop(dial, leaves=3), learners=4)
