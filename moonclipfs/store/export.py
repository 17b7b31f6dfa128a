"""Snapshots written back as plain files."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import CorruptError, ExistsError, MoonclipError, NoSpaceError
from moonclipfs.store.backend import os_errors
from moonclipfs.store.cores import usable_cores
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.progress import Progress
from moonclipfs.store.restore import restore_attributes
from moonclipfs.store.samebytes import same_bytes
from moonclipfs.store.store import Store
from moonclipfs.types import Entry, EntryType, Version

_PART = re.compile(r"\.[0-9a-f]{16}\.moonclipfs-part")
"""Names of files that are being written."""
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""What fsync(2) of a directory answers on file systems that have none."""
_SEGMENT_BYTES = 32 * limits.MIB
_FILES_IN_WORK = 64


@dataclass(slots=True)
class ExportReport:
    """What an export did. `notes` tell of attributes that this host would not take."""

    files: int = 0
    skipped: int = 0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)


def export(
    store: Store,
    version: Version,
    target: Path,
    *,
    path: bytes = b"",
    progress: Callable[[Progress], None] | None = None,
    inside: Path | None = None,
    overwrite: bool = False,
    jobs: int = 0,
    failed: Callable[[MoonclipError], None] | None = None,
) -> ExportReport:
    """Write a version's tree, or what is at `path` in it, into the directory `target`, which is made if need be.

    Bytes, holes, modes, times, symlinks, hard links and extended attributes come back; owners do when run as root.
    A file appears under its name when it is whole and durable; all names are durable in the end. What is there already
    with the same bytes and time of change is left as it is (with `overwrite` it gets the other attributes), so an
    interrupted export goes on where it was; anything else in the way is ExistsError before a byte is written, or is
    replaced with `overwrite` (but never a directory by a file). Files of `target` that the version does not have stay.
    `jobs` threads compare and decode (0: one for each core).
    `failed` is told the error of each file that cannot be written, which names the file, and the others are written all
    the same; without it, and always when the disk is full, the first such error is raised.

    Raises NotFoundError, ExistsError, CorruptError, NoSpaceError, PermissionDeniedError.
    """
    if inside is not None:
        _check_inside(target, inside)
    root = os.fsencode(os.path.abspath(target))
    top = store.lookup(version, path)
    is_tree = top.type is EntryType.DIRECTORY
    below = store.walk_directory(top.child) if is_tree else [(top.name, top)]
    entries = [(os.path.join(root, name), entry) for name, entry in below]
    work = _Export(store, progress or (lambda _: None), overwrite, jobs or usable_cores(), failed)
    with os_errors(f"write below {target}"):
        above = _make_directories(root)
        todo = work.todo(entries)
        originals = _first_of_each_link_group(entries)
        work.run([*_without_links(todo, originals)])
        links = work.link_all(entries, originals)
        # Last, and the deepest first: writing into a directory changes its time, and may not be allowed afterwards.
        directories = [(place, entry) for place, entry in entries if entry.type is EntryType.DIRECTORY]
        for place, entry in [*reversed(directories), *([(root, top)] if is_tree else [])]:
            work.report.notes += _finish_directory(place, entry)
        for place in above if is_tree else [root, *above]:
            work.report.notes += _finish_directory(place, None)
    work.report.files += links
    return work.report


