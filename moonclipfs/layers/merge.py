"""Three-way merge of directory objects: what was changed here goes onto what others published meanwhile.

A name that is the same here as in the base is theirs, whatever they made of it; any other is ours, a removed one too.
Directories that are there on both sides are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeGuard

from moonclipfs.store.publish import Ingest
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Entry, EntryType, ObjectId


class Directories:
    """Directory objects of a store, and those that are being put into it."""

    def __init__(self, store: Store, ingest: Ingest) -> None:
        self._store = store
        self._ingest = ingest
        self._made: dict[ObjectId, Mapping[bytes, Entry]] = {}

    def load(self, object_id: ObjectId) -> Mapping[bytes, Entry]:
        """The entries of a directory object; none for NO_ID. Raises CorruptError."""
        if object_id == NO_ID:
            return {}
        made = self._made.get(object_id)
        return self._store.directory(object_id) if made is None else made

    def put(self, entries: Iterable[Entry]) -> ObjectId:
        """Store a directory object. Raises LimitError."""
        known = {entry.name: entry for entry in entries}
        object_id = self._ingest.put_directory(known.values())
        self._made[object_id] = known
        return object_id

    def highest_group(self, root: ObjectId) -> int:
        """The highest number of a group of hard links in the tree of a directory object."""
        highest, todo, seen = 0, [root], {root}
        while todo:
            for entry in self.load(todo.pop()).values():
                highest = max(highest, entry.link_group)
                if entry.type is EntryType.DIRECTORY and entry.child not in seen:
                    seen.add(entry.child)
                    todo.append(entry.child)
        return highest


class Merge:
    """One merge. `foreign` collects the paths where the result is theirs and not what was here."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self.foreign: list[bytes] = []

    def merge(self, base: ObjectId, ours: ObjectId, theirs: ObjectId, path: bytes = b"") -> ObjectId:
        """The directory object that results; NO_ID stands for an empty directory. Raises CorruptError."""
        if theirs in (ours, base):
            return ours
        b, o, t = map(self._directories.load, (base, ours, theirs))
        merged: list[Entry] = []
        for name in o.keys() | t.keys():
            place = path + b"/" + name if path else name
            entry = self._entry(b.get(name), o.get(name), t.get(name), place)
            if entry is not None:
                merged.append(entry)
        return self._directories.put(merged)

    def _entry(self, base: Entry | None, ours: Entry | None, theirs: Entry | None, path: bytes) -> Entry | None:
        if ours == theirs:
            return ours
        if _is_directory(ours) and _is_directory(theirs):
            below = base.child if _is_directory(base) else NO_ID
            child = self.merge(below, ours.child, theirs.child, path)
            unchanged = base is not None and ours.attributes == base.attributes
            return replace(theirs if unchanged else ours, child=child)
        if ours == base:
            self.foreign.append(path)
            return theirs
        return ours


def _is_directory(entry: Entry | None) -> TypeGuard[Entry]:
    return entry is not None and entry.type is EntryType.DIRECTORY
