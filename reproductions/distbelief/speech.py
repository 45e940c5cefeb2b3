"""Speech features as DistBelief's: 11 consecutive overlapping frames of 25 ms, each as 40 log-energies, with a class for the one in the middle.

The recordings are spoken digits (the Free Spoken Digit Dataset as one npz: `samples`, `offsets`, `label`, `index`, `rate`); a frame's class is the
digit it is part of, a weak label as the paper's are. Not responsible for getting the file.
"""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

WINDOW, HOP = 0.025, 0.010  # seconds
BANDS, CONTEXT = 40, 11
TESTED = 5  # recordings of each digit and speaker


def bands(rate: int, bins: int) -> Tensor:
    """Triangles at equal distances on the mel scale: (bins, BANDS)."""

    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    edges = 700 * (10 ** (torch.linspace(0, mel(rate / 2), BANDS + 2) / 2595) - 1)
    hertz = torch.linspace(0, rate / 2, bins)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    return torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp(min=0)


def frames(samples: Tensor, rate: int) -> Tensor:
    """Log-energies of a recording with their neighbours: (frames, CONTEXT × BANDS)."""
    window, hop = round(WINDOW * rate), round(HOP * rate)
    short = max(0, window + (CONTEXT - 1) * hop - len(samples))
    pieces = torch.nn.functional.pad(samples, (0, short)).unfold(0, window, hop)
    power = torch.fft.rfft(pieces * torch.hann_window(window)).abs().square()
    energies = (power @ bands(rate, power.shape[1]) + 1e-3).log()
    return energies.unfold(0, CONTEXT, 1).flatten(1)


def read(file: Path) -> tuple[TensorDataset, TensorDataset]:
    """Frames for training and for testing, normalised by the former; no recording is in both."""
    with np.load(file) as archive:
        samples, offsets = torch.from_numpy(archive["samples"]).float() / 32768, archive["offsets"]
        labels, indices, rate = archive["label"], archive["index"], int(archive["rate"])
    found = [frames(samples[low:high], rate) for low, high in pairwise(offsets)]
    testing = torch.cat(
        [torch.full((len(f),), bool(i < TESTED)) for f, i in zip(found, indices, strict=True)]
    )
    classes = torch.cat([torch.full((len(f),), int(y)) for f, y in zip(found, labels, strict=True)])
    inputs = torch.cat(found)
    inputs = (inputs - inputs[~testing].mean(0)) / inputs[~testing].std(0)
    return TensorDataset(inputs[~testing], classes[~testing]), TensorDataset(
        inputs[testing], classes[testing]
    )
