"""What a process of ours does to its interpreter is taken back where a test runs its loop in this one."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _garbage_is_collected() -> Iterator[None]:
    yield
    gc.enable()
