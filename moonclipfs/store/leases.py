"""Leases: which processes work on a store, and how old the state is that each still relies on.

A lease is a file that its owner keeps locked for life, so a process that was stopped keeps its lease and one that was
killed loses it at once. Deleting is safe by this rule: a pack that log record C condemned may go when every live
lease has seen C and holds no record before C. Therefore take a hold first, and read the names to rely on after it.

Locks of some network file systems work within one host only. There the owner also counts up, and a process of
another host calls it dead only when the lock is free and the count stood still for long on its own clock.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from moonclipfs import limits
from moonclipfs.errors import LeaseLostError, LimitError
from moonclipfs.store import hostfs, ofd
from moonclipfs.store.backend import mode_of_files, os_errors

_BYTES = 4096
"""Length of a lease file. Fixed, so that rewriting it in place needs no space."""
_PURPOSE_BYTES = 2048
_READ_ATTEMPTS = 20
_SUFFIX = ".lease"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""What locking answers on file systems that have none."""


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What another process says of itself. `hold` is the oldest log record that it relies on, None for none.

    `name`, 32 hexadecimal digits, begins the names of its uploads. Host, boot and pid are for messages.
    """

    name: str
    seen: int
    hold: int | None
    pid: int
    host: str
    boot: str
    purpose: str
    count: int

    def allows(self, condemned: int) -> bool:
        """Whether what record `condemned` condemned may be deleted for all that this process knows and holds."""
        return self.seen >= condemned and (self.hold is None or self.hold >= condemned)


class Hold:
    """A claim on the state after one log record; a context manager that releases it."""

    def __init__(self, lease: Lease, sequence: int) -> None:
        self.sequence = sequence
        self._lease = lease

    def release(self) -> None:
        """Give the claim up; harmless when that was done."""
        self._lease._drop(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Lease:
    """The lease of this process on one store. Thread-safe. A forked child has none: it opens the store anew."""

    def __init__(self, path: Path, fd: int, purpose: str, sequence: int) -> None:
        self.path = path
        self.purpose = purpose
        self._fd = fd
        self._lock = threading.Lock()
        self._seen = sequence
        self._holds: set[Hold] = set()
        self._count = 0
        self._boot = _boot_id()
        self._written: tuple[int, int | None] | None = None
        self._stop = threading.Event()

    @classmethod
    def acquire(cls, root: Path, purpose: str, sequence: int) -> Lease:
        """Make a lease that has seen log record `sequence`; 0 is always safe. `purpose` tells others what this is.

        Raises PermissionDeniedError (ReadOnlyError) where the store's directory cannot be written, NoSpaceError,
        LimitError for a purpose of more than 2048 bytes of JSON.
        """
        if len(json.dumps(purpose)) > _PURPOSE_BYTES:
            raise LimitError(f"the purpose of a lease is longer than {_PURPOSE_BYTES} bytes of JSON")
        directory = Path(root) / "leases"
        with os_errors(f"make a lease in {directory}"):
            mode = mode_of_files(directory)
            while (lease := cls._try(directory, mode, purpose, sequence)) is None:
                pass
        _ours.add(lease)
        if not hostfs.is_local(directory):
            threading.Thread(target=lease._count_up, name="lease", daemon=True).start()
        return lease

    @classmethod
    def _try(cls, directory: Path, mode: int, purpose: str, sequence: int) -> Lease | None:
        """A lease, or None: between its creation and its lock, another process may take it for a dead one's."""
        path = directory / f"{secrets.token_hex(16)}{_SUFFIX}"
        lease = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), purpose, sequence)
        try:
            os.fchmod(lease._fd, mode)
            if _lock(lease._fd) and lease._is_there():
                lease._write()
                return lease
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(path)
            lease._close()
            raise
        lease._close()
        return None

    @property
    def name(self) -> str:
        """32 hexadecimal digits; the uploads of this process begin with them."""
        return self.path.name.removesuffix(_SUFFIX)

    def seen(self, sequence: int) -> None:
        """Say that this process has read the log up to record `sequence` and acts by it. Raises LeaseLostError."""
        with self._lock:
            self._seen = max(self._seen, sequence)
            self._update()

    def hold(self, sequence: int) -> Hold:
        """Claim that nothing which the state after record `sequence` needs is deleted, until the hold is released.

        `sequence` is that of names read before; the names to rely on are read after, since what was condemned
        meanwhile may be gone. Raises LeaseLostError.
        """
        with self._lock:
            hold = Hold(self, sequence)
            self._holds.add(hold)
            self._update()
            return hold

    def check(self) -> None:
        """Raise LeaseLostError when another process took this one for dead: then nothing may be published."""
        with os_errors(f"check the lease {self.path}"):
            if self._fd < 0 or not self._is_there() or not _lock(self._fd):
                raise LeaseLostError(
                    f"the lease {self.path} is lost: others took this process for dead; open the store again"
                )

    def release(self) -> None:
        """Give the lease up; harmless when that was done, or in a forked child."""
        _ours.discard(self)
        self._stop.set()
        with self._lock:
            if self._fd >= 0:
                with os_errors(f"remove the lease {self.path}"):
                    if self._is_there():
                        os.unlink(self.path)
                    # Closing alone would leave the lock with a child that shares the open file.
                    with suppress(OSError):
                        ofd.unlock(self._fd)
                    self._close()

    def _drop(self, hold: Hold) -> None:
        with self._lock:
            if hold in self._holds:
                self._holds.remove(hold)
                if self._fd >= 0:
                    self._update()

    def _update(self) -> None:
        if self._fd < 0:
            raise LeaseLostError(f"the lease {self.path} is not held any more: open the store again")
        with os_errors(f"write the lease {self.path}"):
            if self._written != (self._seen, self._oldest()):
                self._write()

    def _oldest(self) -> int | None:
        return min((hold.sequence for hold in self._holds), default=None)

    def _write(self) -> None:
        hold = self._oldest()
        fields = {
            "seen": self._seen,
            "hold": hold,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": self._boot,
            "purpose": self.purpose,
            "count": self._count,
        }
        text = json.dumps(fields).encode()
        digest = hashlib.sha256(text).hexdigest().encode()
        os.pwrite(self._fd, (digest + b" " + text).ljust(_BYTES - 1) + b"\n", 0)
        self._written = (self._seen, hold)

    def _count_up(self) -> None:
        while not self._stop.wait(limits.LEASE_REFRESH_SECONDS):
            with self._lock:
                if self._fd < 0:
                    return
                self._count += 1
                # A write that fails makes others call us dead in the end; `check` tells then.
                with suppress(OSError):
                    self._write()

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


