"""Trees of the host's file system, as they are to be stored: what is where, read without trusting it to stand still."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from moonclipfs import limits
from moonclipfs.errors import BusyError, LimitError, UsageError
from moonclipfs.store.backend import from_os_error, os_errors, read_range
from moonclipfs.types import Attributes, EntryType, natural_key

_TYPES = {entry_type.st_mode: entry_type for entry_type in EntryType}
_XATTR_NAMESPACE = "user."
_NO_XATTRS = frozenset({errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.ENOSYS})


@dataclass(slots=True)
class Found:
    """One file, directory or other entry on disk. `identity` is (device, inode)."""

    name: bytes
    path: bytes
    type: EntryType
    attributes: Attributes
    size: int = 0
    target: bytes = b""
    identity: tuple[int, int] = (0, 0)
    links: int = 1
    children: list[Found] = field(default_factory=list)

    def walk(self) -> Iterator[Found]:
        """This entry and all below it, parents first, in natural order."""
        yield self
        for child in self.children:
            yield from child.walk()


class FileSource:
    """A file of the host as a `types.Source`, of the size that it had when it was found. Thread-safe.

    It is opened by each read, so that any number may exist; a file that was replaced or cut since is an error.
    """

    def __init__(self, found: Found) -> None:
        self._found = found
        self._fd = -1
        self.size = found.size

    def open(self) -> None:
        """Open the file and check that it is the one that was found. Raises BusyError, PermissionDeniedError."""
        with os_errors(f"read {self.name}"):
            self._fd = os.open(self._found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        self.check()

    def close(self) -> None:
        """Close the file; reads open it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def name(self) -> str:
        """The path, for messages."""
        return os.fsdecode(self._found.path)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes. Raises BusyError when the file has become shorter, BackendError."""
        with os_errors(f"read {self.name}"):
            if self._fd >= 0:
                data = read_range(self._fd, offset, length)
            else:
                fd = os.open(self._found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    data = read_range(fd, offset, length)
                finally:
                    os.close(fd)
        if len(data) != length:
            raise BusyError(f"{self.name} changed while it was read: it became shorter; add it when its writer is done")
        return data

    def check(self) -> None:
        """Raise BusyError unless the open file is as it was found."""
        status = os.fstat(self._fd)
        now = (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns
        if now != (self._found.identity, self._found.size, self._found.attributes.mtime_ns):
            raise BusyError(f"{self.name} changed while it was read; add it when its writer is done")


def scan(path: str | os.PathLike[str], *, forbidden: tuple[int, int] | None = None) -> Found:
    """Return what lies at `path`, and below it when it is a directory; a symlink at `path` itself is followed.

    Directories are sorted naturally. Raises NotFoundError, PermissionDeniedError, LimitError, and UsageError for
    devices and for a tree that holds `forbidden`, the (device, inode) of the store itself.
    """
    place = os.fsencode(os.path.realpath(path))
    name = os.path.basename(os.path.abspath(os.fsencode(path)))
    with os_errors(f"read {os.fsdecode(path)}"):
        status = os.stat(place)
    return _found(name, place, status, forbidden, 0)


def links_out(root: Found) -> list[bytes]:
    """The paths of the symbolic links below `root` that lead, over any others, to what is not below it.

    Below a `root` without a path of its own is what its children are.
    """
    # With a slash at the end of each, what starts with another lies in it.
    tops = tuple(os.path.join(one.path, b"") for one in ([root] if root.path else root.children))
    links = (one.path for one in root.walk() if one.type is EntryType.SYMLINK)
    return [link for link in links if not os.path.join(os.path.realpath(link), b"").startswith(tops)]


def _found(name: bytes, path: bytes, status: os.stat_result, forbidden: tuple[int, int] | None, depth: int) -> Found:
    shown = os.fsdecode(path)
    kind = _TYPES.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        raise UsageError(f"{shown} is a device: only files, directories, symlinks, fifos and sockets can be stored")
    identity = status.st_dev, status.st_ino
    if identity == forbidden:
        raise UsageError(f"{shown} is the store itself: it cannot be put into itself")
    found = Found(name, path, kind, _attributes(path, status), identity=identity)
    if kind is EntryType.FILE:
        found.size, found.links = status.st_size, status.st_nlink
    elif kind is EntryType.SYMLINK:
        with os_errors(f"read {shown}"):
            found.target = os.readlink(path)
    elif kind is EntryType.DIRECTORY:
        if depth > limits.PATH_DEPTH:
            raise LimitError(f"{shown}: more than {limits.PATH_DEPTH} directories deep")
        with os_errors(f"read {shown}"), os.scandir(path) as entries:
            inside = [(entry.name, entry.path, entry.stat(follow_symlinks=False)) for entry in entries]
        inside.sort(key=lambda item: (natural_key(os.fsdecode(item[0])), item[0]))
        found.children = [_found(*item, forbidden, depth + 1) for item in inside]
    return found


def _attributes(path: bytes, status: os.stat_result) -> Attributes:
    """The attributes that are kept. The time of the last change of the inode says nothing about a copy: mtime it is."""
    mode = stat.S_IMODE(status.st_mode)
    return Attributes(mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_mtime_ns, _xattrs(path, status))


def _xattrs(path: bytes, status: os.stat_result) -> dict[bytes, bytes]:
    """Extended attributes of the user's namespace; only files and directories can have such."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return {}
    try:
        names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(_XATTR_NAMESPACE)]
        return {os.fsencode(name): os.getxattr(path, name, follow_symlinks=False) for name in sorted(names)}
    except OSError as error:
        if error.errno in _NO_XATTRS:
            return {}
        raise from_os_error(error, f"read the extended attributes of {os.fsdecode(path)}") from error
