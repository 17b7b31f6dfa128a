"""Reading the journal of a layer: which segments are live, and which of their records count. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from moonclipfs.errors import CorruptError
from moonclipfs.layers.records import Contents, Record, decode_record
from moonclipfs.store import hostfs
from moonclipfs.store.backend import os_errors
from moonclipfs.store.segments import (
    NO_BOOT,
    Extent,
    measure_segment,
    record_payloads,
    segment_name,
    segment_numbers,
)


@dataclass(slots=True)
class Recovered:
    """What a replay left out: records that were never made durable, contents whose bytes were not, and bytes of a
    tail that was cut off. All zero after a clean end, or after a process that was killed.
    """

    power_failure: bool = False
    records: int = 0
    contents: int = 0
    torn_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A live segment. Its records count up to `end`.

    `same_boot` says that it was written under this start of the kernel: then contents count that nobody synced.
    """

    path: Path
    extent: Extent
    end: int
    same_boot: bool


@dataclass(slots=True)
class FoundJournal:
    """The newest whole segment and all behind it; `recovered` is complete when all records were read."""

    segments: list[Segment]
    recovered: Recovered = field(default_factory=Recovered)

    def records(self) -> Iterator[Record]:
        """Yield all records that count, in order. Raises CorruptError, naming file and offset, BackendError."""
        for segment in self.segments:
            with os_errors(f"read {segment.path}"):
                yield from self._of_segment(segment)

    def _of_segment(self, segment: Segment) -> Iterator[Record]:
        with open(segment.path, "rb") as file:
            for frame in record_payloads(file, segment.extent):
                if frame.end > segment.end:
                    self.recovered.records += 1
                    continue
                try:
                    record = decode_record(memoryview(frame.payload)[1:])
                except CorruptError as error:
                    raise CorruptError(f"{segment.path}: {error}, at offset {frame.offset}") from error
                if isinstance(record, Contents) and not record.synced and not segment.same_boot:
                    self.recovered.contents += 1
                else:
                    yield record
            if segment.extent.torn:
                self.recovered.torn_bytes += os.fstat(file.fileno()).st_size - segment.extent.end
        self.recovered.power_failure |= segment.end < segment.extent.end


def read_journal(directory: Path, layer_id: bytes, boot: bytes) -> FoundJournal:
    """Find the live segments, and how far each counts for a process of this start of the kernel.

    Raises CorruptError for damage in front of the tail, naming file and offset, FormatVersionError, BackendError.
    """
    found: list[Segment] = []
    numbers = segment_numbers(directory)
    for number in reversed(numbers):
        path = directory / segment_name(number)
        with os_errors(f"read {path}"), open(path, "rb") as file:
            extent = measure_segment(file, path)
        if extent.header.layer != layer_id or extent.header.number != number:
            raise CorruptError(f"{path}: it belongs to another layer, or to another place: restore the right file")
        # In front of a segment of another start of the kernel, what was not durable has been left out already.
        # Whole frames behind a gap: the file system itself was lost, and pages with it.
        known = boot != NO_BOOT and extent.header.boot == boot
        ours = number == numbers[-1] and known and not extent.broken
        found.insert(0, Segment(path, extent, extent.end if ours else extent.committed, ours))
        if extent.header.whole:
            break
        if number - 1 not in numbers:
            raise CorruptError(f"{path}: the segment before it is missing: restore it")
    return FoundJournal(found)


def this_boot() -> bytes:
    """What segments written now say of the start of the kernel."""
    text = hostfs.boot_id()
    return blake2b(text.encode(), digest_size=len(NO_BOOT)).digest() if text else NO_BOOT
