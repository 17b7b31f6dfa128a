"""How many bytes an overlay has of its own, and the limit of that.

What counts of a file are the ranges that were written here and not cut off since, once each, however often they were
written, staged or encoded. What shows through from the base costs nothing, nor do names, attributes and holes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moonclipfs.errors import QuotaError
from moonclipfs.layers.contents_records import content_of, size_of
from moonclipfs.layers.core import Core
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.ranges import END, RangeMap
from moonclipfs.layers.records import PART_STAGED, Charged

_WRITTEN = 1
_RANGES = 1 << 14
"""In one record."""

Range = tuple[int, int]
"""From one offset to another."""


class Quota:
    """Counts the bytes of one overlay. All of this is under the layer's lock."""

    def __init__(self, layer: Core, limit: int | None) -> None:
        """At most `limit` bytes; None only counts. Applies the records of what is counted from here on."""
        self.limit = limit
        self.used = 0
        """Bytes."""
        self._layer = layer
        self._written: dict[int, RangeMap] = {}
        """_WRITTEN where a file was written here, by its number."""
        self._emptied: set[int] = set()
        """Files that were cut to nothing, which the journal does not know yet."""
        self._replaying = True
        layer.state.handle(Charged, self._charge)

    def admit(self, inode: Inode, ranges: Iterable[Range]) -> None:
        """Raise QuotaError when a write is too much; its ranges do not overlap."""
        if self.limit is None:
            return
        written = self._written.get(inode.number) or RangeMap()
        growth = sum(end - start - _count(written, start, end) for start, end in ranges)
        if growth > 0 and self.used + growth > self.limit:
            name = self._layer.facts.get(b"overlay", b"").decode()
            raise QuotaError(f"overlay {name} has {self.used} bytes of its own, of at most {self.limit}: remove some")

    def wrote(self, inode: Inode, ranges: Iterable[Range]) -> None:
        """Ranges of an own file were written."""
        written = self._written.setdefault(inode.number, RangeMap())
        for start, end in ranges:
            self.used += end - start - _count(written, start, end)
            written.set(start, end, _WRITTEN)

    def cut(self, inode: Inode, size: int) -> None:
        """A file is about to be cut off; raises NoSpaceError, BackendError. One that is open and cut to nothing comes
        back as it was after a crash: the journal learns of it with what is written next.
        """
        written = self._written.get(inode.number)
        lost = 0 if written is None else _count(written, size, END)
        if written is None or not lost:
            return
        if size or not inode.writers:
            self._layer.record(Charged(inode.number, size, ()))
        else:
            self._emptied.add(inode.number)
        written.set(size, END, 0)
        self.used -= lost

    def saved(self, inode: Inode) -> RangeMap | None:
        """What `restore` needs when a change of the file cannot be journalled."""
        written = self._written.get(inode.number)
        return None if written is None else written.copy()

    def restore(self, inode: Inode, saved: RangeMap | None) -> None:
        """The content of a file is again what it was."""
        self._drop(inode)
        if saved is not None:
            self._written[inode.number] = saved
            self.used += _count(saved, 0, END)

    def encoding(self, inode: Inode, generation: int) -> Iterator[Charged]:
        """What is to be journalled before a file is said to be encoded up to a generation: contents tell the rest."""
        content = content_of(inode)
        parts = content.parts(0, content.size) if content.staged_bytes(generation) else ()
        ranges = [
            (part.offset, part.offset + part.length)
            for part in parts
            if part.kind == PART_STAGED and part.generation is not None and part.generation.number <= generation
        ]
        kept = 0 if inode.number in self._emptied else END
        yield from _records(inode.number, kept, ranges)
        if ranges:
            self._emptied.discard(inode.number)

    def gone(self, inode: Inode) -> None:
        """A file has no names and no handles any more."""
        self._emptied.discard(inode.number)
        self._drop(inode)

    def recount(self) -> None:
        """After a replay, and when all that was there is own no more."""
        self._replaying, self.used = False, 0
        own = {inode.number: inode for inode in self._layer.state.own.values() if inode.is_file}
        self._written = {number: written for number, written in self._written.items() if number in own}
        for inode in own.values():
            if inode.number in self._written:
                self._written[inode.number].set(size_of(inode), END, 0)
                self.used += _count(self._written[inode.number], 0, END)
            if inode.content is not None and inode.content.is_staged:
                parts = inode.content.parts(0, inode.content.size)
                self.wrote(inode, ((one.offset, one.offset + one.length) for one in parts if one.kind == PART_STAGED))

    def records(self) -> Iterator[Charged]:
        """For a journal that is written anew."""
        for number, written in self._written.items():
            if number in self._layer.state.own:
                ranges = [(start, end) for start, end, value in written.runs(0, END) if value == _WRITTEN]
                yield from _records(number, 0, ranges)

    def _drop(self, inode: Inode) -> None:
        written = self._written.pop(inode.number, None)
        if written is not None:
            self.used -= _count(written, 0, END)

    def _charge(self, record: Charged) -> None:
        if not self._replaying:
            return  # it comes from here
        written = self._written.setdefault(record.number, RangeMap())
        written.set(record.kept, END, 0)
        for start, end in record.ranges:
            written.set(start, end, _WRITTEN)


def _records(number: int, kept: int, ranges: list[Range]) -> Iterator[Charged]:
    for at in range(0, len(ranges), _RANGES):
        yield Charged(number, kept if not at else END, tuple(ranges[at : at + _RANGES]))


def _count(written: RangeMap, start: int, end: int) -> int:
    """How many bytes of a range were written."""
    return sum(stop - begin for begin, stop, value in written.runs(start, end) if value == _WRITTEN)
