"""The contract between the store and the place where its truth lies, and the local directory that fulfils it.

Keys are ASCII, relative, with `/` between parts, so that a local directory and a bucket prefix can hold the same
store. Packs and log records never change once their key exists.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from moonclipfs.errors import (
    BackendError,
    ExistsError,
    LimitError,
    MoonclipError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    QuotaError,
    ReadOnlyError,
)
from moonclipfs.store import ofd
from moonclipfs.types import Buffer


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One stored key and the length of its value in bytes."""

    key: str
    size: int
    modified_ns: int = 0
    """When the value was stored, by whatever clock: a hint for choosing, never for correctness."""


class Upload(Protocol):
    """A value being written piece by piece; invisible until `publish`."""

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        ...

    def write(self, data: Buffer) -> None:
        """Append `data`. Raises NoSpaceError or BackendError."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset` of what was written; shorter only at its end."""
        ...

    def publish(self, key: str) -> None:
        """Make the value durable, then visible under `key`, then that name durable.

        Raises ExistsError when the key is taken. After any other error the value may or may not be visible: nobody
        may take it away again, since others may have seen it.
        """
        ...

    def abort(self) -> None:
        """Throw the value away; never raises, harmless after `publish`."""
        ...


class Value(Protocol):
    """A stored value held open for reading, whatever becomes of its key."""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`; shorter only at the end of the value.

        Raises BackendError, and NotFoundError where a value cannot be held open against its deletion.
        """
        ...

    def size(self) -> int:
        """Length of the value in bytes."""
        ...

    def deleted(self) -> bool:
        """Whether its key is gone, so that holding it open alone keeps its space from being freed."""
        ...


class Backend(Protocol):
    """Where packs, log and config lie. All methods may be called from several threads.

    A value is never empty: a key of no bytes is one that somebody began to create, and counts as absent.
    """

    owner: str
    """Name of the lease of this process: uploads carry it, so that those of dead owners can be told."""

    def path(self, key: str) -> str:
        """Where a key lies, for messages."""
        ...

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes at `offset` (to the end when None); shorter only at the end of the value.

        Raises NotFoundError or BackendError.
        """
        ...

    def open(self, key: str) -> Value:
        """Hold a value open for many reads. Raises NotFoundError or BackendError."""
        ...

    def create(self, key: str, data: Buffer) -> None:
        """Store a whole value under a new key, durably and atomically. Raises ExistsError when the key exists."""
        ...

    def settle(self, prefix: str) -> None:
        """Make every name directly below `prefix` durable, whoever made or deleted it."""
        ...

    def upload(self) -> Upload:
        """Begin a value whose length is not known."""
        ...

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """Yield every key directly below `prefix` (which ends with `/`), in no order."""
        ...

    def size(self, key: str) -> int:
        """Length of a value in bytes. Raises NotFoundError."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key; no error when it does not exist."""
        ...


class FileOps:
    """The system calls behind `LocalBackend` that change something, so that tests can record, drop or fail them."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """open(2)."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def write(self, fd: int, data: Buffer) -> int:
        """write(2): may write less than asked."""
        return os.write(fd, data)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        """pwrite(2): may write less than asked."""
        return os.pwrite(fd, data, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """posix_fallocate(3): the range has its space on the disk, and reads as zeros where nothing was written."""
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, size: int) -> None:
        """ftruncate(2)."""
        os.ftruncate(fd, size)

    def fdatasync(self, fd: int) -> None:
        """fdatasync(2): the bytes and the size of a file."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """fsync(2)."""
        os.fsync(fd)

    def link(self, source: str, target: str) -> None:
        """link(2): fails with EEXIST when the target exists."""
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        """rename(2)."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """unlink(2)."""
        os.unlink(path)

    def mkdir(self, path: str, mode: int) -> None:
        """mkdir(2)."""
        os.mkdir(path, mode)

    def close(self, fd: int) -> None:
        """close(2)."""
        os.close(fd)


class UnsyncedOps(FileOps):
    """Syncs nothing: what is written survives a crash of the program, not a power cut."""

    def fdatasync(self, fd: int) -> None:
        """Nothing."""

    def fsync(self, fd: int) -> None:
        """Nothing."""


def default_ops() -> FileOps:
    """Those that sync, unless $MOONCLIPFS_FSYNC is 0."""
    return UnsyncedOps() if os.environ.get("MOONCLIPFS_FSYNC") == "0" else FileOps()


class os_errors:
    """Turn an OSError into the project's error of its kind, with `doing` (a verb and a path) in front.

    No generator: its frame and the error would hold each other, and with them whatever file the error is about, until
    garbage is looked for.
    """

    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> Literal[False]:
        if isinstance(error, OSError):
            raise from_os_error(error, self._doing) from error
        return False


_KINDS: dict[int, type[MoonclipError]] = {
    errno.ENOENT: NotFoundError,
    errno.ENOTDIR: NotFoundError,
    errno.ESTALE: NotFoundError,  # a file held open over NFS that another client deleted
    errno.EEXIST: ExistsError,
    errno.ENOSPC: NoSpaceError,
    errno.EDQUOT: QuotaError,
    errno.EFBIG: LimitError,  # of the disk's file system, 16 TiB on ext4
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
    errno.EROFS: ReadOnlyError,
}

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK})
"""What link(2) answers on file systems that have none, or none between two directories."""


def from_os_error(error: OSError, doing: str) -> MoonclipError:
    """The project's error for an OSError met while `doing` something."""
    kind = _KINDS.get(error.errno or 0, BackendError)
    return kind(f"cannot {doing}: {error.strerror or error}")


class LocalValue:
    """A file held open. Its descriptor closes when the last reader lets go of this object, never under one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        with os_errors(f"read {path}"):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if not self.size():
                raise FileNotFoundError(errno.ENOENT, "it is empty")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, offset: int, length: int) -> bytes:
        """See `Value.read`."""
        with os_errors(f"read {self._path}"):
            return read_range(self._fd, offset, length)

    def size(self) -> int:
        """See `Value.size`."""
        return os.fstat(self._fd).st_size

    def deleted(self) -> bool:
        """See `Value.deleted`."""
        # By its path, not its count of links: NFS keeps an open file under another name when it is deleted.
        return not os.path.exists(self._path)


class LocalUpload:
    """An upload into a local directory: a file under `tmp/` until it is published."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._path = backend.path(f"tmp/{backend.owner}-{secrets.token_hex(8)}")
        self.offset = 0
        self._open = False
        with os_errors(f"create {self._path}"):
            self._fd = backend.open_new(self._path)
        self._open = True

    def write(self, data: Buffer) -> None:
        """Append `data`. Raises NoSpaceError or BackendError."""
        view = memoryview(data).cast("B")
        with os_errors(f"write {self._path}"):
            while view:
                written = self._backend.ops.write(self._fd, view)
                self.offset += written
                view = view[written:]

    def read(self, offset: int, length: int) -> bytes:
        """See `Upload.read`."""
        with os_errors(f"read {self._path}"):
            return read_range(self._fd, offset, length)

    def publish(self, key: str) -> None:
        """fsync the bytes, give them their name exclusively, fsync the directory: in this order."""
        target = self._backend.path(key)
        with os_errors(f"publish {target}"):
            self._backend.ops.fsync(self._fd)
            self._name(target)
            self._backend.sync_directory(os.path.dirname(target))
        self.abort()

    def publish_over(self, target: str) -> None:
        """The same in place of what has the name."""
        with os_errors(f"replace {target}"):
            self._backend.ops.fsync(self._fd)
            self._backend.ops.rename(self._path, target)
            self._backend.sync_directory(os.path.dirname(target))

    def _name(self, target: str) -> None:
        try:
            self._backend.ops.link(self._path, target)
        except FileExistsError:
            found = os.stat(target)
            # Over NFS a request whose answer was lost is repeated, and the repetition finds our own link.
            if os.path.samestat(found, os.fstat(self._fd)):
                return
            if found.st_size:
                raise
            self._claim(target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._claim(target)

    def _claim(self, target: str) -> None:
        """Name the value without link(2): an empty, locked file claims the name, then a rename fills it.

        A crash in between leaves an empty file. It counts as absent, and whoever creates that key next takes it
        over: the lock says that its maker is gone.
        """
        ops = self._backend.ops
        fd = ops.open(target, os.O_RDWR | os.O_CREAT, self._backend.file_mode)
        try:
            taken = os.fstat(fd).st_size > 0 or not ofd.lock(fd)
            # Somebody may have filled the name between our open and our lock: then it leads to another file.
            if taken or not os.path.samestat(os.stat(target), os.fstat(fd)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            ops.rename(self._path, target)
        finally:
            ops.close(fd)

    def abort(self) -> None:
        """See `Upload.abort`."""
        if self._open:
            self._open = False
            # What cannot be removed stays in tmp/, where it harms nobody until its owner is dead and gc clears it.
            with suppress(OSError):
                self._backend.ops.close(self._fd)
            with suppress(OSError):
                self._backend.ops.unlink(self._path)


class LocalBackend:
    """A store in a local (or network) directory."""

    def __init__(self, root: str | os.PathLike[str], ops: FileOps | None = None, *, shared: bool = False) -> None:
        """`shared` lets the group in: files are made 0660 instead of 0600."""
        self.root = Path(root)
        self.ops = ops or default_ops()
        self.owner = secrets.token_hex(16)
        self.file_mode = 0o660 if shared else 0o600

    def path(self, key: str) -> str:
        """The file of a key. Keys are made by this package and never hold `..`."""
        return os.path.join(self.root, key)

    def open_new(self, path: str) -> int:
        """Create a file for reading and writing; the umask takes nothing from the mode of a shared store."""
        fd = self.ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self.file_mode)
        if self.file_mode & 0o070:
            os.fchmod(fd, self.file_mode)
        return fd

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        fd = self.ops.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.ops.fsync(fd)
        finally:
            self.ops.close(fd)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `Backend.read`."""
        value = self.open(key)
        return value.read(offset, value.size() - offset if length is None else length)

    def open(self, key: str) -> LocalValue:
        """See `Backend.open`."""
        return LocalValue(self.path(key))

    def create(self, key: str, data: Buffer) -> None:
        """See `Backend.create`."""
        upload = self.upload()
        try:
            upload.write(data)
            upload.publish(key)
        finally:
            upload.abort()

    def replace(self, key: str, data: Buffer) -> None:
        """Store a whole value in place of the one that a key has, durably and atomically. For keys that nobody
        creates. Raises NoSpaceError, PermissionDeniedError, BackendError.
        """
        target = self.path(key)
        upload = self.upload()
        try:
            upload.write(data)
            upload.publish_over(target)
        finally:
            upload.abort()

    def settle(self, prefix: str) -> None:
        """See `Backend.settle`."""
        with os_errors(f"sync {self.path(prefix)}"):
            self.sync_directory(self.path(prefix))

    def upload(self) -> LocalUpload:
        """See `Backend.upload`."""
        return LocalUpload(self)

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """See `Backend.list`."""
        path = self.path(prefix)
        with os_errors(f"list {path}"), os.scandir(path) as entries:
            for entry in entries:
                try:
                    found = entry.stat()
                except FileNotFoundError:
                    continue  # deleted between the listing and the stat: not in the list, then
                if stat.S_ISREG(found.st_mode) and found.st_size:
                    yield KeyInfo(prefix + entry.name, found.st_size, found.st_mtime_ns)

    def size(self, key: str) -> int:
        """See `Backend.size`."""
        return self.open(key).size()

    def delete(self, key: str) -> None:
        """See `Backend.delete`."""
        with os_errors(f"delete {self.path(key)}"), suppress(FileNotFoundError):
            self.ops.unlink(self.path(key))


def mode_of_files(directory: str | os.PathLike[str]) -> int:
    """The mode of files made in a directory of a store: where the group may write, it gets into the files too."""
    return 0o660 if os.stat(directory).st_mode & stat.S_IWGRP else 0o600


def read_range(fd: int, offset: int, length: int) -> bytes:
    """Read up to `length` bytes at `offset`; shorter only at the end of the file."""
    if length <= 0:
        return b""
    data = os.pread(fd, length, offset)
    if len(data) in (0, length):
        return data
    parts = [data]
    total = len(data)
    while total < length and (data := os.pread(fd, length - total, offset + total)):
        parts.append(data)
        total += len(data)
    return b"".join(parts)
