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
from typing import Any, NamedTuple, NoReturn

from fsspec.spec import AbstractFileSystem

from moonclipfs import limits
from moonclipfs.api import RawFile, read_bytes
from moonclipfs.errors import NotFoundError, as_os_errors
from moonclipfs.layers.claims import Claim, Claims
from moonclipfs.layers.links import follow
from moonclipfs.layers.tree import Node, Tree
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.store import Store
from moonclipfs.store.target import is_store
from moonclipfs.types import NO_ID, EntryType

_TYPES = {EntryType.FILE: "file", EntryType.DIRECTORY: "directory"}


class _Opened(NamedTuple):
    """A store, and the claim that keeps it open."""

    claims: Claims
    claim: Claim
    tree: Tree


class _Look(NamedTuple):
    """What one call sees of a store: `path` is absolute, `rest` is that below the store, log record `sequence` held."""

    tree: Tree
    claims: Claims
    sequence: int
    path: str
    rest: bytes

    def find(self, *, last: bool = True) -> Node:
        """The node at the path, links followed (one at its end if `last`). Raises NotFoundError."""
        return follow(self.tree.root, self.rest, self.tree.lookup, _link_text, last=last)

    def target(self, node: Node, rest: bytes) -> Node:
        """What the node at `rest` leads to if it is a link; itself if it is none, or dangling."""
        if _link_text(node) is None:
            return node
        try:
            return follow(self.tree.root, rest, self.tree.lookup, _link_text)
        except NotFoundError:
            return node

    def file(self) -> tuple[Node, FileReader]:
        """The regular file at the path. Raises NotFoundError, OSError for what is none."""
        node = self.find()
        if node.is_directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if node.entry.type is not EntryType.FILE:
            raise OSError(errno.EINVAL, "not a regular file", self.path)
        return node, self.tree.open(node)

    def infos(self, directory: Node) -> Iterator[dict[str, Any]]:
        """Describe what is in a directory, but for names that vanish meanwhile."""
        names = self.tree.names_in(directory)
        for name, child in zip(names, self.tree.children(directory, names), strict=True):
            if child is not None:
                node = child[0]
                yield self.described(
                    f"{self.path}/{os.fsdecode(name)}", node, self.target(node, self.rest + b"/" + name)
                )

    def described(self, path: str, node: Node, followed: Node) -> dict[str, Any]:
        """What `info` gives for a node, and what it leads to."""
        stat, link, version = self.tree.stat(followed), _link_text(node), followed.version
        found: dict[str, Any] = {
            "name": path, "type": _TYPES.get(followed.entry.type, "other"), "size": stat.size, "mode": stat.mode,
            "uid": stat.uid, "gid": stat.gid, "mtime": stat.mtime_ns / 1e9, "islink": link is not None,
        }  # fmt: skip
        if link is not None:
            found["destination"] = os.fsdecode(link)
        if version is not None:
            found |= {"snapshot": version.path, "version": version.number}
        return found


class MoonclipFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Reads any number of stores; every method that would write raises OSError (EROFS)."""

    protocol = "moonclip"
    root_marker = "/"

    def __init__(self, *args: object, **storage_options: object) -> None:
        super().__init__(*args, **storage_options)
        self._lock = threading.Lock()
        self._stores: dict[tuple[int, str], _Opened] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = os.fspath(path)
        text = text.removeprefix("moonclip://").removeprefix("moonclip:")
        return os.path.normpath(os.path.join(os.getcwd(), os.path.expanduser(text)))

    def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[Any]:
        """The entries of a directory, or the file itself; dicts as of `info`, or names."""
        with self._looking(path) as look:
            node = look.find()
            infos = list(look.infos(node)) if node.is_directory else [look.described(look.path, node, node)]
        return infos if detail else [info["name"] for info in infos]

    def info(self, path: str, **kwargs: object) -> dict[str, Any]:
        """`name`, `type`, `size`, `mode`, `uid`, `gid`, `mtime` (seconds), `islink`; `snapshot`, `version` inside one.

        A symbolic link has a `destination` as well, and the type and size of what it leads to.
        """
        with self._looking(path) as look:
            node = look.find(last=False)
            return look.described(look.path, node, look.target(node, look.rest))

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True,
        cache_options: object = None, **kwargs: object,
    ) -> io.BufferedReader:  # fmt: skip
        if mode != "rb":
            self._refuse(path)
        buffer = block_size if isinstance(block_size, int) and block_size > 0 else limits.BLOCK_BYTES
        with self._looking(path) as look:
            node, reader = look.file()
            version = node.version
            claim = look.claims.claim(version.root if version else NO_ID, look.sequence)
            return io.BufferedReader(RawFile(reader, look.path, claim), buffer)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        """The bytes of a file from `start` to `end`; negative ones count from its end."""
        with self._looking(path) as look:
            _, reader = look.file()
            first, last, _ = slice(start, end).indices(reader.size)
            return read_bytes(reader, first, max(0, last - first))

    def checksum(self, path: str) -> int:
        """A number that differs when the bytes do: from the id of what the path holds."""
        return int(self.ukey(path), 16)

    def ukey(self, path: str) -> str:
        """The id of the file's recipe in hex: equal for equal bytes, whatever the name and time."""
        with self._looking(path) as look:
            return look.find().entry.child.hex()

    def modified(self, path: str) -> datetime:
        """The modification time of a file in UTC."""
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    def close(self) -> None:
        """Close all stores, and with them the files that are open. The next call opens them again."""
        with self._lock:
            opened, self._stores = self._stores, {}
        for (pid, _), one in opened.items():
            if pid == os.getpid():
                one.claims.close()

    @contextmanager
    def _looking(self, path: Any) -> Iterator[_Look]:
        """One view of the store of a path; what it shows stays until the end. Errors become those of the system."""
        path = self._strip_protocol(path)
        with as_os_errors(path):
            opened, rest = self._opened(path)
            with opened.claims.held() as sequence:
                with self._lock:
                    if view := opened.tree.look(time.time_ns()):
                        opened.tree.adopt(view)
                yield _Look(opened.tree, opened.claims, sequence, path, rest)

    def _opened(self, path: str) -> tuple[_Opened, bytes]:
        """The store of an absolute path, opened if need be, and the rest of the path. Raises NotFoundError."""
        parts = path.split("/")
        for count in range(2, len(parts) + 1):
            root = "/".join(parts[:count])
            key = (os.getpid(), root)  # a process that was forked must not use the connections of its parent
            with self._lock:
                if key not in self._stores and is_store(root):
                    claims = Claims(Store.open(root, purpose="fsspec"), owned=True)
                    self._stores[key] = _Opened(claims, claims.claim(NO_ID, 0), Tree(claims.store))
                if key in self._stores:
                    return self._stores[key], os.fsencode("/".join(parts[count:]))
        raise NotFoundError(f"no store on the way to {path}")

    def _refuse(self, path: object = "", *args: object, **kwargs: object) -> NoReturn:
        raise OSError(errno.EROFS, "a store is read-only through moonclip://", str(path))

    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = mv = touch = pipe_file = put_file = _refuse


def _link_text(node: Node) -> bytes | None:
    return node.entry.target if node.entry.type is EntryType.SYMLINK else None
