"""Faults for whatever writes through `FileOps`: calls that fail, stop, kill or are watched; and every state of the
disk that a crash may leave.

What a crash may leave of recorded calls (`crash_states`): bytes written since the last fsync of a file are there,
gone, cut off at any byte, or zeros; where they replace others, or space that was preallocated, either end of them may
be there without the other. Names made, changed or removed since the last fsync of their directory are each there or
not, in any combination. Names under `tmp/` are never synced and never read: they are all there.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moonclipfs.store.backend import FileOps
from moonclipfs.types import Buffer

EVERY_CUT = 700
"""A file of at most so many unsynced bytes is cut at each of them, a longer one at a sample."""
CUTS = 24
"""How many cuts that sample has."""
_ENDS = 4


class HookedOps(FileOps):
    """Real system calls with `before(name, arguments)` ahead of each and `after(name, arguments, result)` behind."""

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        """May raise OSError instead of the call."""

    def after(self, name: str, arguments: tuple[object, ...], result: object) -> None:
        """Sees what succeeded."""

    def _call(self, name: str, *arguments: object) -> object:
        self.before(name, arguments)
        result = getattr(super(), name)(*arguments)
        self.after(name, arguments, result)
        return result

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        result = self._call("open", path, flags, mode)
        assert isinstance(result, int)
        return result

    def write(self, fd: int, data: Buffer) -> int:
        result = self._call("write", fd, data)
        assert isinstance(result, int)
        return result

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        result = self._call("pwrite", fd, data, offset)
        assert isinstance(result, int)
        return result

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._call("allocate", fd, offset, length)

    def truncate(self, fd: int, size: int) -> None:
        self._call("truncate", fd, size)

    def fdatasync(self, fd: int) -> None:
        self._call("fdatasync", fd)

    def fsync(self, fd: int) -> None:
        self._call("fsync", fd)

    def link(self, source: str, target: str) -> None:
        self._call("link", source, target)

    def rename(self, source: str, target: str) -> None:
        self._call("rename", source, target)

    def unlink(self, path: str) -> None:
        self._call("unlink", path)

    def mkdir(self, path: str, mode: int) -> None:
        self._call("mkdir", path, mode)

    def close(self, fd: int) -> None:
        self._call("close", fd)


class CountingOps(HookedOps):
    """Counts calls by name."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.calls.values())


class FaultyOps(HookedOps):
    """From call number `at` on (from 0), calls fail with `code`: that one alone, or with `lasting` all that follow
    and need space. `close` and `unlink` succeed on a full disk.
    """

    _SPARED = frozenset({"close", "unlink"})

    def __init__(self, at: int, code: int = errno.ENOSPC, *, lasting: bool = False) -> None:
        self.at = at
        self.code = code
        self.lasting = lasting
        self.count = 0
        self.failed = ""

    @property
    def reached(self) -> bool:
        """Whether there was a call number `at`."""
        return self.count > self.at

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        number = self.count
        self.count += 1
        due = number == self.at or (self.lasting and number > self.at)
        if due and not (self.code == errno.ENOSPC and name in self._SPARED):
            self.failed = self.failed or name
            raise OSError(self.code, os.strerror(self.code))


class KillingOps(HookedOps):
    """Ends the process, as kill -9 would, before call number `at` (from 0)."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        if self.count == self.at:
            os._exit(86)
        self.count += 1


class PausingOps(HookedOps):
    """Runs `then` once, just before (or with `late` just after) the first call of `name` whose path holds `part`."""

    def __init__(self, name: str, part: str, then: Callable[[], None], *, late: bool = False) -> None:
        self.name = name
        self.part = part
        self.then: Callable[[], None] | None = then
        self.late = late

    def _maybe(self, name: str, arguments: tuple[object, ...]) -> None:
        if self.then and name == self.name and any(isinstance(a, str) and self.part in a for a in arguments):
            then, self.then = self.then, None
            then()

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        if not self.late:
            self._maybe(name, arguments)

    def after(self, name: str, arguments: tuple[object, ...], result: object) -> None:
        if self.late:
            self._maybe(name, arguments)


class NoLinkOps(FileOps):
    """A file system without hard links."""

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


class UnsyncedOps(FileOps):
    """Never waits for the disk: for tests that write much and crash never."""

    def fsync(self, fd: int) -> None:
        pass

    def fdatasync(self, fd: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Event:
    """One recorded call. `file` numbers the file meant, `path` is relative to the store, `mark` is a test's own."""

    name: str
    path: str = ""
    target: str = ""
    file: int = -1
    offset: int = 0
    data: bytes = b""
    mark: str = ""


