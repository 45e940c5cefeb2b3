"""How many shards a run gets that names no number."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from syncline.learn.server_session import shards_for
from syncline.topologies import Servers, parse_topology

HALF_A_MEGABYTE = 1 << 17  # float32 parameters


def table(parameters: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(parameters))], lr=0.1)


def sized(learners: int, cores: int, *, lockstep: bool = False) -> Servers:
    found = parse_topology("servers").sized(learners, cores, lockstep=lockstep)
    assert isinstance(found, Servers)
    return found


@pytest.mark.parametrize("learners, cores, expected", [
    (2, 2, 1), (4, 2, 1), (3, 16, 1), (4, 6, 2), (8, 16, 3), (14, 16, 2), (15, 16, 1),
])  # fmt: skip
def test_many_learners_that_leave_cores_have_a_small_table_cut(
    learners: int, cores: int, expected: int
) -> None:
    assert shards_for(table(3 * HALF_A_MEGABYTE), sized(learners, cores)) == expected


def test_large_tables_are_cut_in_any_case_and_named_numbers_hold() -> None:
    cut = partial(shards_for, table(32 * HALF_A_MEGABYTE))
    assert cut(sized(2, 16)) == 4 and cut(sized(2, 2)) == 2
    assert shards_for(table(8), Servers(5, True).sized(8, 16, lockstep=True)) == 5
