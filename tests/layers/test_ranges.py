"""Runs of values over offsets, against a plain list."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonclipfs.layers import ranges
from moonclipfs.layers.ranges import END, RangeMap

LENGTH = 60
offsets = st.integers(0, LENGTH)
operations = st.lists(st.tuples(offsets, offsets | st.just(END), st.integers(0, 3)), max_size=40)


@pytest.fixture(autouse=True, scope="module")
def short_arrays() -> Iterator[None]:
    """Arrays of four runs, so that few runs already take many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "_CHUNK", 4)
        yield


def spelled(found: RangeMap) -> list[int]:
    return [value for start, end, value in found.runs(0, LENGTH) for _ in range(start, end)]


def check(found: RangeMap, expected: list[int]) -> None:
    assert spelled(found) == expected[:LENGTH]
    assert [found.get(offset) for offset in range(LENGTH)] == expected[:LENGTH]
    runs = list(found.runs(0, END))
    assert runs[0][0] == 0 and runs[-1][1] == END and len(runs) == len(found)
    assert all(a[1] == b[0] and a[2] != b[2] for a, b in itertools.pairwise(runs))
    assert all(len(starts) <= ranges._CHUNK for starts in found._starts)
    assert found._firsts == [starts[0] for starts in found._starts]


@given(operations, st.dictionaries(st.integers(0, 3), st.integers(0, 3)))
@settings(max_examples=300)
def test_sets_and_replacements_give_what_a_list_gives(
    steps: list[tuple[int, int, int]], replacements: dict[int, int]
) -> None:
    found, expected = RangeMap(1), [1] * (LENGTH + 1)
    for start, end, value in steps:
        found.set(start, end, value)
        for offset in range(start, min(end, LENGTH + 1)):
            expected[offset] = value
        check(found, expected)
    found.replace(replacements)
    check(found, [replacements.get(value, value) for value in expected])
