"""What holds for every test."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from syncline.sim.simulation import Simulation
from syncline.testing import end_leftovers

settings.register_profile("busy", deadline=None)  # a busy machine misses any
settings.load_profile("busy")
# As learners compute: sums over threads have other bits, and threads that wait for a core spin.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for what tests start
Simulation.honest = True  # in simulated runs, too, nobody sees another's memory


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test() -> Iterator[None]:
    """A test that leaves a run, a thread or a process behind fails, and whatever it left is ended."""
    yield
    left = end_leftovers()
    assert not left, f"left behind: {', '.join(left)}"
