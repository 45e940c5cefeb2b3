"""The paper's networks have the counts that their docstring states."""

import pytest

from reproductions.cots.networks import cots_network
from syncline.errors import UsageError


@pytest.mark.parametrize(
    "name, blocks, weights",
    [("1.8b", [46**2, 42**2, 38**2], 1_639_014_400), ("11b", [46**2, 37**2, 28**2], 12_160_309_248)],
)
def test_counts(name: str, blocks: list[int], weights: int) -> None:
    network = cots_network(name, device="meta")
    assert [stack.filter.geometry.blocks for stack in network] == blocks
    assert sum(parameter.numel() for parameter in network.parameters()) == weights


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"there are 1.8b, 11b"):
        cots_network("12b")
