"""The directories of layers in a store: who holds one, and which objects their journals need.

`layers/NAME/` has `id` (16 random bytes in hexadecimal), `lock` (locked by whoever has the layer, for life) and
`journal/`. Whoever deletes objects asks `layer_roots` first: a layer that nobody mounts needs its objects no less.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from moonclipfs.errors import BusyError, CorruptError, FormatVersionError, UsageError
from moonclipfs.store import ofd
from moonclipfs.store.backend import LocalBackend, mode_of_files, os_errors
from moonclipfs.store.config import LAYERS, enable
from moonclipfs.store.segments import (
    Extent,
    measure_segment,
    record_payloads,
    record_refs,
    segment_name,
    segment_numbers,
)
from moonclipfs.store.store import Store
from moonclipfs.types import Kind, ObjectId

DIRECTORY = "layers"
ID_BYTES = 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_HOLDER_BYTES = 32768
"""Enough for the longest path of a mountpoint, six characters of JSON for each byte."""
_ATTEMPTS = 5


def layer_names(root: Path) -> list[str]:
    """The names of all layers of a store, sorted."""
    directory = Path(root) / DIRECTORY
    with os_errors(f"list {directory}"):
        try:
            return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []


def check_layer_name(name: str) -> None:
    """Raise UsageError for what cannot be the name of a layer."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(f"{name!r} cannot name a layer: use up to 200 letters, digits, dots, dashes and underscores")


def make_layer(store: Store, name: str) -> tuple[Path, bytes]:
    """The directory and the id of a layer, which is made unless it is there.

    The first one gives the store a feature that keeps versions without layers from deleting what these need. Raises
    UsageError for a bad name, CorruptError for a damaged id, NoSpaceError, PermissionDeniedError, BackendError.
    """
    check_layer_name(name)
    backend = store.backend
    store.config = enable(backend, store.config, LAYERS)
    mode = 0o2770 if mode_of_files(backend.root) & 0o070 else 0o700
    for key in (DIRECTORY, f"{DIRECTORY}/{name}", f"{DIRECTORY}/{name}/journal"):
        _make_directory(backend, key, mode)
    key = f"{DIRECTORY}/{name}/id"
    if not os.path.exists(backend.path(key)):
        with os_errors(f"write {backend.path(key)}"):
            _write_id(backend, key)
    return Path(backend.path(f"{DIRECTORY}/{name}")), layer_id(backend.root, name)


def find_layer(store: Store, name: str) -> tuple[Path, bytes]:
    """The directory and the id of a layer that is there. Raises NotFoundError, CorruptError."""
    return Path(store.path) / DIRECTORY / name, layer_id(store.path, name)


def _make_directory(backend: LocalBackend, key: str, mode: int) -> None:
    path = backend.path(key)
    with os_errors(f"make the directory {path}"):
        if not os.path.isdir(path):
            with suppress(FileExistsError):
                backend.ops.mkdir(path, mode)
                os.chmod(path, mode)
        backend.sync_directory(os.path.dirname(path))


def _write_id(backend: LocalBackend, key: str) -> None:
    upload = backend.upload()
    try:
        upload.write(secrets.token_hex(ID_BYTES).encode() + b"\n")
        upload.publish(key)
    finally:
        upload.abort()


def layer_id(root: Path, name: str) -> bytes:
    """The id of a layer, 16 bytes. Raises NotFoundError, CorruptError."""
    path = Path(root) / DIRECTORY / name / "id"
    with os_errors(f"read {path}"):
        text = path.read_text(errors="replace").strip()
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise CorruptError(f"{path} is damaged: restore it from a copy")
    return bytes.fromhex(text)


# What journals need


def layer_roots(root: Path) -> Iterator[tuple[Kind, ObjectId]]:
    """Yield the objects that the journals of all layers name, each as often as a record does.

    Raises CorruptError or FormatVersionError when a journal cannot be read whole: what it needs is not known, so
    nothing may be deleted.
    """
    for _, kind, object_id in LayerRoots(root).more():
        yield kind, object_id


