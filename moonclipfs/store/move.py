"""The second half of `add --move`: originals are deleted once the store was seen to hold every byte of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import BusyError, CorruptError
from moonclipfs.store.backend import os_errors
from moonclipfs.store.scan import FileSource, Found, scan
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType, Version

_CHECKED = b".moving-into-moonclipfs"
"""What a directory is renamed to while its last check runs. What an interruption leaves goes back to its name."""
_DOOMED = b".moved-into-moonclipfs"
"""What it is renamed to before it is deleted: its own name never stands for half of it."""


def verify_and_delete(store: Store, version: Version, root: Found) -> None:
    """Compare what the store gives back with the originals below `root`, byte by byte, then delete these.

    Raises CorruptError when a byte differs, BusyError when an original changed since it was stored; all originals are
    left then.
    """
    for path, found in _files(root):
        _compare(store, version, path, found)
    for one in [root] if root.path else root.children:
        if one.type is EntryType.DIRECTORY:
            _delete_directory(one)
        else:
            with os_errors(f"delete {os.fsdecode(one.path)}"):
                os.unlink(one.path)


def finish(paths: Sequence[Path]) -> None:
    """End what earlier, interrupted moves of things beside `paths` left behind under other names."""
    for parent in {os.path.dirname(os.path.abspath(os.fsencode(path))) for path in paths}:
        with os_errors(f"tidy {os.fsdecode(parent)}"):
            for name in os.listdir(parent):
                place = os.path.join(parent, name)
                if name.startswith(b".") and name.endswith(_DOOMED):
                    shutil.rmtree(place)
                elif name.startswith(b".") and name.endswith(_CHECKED):
                    os.rename(place, os.path.join(parent, name[1 : -len(_CHECKED)]))


def _files(root: Found) -> Iterator[tuple[bytes, Found]]:
    start = len(root.path) + 1 if root.path else 0
    for one in root.walk():
        if one.type is EntryType.FILE:
            yield (one.path[start:] if root.path else one.name), one


def _compare(store: Store, version: Version, path: bytes, found: Found) -> None:
    reader = store.open_file(store.lookup(version, path))
    source = FileSource(found)
    source.open()
    try:
        for offset in range(0, found.size, limits.PREFETCH_BYTES):
            stored = bytearray(min(limits.PREFETCH_BYTES, found.size - offset))
            reader.stream_into(offset, memoryview(stored))
            if stored != source.read(offset, len(stored)):
                raise CorruptError(
                    f"{source.name}: the store gives back other bytes near {offset}; nothing was deleted"
                )
        source.check()
    finally:
        source.close()


def _delete_directory(found: Found) -> None:
    """Rename first: then nobody writes into it by name, and what came since the scan shows."""
    parent, name = os.path.split(found.path)
    checked, doomed = (os.path.join(parent, b"." + name + suffix) for suffix in (_CHECKED, _DOOMED))
    with os_errors(f"delete {os.fsdecode(found.path)}"):
        os.rename(found.path, checked)
        if _listing(scan(os.fsdecode(checked))) != _listing(found):
            os.rename(checked, found.path)
            raise BusyError(f"{os.fsdecode(found.path)} changed since it was stored and was kept: run the move again")
        os.rename(checked, doomed)
        shutil.rmtree(doomed)


def _listing(root: Found) -> list[tuple[bytes, object]]:
    start = len(root.path)
    return [
        (
            one.path[start:],
            (
                one.type,
                one.identity,
                one.size,
                one.target,
                one.attributes.mtime_ns if one.type is EntryType.FILE else 0,
            ),
        )
        for one in root.walk()
    ]
