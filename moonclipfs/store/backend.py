"""The contract between the store and the place where its truth lies, and the local directory that fulfils it.

Keys are ASCII, relative, with `/` between parts, so that a local directory and a bucket prefix can hold the same
store. Packs and log records never change once their key exists.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moonclipfs.errors import (
    BackendError,
    ExistsError,
    MoonclipError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    ReadOnlyError,
)
from moonclipfs.types import Buffer


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One stored key and the length of its value in bytes."""

    key: str
    size: int


class Upload(Protocol):
    """A value being written piece by piece; invisible until `publish`."""

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        ...

    def write(self, data: Buffer) -> None:
        """Append `data`. Raises NoSpaceError or BackendError."""
        ...

    def publish(self, key: str) -> None:
        """Make the value durable, then visible under `key`, then that name durable. Raises ExistsError."""
        ...

    def abort(self) -> None:
        """Throw the value away; harmless after `publish`."""
        ...


class Backend(Protocol):
    """Where packs, log and config lie. All methods may be called from several threads."""

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes at `offset` (to the end when None); shorter only at the end of the value.

        Raises NotFoundError or BackendError.
        """
        ...

    def create(self, key: str, data: Buffer) -> None:
        """Store a whole value under a new key, durably and atomically. Raises ExistsError when the key exists."""
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
    """The system calls behind `LocalBackend`, one method each, so that tests can record, drop or fail them."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """open(2)."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def write(self, fd: int, data: Buffer) -> int:
        """write(2): may write less than asked."""
        return os.write(fd, data)

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

    def close(self, fd: int) -> None:
        """close(2)."""
        os.close(fd)


@contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """Turn an OSError into the project's error of its kind, with `doing` (a verb and a path) in front."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, doing) from error


_KINDS: dict[int, type[MoonclipError]] = {
    errno.ENOENT: NotFoundError,
    errno.ENOTDIR: NotFoundError,
    errno.EEXIST: ExistsError,
    errno.ENOSPC: NoSpaceError,
    errno.EDQUOT: NoSpaceError,
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
    errno.EROFS: ReadOnlyError,
}


def from_os_error(error: OSError, doing: str) -> MoonclipError:
    """The project's error for an OSError met while `doing` something."""
    kind = _KINDS.get(error.errno or 0, BackendError)
    return kind(f"cannot {doing}: {error.strerror or error}")


class LocalUpload:
    """An upload into a local directory: a file under `tmp/` until it is published."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._path = backend.path(f"tmp/{secrets.token_hex(8)}")
        self.offset = 0
        with os_errors(f"create {self._path}"):
            self._fd = backend.ops.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, backend.file_mode)
        self._open = True

    def write(self, data: Buffer) -> None:
        """Append `data`. Raises NoSpaceError or BackendError."""
        view = memoryview(data).cast("B")
        with os_errors(f"write {self._path}"):
            while view:
                written = self._backend.ops.write(self._fd, view)
                self.offset += written
                view = view[written:]

    def publish(self, key: str) -> None:
        """fsync the bytes, give them their name exclusively, fsync the directory: in this order."""
        ops, target = self._backend.ops, self._backend.path(key)
        with os_errors(f"publish {target}"):
            ops.fsync(self._fd)
            ops.link(self._path, target)
            self._backend.sync_directory(os.path.dirname(target))
        self.abort()

    def abort(self) -> None:
        """Throw the temporary name away; harmless after `publish`."""
        if self._open:
            self._open = False
            with os_errors(f"remove {self._path}"):
                self._backend.ops.close(self._fd)
                self._backend.ops.unlink(self._path)


class LocalBackend:
    """A store in a local (or network) directory."""

    def __init__(self, root: str | os.PathLike[str], ops: FileOps | None = None, *, shared: bool = False) -> None:
        """`shared` lets the group in: files are made 0660 instead of 0600."""
        self.root = Path(root)
        self.ops = ops or FileOps()
        self.file_mode = 0o660 if shared else 0o600

    def path(self, key: str) -> str:
        """The file of a key. Keys are made by this package and never hold `..`."""
        return os.path.join(self.root, key)

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        fd = self.ops.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.ops.fsync(fd)
        finally:
            self.ops.close(fd)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `Backend.read`."""
        path = self.path(key)
        with os_errors(f"read {path}"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return read_range(fd, offset, os.fstat(fd).st_size - offset if length is None else length)
            finally:
                os.close(fd)

    def create(self, key: str, data: Buffer) -> None:
        """See `Backend.create`."""
        upload = self.upload()
        try:
            upload.write(data)
            upload.publish(key)
        finally:
            upload.abort()

    def upload(self) -> LocalUpload:
        """See `Backend.upload`."""
        return LocalUpload(self)

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """See `Backend.list`."""
        path = self.path(prefix)
        with os_errors(f"list {path}"), os.scandir(path) as entries:
            for entry in entries:
                try:
                    yield KeyInfo(prefix + entry.name, entry.stat().st_size)
                except FileNotFoundError:
                    continue  # deleted between the listing and the stat: not in the list, then

    def size(self, key: str) -> int:
        """See `Backend.size`."""
        with os_errors(f"read {self.path(key)}"):
            return os.stat(self.path(key)).st_size

    def delete(self, key: str) -> None:
        """See `Backend.delete`."""
        with os_errors(f"delete {self.path(key)}"):
            try:
                self.ops.unlink(self.path(key))
            except FileNotFoundError:
                return


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
