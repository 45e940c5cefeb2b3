"""A table that cannot fit on its card is refused before anything starts, with the numbers (no GPU needed)."""

from __future__ import annotations

import pytest
from torch import nn

from syncline.dial import Course
from syncline.errors import UsageError
from syncline.roles.run_plan import RunPlan
from syncline.topologies import parse_topology
from syncline.train import groups


def plan(sync: str) -> RunPlan:
    return RunPlan(course=Course.of(sync), learners=2, topology=parse_topology("servers:1"), seed=0)


@pytest.mark.parametrize(("sync", "most"), [("async", 3 + 2 * 3 + 4), ("delayed:2", 6 + 2 * 4 + 4)])
def test_what_a_table_takes(sync: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1000, bias=False)  # 4 MB
    monkeypatch.setattr(groups, "free_memory", lambda device: most * 4_000_000)
    groups.check_card("cuda:0", ["cuda:0", "cuda:0"], plan(sync), model)
    monkeypatch.setattr(groups, "free_memory", lambda device: most * 4_000_000 - 1)
    with pytest.raises(
        UsageError, match=r"does not fit on cuda:0: \d versions take .* MB.*table_device=\"cpu\""
    ):
        groups.check_card("cuda:0", ["cuda:0", "cuda:0"], plan(sync), model)