class LayerRoots:
    """The objects that journals name, read on from where the last look ended."""

    def __init__(self, root: Path) -> None:
        self._root = Path(root)
        self._read: dict[tuple[str, int], Extent] = {}
        """By layer and number of the segment, as far as it was read."""

    def more(self) -> Iterator[tuple[str, Kind, ObjectId]]:
        """Yield (layer, kind, object) of all records that came since the last call. Raises as `layer_roots` does."""
        for name in layer_names(self._root):
            for kind, object_id in self.more_of(name):
                yield name, kind, object_id

    def more_of(self, name: str) -> Iterator[tuple[Kind, ObjectId]]:
        """The same of one layer."""
        try:
            yield from self._of_layer(name)
        except (CorruptError, FormatVersionError) as error:
            raise type(error)(f"layer {name}: {error}") from error

    def _of_layer(self, name: str) -> Iterator[tuple[Kind, ObjectId]]:
        directory = self._root / DIRECTORY / name / "journal"
        seen: set[int] = set()
        # What is not in the segments of one listing is in those of the next: a segment gives way to a newer one only.
        # Look once more at the end, since one listing may miss both a new segment and the one that it replaces.
        last_look = False
        while True:
            numbers = [number for number in segment_numbers(directory) if number not in seen]
            if not numbers and last_look:
                return
            last_look = not numbers
            for number in numbers:
                seen.add(number)
                yield from self._of_segment(name, number, directory / segment_name(number))

    def _of_segment(self, name: str, number: int, path: Path) -> Iterator[tuple[Kind, ObjectId]]:
        with os_errors(f"read {path}"), ExitStack() as stack:
            try:
                file = stack.enter_context(open(path, "rb"))
            except FileNotFoundError:
                return  # a newer one has taken its place
            before = self._read.get((name, number))
            extent = _measure(file, path, before)
            for frame in record_payloads(file, extent, before.end if before else 0):
                try:
                    yield from record_refs(frame.payload)
                except CorruptError as error:
                    raise CorruptError(f"{path}: {error}, at offset {frame.offset}") from error
            self._read[name, number] = extent


def _measure(file: BinaryIO, path: Path, before: Extent | None) -> Extent:
    """A frame that is being written while it is read looks damaged, when the next one is whole: then look again."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(CorruptError):
            return measure_segment(file, path, before)
    return measure_segment(file, path, before)


# Who holds a layer


class LayerLock:
    """The lock of a layer's directory, held by whoever writes to the layer."""

    def __init__(self, fd: int) -> None:
        """Use `acquire`."""
        self._fd = fd

    @classmethod
    def acquire(cls, directory: Path, holder: Mapping[str, object]) -> LayerLock:
        """Take the lock of the layer in `directory`. `holder` (pid, host, mountpoint) is for what others are told.

        Raises BusyError, which names the holder, PermissionDeniedError, NoSpaceError, BackendError also where the
        file system has no locks.
        """
        path = directory / "lock"
        with os_errors(f"lock {path}"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode_of_files(directory))
            try:
                if not ofd.lock(fd):
                    raise BusyError(_busy(directory.name, _read_holder(fd)))
                text = json.dumps(dict(holder)).encode()[: _HOLDER_BYTES - 1]
                # In one write of a fixed length: who reads it meanwhile finds the holder before, or this one.
                os.pwrite(fd, text.ljust(_HOLDER_BYTES - 1) + b"\n", 0)
            except BaseException:
                os.close(fd)
                raise
        return cls(fd)

    def release(self) -> None:
        """Give the lock up; harmless when that was done."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # Closing alone would leave the lock with a child that shares the open file.
            with suppress(OSError):
                ofd.unlock(fd)
            os.close(fd)


def layer_holder(directory: Path) -> Mapping[str, object] | None:
    """What the holder of a layer says of itself; None when nobody has it."""
    path = directory / "lock"
    with os_errors(f"read {path}"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _read_holder(fd) if ofd.is_locked(fd) else None
        finally:
            os.close(fd)


def _read_holder(fd: int) -> Mapping[str, object]:
    try:
        found = json.loads(os.pread(fd, _HOLDER_BYTES, 0))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _busy(name: str, holder: Mapping[str, object]) -> str:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
    where = f", mounted at {holder['mountpoint']}" if holder.get("mountpoint") else ""
    return f"layer {name} is in use by {who}{where}: unmount it there, or take another layer with `--layer NAME`"
