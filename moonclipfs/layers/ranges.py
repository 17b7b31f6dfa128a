"""A number for every offset of a file, kept as runs in compact sorted arrays: which of its bytes come from where."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import chain

END = 1 << 62
"""Past every offset."""
_CHUNK = 1024
"""Runs in one array: inserting moves at most so many."""


class RangeMap:
    """Maps offsets from 0 to `END` to integers. Neighbouring runs of equal values are one. Not thread-safe.

    A run lasts until the next one starts. The arrays are short, so that changing one run among millions is cheap.
    """

    __slots__ = ("_firsts", "_starts", "_values")

    def __init__(self, value: int = 0) -> None:
        self._firsts = [0]
        """Where the first run of each array starts."""
        self._starts = [array("q", [0])]
        self._values = [array("q", [value])]

    def __len__(self) -> int:
        """Count of runs."""
        return sum(map(len, self._starts))

    def copy(self) -> RangeMap:
        """Another map with the same values."""
        other = RangeMap()
        other._firsts = self._firsts[:]
        other._starts = [starts[:] for starts in self._starts]
        other._values = [values[:] for values in self._values]
        return other

    def get(self, offset: int) -> int:
        """The value at an offset."""
        chunk = bisect_right(self._firsts, offset) - 1
        return self._values[chunk][bisect_right(self._starts[chunk], offset) - 1]

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, value) of every run in a range, clipped to it, in order. The map must not change."""
        if start >= end:
            return
        chunk = bisect_right(self._firsts, start) - 1
        index = bisect_right(self._starts[chunk], start) - 1
        value = self._values[chunk][index]
        while True:
            index += 1
            if index == len(self._starts[chunk]):
                chunk, index = chunk + 1, 0
            if chunk == len(self._firsts) or self._starts[chunk][index] >= end:
                yield start, end, value
                return
            following = self._starts[chunk][index]
            yield start, following, value
            start, value = following, self._values[chunk][index]

    def set(self, start: int, end: int, value: int) -> None:
        """Give a range of offsets one value."""
        if start >= end:
            return
        first = bisect_right(self._firsts, start) - 1
        starts, values = self._starts[first], self._values[first]
        low = bisect_left(starts, start)
        before = values[low - 1] if low else self._values[first - 1][-1] if first else None
        last = first if first + 1 == len(self._firsts) or end < self._firsts[first + 1] else self._chunk_of(end)
        high = bisect_right(self._starts[last], end)
        after = self._values[last][high - 1]
        new_starts, new_values = array("q"), array("q")
        if before != value:
            new_starts.append(start)
            new_values.append(value)
        if end < END and after != value:
            new_starts.append(end)
            new_values.append(after)
        if first == last:
            starts[low:high] = new_starts
            values[low:high] = new_values
        else:
            starts = starts[:low] + new_starts + self._starts[last][high:]
            values = values[:low] + new_values + self._values[last][high:]
        if first == last and 0 < len(starts) <= _CHUNK:
            self._firsts[first] = starts[0]
            return
        self._replace(first, last, starts, values)

    def _chunk_of(self, offset: int) -> int:
        return bisect_right(self._firsts, offset) - 1

    def _replace(self, first: int, last: int, starts: array[int], values: array[int]) -> None:
        """Put runs in the place of the arrays from `first` to `last`, in arrays of at most `_CHUNK`."""
        step = len(starts) if len(starts) <= _CHUNK else _CHUNK // 2
        cuts = range(0, len(starts), step) if starts else ()
        self._firsts[first : last + 1] = [starts[cut] for cut in cuts]
        self._starts[first : last + 1] = [starts[cut : cut + step] for cut in cuts]
        self._values[first : last + 1] = [values[cut : cut + step] for cut in cuts]

    def replace(self, replacements: Mapping[int, int]) -> None:
        """Give every run whose value is in `replacements` that one's value instead."""
        starts, values = array("q"), array("q")
        for start, value in zip(chain(*self._starts), chain(*self._values), strict=True):
            value = replacements.get(value, value)
            if not values or values[-1] != value:
                starts.append(start)
                values.append(value)
        self._replace(0, len(self._firsts) - 1, starts, values)
