"""What holds for every test."""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from syncline.sim.simulation import Simulation
from syncline.testing import end_leftovers
from tests import ready_python

settings.register_profile("busy", deadline=None)  # a busy machine misses any
settings.load_profile("busy")
# As learners compute: sums over threads have other bits, and threads that wait for a core spin.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for what tests start
os.environ.setdefault("SYNCLINE_PROGRESS", "off")  # tests of the display switch it on
os.environ["RAY_TQDM_PATCH_PRINT"] = "0"  # a driver of Ray replaces print, which then pickles no more
# A shell that starts tests in the background ignores Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
Simulation.honest = True  # in simulated runs, too, nobody sees another's memory


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a sweep (`@pytest.mark.sweep(n)`) `make test` has n cases that are not long, evenly spread; `make test-long` the others."""
    sweeps: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is not None and item.get_closest_marker("long") is None:
            sweeps[str(item.path), getattr(item, "originalname", item.name)].append(item)
    for cases in sweeps.values():
        mark = cases[0].get_closest_marker("sweep")
        assert mark is not None
        kept = {index * len(cases) // mark.args[0] for index in range(mark.args[0])}
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker("long")


@pytest.fixture(autouse=True, scope="session")
def _warm_interpreter_ends() -> Iterator[None]:
    yield
    ready_python.end()


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test() -> Iterator[None]:
    """A test that leaves a run, a thread or a process behind fails, and whatever it left is ended."""
    yield
    left = end_leftovers()
    assert not left, f"left behind: {', '.join(left)}"
