"""What other snapshots of a line hold: a checkpoint that lacks what they all have is not finished."""

from __future__ import annotations

import os

from moonclipfs import limits
from moonclipfs.layers.names import path_bytes
from moonclipfs.layers.units import masked
from moonclipfs.store.log import Names
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType, Version


def siblings(names: Names, path: bytes) -> list[Version]:
    """The newest complete snapshots beside `path` that are called as it is, but for numbers: `checkpoint-500`."""
    parent, _, name = path.rpartition(b"/")
    found = []
    for other, version in names.bound().items():
        above, _, last = path_bytes(other).rpartition(b"/")
        if above == parent and last != name and masked(last) == masked(name) and not version.metadata.get("incomplete"):
            found.append(version)
    return sorted(found, key=lambda version: version.order)[-limits.SIBLINGS :]


def sibling_files(store: Store, path: bytes) -> list[set[str]]:
    """The paths of the files of each of the `siblings` of a path. Raises CorruptError."""
    return [
        {os.fsdecode(place) for place, entry in store.walk(version) if entry.type is EntryType.FILE}
        for version in siblings(store.names(), path)
    ]
