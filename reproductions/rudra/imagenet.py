"""The sizes of Rudra's ImageNet experiments, and its p775 with their computation.

A learner's seconds are base + per_example·μ, from two of the paper's figures: 54 hours an epoch for μ = 256, λ = 1 (no communication
to speak of), and Rudra-adv*'s 125 minutes an epoch for μ = 4, λ = 54, which hides all of it (Table 1). Everything else is the p775 that
was fitted to CIFAR-10's times (docs/howto/simulator.md).
"""

from __future__ import annotations

import syncline as sl
from syncline.cluster import Compute

PARAMETERS = 72_000_000
EXAMPLES = 1_200_000
FAN_IN = 4  # learners of a node


def cluster() -> sl.Cluster:
    plain = sl.Cluster.named("p775")
    crowd = plain.pace(0, seed=0, learners=54)  # by what neighbours on a node slow each other
    large, small = 54 * 3600 * 256 / EXAMPLES, 125 * 60 * 54 * 4 / EXAMPLES / crowd
    per_example = (large - small) / (256 - 4)
    return sl.Cluster.named("p775", compute=Compute(base=small - 4 * per_example, per_example=per_example))
