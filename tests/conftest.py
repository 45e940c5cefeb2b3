"""What holds for every test."""

from collections.abc import Iterator

import pytest

from syncline.engines.sim.world import World
from syncline.testing import end_leftovers

World.honest = True  # in simulated runs, too, nobody sees another's memory


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test() -> Iterator[None]:
    """A test that leaves a run, a thread or a process behind fails, and whatever it left is ended."""
    yield
    left = end_leftovers()
    assert not left, f"left behind: {', '.join(left)}"
