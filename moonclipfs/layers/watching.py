"""A plain output directory, watched: each finished checkpoint in it becomes a snapshot, and the older ones go.

What is finished is told as for a mount (`units.py`, `completeness.py`): a unit that nobody writes to, that has been
quiet, and that is complete. A checkpoint is deleted only after every byte of it was read back from the store and
compared, and only while it is as it was then. Nothing is remembered outside the store, so a watcher may be stopped at
any moment and started again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moonclipfs import limits
from moonclipfs.errors import (
    BackendError,
    BusyError,
    MoonclipError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UsageError,
)
from moonclipfs.formats.layout import Layout
from moonclipfs.formats.sniff import parse
from moonclipfs.layers.completeness import missing
from moonclipfs.layers.siblings import sibling_files
from moonclipfs.layers.units import units
from moonclipfs.store import move
from moonclipfs.store.add import add
from moonclipfs.store.paths import check_path
from moonclipfs.store.scan import FileSource, Found, links_out, scan
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType, Version, natural_key

log = logging.getLogger(__name__)


class Absorbed(NamedTuple):
    """A checkpoint that is in the store now, verified; `new` unless it was there before."""

    path: Path
    version: Version
    new: bool


@dataclass(slots=True)
class _Unit:
    """One checkpoint on the disk, as it was seen last."""

    found: Found
    state: object
    next_try: float
    """When to absorb it unless it changes before, in seconds of the monotonic clock."""
    missing: tuple[str, ...] = ()
    version: Version | None = None
    """What it is in the store, once that was verified."""
    settled_ns: int = 0
    trouble: str = ""


@dataclass(slots=True)
class _Branch:
    """A directory of the host under the rule of units."""

    found: Found
    name: str
    bound: Iterable[str]
    is_top: bool = False
    """Also the directory that is watched may be a unit: it has a name."""

    def files(self) -> list[bytes]:
        return [one.name for one in self.found.children if one.type is EntryType.FILE]

    def folders(self) -> list[bytes]:
        return [one.name for one in self.found.children if _is_folder(one)]

    def has_snapshots_below(self) -> bool:
        return any(name.startswith(self.name + "/") for name in self.bound)

    def open(self, name: bytes) -> _Branch | None:
        child = next(one for one in self.found.children if one.name == name)
        return _Branch(child, f"{self.name}/{os.fsdecode(name)}", self.bound)


class Watcher:
    """Absorbs the checkpoints of one directory. One thread uses it."""

    def __init__(
        self,
        directory: Path,
        store: Store,
        *,
        as_name: str | None = None,
        keep_plain: int | None = None,
        quiet: float = limits.WATCH_QUIET_SECONDS,
        provenance: Mapping[str, object] | None = None,
        deleted: Callable[[Path, Version], None] = lambda path, version: None,
    ) -> None:
        """Checkpoints become snapshots below `as_name`, by default the name of the directory.

        Of those beside each other only the newest `keep_plain` stay as plain files; all do without. `quiet` are the
        seconds for which one must not have changed. `deleted` is told what has left the disk.
        `store` is open for writing. Raises NotFoundError, UsageError.
        """
        self._directory = Path(os.path.realpath(directory))
        if not self._directory.is_dir():
            raise NotFoundError(f"no directory {directory} to watch")
        if keep_plain is not None and keep_plain < 0:
            raise UsageError(f"{keep_plain} checkpoints cannot be kept: give 0 or more")
        self._store = store
        self._name = check_path((self._directory.name if as_name is None else as_name).strip("/"))
        self._keep_plain = keep_plain
        self._quiet = quiet
        self._provenance = provenance
        self._deleted = deleted
        self._units: dict[bytes, _Unit] = {}
        self._tidied: set[bytes] = set()
        status = os.stat(store.path)
        self._forbidden = status.st_dev, status.st_ino

    def tick(self, now: float | None = None) -> list[Absorbed]:
        """Look once; `now` is the monotonic time in seconds. Absorbs what is finished, and deletes what is old.

        Of one checkpoint that cannot be absorbed the log tells once, and it is tried again when it has changed. Raises
        NotFoundError when the directory is gone, and NoSpaceError, LeaseLostError, BackendError of the store.
        """
        now = time.monotonic() if now is None else now
        self._store.renew_lease()  # who was stopped for long may have been taken for dead
        absorbed = []
        for path, unit in self._look(now):
            if unit.version is None and now >= unit.next_try and (done := self._try(path, unit)):
                absorbed.append(done)
            elif unit.version is None and now >= unit.next_try:
                unit.next_try = now + limits.RETRY_SECONDS
        if self._keep_plain is not None:
            self._delete_old(self._keep_plain)
        return absorbed

    @property
    def pending(self) -> bool:
        """Whether something is there that a later `tick` may absorb without any change."""
        return any(unit.version is None and not unit.missing and not unit.trouble for unit in self._units.values())

    def missing(self) -> dict[str, list[str]]:
        """What checkpoints that are not absorbed lack, or what went wrong with them, by path."""
        return {
            os.fsdecode(path): [*unit.missing, *filter(None, [unit.trouble])]
            for path, unit in self._units.items()
            if unit.version is None and (unit.missing or unit.trouble)
        }

    # What is there

    def _look(self, now: float) -> list[tuple[bytes, _Unit]]:
        """The units that are there, in natural order; what is known of one counts only while it is as it was."""
        names = self._store.names().bound()
        try:
            top = scan(self._directory, forbidden=self._forbidden)
        except BusyError:
            return []
        except NotFoundError:
            if not self._directory.is_dir():
                raise
            return []  # something went away while it was looked at
        self._tidy(top)
        seen: dict[bytes, _Unit] = {}
        for branch in units(_Branch(top, self._name, list(names))):
            found = branch.found
            known = self._units.get(found.path)
            with suppress(FileNotFoundError):
                state = _state(found)
                seen[found.path] = known if known and known.state == state else _Unit(found, state, now + self._quiet)
        self._units = seen
        return sorted(seen.items(), key=lambda item: natural_key(os.fsdecode(item[0])))

    def _tidy(self, top: Found) -> None:
        """End what an interrupted deletion left beside checkpoints."""
        for found in top.walk():
            if found.type is EntryType.DIRECTORY and found.path not in self._tidied:
                if any(move.is_aside(one.name) for one in found.children):
                    move.finish([Path(os.fsdecode(found.path)) / "none"])
                self._tidied.add(found.path)

    # Into the store

    def _try(self, path: bytes, unit: _Unit) -> Absorbed | None:
        try:
            return self._absorb(Path(os.fsdecode(path)), unit)
        except (BusyError, UsageError, PermissionDeniedError) as error:
            if str(error) != unit.trouble:
                log.warning("%s is not absorbed yet: %s", os.fsdecode(path), error)
            unit.trouble = str(error)
            return None

    def _absorb(self, path: Path, unit: _Unit) -> Absorbed | None:
        """Store and verify a unit, unless it is written to or something is missing."""
        if _has_writer(unit.found):
            unit.missing = ("a process has a file of it open for writing",)
            return None
        name = self._name_of(path)
        siblings = sibling_files(self._store, os.fsencode(name))
        unit.missing = tuple(missing(_PlainFiles(unit.found), siblings))
        if unit.missing:
            return None
        version = self._store.names().bound().get(name)
        new = version is None or not self._is_stored(version, unit.found)
        if new:
            report = add(self._store, [path], name=name, provenance=self._provenance)
            version, new = report.snapshots[0].version, not report.snapshots[0].unchanged
        assert version is not None
        settled_ns = move.verify(self._store, version, unit.found)
        if _state(unit.found) != unit.state:
            return None  # it changed meanwhile: the next look finds a new state
        unit.version, unit.settled_ns, unit.trouble = version, settled_ns, ""
        return Absorbed(path, version, new)

    def _name_of(self, path: Path) -> str:
        relative = os.path.relpath(path, self._directory)
        return self._name if relative == "." else f"{self._name}/{relative}"

    def _is_stored(self, version: Version, found: Found) -> bool:
        """Whether a version has the same names, sizes and times as what is on the disk: then it need not be read."""
        start = len(found.path) + 1
        here = {one.path[start:]: (one.type, one.size, one.attributes) for one in found.walk() if one is not found}
        there = {path: (entry.type, entry.size, entry.attributes) for path, entry in self._store.walk(version)}
        return here == there

    # Off the disk

    def _delete_old(self, keep: int) -> None:
        """Of verified checkpoints beside each other, delete all but the newest."""
        beside: dict[bytes, list[_Unit]] = {}
        for path, unit in self._units.items():
            if unit.version is not None and path != os.fsencode(self._directory):
                beside.setdefault(os.path.dirname(path), []).append(unit)
        kept = {version.sequence for version in self._store.names().all_versions()}
        for several in beside.values():
            several.sort(key=_age)
            for unit in several[: max(0, len(several) - keep)]:
                if unit.version is not None and unit.version.sequence in kept and not unit.trouble:
                    self._delete(unit)

    def _delete(self, unit: _Unit) -> None:
        shown = os.fsdecode(unit.found.path)
        try:
            if links := links_out(unit.found):
                raise BusyError(f"its symbolic link {os.fsdecode(links[0])} leads out of it")
            move.delete(unit.found, unit.settled_ns)
        except MoonclipError as error:
            unit.trouble = str(error)
            log.warning("%s stays: %s", shown, error)
        else:
            assert unit.version is not None
            self._deleted(Path(shown), unit.version)


class _PlainFiles:
    """The files of a directory of the host, for `completeness.missing`."""

    def __init__(self, found: Found) -> None:
        start = len(found.path) + 1
        self._files = {os.fsdecode(one.path[start:]): one for one in found.walk() if one.type is EntryType.FILE}

    def paths(self) -> Iterable[str]:
        return self._files

    def layout(self, path: str) -> Layout:
        return parse(self.source(path))

    def source(self, path: str) -> FileSource:
        return FileSource(self._files[path])


def _is_folder(one: Found) -> bool:
    return one.type is EntryType.DIRECTORY and not move.is_aside(one.name)


def _state(found: Found) -> list[tuple[object, ...]]:
    """All that tells whether something changed below a directory. Raises FileNotFoundError."""
    return [
        (one.path, one.type, one.identity, one.size, one.attributes, os.lstat(one.path).st_ctime_ns)
        for one in found.walk()
        if one is not found
    ]


def _age(unit: _Unit) -> tuple[int, object]:
    """Sorts units by when their files were written last."""
    times = (one.attributes.mtime_ns for one in unit.found.walk() if one.type is EntryType.FILE)
    return max(times, default=0), natural_key(os.fsdecode(unit.found.path))


def _has_writer(found: Found) -> bool:
    """Whether a process has a file of a directory open for writing, as far as the kernel tells us."""
    return any(_is_written(one.path) for one in found.walk() if one.type is EntryType.FILE)


def _is_written(path: bytes) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # whoever reads it next says why
    try:
        # A lease for reading is refused while somebody else may write.
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False  # not our file, or a file system without leases
    finally:
        os.close(fd)
    return False


def watch(watcher: Watcher, stop: threading.Event, seconds: float = limits.WATCH_LOOK_SECONDS) -> Iterator[Absorbed]:
    """Yield what is absorbed until `stop` is set, looking every so many seconds. A full disk is waited for."""
    trouble = ""
    while not stop.is_set():
        try:
            yield from watcher.tick()
            trouble = ""
        except (NoSpaceError, BackendError) as error:
            if str(error) != trouble:
                log.warning("nothing is absorbed at the moment: %s", error)
            trouble = str(error)
        stop.wait(seconds)


def watch_once(watcher: Watcher, stop: threading.Event, seconds: float = 0.5) -> Iterator[Absorbed]:
    """Yield what is absorbed of what is there, until the rest is incomplete, in trouble or written to."""
    while not stop.is_set():
        yield from watcher.tick()
        if not watcher.pending:
            return
        stop.wait(seconds)
