"""Numbers that a hostile objective may answer, as tapes that repeat."""

import math
from dataclasses import dataclass

from hypothesis import strategies as st

BAD = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, 1e-200, -1.0, 1.0])
SCALARS = st.one_of(BAD, st.floats(-10, 10), st.floats())
TAPES = st.lists(SCALARS, min_size=1, max_size=40)


@dataclass
class Tape:
    """Values over and over."""

    values: list[float]
    at: int = 0

    def next(self) -> float:
        self.at += 1
        return self.values[(self.at - 1) % len(self.values)]
