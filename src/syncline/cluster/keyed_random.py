"""Random numbers that depend on nothing but their place: (seed, learner, step) gives the same number every time.

Counter-based, so that the order of events does not matter and a run that goes on draws what it would have drawn.
"""

from __future__ import annotations

from statistics import NormalDist

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_NORMAL = NormalDist()


def _mix(word: int) -> int:
    """The finaliser of splitmix64: every bit of the input changes every bit of the output half of the time."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, *place: int) -> float:
    """In the open interval (0, 1)."""
    word = _mix((seed + _STEP) & _MASK)
    for part in place:
        word = _mix((word ^ part) + _STEP & _MASK)
    return ((word >> 11) + 0.5) / (1 << 53)


def normal(share: float) -> float:
    """The standard normal value below which this share lies."""
    return _NORMAL.inv_cdf(share)