_ours: weakref.WeakSet[Lease] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child: the lock belongs to the open file, and would outlive the parent as long as we keep it."""
    for lease in list(_ours):
        lease._lock = threading.Lock()
        lease._close()
    _ours.clear()


os.register_at_fork(after_in_child=_close_inherited)


def live_leases(root: Path, patience: float = 0.0) -> list[LeaseState]:
    """Return the leases of processes that may be alive, and clear those of dead ones.

    A lease that cannot be read counts as one that has seen nothing. Where locks do not reach other hosts, a lease of
    another host counts as alive until it was silent for `limits.LEASE_SILENCE_SECONDS` under the eyes of this
    process; up to `patience` seconds are spent watching. Raises BackendError when the directory cannot be listed.
    """
    directory = Path(root) / "leases"
    local = hostfs.is_local(directory)
    deadline = time.monotonic() + patience
    while True:
        with os_errors(f"list {directory}"):
            paths = sorted(directory / name for name in os.listdir(directory) if name.endswith(_SUFFIX))
            found = [answer for path in paths if (answer := _examine(path, local)) is not None]
        if time.monotonic() >= deadline or not any(suspect for _, suspect in found):
            return [state for state, _ in found]
        time.sleep(limits.LEASE_REFRESH_SECONDS)


def _examine(path: Path, local: bool) -> tuple[LeaseState, bool] | None:
    """The state of a lease and whether it may belong to a dead process of another host; None for a dead one's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError:
        return _unknown(path), False
    try:
        state = _read(fd, path)
        locked = _is_locked(fd)
    finally:
        os.close(fd)
    if locked:
        return state, False
    if (locked is None or not (local or state.boot == _boot_id())) and not _is_silent(path, state):
        return state, True
    with suppress(OSError):  # who may not clear it still knows that it is dead
        os.unlink(path)
    return None


def _is_silent(path: Path, state: LeaseState) -> bool:
    """Whether the owner has not counted up for so long, on this process's clock, that it is dead."""
    now = time.monotonic()
    count, since = _observed.get(path, (None, now))
    if count != state.count:
        since = now
    _observed[path] = (state.count, since)
    return now - since >= limits.LEASE_SILENCE_SECONDS


_observed: dict[Path, tuple[int | None, float]] = {}


def _read(fd: int, path: Path) -> LeaseState:
    for _ in range(_READ_ATTEMPTS):
        digest, _, text = os.pread(fd, _BYTES, 0).rstrip().partition(b" ")
        if hashlib.sha256(text).hexdigest().encode() == digest:
            with suppress(ValueError, TypeError):
                return LeaseState(name=path.name.removesuffix(_SUFFIX), **json.loads(text))
        time.sleep(0.001)  # it is being rewritten
    return _unknown(path)


def _unknown(path: Path) -> LeaseState:
    return LeaseState(path.name.removesuffix(_SUFFIX), 0, 0, 0, "", "", "unknown", 0)


def _lock(fd: int) -> bool:
    """Lock a lease; True also where the file system has no locks: there the count alone tells who is alive."""
    try:
        return ofd.lock(fd)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        raise


def _is_locked(fd: int) -> bool | None:
    """Whether the owner of a lease holds its lock; None where the file system has no locks."""
    try:
        return ofd.is_locked(fd)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise


def _boot_id() -> str:
    """Processes that agree on it see each other's locks."""
    return hostfs.boot_id() or socket.gethostname()