class RecordingOps(HookedOps):
    """Records what changes below `root`, for `crash_states`. Several backends may share one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []
        self._files = itertools.count()
        self._open: dict[int, tuple[str, int]] = {}
        self._offsets: dict[int, int] = {}
        self._known: dict[tuple[int, int], int] = {}
        truth = [path for path in root.glob("*") if path.name in ("config.json", "README.txt")]
        truth += [path for directory in ("log", "packs", "tmp") for path in (root / directory).glob("*")]
        truth += [path for path in (root / "layers").glob("**/*") if path.is_file()]
        self.start = {os.path.relpath(path, root): path.read_bytes() for path in sorted(truth)}
        for number, name in enumerate(self.start):
            status = os.stat(root / name)
            self._known[status.st_dev, status.st_ino] = -1 - number

    def mark(self, mark: str) -> None:
        """Note that something was promised to the caller at this point."""
        self.events.append(Event("mark", mark=mark))

    def _relative(self, path: object) -> str:
        return os.path.relpath(str(path), self.root)

    def _opened(self, fd: int, path: str, flags: int, existed: bool) -> None:
        status = os.fstat(fd)
        number = self._known.setdefault((status.st_dev, status.st_ino), next(self._files))
        self._open[fd] = (path, number)
        self._offsets[fd] = 0
        if flags & os.O_CREAT and not existed:
            number = self._known[status.st_dev, status.st_ino] = next(self._files)
            self._open[fd] = (path, number)
            self.events.append(Event("create", path, file=number))

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        if name == "open":
            self._existed = os.path.exists(str(arguments[0]))

    def after(self, name: str, arguments: tuple[object, ...], result: object) -> None:
        first = arguments[0]
        if name == "open":
            assert isinstance(result, int) and isinstance(arguments[1], int)
            self._opened(result, self._relative(first), arguments[1], self._existed)
        elif name == "write":
            assert isinstance(first, int) and isinstance(result, int)
            assert isinstance(arguments[1], bytes | bytearray | memoryview)
            data = bytes(memoryview(arguments[1])[:result])
            self.events.append(Event("write", file=self._open[first][1], offset=self._offsets[first], data=data))
            self._offsets[first] += result
        elif name == "pwrite":
            assert isinstance(first, int) and isinstance(result, int) and isinstance(arguments[2], int)
            assert isinstance(arguments[1], bytes | bytearray | memoryview)
            data = bytes(memoryview(arguments[1])[:result])
            self.events.append(Event("write", file=self._open[first][1], offset=arguments[2], data=data))
        elif name in ("allocate", "truncate"):
            assert isinstance(first, int)
            self.events.append(Event(name, file=self._open[first][1], offset=os.fstat(first).st_size))
        elif name in ("fsync", "fdatasync"):
            assert isinstance(first, int)
            path, number = self._open[first]
            kind = "sync_directory" if (self.root / path).is_dir() else "sync"
            self.events.append(Event(kind, path, file=number))
        elif name == "close":
            assert isinstance(first, int)
            del self._open[first]
        elif name in ("link", "rename"):
            self.events.append(Event(name, self._relative(first), self._relative(arguments[1])))
        elif name in ("unlink", "mkdir"):
            self.events.append(Event(name, self._relative(first)))


@dataclass(slots=True)
class _File:
    synced: bytes = b""
    current: bytes = b""

    def variants(self) -> list[bytes]:
        """What a crash may leave of its bytes."""
        if self.synced == self.current:
            return [self.current]
        if not self.current.startswith(self.synced) or self.current.endswith(b"\0"):
            return self._mixtures()
        low, high = len(self.synced), len(self.current)
        step = 1 if high - low <= EVERY_CUT else max(1, (high - low) // CUTS)
        cuts = [self.current[:end] for end in range(low, high, step)]
        zeroed = [self.current[: low + (high - low) // 2].ljust(high, b"\0"), self.synced.ljust(high, b"\0")]
        return list(dict.fromkeys([self.synced, *cuts, self.current[:-1], *zeroed, self.current]))

    def _mixtures(self) -> list[bytes]:
        """The same where bytes were changed in place, or space was allocated ahead of them."""
        old, new = self.synced.ljust(len(self.current), b"\0"), self.current.ljust(len(self.synced), b"\0")
        changed = [at for at in range(len(new)) if old[at] != new[at]] or [len(new)]
        low, high = changed[0], changed[-1] + 1
        found = [self.synced, self.current]
        coarse = max(1, (high - low) // _ENDS)
        for cut in range(low, high, 1 if high - low <= EVERY_CUT else max(1, (high - low) // CUTS)):
            found.append(new[:cut] + old[cut:])
            if (cut - low) % coarse == 0:
                found += [found[-1][: len(self.synced)], old[:cut] + new[cut:]]
        return list(dict.fromkeys(found))


@dataclass(slots=True)
class _Disk:
    """The disk after some events: `durable` names, and per directory the changes of names that are not durable yet."""

    files: dict[int, _File] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    pending: dict[str, list[dict[str, int | None]]] = field(default_factory=dict)

    @classmethod
    def of(cls, recorder: RecordingOps) -> _Disk:
        """The disk as the recorder found it."""
        disk = cls()
        for number, (path, data) in enumerate(recorder.start.items()):
            disk.files[-1 - number] = _File(data, data)
            disk.names[path] = disk.durable[path] = -1 - number
        return disk

    def live(self) -> dict[str, bytes]:
        """What is there while the machine runs, as path to bytes."""
        return {path: self.files[number].current for path, number in self.names.items()}

    def apply(self, event: Event) -> None:
        if event.name == "create":
            self.files[event.file] = _File()
            self._change(event.path, {event.path: event.file})
        elif event.name == "write":
            file = self.files[event.file]
            end = event.offset + len(event.data)
            file.current = file.current[: event.offset].ljust(event.offset, b"\0") + event.data + file.current[end:]
        elif event.name in ("allocate", "truncate"):
            file = self.files[event.file]
            file.current = file.current[: event.offset].ljust(event.offset, b"\0")
        elif event.name == "sync":
            file = self.files[event.file]
            file.synced = file.current
        elif event.name == "sync_directory":
            for change in self.pending.pop("" if event.path == "." else event.path, []):
                _merge(self.durable, change)
        elif event.name == "link":
            self._change(event.target, {event.target: self.names[event.path]})
        elif event.name == "rename":
            self._change(event.target, {event.path: None, event.target: self.names[event.path]})
        elif event.name == "unlink":
            self._change(event.path, {event.path: None})

    def _change(self, path: str, change: dict[str, int | None]) -> None:
        _merge(self.names, change)
        self.pending.setdefault(os.path.dirname(path), []).append(change)

    def states(self) -> Iterator[dict[str, bytes]]:
        """Every legal content of the disk after a crash at this point, as path to bytes."""
        choosable = [change for directory, all_ in self.pending.items() if directory != "tmp" for change in all_]
        scratch = self.pending.get("tmp", [])
        for chosen in itertools.product((True, False), repeat=len(choosable)):
            names = dict(self.durable)
            for change in scratch:
                _merge(names, change)
            for change, taken in zip(choosable, chosen, strict=True):
                if taken:
                    _merge(names, change)
            paths = sorted(names)
            reachable = sorted({names[path] for path in paths if not path.startswith("tmp/")})
            for contents in itertools.product(*(self.files[number].variants() for number in reachable)):
                content = dict(zip(reachable, contents, strict=True))
                yield {path: content.get(names[path], self.files[names[path]].current) for path in paths}


def _merge(names: dict[str, int], change: Mapping[str, int | None]) -> None:
    for path, number in change.items():
        if number is None:
            names.pop(path, None)
        else:
            names[path] = number


@dataclass(frozen=True, slots=True)
class CrashState:
    """The files that a crash left, the marks passed before it, and the name of the next event, for messages."""

    files: Mapping[str, bytes]
    marks: tuple[str, ...]
    at: str

    def write(self, root: Path) -> Path:
        """Make the store of this state in a new directory."""
        for directory in ("log", "packs", "tmp", "leases"):
            (root / directory).mkdir(parents=True)
        for path, data in self.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        return root


def kill_states(recorder: RecordingOps) -> Iterator[CrashState]:
    """Every state that a killed process leaves: all that was written is there, the last write perhaps in part."""
    disk = _Disk.of(recorder)
    marks: list[str] = []
    for event in (*recorder.events, Event("end")):
        for cut in range(1, len(event.data), max(1, len(event.data) // CUTS)):
            torn = copy.deepcopy(disk)
            torn.apply(dataclasses.replace(event, data=event.data[:cut]))
            yield CrashState(torn.live(), tuple(marks), f"in {event.name} at byte {cut}")
        yield CrashState(disk.live(), tuple(marks), f"before {event.name} {event.path}{event.target}")
        if event.name == "mark":
            marks.append(event.mark)
        else:
            disk.apply(event)


def crash_states(recorder: RecordingOps) -> Iterator[CrashState]:
    """Every distinct state that a crash before any recorded event, or after the last, may leave."""
    disk = _Disk.of(recorder)
    marks: list[str] = []
    seen: set[tuple[object, ...]] = set()
    events: Sequence[Event] = recorder.events
    for event in (*events, Event("end")):
        for files in disk.states():
            key = (tuple(marks), *sorted((path, data) for path, data in files.items() if not path.startswith("tmp/")))
            if key not in seen:
                seen.add(key)
                yield CrashState(files, tuple(marks), f"before {event.name} {event.path}{event.target}")
        if event.name == "mark":
            marks.append(event.mark)
        else:
            disk.apply(event)
