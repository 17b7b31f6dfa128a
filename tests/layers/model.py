"""A reference model of a writable tree: what POSIX says, in plain dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from moonclipfs.errors import (
    DirectoryError,
    ExistsError,
    NameTooLongError,
    NoDirectoryError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    UsageError,
)
from moonclipfs.types import EntryType


@dataclass(eq=False)
class Node:
    """A file or directory of the model. `number` is the inode number that it was first seen with."""

    type: EntryType
    mode: int
    uid: int = 0
    gid: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    data: bytes = b""
    links: int = 1
    target: bytes = b""
    bound: bool = False
    number: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    entries: dict[bytes, Node] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.target or self.data)

    @property
    def is_directory(self) -> bool:
        return self.type is EntryType.DIRECTORY

    def touch(self, now: int) -> None:
        self.mtime_ns = self.ctime_ns = now

    def nlink(self) -> int:
        if not self.is_directory:
            return self.links
        return 2 + sum(child.is_directory for child in self.entries.values())

    def walk(self, path: bytes = b"") -> Iterator[tuple[bytes, Node, Node, bytes]]:
        """(path, node, directory, name) of everything below."""
        for name, child in list(self.entries.items()):
            at = path + b"/" + name if path else name
            yield at, child, self, name
            if child.is_directory:
                yield from child.walk(at)

    def holds(self, node: Node) -> bool:
        return self is node or any(child is node for _, child, _, _ in self.walk())

    def has_bound(self) -> bool:
        return self.bound or any(child.bound for _, child, _, _ in self.walk())


class Model:
    """What POSIX says of a tree: each method changes it, or raises what the layer has to raise."""

    def __init__(self) -> None:
        self.root = Node(EntryType.DIRECTORY, 0o755)
        self.reserved = True
        """Whether names that begin with @ are taken at the root."""

    def _new(self, directory: Node, name: bytes) -> None:
        if not directory.is_directory:
            raise NoDirectoryError
        if len(name) > 255:
            raise NameTooLongError
        if self.reserved and directory is self.root and name.startswith(b"@"):
            raise NotPermittedError

    def make(
        self, directory: Node, name: bytes, type_: EntryType, mode: int, uid: int, gid: int, now: int, target: bytes
    ) -> None:
        self._new(directory, name)
        if name in directory.entries:
            raise ExistsError
        node = Node(type_, mode, uid, gid, now, now, now, target=target)
        if directory.mode & 0o2000:
            node.gid = directory.gid
            node.mode |= 0o2000 if node.is_directory else 0
        directory.entries[name] = node
        directory.touch(now)

    def link(self, node: Node, directory: Node, name: bytes, now: int) -> None:
        self._new(directory, name)
        if name in directory.entries:
            raise ExistsError
        if node.is_directory:
            raise NotPermittedError
        directory.entries[name] = node
        node.links += 1
        node.ctime_ns = now
        directory.touch(now)

    def _get(self, directory: Node, name: bytes) -> Node:
        if not directory.is_directory:
            raise NoDirectoryError
        if len(name) > 255:
            raise NameTooLongError
        if name not in directory.entries:
            raise NotFoundError
        return directory.entries[name]

    def unlink(self, directory: Node, name: bytes, now: int) -> None:
        node = self._get(directory, name)
        if node.is_directory:
            raise DirectoryError
        self._leave(directory, name, now)
        directory.touch(now)

    def rmdir(self, directory: Node, name: bytes, now: int) -> None:
        node = self._get(directory, name)
        if not node.is_directory:
            raise NoDirectoryError
        if node.entries:
            raise NotEmptyError
        self._leave(directory, name, now)
        directory.touch(now)

    def _leave(self, directory: Node, name: bytes, now: int) -> None:
        node = directory.entries.pop(name)
        node.links -= 1
        node.ctime_ns = now

    def rename(
        self, directory: Node, name: bytes, new: Node, new_name: bytes, now: int, replace: bool, exchange: bool
    ) -> None:
        node = self._get(directory, name)
        self._new(new, new_name)
        victim = new.entries.get(new_name)
        self._check_rename(node, directory, victim, new, replace, exchange)
        if victim is node:
            return
        if exchange:
            assert victim is not None
            if node.is_directory and victim.is_directory and node.has_bound() and victim.has_bound():
                raise UsageError
            directory.entries[name] = victim
            victim.ctime_ns = now
        else:
            if victim is not None:
                self._leave(new, new_name, now)
            del directory.entries[name]
        new.entries[new_name] = node
        node.ctime_ns = now
        directory.touch(now)
        new.touch(now)

    def _check_rename(
        self, node: Node, directory: Node, victim: Node | None, new: Node, replace: bool, exchange: bool
    ) -> None:
        if exchange and victim is None:
            raise NotFoundError
        if victim is not None and not (replace or exchange):
            raise ExistsError
        if node.is_directory and node.holds(new):
            raise UsageError
        if victim is None or victim is node:
            return
        if victim.holds(directory):
            raise UsageError if exchange else NotEmptyError
        if exchange:
            return
        if node.is_directory and not victim.is_directory:
            raise NoDirectoryError
        if victim.is_directory and not node.is_directory:
            raise DirectoryError
        if victim.entries:
            raise NotEmptyError

    def set_attributes(
        self, node: Node, now: int, mode: int | None, uid: int | None, gid: int | None, mtime: int | None
    ) -> None:
        if mode is None and (uid is not None or gid is not None) and not node.is_directory:
            mode = node.mode & ~0o4000
            mode &= ~0o2000 if node.mode & 0o010 else ~0
        node.mode = node.mode if mode is None else mode
        node.uid = node.uid if uid is None else uid
        node.gid = node.gid if gid is None else gid
        node.mtime_ns = node.mtime_ns if mtime is None else mtime
        node.ctime_ns = now

    def write(self, node: Node, offset: int, data: bytes, now: int) -> None:
        node.data = node.data.ljust(offset, b"\0")
        node.data = node.data[:offset] + data + node.data[offset + len(data) :]
        self._wrote(node, now)

    def truncate(self, node: Node, size: int, now: int) -> None:
        node.data = node.data[:size].ljust(size, b"\0")
        self._wrote(node, now)

    def _wrote(self, node: Node, now: int) -> None:
        node.mode &= ~0o4000
        node.mode &= ~0o2000 if node.mode & 0o010 else ~0
        node.touch(now)

    def set_xattr(self, node: Node, name: bytes, value: bytes | None, now: int) -> None:
        if name.startswith(b"user.moonclip."):
            raise NotPermittedError
        if value is not None:
            node.xattrs[name] = value
        elif node.xattrs.pop(name, None) is None:
            raise NotFoundError
        node.ctime_ns = now
