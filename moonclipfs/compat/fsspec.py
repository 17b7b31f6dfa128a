"""The fsspec file system `moonclip://`: the snapshots of stores, for reading, without a mount.

    moonclip:///data/store/run1/checkpoint-500/model.safetensors       the current version
    moonclip:///data/store/run1/checkpoint-500@2/model.safetensors     version 2

A path is that of the store, followed by a path as a mount of the store would show it. The first directory on the way
that is a store is the one meant.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NoReturn

from fsspec.spec import AbstractFileSystem

from moonclipfs import limits
from moonclipfs.api import RawFile, Snapshot, StoreReader
from moonclipfs.errors import MoonclipError, NotFoundError
from moonclipfs.store.target import is_store, locate
from moonclipfs.types import Entry, EntryType

_TYPES = {EntryType.FILE: "file", EntryType.DIRECTORY: "directory"}


class MoonclipFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Reads any number of stores; every method that would write raises OSError (EROFS)."""

    protocol = "moonclip"
    root_marker = "/"

    def __init__(self, *args: object, **storage_options: object) -> None:
        super().__init__(*args, **storage_options)
        self._lock = threading.Lock()
        self._stores: dict[tuple[int, str], StoreReader] = {}

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
            reader, spec = self._split(path)
            found = self.info(path)
            infos = [found] if found["type"] != "directory" else self._listing(reader, path, spec)
        return infos if detail else [info["name"] for info in infos]

    def info(self, path: str, **kwargs: object) -> dict[str, Any]:
        """`name`, `type`, `size`, and for what lies in a snapshot `mode`, `uid`, `gid`, `mtime`, `snapshot`, `version`.

        A symbolic link has `islink` and `destination`, and the type and size of what it leads to.
        """
        path = self._strip_protocol(path)
        with _os_errors(path):
            reader, spec = self._split(path)
            try:
                snapshot, inside = self._place(reader, spec)
                return self._described(path, snapshot, inside)
            except NotFoundError:
                if _names_below(reader, spec):
                    return {"name": path, "type": "directory", "size": 0}
                raise

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True,
        cache_options: object = None, **kwargs: object,
    ) -> io.BufferedReader:  # fmt: skip
        if mode != "rb":
            self._refuse(path)
        with _os_errors(path):
            snapshot, inside = self._file(path)
            buffer = block_size if isinstance(block_size, int) and block_size > 0 else limits.BLOCK_BYTES
            return io.BufferedReader(RawFile(snapshot.reader(inside)), buffer)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        """The bytes of a file from `start` to `end`; negative ones count from its end."""
        path = self._strip_protocol(path)
        with _os_errors(path):
            snapshot, inside = self._file(path)
            reader = snapshot.reader(inside)
            first, last, _ = slice(start, end).indices(reader.size)
            return reader.read(first, max(0, last - first))

    def checksum(self, path: str) -> int:
        """A number that differs when the bytes do: from the id of what the path holds."""
        return int(self.ukey(path), 16)

    def ukey(self, path: str) -> str:
        """The id of the file's recipe in hex: equal for equal bytes, whatever the name and time."""
        path = self._strip_protocol(path)
        with _os_errors(path):
            snapshot, inside = self._file(path)
            return snapshot.entry(inside).child.hex()

    def modified(self, path: str) -> datetime:
        """The modification time of a file in UTC."""
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    def _split(self, path: str) -> tuple[StoreReader, str]:
        """The store of an absolute path, and the rest of the path. Raises NotFoundError."""
        parts = path.split("/")
        for count in range(2, len(parts) + 1):
            root = "/".join(parts[:count])
            # A process that was forked must not use the connections of its parent.
            key = (os.getpid(), root)
            with self._lock:
                if key not in self._stores and is_store(root):
                    self._stores[key] = StoreReader(root)
                if key in self._stores:
                    return self._stores[key], "/".join(parts[count:])
        raise NotFoundError(f"no store on the way to {path}")

    def _place(self, reader: StoreReader, spec: str) -> tuple[Snapshot, str]:
        place = locate(reader.store.names(), spec)
        if place.version is None:
            raise NotFoundError(f"no snapshot {spec}")
        return Snapshot(reader.store, place.version), os.fsdecode(place.path)

    def _file(self, path: str) -> tuple[Snapshot, str]:
        found = self._place(*self._split(path))
        if found[0].entry(found[1]).type is EntryType.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return found

    def _listing(self, reader: StoreReader, path: str, spec: str) -> list[dict[str, Any]]:
        infos = {}
        try:
            snapshot, inside = self._place(reader, spec)
            directory = snapshot.entry(inside)
            for name in reader.store.directory(directory.child):
                text = os.fsdecode(name)
                infos[text] = self._described(f"{path}/{text}", snapshot, f"{inside}/{text}")
        except NotFoundError:
            pass  # a directory that only names of snapshots make
        for text in _names_below(reader, spec):
            infos[text] = self.info(f"{path}/{text}")
        return [infos[text] for text in sorted(infos)]

    def _described(self, path: str, snapshot: Snapshot, inside: str) -> dict[str, Any]:
        entry = snapshot.entry(inside, follow=False)
        link: dict[str, Any] = {"islink": False}
        if entry.type is EntryType.SYMLINK:
            link = {"islink": True, "destination": os.fsdecode(entry.target)}
            entry = _followed(snapshot, inside, entry)
        attributes = entry.attributes
        return {
            "name": path, "type": _TYPES.get(entry.type, "other"), "size": entry.size, **link,
            "mode": entry.type.st_mode | attributes.mode, "uid": attributes.uid, "gid": attributes.gid,
            "mtime": attributes.mtime_ns / 1e9, "snapshot": snapshot.name, "version": snapshot.version.number,
        }  # fmt: skip

    def _refuse(self, path: object = "", *args: object, **kwargs: object) -> NoReturn:
        raise OSError(errno.EROFS, "a store is read-only through moonclip://", str(path))

    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = mv = touch = pipe_file = put_file = _refuse


def _followed(snapshot: Snapshot, inside: str, link: Entry) -> Entry:
    try:
        return snapshot.entry(inside)
    except NotFoundError:
        return link  # dangling: described as itself


def _names_below(reader: StoreReader, spec: str) -> set[str]:
    """The next parts of all bound names below `spec`."""
    below = spec + "/" if spec else ""
    names = reader.store.names().bound()
    return {name[len(below) :].split("/")[0] for name in names if name.startswith(below)}


@contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Raise what fsspec's callers expect: FileNotFoundError, PermissionError, OSError with the kind's errno."""
    try:
        yield
    except MoonclipError as error:
        raise OSError(error.errno, str(error), path) from error
