"""Which whole numbers below a limit are free, as gaps between those that are not; plain data, no decisions."""

from __future__ import annotations

from bisect import bisect_right


class Gaps:
    """Sorted, never touching: `starts[i]…stops[i]−1` is free."""

    def __init__(self, size: int) -> None:
        self._starts, self._stops = ([0], [size]) if size else ([], [])
        self._free = size

    def __len__(self) -> int:
        return self._free

    def at(self, number: int) -> tuple[int, int] | None:
        """The rest of its gap from this number on, if it is free."""
        i = bisect_right(self._starts, number) - 1
        return (number, self._stops[i]) if i >= 0 and number < self._stops[i] else None

    def lowest(self) -> tuple[int, int]:
        return self._starts[0], self._stops[0]

    def largest(self) -> tuple[int, int]:
        i = max(range(len(self._starts)), key=lambda i: self._stops[i] - self._starts[i])
        return self._starts[i], self._stops[i]

    def take(self, start: int, stop: int) -> None:
        """These are free, and now are not."""
        i = bisect_right(self._starts, start) - 1
        parts = [(self._starts[i], start), (stop, self._stops[i])]
        self._replace(i, i + 1, [(a, b) for a, b in parts if a < b])
        self._free -= stop - start

    def give(self, number: int) -> None:
        """This is free again."""
        i = bisect_right(self._starts, number)
        low, high, start, stop = i, i, number, number + 1
        if i > 0 and self._stops[i - 1] == number:
            low, start = i - 1, self._starts[i - 1]
        if i < len(self._starts) and self._starts[i] == number + 1:
            high, stop = i + 1, self._stops[i]
        self._replace(low, high, [(start, stop)])
        self._free += 1

    def _replace(self, low: int, high: int, gaps: list[tuple[int, int]]) -> None:
        self._starts[low:high] = [start for start, _ in gaps]
        self._stops[low:high] = [stop for _, stop in gaps]
