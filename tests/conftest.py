"""Options of the test suite, and what holds for every test."""

from collections.abc import Iterator

import pytest

from syncline.testing import end_leftovers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-crash-points", action="store_true", help="try every crash point of a shard, not some of them"
    )


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test() -> Iterator[None]:
    """A test that leaves a run, a thread or a process behind fails, and whatever it left is ended."""
    yield
    left = end_leftovers()
    assert not left, f"left behind: {', '.join(left)}"
