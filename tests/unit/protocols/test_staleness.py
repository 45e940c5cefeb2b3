"""The staleness of gradients and updates (R2), against a brute force account."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.protocols.staleness import StalenessClock


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1)), max_size=20))
def test_the_clock_is_the_brute_force_account(folds: list[tuple[int, list[int]]]) -> None:
    """R2: an update's staleness is the version before it minus the mean of its stamps."""
    clock, sigmas = StalenessClock(), []
    for extra, stamps in folds:
        before = max(stamps) + extra
        sigmas += [before - stamp for stamp in stamps]
        mean = clock.fold(before, stamps)
        assert mean == clock.last_update == pytest.approx(before - sum(stamps) / len(stamps))
    account = clock.account()
    assert account.histogram == Counter(sigmas) and account.gradients == len(sigmas)
    assert account.max == max(sigmas, default=0)
    assert account.mean == pytest.approx(sum(sigmas) / max(1, len(sigmas)))
    assert str(len(sigmas)) in str(account)


def test_a_gradient_from_the_future_is_an_error() -> None:
    with pytest.raises(AssertionError, match="future"):
        StalenessClock().fold(2, [1, 3])
