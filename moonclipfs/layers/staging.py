"""Staging: bytes that were written and are not encoded yet, in generations: in memory while small, else in files.

A generation holds bytes of one file at the file's own offsets. They are overwritten in place until it is frozen; then
they never change again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MoonclipError, NoSpaceError, StagingFullError
from moonclipfs.layers.ranges import RangeMap
from moonclipfs.layers.stagingplace import NAME_DIGITS, staged_numbers
from moonclipfs.store.backend import FileOps, from_os_error, os_errors
from moonclipfs.store.cache import BoundedCache
from moonclipfs.types import Buffer

log = logging.getLogger(__name__)

_COPY_BYTES = 1 * limits.MIB


class _OpenFile:
    """A descriptor that is closed when the last one who uses it lets go, never under somebody."""

    __slots__ = ("_ops", "fd")

    def __init__(self, ops: FileOps, fd: int) -> None:
        self._ops = ops
        self.fd = fd

    def __del__(self) -> None:
        # Whatever close says comes too late: `Generation.sync` alone promises something, and has asked before.
        with suppress(OSError):
            self._ops.close(self.fd)


class Generation:
    """Bytes of one file. Thread-safe: writes take turns, and reads wait for none.

    `number` is unique in the layer; `path` is None while the bytes are in memory. Made by `Staging`.
    """

    __slots__ = (
        "__weakref__",
        "_aside",
        "_deleted",
        "_end",
        "_exists",
        "_failure",
        "_kept",
        "_lock",
        "_marked",
        "_memory",
        "_named",
        "_staging",
        "_sync_lock",
        "_synced",
        "_writes",
        "bytes",
        "frozen",
        "number",
        "path",
    )

    def __init__(self, staging: Staging, number: int, *, in_memory: bool, exists: bool = False) -> None:
        self.number = number
        self.frozen = False
        """Captured or being encoded: no write begins any more. One that is under way on another thread may still end
        in it; who made it then writes the same to a new generation.
        """
        self.path: str | None = None if in_memory else staging.path(number)
        self.bytes = 0
        """Of it in staging."""
        self._aside = False
        self._staging = staging
        self._lock = threading.Lock()
        self._memory: bytearray | None = bytearray() if in_memory else None
        self._exists = exists
        self._kept: _OpenFile | None = None
        """The file, once its name is gone."""
        self._deleted = False
        self._marked: RangeMap | None = None
        """1 where the file was written."""
        self._end = 0
        """The last byte written or journalled is before this: with fewer bytes the generation is damaged."""
        self._sync_lock = threading.Lock()
        self._writes = int(exists)
        self._synced = 0
        """Of the writes, how many are on the disk."""
        self._named = 0
        """Which of the names made in the directory this one's is."""
        self._failure: MoonclipError | None = None
        """Why the last sync failed."""

    def __repr__(self) -> str:
        return f"<generation {self.number} {self.path or 'in memory'} frozen={self.frozen}>"

    def write(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`. Raises NoSpaceError or BackendError; then the old bytes may be partly replaced."""
        written = self.try_write(offset, data)
        assert written, f"{self} is frozen or deleted: the write needs a new generation"

    def try_write(self, offset: int, data: Buffer) -> bool:
        """As `write`; False, with nothing written, when the generation was frozen or deleted meanwhile."""
        view = memoryview(data).cast("B")
        end = offset + len(view)
        if not view:
            return True
        with self._lock:
            if self.frozen or self._deleted:
                return False
            if self._memory is not None:
                growth = max(0, end - len(self._memory))
                if end <= limits.INLINE_BYTES and self._staging._count(self, growth):
                    self._memory.extend(bytes(growth))
                    self._memory[offset:end] = view
                    return True
                self._spill(self._memory)
            file = self._file() if self._exists else self._create()
            self._write_all(file, offset, view)
            self._writes += 1
            self._mark(offset, end)
            return True

    def leave_memory(self) -> None:
        """Go on in a file, wherever the bytes are now. Raises NoSpaceError or BackendError; then they stay there."""
        with self._lock:
            if self._memory is not None and not self._deleted:
                self._spill(self._memory)

    def put_back(self, offset: int, data: Buffer) -> None:
        """Write what is in the journal (replay): in memory where the rest is, whatever the limit, since there may be
        a file of this number already, with more in it.
        """
        view = memoryview(data).cast("B")
        if self._memory is None:
            self.write(offset, view)
            return
        with self._lock:
            growth = max(0, offset + len(view) - len(self._memory))
            self._staging._count(self, growth, limited=False)
            self._memory.extend(bytes(growth))
            self._memory[offset : offset + len(view)] = view

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; what was never written reads as zeros.

        Raises CorruptError when bytes that were written or journalled are missing, BackendError.
        """
        memory = self._memory
        done = 0
        if memory is not None:
            data = memory[offset : offset + len(out)]
            done = len(data)
            out[:done] = data
        elif self._exists:
            file = self._file()
            with os_errors(f"read {self.path}"):
                while done < len(out) and (count := os.preadv(file.fd, [out[done:]], offset + done)):
                    done += count
        if done < len(out):
            if offset + done < self._end:
                raise CorruptError(f"staged bytes are missing from {offset + done} on in {self.path or 'the journal'}")
            out[done:] = bytes(len(out) - done)

    def cached(self, offset: int, length: int) -> Buffer | None:
        """Return what `read_into` fills in, if that waits for no disk; else None."""
        memory = self._memory
        if memory is not None:
            data = bytes(memory[offset : offset + length])
            return data if len(data) == length else None
        file = self._kept or self._staging.opened.get(self.number)
        if file is None:
            return None
        out = bytearray(length)
        try:
            count = os.preadv(file.fd, [out], offset, os.RWF_NOWAIT)
        except OSError:
            return None  # not in the page cache, or a file system that cannot tell; `read_into` says what is wrong
        return out if count == length else None

    def lost(self, end: int) -> str:
        """What is lost of the bytes up to `end`, which were written, for a person; empty for nothing.

        Where the whole staging directory is gone, its disk may come back: that is not called lost.
        """
        with self._lock:
            if not self._exists or self._deleted or self.path is None:
                return ""
            try:
                size = os.stat(self.path).st_size
            except FileNotFoundError:
                return f"staged bytes are lost: {self.path} is gone" if self._staging.directory.is_dir() else ""
            except OSError:
                return ""  # cannot be told; whoever reads it learns why
            return "" if size >= end else f"staged bytes are lost: {self.path} ends at byte {size} of {end}"

    def sync(self) -> None:
        """Make what was written durable. Nothing to do in memory: those bytes are in the journal.

        Raises NoSpaceError, or BackendError: then also each time that it is called again.
        """
        writes = self._writes
        if not self._exists or self._deleted or self._synced >= writes:
            return
        with self._sync_lock:
            if self._synced >= writes:
                return
            writes = self._writes
            file = self._file()
            self._retry(file)
            try:
                self._staging.ops.fdatasync(file.fd)
            except OSError as error:
                self._failure = from_os_error(error, f"sync {self.path}")
                raise self._failure from error
            self._staging.sync_names(self._named)
            self._synced = writes

    def mark(self, offset: int, length: int) -> None:
        """Say that a range was written before (replay): it counts as staged, and must not be missing."""
        with self._lock:
            if self._memory is None:
                self._mark(offset, offset + length)
            else:
                self._end = max(self._end, offset + length)

    def _mark(self, offset: int, end: int) -> None:
        marked = self._marked = self._marked or RangeMap()
        new = sum(stop - start for start, stop, value in marked.runs(offset, end) if not value)
        if new:
            marked.set(offset, end, 1)
            self._staging._count(self, new)
        self._end = max(self._end, end)

    def _spill(self, memory: bytearray) -> None:
        """Go on in a file."""
        self.path = self._staging.path(self.number)
        try:
            self._write_all(self._create(), 0, memoryview(bytes(memory)))
        except MoonclipError:
            self._staging.opened.drop(self.number)
            with suppress(MoonclipError):  # a file that stays is an orphan, or written anew by the next attempt
                self._staging.remove(self.number)
            self.path, self._exists = None, False
            raise
        self._writes += 1
        self._staging._moved(self)
        self._mark(0, len(memory))
        self._memory = None

    def _write_all(self, file: _OpenFile, offset: int, view: memoryview) -> None:
        with os_errors(f"write {self.path}"):
            while view:
                count = self._staging.ops.pwrite(file.fd, view, offset)
                view = view[count:]
                offset += count

    def _create(self) -> _OpenFile:
        assert self.path is not None
        # A file of this number can only be one that an earlier attempt left.
        file = self._open(os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._exists = True
        self._named = self._staging.made_name()
        return file

    def _file(self) -> _OpenFile:
        file = self._kept or self._staging.opened.get(self.number)
        return file if file is not None else self._open(os.O_RDWR)

    def _open(self, flags: int) -> _OpenFile:
        assert self.path is not None
        ops = self._staging.ops
        with os_errors(f"open {self.path}"):
            try:
                file = _OpenFile(ops, ops.open(self.path, flags))
            except FileNotFoundError as error:
                raise CorruptError(f"staged bytes are missing: {self.path} is gone") from error
        self._staging.opened.put(self.number, file)
        return file

    def _retry(self, file: _OpenFile) -> None:
        """Before a sync that follows a failed one: the kernel takes pages that it could not write for clean ones."""
        if self._failure is None:
            return
        if not isinstance(self._failure, NoSpaceError):
            raise type(self._failure)(str(self._failure))
        with self._lock:
            for start, end, _ in [run for run in (self._marked or RangeMap()).runs(0, self._end) if run[2]]:
                for offset in range(start, end, _COPY_BYTES):
                    out = memoryview(bytearray(min(_COPY_BYTES, end - offset)))
                    self.read_into(offset, out)
                    self._write_all(file, offset, out)
        self._failure = None


class Staging:
    """The generations of one layer, in files of `directory` and in memory. Thread-safe."""

    def __init__(self, directory: Path, limit: int, ops: FileOps) -> None:
        """`limit` is in bytes, see `admit`. The directory is made. Raises BackendError and its kin."""
        self.directory = directory
        self.limit = limit
        self.ops = ops
        self.opened: BoundedCache[int, _OpenFile] = BoundedCache(limits.STAGING_FILES)
        """Open files by number; another file is opened again when it is used."""
        self.used = 0
        """Bytes staged."""
        self.refuses = False
        """Whether the last write was not admitted: somebody waits for room."""
        self._aside = 0
        """Bytes that were set aside."""
        self._in_memory = 0
        self._lock = threading.Lock()
        self._generations: dict[int, Generation] = {}
        self._closing: list[_OpenFile] = []
        self._names_made = 0
        self._names_synced = 0
        with os_errors(f"make {directory}"):
            if not directory.is_dir():
                directory.parent.mkdir(parents=True, exist_ok=True)
                ops.mkdir(str(directory), 0o700)

    def path(self, number: int) -> str:
        """The file of a generation."""
        return os.path.join(self.directory, f"{number:0{NAME_DIGITS}x}")

    def create(self, number: int) -> Generation:
        """A new, empty generation. The number was never given before."""
        assert number not in self._generations, f"generation {number} exists"
        in_memory = self._in_memory < limits.INLINE_TOTAL_BYTES
        return self._generations.setdefault(number, Generation(self, number, in_memory=in_memory))

    def open(self, number: int) -> Generation:
        """A generation that the journal names without its bytes; that its file is missing shows when it is read."""
        generation = self._generations.get(number)
        if generation is None:
            generation = Generation(self, number, in_memory=False, exists=True)
            generation._named = self.made_name()
            self._generations[number] = generation
        elif generation._memory is not None and os.path.exists(self.path(number)):
            # What was small at first went on in a file, beginning with a copy of what it was.
            length = len(generation._memory)
            self._moved(generation)
            generation.path, generation._exists, generation._memory = self.path(number), True, None
            generation._writes += 1
            generation._named = self.made_name()
            generation.mark(0, length)
        return generation

    def restore(self, number: int, pieces: Iterable[tuple[int, Buffer]]) -> Generation:
        """A generation whose bytes, (offset, data) each, are in the journal; more of them for one that is known."""
        generation = self._generations.setdefault(number, Generation(self, number, in_memory=True))
        for offset, data in pieces:
            generation.put_back(offset, data)
        return generation

    def delete(self, generation: Generation) -> None:
        """Give the space of a generation back; who reads it may go on.

        Never fails: a file that cannot be deleted is an orphan for the next replay.
        """
        with generation._lock:
            if generation._deleted:
                return
            if generation._exists:
                self._unlink(generation)
            generation._deleted = True
            self.opened.drop(generation.number)
            self._moved(generation)
            self._generations.pop(generation.number, None)

    def _unlink(self, generation: Generation) -> None:
        """Delete the file of a generation, which stays open for those who read it."""
        try:
            with suppress(CorruptError):  # its file is gone already
                generation._kept = generation._file()
                if generation.bytes >= limits.LONG_CLOSE_BYTES:
                    self._closing.append(generation._kept)
        except MoonclipError as error:
            log.warning("%s: whoever still reads it gets an error", error)
        try:
            self.remove(generation.number)
        except MoonclipError as error:
            log.warning("%s; nobody needs it, and it goes when the layer is opened next", error)

    def close_deleted(self) -> None:
        """Let go of large files that were deleted, which frees their space and takes long; not under the lock."""
        self._closing = []

    def orphans(self, known: Set[int]) -> list[int]:
        """Numbers of the files that belong to no generation in `known`."""
        return sorted(staged_numbers(self.directory) - known)

    def remove(self, number: int) -> None:
        """Delete the file of a number; none is no error."""
        path = self.path(number)
        with os_errors(f"delete {path}"), suppress(FileNotFoundError):
            self.ops.unlink(path)

    @property
    def in_memory(self) -> int:
        """Bytes staged in memory, and so in the journal."""
        return self._in_memory

    def set_aside(self, generations: Iterable[Generation]) -> None:
        """These do not count against the limit any more: they are kept for a crash until a file is written anew, and
        whoever writes it could wait for ever for them to be encoded.
        """
        with self._lock:
            for generation in generations:
                if not generation._aside and not generation._deleted:
                    generation._aside = True
                    self._aside += generation.bytes

    @property
    def waiting(self) -> int:
        """Bytes that count against the limit: those that encoding can free."""
        return self.used - self._aside

    @property
    def full(self) -> bool:
        """Whether nothing more is admitted."""
        return self.waiting >= self.limit

    def admit(self, length: int) -> None:
        """Raise StagingFullError when `length` more bytes would pass the limit; into an empty staging all may go."""
        self.refuses = bool(self.waiting) and self.waiting + length > self.limit
        if self.refuses:
            raise StagingFullError(f"{self.directory}: {self.waiting} bytes of at most {self.limit} wait to be encoded")

    def made_name(self) -> int:
        """Count a new name in the directory."""
        with self._lock:
            self._names_made += 1
            return self._names_made

    def sync_names(self, made: int) -> None:
        """Make the first `made` names durable."""
        if self._names_synced >= made:
            return
        made = self._names_made
        with os_errors(f"sync {self.directory}"):
            directory = _OpenFile(self.ops, self.ops.open(str(self.directory), os.O_RDONLY | os.O_DIRECTORY))
            self.ops.fsync(directory.fd)
        with self._lock:
            self._names_synced = max(self._names_synced, made)

    def _count(self, generation: Generation, growth: int, *, limited: bool = True) -> bool:
        """Count more bytes of a generation; False, uncounted, when memory must not take so many."""
        with self._lock:
            if generation._memory is not None and generation.path is None:
                if limited and self._in_memory + growth > limits.INLINE_TOTAL_BYTES:
                    return False
                self._in_memory += growth
            generation.bytes += growth
            self.used += growth
            self._aside += growth if generation._aside else 0
            return True

    def _moved(self, generation: Generation) -> None:
        """The bytes counted so far are not where they were."""
        with self._lock:
            if generation._memory is not None:
                self._in_memory -= generation.bytes
            self.used -= generation.bytes
            self._aside -= generation.bytes if generation._aside else 0
            generation.bytes = 0
