"""The best accuracy over thresholds, against trying all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reproductions.cots.selectivity import selectivity
from syncline.errors import UsageError

responses = st.lists(st.integers(0, 6), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(responses, responses)
def test_it_is_the_best_of_all_thresholds(positive: list[int], negative: list[int]) -> None:
    count = len(positive) + len(negative)
    best = max(
        (sum(value >= t for value in positive) + sum(value < t for value in negative)) / count
        for t in [*positive, *negative, 7]
    )
    one, other = torch.tensor(positive).view(-1, 1), torch.tensor(negative).view(-1, 1)
    accuracy, threshold = selectivity(one, other)
    assert accuracy.item() == pytest.approx(best)
    assert ((one >= threshold).sum() + (other < threshold).sum()).item() / count == pytest.approx(best)


def test_neurons_are_judged_one_by_one() -> None:
    positive = torch.tensor([[1.0, 5.0], [2.0, -5.0], [3.0, 5.0]])
    negative = torch.tensor([[0.0, 5.0], [0.5, -5.0]])
    accuracy, threshold = selectivity(positive, negative)
    torch.testing.assert_close(accuracy, torch.tensor([1.0, 0.6]))
    assert threshold[0] == 1.0


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match="same neurons"):
        selectivity(torch.zeros(3, 2), torch.zeros(3, 4))
    with pytest.raises(UsageError, match="got 0 positive and 3 negative"):
        selectivity(torch.zeros(0, 2), torch.zeros(3, 2))
