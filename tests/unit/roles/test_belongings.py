"""What the leading shard keeps of learners (M6)."""

from __future__ import annotations

import torch

from syncline.roles.counters import LearnerStates


def test_a_lost_learners_statistics_stay_where_its_table_has_no_others() -> None:
    belongings = LearnerStates()
    for table, learner, value in ((0, 1, 2.0), (0, 2, 4.0), (1, 1, 8.0)):
        belongings.buffers[table, learner] = [torch.tensor([value])]
    belongings.lose(1)
    assert belongings.joint(0) == [torch.tensor([4.0])]
    assert belongings.joint(1) == [torch.tensor([8.0])]
    belongings.lose(2)
    assert belongings.joint(0) == [torch.tensor([4.0])]
