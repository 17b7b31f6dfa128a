"""What shows through a layer: directory objects of the store, and what is known of whole trees of them.

Answers come from memory: under the layer's lock nothing waits. What is not there raises `Missing`, which whoever holds
no lock can `load`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from moonclipfs import limits
from moonclipfs.errors import CorruptError
from moonclipfs.layers.names import join
from moonclipfs.layers.tree import NotCachedError
from moonclipfs.store.cache import BoundedCache
from moonclipfs.store.directories import directory_weight
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Entry, EntryType, ObjectId

Groups: TypeAlias = Mapping[int, tuple[bytes, ...]]
"""The paths of each group of hard links in a tree."""
T = TypeVar("T")
_NONE: Mapping[bytes, Entry] = {}


class Missing(NotCachedError):
    """The answer needs something of the store that is not in memory: `load` gets it."""

    def __init__(self, key: object, load: Callable[[], object]) -> None:
        super().__init__()
        self.key = key
        self.load = load


class Caches:
    """What is known of directory objects, for any number of layers of one store. Thread-safe."""

    def __init__(self) -> None:
        capacity = limits.DIRECTORY_CACHE_ENTRIES
        self.directories: BoundedCache[ObjectId, Mapping[bytes, Entry]] = BoundedCache(capacity)
        self.subdirectories: BoundedCache[ObjectId, int] = BoundedCache(capacity)
        self.groups: BoundedCache[ObjectId, Groups] = BoundedCache(capacity)
        self.linked: BoundedCache[ObjectId, bool] = BoundedCache(capacity)


class Base:
    """Directory objects by id. Thread-safe."""

    def __init__(self, store: Store, caches: Caches | None = None) -> None:
        self._store = store
        caches = caches or Caches()
        self._directories, self._subdirectories = caches.directories, caches.subdirectories
        self._groups, self._linked = caches.groups, caches.linked
        self.pinned: dict[object, object] = {}
        """What the call that holds the layer's lock has loaded for itself, in case the caches are too small."""

    def entries(self, object_id: ObjectId) -> Mapping[bytes, Entry]:
        """The entries of a directory object. Raises Missing, CorruptError."""
        if object_id == NO_ID:
            return _NONE
        found = self._directories.get(object_id)
        return self._pinned("entries", object_id, self._load_entries) if found is None else found

    def subdirectories(self, object_id: ObjectId) -> int:
        """How many entries of a directory object are directories; 0 where it is damaged: whoever opens it is told.
        Raises Missing.
        """
        if object_id == NO_ID:
            return 0
        found = self._subdirectories.get(object_id)
        return self._pinned("subdirectories", object_id, self._count) if found is None else found

    def groups(self, root: ObjectId) -> Groups:
        """The groups of hard links below a directory object, except in damaged directories. Raises Missing."""
        if root == NO_ID:
            return {}
        found = self._groups.get(root)
        return self._pinned("groups", root, self._load_groups) if found is None else found

    def has_groups(self, object_id: ObjectId) -> bool:
        """Whether there are hard links at or below a directory object. Raises Missing."""
        if object_id == NO_ID:
            return False
        found = self._linked.get(object_id)
        return self._pinned("linked", object_id, self._look_for_groups) if found is None else found

    def _pinned(self, kind: str, object_id: ObjectId, load: Callable[[ObjectId], T]) -> T:
        key = (kind, object_id)
        if key not in self.pinned:
            raise Missing(key, lambda: load(object_id))
        found: Any = self.pinned[key]
        if isinstance(found, CorruptError):
            raise found
        value: T = found
        return value

    def _load_entries(self, object_id: ObjectId) -> Mapping[bytes, Entry]:
        entries = self._store.directory(object_id)
        weight = min(directory_weight(entries), limits.DIRECTORY_CACHE_ENTRIES // 2)  # the largest is kept too
        self._directories.put(object_id, entries, weight)
        return entries

    def _count(self, object_id: ObjectId) -> int:
        entries = self._readable(object_id)
        count = sum(entry.type is EntryType.DIRECTORY for entry in entries.values())
        self._subdirectories.put(object_id, count)
        return count

    def _load_groups(self, root: ObjectId) -> Groups:
        found: dict[int, list[bytes]] = {}
        directories = [(root, b"", 0)]
        while directories:
            object_id, path, depth = directories.pop()
            for name, entry in self._readable(object_id).items():
                if entry.link_group:
                    found.setdefault(entry.link_group, []).append(join(path, name))
                if entry.type is EntryType.DIRECTORY and depth < limits.PATH_DEPTH:
                    directories.append((entry.child, join(path, name), depth + 1))
        groups = {group: tuple(paths) for group, paths in found.items()}
        weight = 1 + sum(map(len, groups.values()))
        self._groups.put(root, groups, min(weight, limits.DIRECTORY_CACHE_ENTRIES // 2))
        return groups

    def _look_for_groups(self, object_id: ObjectId, depth: int = 0) -> bool:
        found = self._linked.get(object_id)
        if found is None:
            entries = self._readable(object_id).values()
            found = any(entry.link_group for entry in entries) or any(
                entry.type is EntryType.DIRECTORY
                and depth < limits.PATH_DEPTH
                and self._look_for_groups(entry.child, depth + 1)
                for entry in entries
            )
            self._linked.put(object_id, found)
        return found

    def _readable(self, object_id: ObjectId) -> Mapping[bytes, Entry]:
        try:
            return self._store.directory(object_id) if object_id != NO_ID else _NONE
        except CorruptError:
            return _NONE
