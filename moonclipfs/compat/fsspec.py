"""The fsspec file system `moonclip://`: the snapshots of stores, for reading, without a mount.

    moonclip:///data/store/run1/checkpoint-500/model.safetensors                the current version
    moonclip:///data/store/@versions/run1/checkpoint-500/2/model.safetensors    version 2

A path is that of the store, followed by a path as a mount of the store shows it, `@versions` and `@latest` included.
The first directory on the way that is a store is the one meant.
"""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NoReturn

from fsspec.spec import AbstractFileSystem

from moonclipfs import limits
from moonclipfs.api import RawFile
from moonclipfs.errors import MoonclipError, NotFoundError
from moonclipfs.layers.links import follow
from moonclipfs.layers.tree import Node, Tree
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.store import Store
from moonclipfs.store.target import is_store
from moonclipfs.types import EntryType

_TYPES = {EntryType.FILE: "file", EntryType.DIRECTORY: "directory"}


class MoonclipFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Reads any number of stores; every method that would write raises OSError (EROFS)."""

    protocol = "moonclip"
    root_marker = "/"

    def __init__(self, *args: object, **storage_options: object) -> None:
        super().__init__(*args, **storage_options)
        self._lock = threading.Lock()
        self._stores: dict[tuple[int, str], tuple[Store, Tree]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = os.fspath(path)
        text = text.removeprefix("moonclip://").removeprefix("moonclip:")
        return os.path.normpath(os.path.join(os.getcwd(), os.path.expanduser(text)))

    def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[Any]:
        """The entries of a directory, or the file itself; dicts as of `info`, or names."""
        path = self._strip_protocol(path)
        with _os_errors(path):
            tree, node = self._find(path)
            if not node.is_directory:
                infos = [_described(tree, path, node, node)]
            else:
                infos = [self.info(f"{path}/{os.fsdecode(name)}") for name in tree.names_in(node)]
        return infos if detail else [info["name"] for info in infos]

    def info(self, path: str, **kwargs: object) -> dict[str, Any]:
        """`name`, `type`, `size`, `mode`, `uid`, `gid`, `mtime` (seconds), `islink`; `snapshot`, `version` inside one.

        A symbolic link has a `destination` as well, and the type and size of what it leads to.
        """
        path = self._strip_protocol(path)
        with _os_errors(path):
            tree, node = self._find(path, last=False)
            try:
                _, followed = self._find(path)
            except NotFoundError:
                followed = node  # a dangling link is described as itself
            return _described(tree, path, node, followed)

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True,
        cache_options: object = None, **kwargs: object,
    ) -> io.BufferedReader:  # fmt: skip
        if mode != "rb":
            self._refuse(path)
        with _os_errors(path):
            buffer = block_size if isinstance(block_size, int) and block_size > 0 else limits.BLOCK_BYTES
            return io.BufferedReader(RawFile(self._reader(path)), buffer)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        """The bytes of a file from `start` to `end`; negative ones count from its end."""
        path = self._strip_protocol(path)
        with _os_errors(path):
            reader = self._reader(path)
            first, last, _ = slice(start, end).indices(reader.size)
            return reader.read(first, max(0, last - first))

    def checksum(self, path: str) -> int:
        """A number that differs when the bytes do: from the id of what the path holds."""
        return int(self.ukey(path), 16)

    def ukey(self, path: str) -> str:
        """The id of the file's recipe in hex: equal for equal bytes, whatever the name and time."""
        path = self._strip_protocol(path)
        with _os_errors(path):
            return self._find(path)[1].entry.child.hex()

    def modified(self, path: str) -> datetime:
        """The modification time of a file in UTC."""
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    def _tree(self, path: str) -> tuple[Tree, bytes]:
        """The newest state of the store of an absolute path, and the rest of the path. Raises NotFoundError."""
        parts = path.split("/")
        for count in range(2, len(parts) + 1):
            root = "/".join(parts[:count])
            key = (os.getpid(), root)  # a process that was forked must not use the connections of its parent
            with self._lock:
                if key not in self._stores and is_store(root):
                    store = Store.open(root, purpose="fsspec")
                    self._stores[key] = (store, Tree(store))
                if key in self._stores:
                    tree = self._stores[key][1]
                    if view := tree.look(time.time_ns()):
                        tree.adopt(view)
                    return tree, os.fsencode("/".join(parts[count:]))
        raise NotFoundError(f"no store on the way to {path}")

    def _find(self, path: str, *, last: bool = True) -> tuple[Tree, Node]:
        tree, rest = self._tree(path)
        return tree, follow(tree.root, rest, tree.lookup, _link_text, last=last)

    def _reader(self, path: str) -> FileReader:
        tree, node = self._find(path)
        if node.is_directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if node.entry.type is not EntryType.FILE:
            raise OSError(errno.EINVAL, "not a regular file", path)
        return tree.open(node)

    def _refuse(self, path: object = "", *args: object, **kwargs: object) -> NoReturn:
        raise OSError(errno.EROFS, "a store is read-only through moonclip://", str(path))

    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = mv = touch = pipe_file = put_file = _refuse


def _link_text(node: Node) -> bytes | None:
    return node.entry.target if node.entry.type is EntryType.SYMLINK else None


def _described(tree: Tree, path: str, node: Node, followed: Node) -> dict[str, Any]:
    stat, link, version = tree.stat(followed), _link_text(node), followed.version
    found: dict[str, Any] = {
        "name": path, "type": _TYPES.get(followed.entry.type, "other"), "size": stat.size, "mode": stat.mode,
        "uid": stat.uid, "gid": stat.gid, "mtime": stat.mtime_ns / 1e9, "islink": link is not None,
    }  # fmt: skip
    if link is not None:
        found["destination"] = os.fsdecode(link)
    if version is not None:
        found |= {"snapshot": version.path, "version": version.number}
    return found


@contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Raise what fsspec's callers expect: FileNotFoundError, PermissionError, OSError with the kind's errno."""
    try:
        yield
    except MoonclipError as error:
        raise OSError(error.errno, str(error), path) from error
