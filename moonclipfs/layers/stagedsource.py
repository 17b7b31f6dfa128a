"""The bytes of a captured file for an ingest: staged ones from the staging files, the rest from the store or none."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from moonclipfs.errors import CorruptError
from moonclipfs.formats.cut import CutRules
from moonclipfs.layers.records import PART_HOLE, PART_RECIPE, PART_STAGED
from moonclipfs.store.backend import os_errors, read_range
from moonclipfs.store.kept import Kept, Previous
from moonclipfs.types import Source


class StagedSource:
    """A `types.Source` over parts as `records.Contents` has them. Thread-safe, but for `close`."""

    def __init__(
        self,
        size: int,
        parts: Sequence[tuple[int, int, int, int]],
        data: Sequence[tuple[int, int, bytes]],
        paths: Mapping[int, str],
        before: Source | None,
    ) -> None:
        """`data` are staged bytes that are in no file, `paths` the files of the other generations; `before` is what
        PART_RECIPE means. Raises CorruptError for a generation that is missing.
        """
        self.size = size
        self._parts = parts
        self._starts = [offset for offset, *_ in parts]
        self._data = data
        self._before = before
        self._fds: dict[int, int] = {}
        memory = {generation for generation, *_ in data}
        needed = {generation for _, _, kind, generation in parts if kind == PART_STAGED} - memory
        try:
            for generation in needed:
                with os_errors(f"read staging file {paths[generation]}"):
                    self._fds[generation] = os.open(paths[generation], os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except KeyError as error:
            self.close()
            raise CorruptError(f"staging generation {error} is missing") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the staging files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes. Raises CorruptError where staged bytes are missing."""
        end = offset + length
        first_part = max(0, bisect_right(self._starts, offset) - 1)
        if length and first_part < len(self._parts):
            start, count, kind, generation = self._parts[first_part]
            if kind == PART_STAGED and start <= offset and end <= start + count:
                return self._staged(generation, offset, length)  # most reads are of this kind: without a copy
        out = bytearray(length)
        for number in range(first_part, len(self._parts)):
            start, count, kind, generation = self._parts[number]
            if start >= end:
                break
            first, last = max(start, offset), min(start + count, end)
            if first < last and kind == PART_RECIPE and self._before is not None:
                found = self._before.read(first, last - first)
                if len(found) != last - first:
                    raise CorruptError(f"the file before ends at byte {first + len(found)}: {last} are needed")
                out[first - offset : last - offset] = found
            elif first < last and kind == PART_STAGED:
                out[first - offset : last - offset] = self._staged(generation, first, last - first)
        return bytes(out)

    def _staged(self, generation: int, offset: int, length: int) -> bytes:
        if generation in self._fds:
            with os_errors("read a staging file"):
                found = read_range(self._fds[generation], offset, length)
        else:
            out = bytearray(length)
            for number, start, data in self._data:
                first, last = max(start, offset), min(start + len(data), offset + length)
                if number == generation and first < last:
                    out[first - offset : last - offset] = data[first - start : last - start]
            found = bytes(out)
        if len(found) != length:
            raise CorruptError(f"staging generation {generation}: {len(found)} of {length} bytes at {offset}")
        return found


def kept_parts(rules: CutRules, parts: Sequence[tuple[int, int, int, int]], before: Previous | None) -> Kept:
    """What an ingest need not read of such a source: holes, and what is as it was in the file before."""
    unchanged = [(offset, length) for offset, length, kind, _ in parts if kind == PART_RECIPE]
    holes = [(offset, length) for offset, length, kind, _ in parts if kind == PART_HOLE]
    return Kept(rules, before, unchanged, holes)
