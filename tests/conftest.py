"""What holds for every test."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from syncline.sim.simulation import Simulation
from syncline.testing import end_leftovers

settings.register_profile("busy", deadline=None)  # a busy machine misses any
settings.load_profile("busy")
Simulation.honest = True  # in simulated runs, too, nobody sees another's memory


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test() -> Iterator[None]:
    """A test that leaves a run, a thread or a process behind fails, and whatever it left is ended."""
    yield
    left = end_leftovers()
    assert not left, f"left behind: {', '.join(left)}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """This process computes as its learners do: sums over threads have other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
