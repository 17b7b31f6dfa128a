"""What need not be read of a file that was changed in places: what is as it was in the file before, and holes."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Protocol

from moonclipfs.errors import CorruptError
from moonclipfs.formats.cut import CutRules, Piece, zero_chunk
from moonclipfs.formats.layout import Region, RegionKind
from moonclipfs.formats.sniff import parse
from moonclipfs.store.recipes import Recipe
from moonclipfs.types import Extent, Source

log = logging.getLogger(__name__)


class Previous(Source, Protocol):
    """The same file in the snapshot before."""

    @property
    def recipe(self) -> Recipe:
        """Its extents."""
        ...


class Kept:
    """What is known of a file without reading it. What is stored with its help is what would be stored without."""

    def __init__(
        self,
        rules: CutRules,
        before: Previous | None = None,
        unchanged: Iterable[tuple[int, int]] = (),
        holes: Iterable[tuple[int, int]] = (),
    ) -> None:
        """`unchanged` are the (offset, length) of bytes that are those of `before` at the same place, `holes` of
        zeros that no byte was written over.
        """
        self._rules = rules
        self._before = before
        self._unchanged = _Ranges(unchanged if before is not None else ())
        self._holes = _Ranges([*holes, *self._old_holes()])

    def extent(self, piece: Piece) -> Extent | None:
        """The extent of a piece that is a hole, or one object of the file before and no more; None to read it."""
        end = piece.offset + piece.length
        if self._holes.end(piece.offset) >= end:
            return Extent(piece.length)
        if self._before is None or self._unchanged.end(piece.offset) < end:
            return None
        extent, inside, _ = next(self._before.recipe.locate(piece.offset, piece.length))
        whole = not inside and not extent.object_offset and extent.length == piece.length
        return extent if whole and extent.object_id is not None else None

    def next_cut(self, region: Region, start: int) -> int:
        """See `cut.KnownCut`: chunks of the file before that are unchanged, and zeros."""
        hole = min(self._holes.end(start), region.end)
        if hole == region.end:
            return hole - start
        length = (hole - start) // zero_chunk(self._rules) * zero_chunk(self._rules)
        return length if length > 0 else self._old_chunk(region, start)

    def _old_chunk(self, region: Region, start: int) -> int:
        """Length of the chunk that began at `start` in the file before, if it is one here too; else 0."""
        if self._before is None or self._unchanged.end(start) <= start:
            return 0
        old_end = self._old_regions.get(region.offset, 0)
        if start >= old_end:
            return 0
        extent, inside, _ = next(self._before.recipe.locate(start, 1))
        end = start + extent.length
        if inside or extent.is_hole or end > min(old_end, region.end) or self._unchanged.end(start) < end:
            return 0
        # The last chunk of a region may end there only because the region does.
        return extent.length if end < old_end or end == region.end else 0

    @cached_property
    def _old_regions(self) -> dict[int, int]:
        """Offset to end of the regions that were cut by content in the file before."""
        assert self._before is not None
        try:
            regions = parse(self._before).regions
        except CorruptError as error:
            log.warning("the file before is damaged, so all of the new one is read: %s", error)
            return {}
        least = self._rules.small_region_bytes
        return {r.offset: r.end for r in regions if r.kind is not RegionKind.TENSOR and r.length >= least}

    def _old_holes(self) -> Iterator[tuple[int, int]]:
        """The unchanged holes of the file before."""
        if self._before is None:
            return
        at = 0
        for extent in self._before.recipe.extents:
            if extent.is_hole:
                yield from self._unchanged.within(at, extent.length)
            at += extent.length


class _Ranges:
    """Ranges of offsets, neighbours made one."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for offset, length in sorted(ranges):
            if self._ends and offset <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], offset + length)
            elif length:
                self._starts.append(offset)
                self._ends.append(offset + length)

    def end(self, offset: int) -> int:
        """End of the range that `offset` is in; -1 for none."""
        index = bisect_right(self._starts, offset) - 1
        return self._ends[index] if index >= 0 and self._ends[index] > offset else -1

    def within(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """The (offset, length) of what lies in this range."""
        index = bisect_right(self._ends, offset)
        while index < len(self._starts) and self._starts[index] < offset + length:
            start, end = max(offset, self._starts[index]), min(offset + length, self._ends[index])
            yield start, end - start
            index += 1
