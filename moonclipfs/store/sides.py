"""The two sides of a comparison: files by relative path, out of a snapshot or from the disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from moonclipfs.errors import BackendError, UsageError
from moonclipfs.formats.layout import Layout, opaque
from moonclipfs.formats.sniff import parse
from moonclipfs.store.backend import os_errors, read_range
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.store import Store
from moonclipfs.types import BytesSource, Entry, EntryType, Source, Version


class SideFile:
    """One path of a side: a file, or a symlink with its `target`. `recipe` is None for a file on the disk."""

    def __init__(
        self,
        type_: EntryType,
        source: Callable[[], Source],
        *,
        target: bytes = b"",
        recipe: Recipe | None = None,
        layout: Callable[[Source], Layout] = parse,
    ) -> None:
        self.type = type_
        self.target = target
        self.recipe = recipe
        self._source = source
        self._layout = layout

    @cached_property
    def source(self) -> Source:
        """The bytes; empty for anything but a file."""
        return self._source()

    @cached_property
    def layout(self) -> Layout:
        """The structure of the bytes."""
        return self._layout(self.source) if self.type is EntryType.FILE else opaque(0, "not a file")


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared: `files` by relative path; `single` when a file was named rather than a directory."""

    files: dict[bytes, SideFile]
    single: bool = False


def store_side(store: Store, version: Version, path: bytes = b"") -> Side:
    """A snapshot, or a directory or file inside it. Raises NotFoundError for a path that is not there."""
    entry = store.lookup(version, path)
    if entry.type is not EntryType.DIRECTORY:
        return Side({entry.name: _stored(store, entry)}, single=True)
    below = path + b"/" if path else b""
    return Side(
        {
            found[len(below) :]: _stored(store, inner)
            for found, inner in store.walk(version)
            if inner.type is not EntryType.DIRECTORY and found.startswith(below)
        }
    )


def _stored(store: Store, entry: Entry) -> SideFile:
    if entry.type is not EntryType.FILE:
        return SideFile(entry.type, _no_bytes, target=entry.target)
    return SideFile(
        entry.type,
        partial(store.open_file, entry),
        recipe=store.recipe(entry),
        layout=lambda _source: store.layout(entry),
    )


def path_side(path: Path) -> Side:
    """A file or directory on the disk. Raises NotFoundError, PermissionDeniedError, or UsageError for a device."""
    with os_errors(f"read {path}"):
        mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        return Side({os.fsencode(path.name): SideFile(EntryType.FILE, partial(DiskSource, path))}, single=True)
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{path} is neither a file nor a directory")
    return Side(dict(_walk(path, b"")))


def _walk(directory: Path, below: bytes) -> Iterator[tuple[bytes, SideFile]]:
    with os_errors(f"read {directory}"), os.scandir(directory) as entries:
        ordered = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    for entry in ordered:
        name = below + os.fsencode(entry.name)
        if entry.is_symlink():
            with os_errors(f"read {entry.path}"):
                yield name, SideFile(EntryType.SYMLINK, _no_bytes, target=os.fsencode(os.readlink(entry.path)))
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), name + b"/")
        elif entry.is_file(follow_symlinks=False):
            yield name, SideFile(EntryType.FILE, partial(DiskSource, Path(entry.path)))


def _no_bytes() -> Source:
    return BytesSource(b"")


class DiskSource:
    """A `Source` over a file on the disk that holds no descriptor between reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with os_errors(f"read {path}"):
            self.size = os.stat(path).st_size

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`. Raises BackendError when the file has become shorter."""
        with os_errors(f"read {self._path}"):
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = read_range(fd, offset, length)
            finally:
                os.close(fd)
        if len(data) != length:
            raise BackendError(f"{self._path} became shorter while it was read")
        return data
