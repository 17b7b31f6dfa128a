"""The experts that the kernel knows, by the bytes and directories that they depend on: it is told when these change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from itertools import accumulate

from moonclipfs.layers.expertinodes import ExpertInode


class _OfFile:
    """The known experts that have bytes in one file. Where these are is sorted when it is asked for."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._experts: dict[int, ExpertInode] = {}
        self._starts: list[int] | None = None
        self._spans: list[tuple[int, int, ExpertInode]] = []
        self._ends: list[int] = []
        """For each span, the largest end of it and those before."""
        self._head = 0
        """Bytes at the beginning of the file that say where all tensors are."""

    def __bool__(self) -> bool:
        return bool(self._experts)

    def add(self, inode: ExpertInode) -> None:
        self._experts[inode.number] = inode
        self._starts = None

    def drop(self, inode: ExpertInode) -> None:
        self._experts.pop(inode.number, None)
        self._starts = None

    def all(self) -> list[ExpertInode]:
        return list(self._experts.values())

    def within(self, start: int, end: int) -> list[ExpertInode] | None:
        """Those with bytes in a range; None where it may say where tensors are."""
        starts = self._sorted()
        if start < self._head or not self._head:
            return None
        found: dict[int, ExpertInode] = {}
        at = bisect_left(starts, end) - 1
        while at >= 0 and self._ends[at] > start:
            if self._spans[at][1] > start:
                found[self._spans[at][2].number] = self._spans[at][2]
            at -= 1
        return list(found.values())

    def _sorted(self) -> list[int]:
        if self._starts is None:
            self._spans = sorted(self._all_spans(), key=lambda span: span[:2])
            self._starts = [span[0] for span in self._spans]
            self._ends = list(accumulate((span[1] for span in self._spans), max))
        return self._starts

    def _all_spans(self) -> Iterable[tuple[int, int, ExpertInode]]:
        for inode in self._experts.values():
            if inode.expert is not None:
                for part in inode.expert.parts:
                    source = inode.expert.sources[part.file]
                    if source.inode.number == self._number:
                        self._head = source.head_length
                        yield part.offset, part.offset + part.length, inode


class KnownExperts:
    """All of this happens under the lock of the layer."""

    def __init__(self) -> None:
        self._files: dict[int, _OfFile] = {}
        self._directories: dict[int, dict[int, ExpertInode]] = {}

    def __bool__(self) -> bool:
        return bool(self._files)

    def add(self, inode: ExpertInode) -> None:
        """The kernel knows an expert from here on."""
        for number in _sources(inode):
            if number not in self._files:
                self._files[number] = _OfFile(number)
            self._files[number].add(inode)
        self._directories.setdefault(inode.real.number, {})[inode.number] = inode

    def drop(self, inode: ExpertInode) -> None:
        """The kernel has forgotten an expert."""
        for number in _sources(inode):
            found = self._files.get(number)
            if found is not None:
                found.drop(inode)
                if not found:
                    del self._files[number]
        siblings = self._directories.get(inode.real.number, {})
        siblings.pop(inode.number, None)
        if not siblings:
            self._directories.pop(inode.real.number, None)

    def of_file(self, number: int, span: tuple[int, int] | None) -> tuple[list[ExpertInode], bool]:
        """Those that depend on a range of a file, or on all of it, and whether they may be others by a change there."""
        found = self._files.get(number)
        if found is None:
            return [], False
        inside = None if span is None else found.within(*span)
        return (found.all(), True) if inside is None else (inside, False)

    def of_directory(self, number: int) -> list[ExpertInode]:
        """Those of the checkpoint in a directory."""
        return list(self._directories.get(number, {}).values())


def _sources(inode: ExpertInode) -> Collection[int]:
    return () if inode.expert is None else {source.inode.number for source in inode.expert.sources.values()}
