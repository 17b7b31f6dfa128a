"""The journal of a layer: every change of it in order, as records in segments (`store/segments.py`).

A record is in the page cache when `append` returns, so a killed process loses nothing. It is on the disk when a
`commit` that began later returns. After a power failure, or on another machine, what stands behind the last commit
mark does not count, nor do contents whose bytes were not synced.

Space is preallocated ahead of the end, unless the journal is one of many, and the last `limits.JOURNAL_RESERVE_BYTES`
of it are not for new data: names can be removed and changed on a full disk.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from moonclipfs import limits
from moonclipfs.errors import BackendError, LimitError, MoonclipError, NoSpaceError
from moonclipfs.layers.journalreading import Recovered, Segment, read_journal, this_boot
from moonclipfs.layers.records import Contents, Link, Make, Record, SetXattr, encode_record
from moonclipfs.store.backend import FileOps, from_os_error, mode_of_files, os_errors, read_range
from moonclipfs.store.frames import encode_frame
from moonclipfs.store.segments import RECORD, Header, encode_header, encode_mark, segment_name, segment_numbers
from moonclipfs.types import Buffer, Kind, ObjectId

Refs = Iterable[tuple[Kind, ObjectId]]
_RETRY_SECONDS = 1.0
"""How long a full disk is not asked again for space that is not needed yet."""
_HOOK_ROUNDS = 4
_BUFFER_BYTES = limits.MIB
_UNNAMED = ".new"


class _Position(NamedTuple):
    segment: int
    offset: int


class Journal:
    """The journal in one directory. Thread-safe. `replay` comes first; then records are appended."""

    def __init__(
        self,
        directory: Path,
        ops: FileOps,
        before_commit: Callable[[], object] = lambda: None,
        *,
        lock: threading.RLock | None = None,
        layer_id: bytes = bytes(16),
        boot: bytes | None = None,
        reserve: bool = True,
        borrow: Callable[[], bool] = lambda: False,
    ) -> None:
        """`before_commit` syncs what must be on the disk before the records so far are, and may append records.

        It is called by the thread that commits: without locks, again as long as it returns True (there was something
        to sync), and then once more under `lock`, right before the commit mark: so nothing comes in between. `lock`
        is the layer's, under which all records are appended. Without a `reserve` nothing is preallocated: on a full
        disk `borrow` makes a little room, if it can, for what changes or removes. `boot` is for tests.
        """
        self.directory = directory
        self._ops = ops
        self._before_commit = before_commit
        self._layer_lock = lock or threading.RLock()
        self._layer_id = layer_id
        self._boot = this_boot() if boot is None else boot
        self._reserve = reserve
        self._borrow = borrow
        self._lock = threading.Lock()
        """Of all below; taken after the layer's lock."""
        self._fd = -1
        self._header = Header(True, 0, layer_id, self._boot, 0)
        self._end = 0
        self._allocated = 0
        self._retry_at = 0.0
        self._older_bytes = 0
        """Of the segments before the one that is written to."""
        self._fresh_bytes = 0
        """What the journal took when it was written anew."""
        self._durable = _Position(0, 0)
        self._failure: MoonclipError | None = None
        """Why nothing can be written any more."""
        self._committed = threading.Condition()
        self._committing = False
        self._syncing = -1
        """The file that a commit is syncing: whoever replaces it leaves closing it to the commit."""
        self.recovered = Recovered()

    # Replay

    def replay(self) -> Iterator[Record]:
        """Yield all records that count, in order, then make the journal ready to be appended to.

        What does not count is cut off, so that it never will. Raises CorruptError for damage in front of the tail,
        naming file and offset, FormatVersionError, NoSpaceError, BackendError; then nothing was changed.
        """
        found = read_journal(self.directory, self._layer_id, self._boot)
        yield from found.records()
        self.recovered = found.recovered
        with self._lock, os_errors(f"write the journal {self.directory}"):
            self._begin_writing(found.segments)

    def _begin_writing(self, segments: list[Segment]) -> None:
        live = {segment.path.name for segment in segments}
        for name in os.listdir(self.directory):
            if name.endswith(_UNNAMED) or (name.endswith(".log") and name not in live):
                self._ops.unlink(str(self.directory / name))
        self._older_bytes = sum(segment.end for segment in segments[:-1])
        self._fresh_bytes = segments[0].extent.first if segments else 0
        if segments and segments[-1].same_boot:
            self._go_on(segments[-1])
        elif segments:
            self._cut(segments[-1])
            self._older_bytes += segments[-1].end
            self._switch(segments[-1].extent.header.number + 1, False, ())
        else:
            self._switch(1, True, ())
            self._fresh_bytes = self._end
        self._make_room(0, 0)

    def _cut(self, segment: Segment) -> None:
        """Cut off what does not count; that gives its reserve back too, which the next segment needs."""
        fd = self._ops.open(str(segment.path), os.O_RDWR)
        try:
            self._ops.truncate(fd, segment.end)
            self._ops.fsync(fd)
        finally:
            self._ops.close(fd)

    def _go_on(self, segment: Segment) -> None:
        """Append to a segment that was written under this start of the kernel."""
        extent = segment.extent
        fd = self._ops.open(str(segment.path), os.O_RDWR)
        try:
            if extent.torn:
                self._ops.truncate(fd, extent.end)
            # After an fdatasync that failed, pages that are not on the disk pass for clean: make them dirty again.
            tail = read_range(fd, extent.durable, extent.end - extent.durable)
            self._write_all(fd, tail, extent.durable)
            self._ops.fdatasync(fd)
            self._allocated = os.fstat(fd).st_size
        except BaseException:
            self._ops.close(fd)
            raise
        self._fd, self._header, self._end = fd, extent.header, extent.end
        self._durable = _Position(extent.header.number, extent.committed)

    # Writing

    def append(self, record: Record, refs: Refs = ()) -> None:
        """Write a record; `refs` are the objects that it needs. When this raises, the record does not count.

        Raises NoSpaceError only when the reserve does not allow for a record of this kind any more: new data may use
        nothing of it, new names half, and what changes or removes all. Raises LimitError for a record that is too
        long, BackendError.
        """
        payload = RECORD + encode_record(record, refs)
        if len(payload) > limits.RECORD_BYTES:
            raise LimitError(f"a journal record of {len(payload)} bytes: at most {limits.RECORD_BYTES} are allowed")
        with self._lock:
            self._append(payload, _spared(record))

    def _append(self, payload: bytes, spared: int) -> None:
        self._require_usable()
        frame = encode_frame(payload, self._end, self._header.salt)
        self._make_room(len(frame), spared)
        try:
            self._write(frame)
        except NoSpaceError:
            if spared or not self._borrow():
                raise
            self._write(frame)
        self._end += len(frame)

    def _write(self, frame: bytes) -> None:
        """At the end, whole or not at all."""
        written = 0
        try:
            while written < len(frame):
                written += self._ops.pwrite(self._fd, memoryview(frame)[written:], self._end + written)
        except OSError as error:
            failure = from_os_error(error, f"write the journal {self.directory}")
            self._wipe(written if isinstance(failure, NoSpaceError) else len(frame))
            raise failure from error

    def _write_all(self, fd: int, data: Buffer, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = self._ops.pwrite(fd, view, offset)
            view = view[written:]
            offset += written

    def _wipe(self, length: int) -> None:
        """Leave nothing of a frame that was not written whole: the next one may be shorter."""
        try:
            with os_errors(f"write the journal {self.directory}"):
                length = min(length, os.fstat(self._fd).st_size - self._end)
                self._write_all(self._fd, bytes(max(length, 0)), self._end)
        except MoonclipError as error:
            self._failure = error

    def _make_room(self, length: int, spared: int) -> None:
        """See that `length` bytes and the reserve behind them have their space, or without more space, that
        `spared` bytes of the reserve are left.
        """
        if not self._reserve:
            return
        wanted = self._end + length + limits.JOURNAL_RESERVE_BYTES
        enough = self._end + length + spared <= self._allocated
        if wanted <= self._allocated or (enough and time.monotonic() < self._retry_at):
            return
        if self._allocate(wanted + limits.JOURNAL_STEP_BYTES) is None or (refused := self._allocate(wanted)) is None:
            return
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        if not enough:
            raise refused

    def _allocate(self, target: int) -> NoSpaceError | None:
        """Preallocate up to `target`; returns why that cannot be."""
        try:
            # Where a file system cannot preallocate, a write tells whether there is space.
            with suppress(BackendError), os_errors(f"write the journal {self.directory}"):
                self._ops.allocate(self._fd, self._allocated, target - self._allocated)
        except NoSpaceError as error:
            return error
        self._allocated = target
        return None

    # Making durable

    def commit(self) -> None:
        """Make all records so far durable: of threads that call this at one time, one does it for all.

        Not to be called under the layer's lock. When the disk fails to sync, all who wait get the error, and so does
        everybody until the journal is opened again: what is on the disk is not known. Raises BackendError, and
        whatever `before_commit` raises.
        """
        with self._lock:
            self._require_usable()
            target = _Position(self._header.number, self._end)
        with self._committed:
            while self._committing and self._durable < target:
                self._committed.wait()
            if self._durable >= target:
                return
            self._require_usable()
            self._committing = True
        try:
            self._commit()
        finally:
            with self._committed:
                self._committing = False
                self._committed.notify_all()

    def _commit(self) -> None:
        for _ in range(_HOOK_ROUNDS):
            if not self._before_commit():
                break
        with self._layer_lock:
            self._before_commit()
            with self._lock:
                self._mark()
                position = _Position(self._header.number, self._end)
                fd = self._syncing = self._fd
        try:
            with os_errors(f"sync the journal {self.directory}"):
                self._ops.fdatasync(fd)
        except MoonclipError as error:
            with self._lock:
                if fd == self._fd:
                    self._failure = error
        with self._lock:
            self._syncing = -1
            if fd != self._fd:  # written anew meanwhile, and durable by that
                with os_errors(f"close the journal {self.directory}"):
                    self._ops.close(fd)
            else:
                self._require_usable()
                self._durable = max(self._durable, position)

    def _mark(self) -> None:
        durable = self._durable.offset if self._durable.segment == self._header.number else 0
        self._append(encode_mark(durable), 0)

    def _require_usable(self) -> None:
        if self._failure is not None:
            advice = "the journal takes nothing more until the layer is mounted again"
            raise type(self._failure)(f"{self._failure}; {advice}") from self._failure
        if self._fd < 0:
            raise BackendError(f"the journal {self.directory} is not open")

    # Writing anew

    @property
    def size(self) -> int:
        """Bytes of all live segments."""
        return self._older_bytes + self._end

    @property
    def wants_rewrite(self) -> bool:
        """Whether it is long, and a fresh one would be much shorter."""
        return self.size > max(limits.JOURNAL_SEGMENT_BYTES, 2 * self._fresh_bytes)

    def rewrite(self, records: Iterable[tuple[Record, Refs]]) -> None:
        """Write the whole state as a new journal, durable when this returns, and delete the old one.

        The layer's lock is held all along, so that nothing is appended meanwhile. Of each file, `records` need contents
        that are synced, ahead of those that are not: after a power failure there is nothing else to go back to. When
        this raises NoSpaceError, the old journal goes on.
        """
        with self._layer_lock, self._lock, os_errors(f"write the journal {self.directory}"):
            self._require_usable()
            old = self._header.number
            self._switch(old + 1, True, (RECORD + encode_record(record, refs) for record, refs in records))
            self._fresh_bytes, self._older_bytes = self._end, 0
            for number in segment_numbers(self.directory):
                if number <= old:
                    self._ops.unlink(str(self.directory / segment_name(number)))
            self._make_room(0, 0)

    def lend_reserve(self) -> None:
        """Give the disk what is preallocated: for `rewrite`, which takes it again. Raises BackendError."""
        with self._lock, os_errors(f"write the journal {self.directory}"):
            self._require_usable()
            self._ops.truncate(self._fd, self._end)
            self._allocated = self._end

    def _switch(self, number: int, whole: bool, payloads: Iterable[bytes]) -> None:
        """Go on in a new segment that begins with `payloads`, durable before it has its name."""
        header = Header(whole, secrets.randbits(32), self._layer_id, self._boot, number)
        path = str(self.directory / segment_name(number))
        unnamed = path + _UNNAMED
        with suppress(FileNotFoundError):
            self._ops.unlink(unnamed)
        mode = mode_of_files(self.directory)
        fd = self._ops.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        try:
            os.fchmod(fd, mode)
            end = self._fill(fd, header, payloads)
            self._ops.fsync(fd)
            self._ops.rename(unnamed, path)
        except BaseException:
            self._ops.close(fd)
            with suppress(OSError):  # it counts for nothing, and goes when the journal is opened next
                self._ops.unlink(unnamed)
            raise
        if self._fd >= 0 and self._fd != self._syncing:
            self._ops.close(self._fd)
        self._fd, self._header, self._end, self._allocated = fd, header, end, end
        try:
            self._sync_directory()
        except OSError as error:
            self._failure = from_os_error(error, f"sync {self.directory}")
            raise
        self._durable = _Position(number, end)

    def _fill(self, fd: int, header: Header, payloads: Iterable[bytes]) -> int:
        """Write the header, `payloads` and a commit mark; returns where they end."""
        buffer = bytearray(encode_header(header))
        start = 0
        for payload in chain(payloads, (encode_mark(0),)):
            buffer += encode_frame(payload, start + len(buffer), header.salt)
            if len(buffer) >= _BUFFER_BYTES:
                self._write_all(fd, buffer, start)
                start += len(buffer)
                buffer = bytearray()
        self._write_all(fd, buffer, start)
        return start + len(buffer)

    def _sync_directory(self) -> None:
        fd = self._ops.open(str(self.directory), os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._ops.fsync(fd)
        finally:
            self._ops.close(fd)

    def close(self) -> None:
        """Let go of the files; harmless when that was done. What was not committed is in the page cache."""
        with self._lock, os_errors(f"close the journal {self.directory}"):
            if self._fd < 0:
                return
            try:
                if self._failure is None and self._durable.offset == self._end:
                    self._mark()  # so that damage in what was committed last is told from a torn tail
            finally:
                fd, self._fd = self._fd, -1
                if fd != self._syncing:
                    self._ops.close(fd)


def _spared(record: Record) -> int:
    """How much of the reserve a record leaves to others."""
    if isinstance(record, Contents) and record.data:
        return limits.JOURNAL_RESERVE_BYTES
    if isinstance(record, Make | Link) or (isinstance(record, SetXattr) and record.value is not None):
        return limits.JOURNAL_RESERVE_BYTES // 2
    return 0