class _Part:
    """A file that is being written under another name, piece by piece, by several threads."""

    def __init__(self, path: bytes, entry: Entry, reader: FileReader) -> None:
        self.path = path
        self.entry = entry
        self._reader = reader
        self._name = _part_name(path)
        self._fd = os.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.truncate(self._fd, reader.size)

    def segments(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of the parts that hold bytes, in turn; holes are left out."""
        offset = start = 0
        for extent in self._reader.recipe.extents:
            if extent.is_hole or offset + extent.length - start > _SEGMENT_BYTES:
                if offset > start:
                    yield start, offset - start
                start = offset + extent.length if extent.is_hole else offset
            offset += extent.length
        if offset > start:
            yield start, offset - start

    def write(self, offset: int, length: int) -> int:
        """Write a range and return its length."""
        step = limits.PREFETCH_BYTES
        for at in range(offset, offset + length, step):
            data = memoryview(bytearray(min(step, offset + length - at)))
            with _naming(self.path):
                self._reader.stream_into(at, data)
            with os_errors(f"write {os.fsdecode(self.path)}"):
                _pwrite(self._fd, data, at)
        return length

    def finish(self) -> list[str]:
        """Give the file its attributes and, once it is durable, its name."""
        with os_errors(f"write {os.fsdecode(self.path)}"):
            notes = restore_attributes(self._name, self.entry, self.path)
            os.fsync(self._fd)
            os.rename(self._name, self.path)
            os.close(self._fd)
        return notes

    def abort(self) -> None:
        """Throw away what was written."""
        os.close(self._fd)
        os.unlink(self._name)


class _Export:
    def __init__(
        self,
        store: Store,
        tell: Callable[[Progress], None],
        overwrite: bool,
        jobs: int,
        failed: Callable[[MoonclipError], None] | None = None,
    ) -> None:
        self._store = store
        self._tell = tell
        self._overwrite = overwrite
        self._jobs = jobs
        self._failed = failed
        self._unwritten: set[bytes] = set()
        self._lock = threading.Lock()
        self._progress = Progress()
        self.report = ExportReport()

    def todo(self, entries: list[tuple[bytes, Entry]]) -> list[tuple[bytes, Entry]]:
        """What needs writing. Raises ExistsError for what may not be replaced."""
        with ThreadPoolExecutor(self._jobs, "compare") as pool:
            done = list(pool.map(lambda one: self._is_done(*one), entries))
        for (path, entry), is_done in zip(entries, done, strict=True):
            self.report.skipped += is_done and entry.type is EntryType.FILE
            if is_done and self._overwrite:
                self.report.notes += restore_attributes(path, entry, path)
        return [one for one, is_done in zip(entries, done, strict=True) if not is_done]

    def _is_done(self, path: bytes, entry: Entry) -> bool:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        same_type = stat.S_IFMT(status.st_mode) == entry.type.st_mode
        if same_type and entry.type is EntryType.DIRECTORY:
            return False
        if same_type and entry.type is EntryType.SYMLINK:
            if os.readlink(path) == entry.target:
                return True
        elif (
            same_type
            and (entry.size, entry.attributes.mtime_ns) == (status.st_size, status.st_mtime_ns)
            and (entry.type is not EntryType.FILE or self._is_whole(path, entry))
        ):
            return True
        if stat.S_ISDIR(status.st_mode) or entry.type is EntryType.DIRECTORY:
            raise ExistsError(
                f"{os.fsdecode(path)} is in the way, and of another type: move it away, or choose another target"
            )
        if not self._overwrite:
            raise ExistsError(
                f"{os.fsdecode(path)} exists and differs: choose another target, or allow it to be overwritten"
            )
        return False

    def _is_whole(self, path: bytes, entry: Entry) -> bool:
        """Whether the file at `path` has the bytes of `entry`; they are durable then."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError:
            return False  # nobody can tell
        try:
            with os_errors(f"compare {os.fsdecode(path)}"), _naming(path):
                if not same_bytes(fd, self._store.open_file(entry)):
                    return False
                os.fsync(fd)
                return True
        finally:
            os.close(fd)

    def run(self, todo: list[tuple[bytes, Entry]]) -> None:
        """Make directories and special files, then write all files, several segments at a time."""
        for path, entry in todo:
            if entry.type is EntryType.DIRECTORY:
                _make_directory(path)
            elif entry.type is not EntryType.FILE:
                self._make_special(path, entry)
        for directory in {os.path.dirname(path) for path, _ in todo}:
            _remove_parts(directory)
        files = [(path, entry) for path, entry in todo if entry.type is EntryType.FILE]
        self._progress.total = sum(entry.size for _, entry in files)
        working: deque[tuple[_Part, list[Future[None]]]] = deque()
        with ThreadPoolExecutor(self._jobs, "export") as pool:
            try:
                for path, entry in files:
                    reader = self._open(path, entry)
                    if reader is None:
                        continue
                    part = _Part(path, entry, reader)
                    working.append((part, []))
                    working[-1][1].extend(pool.submit(self._write, part, *segment) for segment in part.segments())
                    if len(working) >= _FILES_IN_WORK:
                        self._finish(working)
                while working:
                    self._finish(working)
            finally:
                for part, futures in working:
                    _give_up(part, futures)

    def _open(self, path: bytes, entry: Entry) -> FileReader | None:
        try:
            with _naming(path):
                return self._store.open_file(entry)
        except MoonclipError as error:
            self._fail(path, error)
            return None

    def _fail(self, path: bytes, error: MoonclipError) -> None:
        """Tell of a file that cannot be written, or raise `error` when that is the end of the export."""
        if self._failed is None or isinstance(error, NoSpaceError):
            raise error
        self._failed(error)
        self._unwritten.add(path)

    def _write(self, part: _Part, offset: int, length: int) -> None:
        part.write(offset, length)
        with self._lock:
            self._progress.path = os.fsdecode(part.path)
            self._progress.done += length
            self._tell(self._progress)

    def _finish(self, working: deque[tuple[_Part, list[Future[None]]]]) -> None:
        part, futures = working[0]
        try:
            for future in futures:
                future.result()
            self.report.notes += part.finish()
        except MoonclipError as error:
            self._fail(part.path, error)
            working.popleft()
            _give_up(part, futures)
            return
        working.popleft()
        self.report.files += 1
        self.report.bytes += part.entry.size

    def _make_special(self, path: bytes, entry: Entry) -> None:
        """A symlink, fifo or socket, made under another name first."""
        name = _part_name(path)
        if entry.type is EntryType.SYMLINK:
            os.symlink(entry.target, name)
        else:
            os.mknod(name, 0o600 | entry.type.st_mode)
        self.report.notes += restore_attributes(name, entry, path)
        os.rename(name, path)

    def link_all(self, entries: list[tuple[bytes, Entry]], originals: Mapping[int, bytes]) -> int:
        """Make the names of each link group names of one file again; return how many were made."""
        made = 0
        for path, entry in entries:
            original = originals.get(entry.link_group, path)
            if original == path:
                continue
            if original in self._unwritten:
                reason = f"it is one file with {os.fsdecode(original)}"
                self._fail(path, CorruptError(f"cannot write {os.fsdecode(path)}: {reason}"))
                continue
            if os.path.exists(path) and os.path.samefile(path, original):
                continue
            name = _part_name(path)
            os.link(original, name)
            os.rename(name, path)
            made += 1
        return made


@contextmanager
def _naming(path: bytes) -> Iterator[None]:
    """Put the file that is to be written in front of an error of reading what is stored."""
    try:
        yield
    except MoonclipError as error:
        raise type(error)(f"cannot write {os.fsdecode(path)}: {error}") from error


def _give_up(part: _Part, futures: list[Future[None]]) -> None:
    """Throw a part away once no thread writes it any more."""
    wait([future for future in futures if not future.cancel()])
    part.abort()


def _check_inside(target: Path, directory: Path) -> None:
    """Raise CorruptError when `target` is not at or below `directory`, ExistsError when a symlink is on the way."""
    names = target.relative_to(directory).parts if target.is_relative_to(directory) else ("..",)
    if ".." in names:
        raise CorruptError(f"{target} is outside {directory}: no snapshot can have a name that leads there")
    for name in names:
        directory = directory / name
        if directory.is_symlink():
            raise ExistsError(f"{directory} is in the way, a symbolic link: move it away, or choose another target")


def _first_of_each_link_group(entries: list[tuple[bytes, Entry]]) -> dict[int, bytes]:
    originals: dict[int, bytes] = {}
    for path, entry in entries:
        if entry.link_group:
            originals.setdefault(entry.link_group, path)
    return originals


def _without_links(entries: list[tuple[bytes, Entry]], originals: Mapping[int, bytes]) -> Iterator[tuple[bytes, Entry]]:
    """Those that are not to become one more name of another."""
    for path, entry in entries:
        if originals.get(entry.link_group, path) == path:
            yield path, entry


def _part_name(path: bytes) -> bytes:
    """A name beside `path` to write under."""
    return os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.moonclipfs-part".encode())


def _make_directories(path: bytes) -> list[bytes]:
    """Make a directory and what is missing above it; return those, deepest first, that got a name by it."""
    above, place = [], path
    while not os.path.isdir(place):
        place = os.path.dirname(place)
        above.append(place)
    os.makedirs(path, exist_ok=True)
    return above


def _finish_directory(path: bytes, entry: Entry | None) -> list[str]:
    """Give a directory the attributes of its entry, if any, and make these and the names in it durable."""
    shown = os.fsdecode(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError as error:
        if entry is not None:
            raise
        return [f"{shown}: a new name in it may not outlive a crash of this host: {error.strerror}"]
    try:
        notes = restore_attributes(path, entry, path) if entry is not None else []
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FSYNC:
                raise
            notes.append(f"{shown}: the names in it may not outlive a crash of this host: {error.strerror}")
    finally:
        os.close(fd)
    return notes


def _make_directory(path: bytes) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        os.chmod(path, 0o700)  # of an interrupted export, which may have made it read-only


def _remove_parts(directory: bytes) -> None:
    """Remove what an interrupted export left."""
    for name in os.listdir(directory):
        if _PART.fullmatch(os.fsdecode(name)):
            os.unlink(os.path.join(directory, name))


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
