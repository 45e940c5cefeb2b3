"""Which parameters are reduced together, and when a bucket's reduction may start (A2).

Buckets are filled in the order in which backward makes gradients, from the last parameter to the first; small neighbours
of one dtype are fused. All learners start the same buckets in the same order, whatever order their gradients come in.
Not responsible for memory nor for the reduction itself.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan_buckets(
    sizes: Sequence[int], kinds: Sequence[str], limit: int | None
) -> tuple[tuple[int, ...], ...]:
    """Indices of parameters by bucket, the last parameters first; `sizes` in bytes, `kinds` their dtypes.

    A bucket closes when it holds `limit` bytes (None: never); a parameter is never cut. Without a limit there is one
    bucket for each dtype.
    """
    done: list[tuple[int, ...]] = []
    open_: dict[str, list[int]] = {}
    for index in reversed(range(len(sizes))):
        bucket = open_.setdefault(kinds[index], [])
        bucket.append(index)
        if limit is not None and sum(sizes[i] for i in bucket) >= limit:
            done.append(tuple(bucket))
            del open_[kinds[index]]
    done += [tuple(bucket) for bucket in open_.values()]
    return tuple(sorted(done, key=lambda bucket: -bucket[-1]))  # whose last gradient comes first


class Filling:
    """One backward: gradients come in any order, buckets start in theirs."""

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        self.begin()

    def begin(self) -> None:
        """A new backward."""
        self._missing = list(self._sizes)
        self._come: set[int] = set()
        self.started = 0  # buckets

    @property
    def complete(self) -> bool:
        """Every bucket has been started."""
        return self.started == len(self._sizes)

    def come(self, index: int) -> range:
        """This parameter's gradient is there: the buckets to start now."""
        if index in self._come:
            return range(0)
        self._come.add(index)
        self._missing[self._bucket_of[index]] -= 1
        return self._startable()

    def has(self, index: int) -> bool:
        return index in self._come

    def _startable(self) -> range:
        first = self.started
        while self.started < len(self._sizes) and self._missing[self.started] == 0:
            self.started += 1
        return range(first, self.started)

    def rest(self) -> range:
        """Backward is over, no more gradients come: all that were not started."""
        first, self.started = self.started, len(self._sizes)
        return range(first, self.started)
