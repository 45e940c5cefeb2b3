"""How well a single neuron tells two kinds of images apart: its best accuracy over thresholds (C5, Table 2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from syncline.errors import UsageError


class Selectivity(NamedTuple):
    """Per neuron."""

    accuracy: Tensor
    threshold: Tensor  # a response at or above it means 'positive'


def selectivity(positive: Tensor, negative: Tensor) -> Selectivity:
    """The highest accuracy of "response ≥ t means positive" over all t, for each of the neurons.

    `positive` is (P, neurons) and `negative` (M, neurons). All thresholds are tried, those that call everything positive
    or everything negative too, so the accuracy is never below the majority rate.
    """
    if positive.dim() != 2 or negative.dim() != 2 or positive.shape[1] != negative.shape[1]:
        raise UsageError(
            f"responses are (images, neurons) for the same neurons, got {list(positive.shape)} and {list(negative.shape)}"
        )
    if not len(positive) or not len(negative):
        raise UsageError(
            f"both kinds are needed, got {len(positive)} positive and {len(negative)} negative images"
        )
    values, order = torch.cat([positive, negative]).float().sort(0, descending=True)
    hits = torch.where(order < len(positive), 1, -1).cumsum(0)  # right minus wrong, for the responses so far
    inside = torch.ones_like(hits, dtype=torch.bool)
    inside[:-1] = values[:-1] > values[1:]  # equal responses fall on one side together
    hits = hits.masked_fill(~inside, -len(values))
    best, at = hits.max(0)
    threshold = values.gather(0, at.unsqueeze(0)).squeeze(0)
    threshold = torch.where(best > 0, threshold, torch.inf)  # calling nothing positive is as good
    return Selectivity((best.clamp_min(0) + len(negative)) / len(values), threshold)
