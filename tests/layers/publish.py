"""Small snapshots, published from Python values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from moonclipfs.store.publish import Ingest
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, BytesSource, Entry, EntryType, ObjectId, Version

MTIME = 1_600_000_000_123_456_789


@dataclass(frozen=True)
class File:
    """A file with more to it than its bytes."""

    data: bytes = b""
    mode: int = 0o644
    mtime_ns: int = MTIME
    link_group: int = 0
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Fifo:
    """A named pipe."""


Files: TypeAlias = Mapping[str, "bytes | str | File | Fifo | Files"]
"""By name: bytes or File for a file, str for a symlink's target, a mapping for a directory."""


def publish(store: Store, path: str, files: Files, **metadata: object) -> Version:
    """Bind `files` as the next version of the snapshot `path`."""
    attributes = {"mode": 0o750, "uid": 0, "gid": 0, "mtime_ns": MTIME, "ctime_ns": MTIME}
    with store.ingest() as ingest:
        return ingest.publish(path, _directory(ingest, files), {"attributes": attributes, **metadata})


def _directory(ingest: Ingest, files: Files) -> ObjectId:
    return ingest.put_directory(
        [_entry(ingest, name.encode("utf-8", "surrogateescape"), v) for name, v in files.items()]
    )


def _entry(ingest: Ingest, name: bytes, value: bytes | str | File | Fifo | Files) -> Entry:
    plain = Attributes(0o755, 0, 0, MTIME, MTIME)
    if isinstance(value, str):
        return Entry(name, EntryType.SYMLINK, plain, target=value.encode())
    if isinstance(value, Fifo):
        return Entry(name, EntryType.FIFO, plain)
    if isinstance(value, Mapping):
        return Entry(name, EntryType.DIRECTORY, plain, child=_directory(ingest, value))
    file = File(value) if isinstance(value, bytes) else value
    recipe, size, _ = ingest.put_file(BytesSource(file.data))
    attributes = Attributes(file.mode, 0, 0, file.mtime_ns, file.mtime_ns, file.xattrs)
    return Entry(name, EntryType.FILE, attributes, size, recipe if size else NO_ID, link_group=file.link_group)
