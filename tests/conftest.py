"""Options of the test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-crash-points", action="store_true", help="try every crash point of a shard, not some of them"
    )
