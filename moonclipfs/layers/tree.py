"""A store as a read-only file system: what lies at a path, what a directory holds, what stat says, the bytes of a file.

There is no table of nodes here: a `Node` says by itself what it is, and its inode number follows from that alone.
Calls may wait for the store; with `wait=False` they raise NotCachedError instead, and are fit for an event loop.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from stat import S_IFREG
from typing import NamedTuple

from moonclipfs import limits
from moonclipfs.errors import CorruptError, NotFoundError
from moonclipfs.layers.experts import ExpertEntry, Experts
from moonclipfs.layers.names import Area, Children, Link, NameTree, View, join, path_bytes
from moonclipfs.store.cache import BoundedCache
from moonclipfs.store.directories import directory_weight
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, ObjectId, Version

ROOT_INODE = 1
XATTR_PREFIX = b"user.moonclip."


class NotCachedError(Exception):
    """The answer needs the store, and the caller would not wait."""


class Node(NamedTuple):
    """One file or directory, at `path` below its area. Without a version it is a directory or link that names make;
    else the first `bound` bytes of `path` are the place of the snapshot, and `entry` is what the snapshot holds there.
    """

    area: Area
    path: bytes
    entry: Entry
    version: Version | None = None
    bound: int = 0

    @property
    def is_name(self) -> bool:
        """True for what names make, and for roots of snapshots: these come and go, what lies inside does not."""
        return self.version is None or len(self.path) == self.bound

    @property
    def is_root(self) -> bool:
        """True for the root of the mount."""
        return not self.path and self.area is Area.LIVE

    @property
    def is_directory(self) -> bool:
        """True for a directory of any kind."""
        return self.entry.type is EntryType.DIRECTORY

    @property
    def place(self) -> str:
        """The path from the root of the mount, for messages."""
        path = join(self.area.value, self.path) if self.path else self.area.value
        return "/" + path.decode("utf-8", "surrogateescape")

    @property
    def identity(self) -> bytes:
        """What makes this the same file as another node, also at another mount. Hard links in a snapshot share it."""
        area, path, entry, version, bound = self
        number = 0 if version is None else version.number
        if entry.link_group:
            return b"%b\0%b\0%d\0link\0%d" % (area.value, path[:bound], number, entry.link_group)
        return b"%b\0%b\0%d\0%d\0%b" % (area.value, path, number, bound, entry.target)

    @property
    def inode(self) -> int:
        """The inode number that follows from `identity`: two files may, very rarely, have the same."""
        return ROOT_INODE if self.is_root else inode_number(self.identity)


def inode_number(identity: bytes) -> int:
    """A number from 2 to 2**62 - 1; those of layers are above."""
    digest = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little") >> 2
    return max(digest, ROOT_INODE + 1)


class Stat(NamedTuple):
    """What stat says of a node; times in nanoseconds, size in bytes, `mode` with the type bits."""

    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Tree:
    """The file system. `adopt` changes what names mean; every other call may come from any thread."""

    def __init__(self, store: Store, *, show_virtual: bool = False) -> None:
        """With `show_virtual`, what begins with @ is listed at the root, and computed xattrs too."""
        self._store = store
        self._show_virtual = show_virtual
        self._owner = (os.geteuid(), os.getegid())
        self._directories: BoundedCache[ObjectId, Mapping[bytes, Entry]] = BoundedCache(limits.DIRECTORY_CACHE_ENTRIES)
        self._subdirectories: BoundedCache[ObjectId, int] = BoundedCache(limits.DIRECTORY_CACHE_ENTRIES)
        self._groups: BoundedCache[ObjectId, Counter[int]] = BoundedCache(limits.DIRECTORY_CACHE_ENTRIES)
        self._experts = Experts(store)
        self.view = View(store.names())
        self.root = self._directory_of_names(Area.LIVE, b"")

    def look(self, now_ns: int) -> View | None:
        """Read the log; return what names mean by it, or None when nothing is new since the adopted view."""
        names = self._store.names()
        return None if names.sequence == self.view.sequence else View(names, self.view, now_ns)

    def adopt(self, view: View) -> None:
        """From here on names mean what `view` says."""
        self.view = view

    def changed(self, before: View, areas: Iterable[Area] = tuple(Area)) -> Iterator[tuple[Node, bytes]]:
        """Yield (directory, name) where a name stands for something else than in the view `before`."""
        for area in areas:
            if before.built(area):
                for path, name in self.view.area(area).changes(before.area(area)):
                    try:
                        yield self.resolve(area, path), name
                    except (NotFoundError, CorruptError):
                        continue  # the directory went away with it: then its own name is among the changes

    def resolve(self, area: Area, path: bytes, *, wait: bool = True) -> Node:
        """The node at a path below the root of an area. Raises NotFoundError."""
        node = self._directory_of_names(area, b"")
        for name in path.split(b"/") if path else ():
            node = self.lookup(node, name, wait=wait)
        return node

    def parent(self, node: Node, *, wait: bool = True) -> Node:
        """The directory that a node is in; the root is its own. Raises NotFoundError when names changed meanwhile."""
        if not node.path:
            return self.root
        return self.resolve(node.area, node.path.rpartition(b"/")[0], wait=wait)

    def lookup(self, directory: Node, name: bytes, *, wait: bool = True) -> Node:
        """The node called `name` in a directory, `.` and `..` too. Raises NotFoundError."""
        if name == b".":
            return directory
        if name == b"..":
            return self.parent(directory, wait=wait)
        names = self._names(directory, wait)
        try:
            entries = {} if names.get(name) is not None else self._entries(directory, wait)
        except CorruptError:
            if name not in names:
                raise
            entries = {}  # what names make does not need what the snapshot around it holds
        return self._child(directory, name, names, entries)

    def names_in(self, directory: Node, *, wait: bool = True) -> list[bytes]:
        """The names in a directory, sorted; some may be gone when they are looked up."""
        names, entries = self._names(directory, wait), self._entries(directory, wait)
        virtual = list(_VIRTUAL) if self._show_virtual and directory.is_root else []
        if not names and not virtual:
            return list(entries)
        return sorted({*names, *entries, *virtual})

    def children(self, directory: Node, names: Iterable[bytes], *, wait: bool = True) -> list[tuple[Node, Stat] | None]:
        """Lookup and stat of several names at once; None for one that is not there. Understands `.` and `..`."""
        found: list[tuple[Node, Stat] | None] = []
        made, entries = self._names(directory, wait), None
        for name in names:
            try:
                if name in made or name in (b".", b".."):
                    node = self.lookup(directory, name, wait=wait)
                else:
                    if entries is None:
                        entries = self._entries(directory, wait)
                    node = self._child(directory, name, made, entries)
            except NotFoundError:
                found.append(None)
            else:
                found.append((node, self.stat(node, wait=wait)))
        return found

    def stat(self, node: Node, *, wait: bool = True) -> Stat:
        """What stat says of a node."""
        entry = node.entry
        type_, attributes = entry.type, entry.attributes
        mtime, ctime, size, nlink = attributes.mtime_ns, attributes.ctime_ns, entry.size, 1
        if type_ is EntryType.DIRECTORY:
            # Which experts a directory holds is found out when it is opened, not when it is listed: 1 says nothing.
            size, nlink = 0, 1 if node.area is Area.EXPERTS else 2 + self._count_subdirectories(node, wait)
            if (view := self._current(node)) is not None and (named := view.mtimes.get(node.path, 0)) > mtime:
                mtime, ctime = named, max(ctime, named)
        elif type_ is EntryType.SYMLINK:
            size = len(entry.target)
        if entry.link_group:
            nlink = max(1, self._group_sizes(node, wait)[entry.link_group])
        mode = (S_IFREG if type_ is EntryType.FILE else type_.st_mode) | attributes.mode
        return Stat(mode, nlink, attributes.uid, attributes.gid, size, mtime, ctime)

    def open(self, node: Node) -> FileReader:
        """The bytes of a file. Raises CorruptError."""
        if isinstance(node.entry, ExpertEntry):
            return self._experts.open(node.entry, self._directory(node.entry.home, wait=True))
        return self._store.open_file(node.entry)

    def is_kept(self, node: Node) -> bool:
        """False for what lies in a version that was forgotten: then its bytes may be gone, and nothing is damaged."""
        version = node.version
        return version is None or self.view.keeps(version)

    def xattr_names(self, node: Node) -> list[bytes]:
        """The names that listxattr gives: what a copy should carry, so computed ones are not among them."""
        computed = [XATTR_PREFIX + name for name in self._computed(node)] if self._show_virtual else []
        return [*node.entry.attributes.xattrs, *computed]

    def xattr(self, node: Node, name: bytes) -> bytes:
        """The value of an extended attribute, stored or computed. Raises NotFoundError."""
        computed = name.removeprefix(XATTR_PREFIX)
        if computed != name and computed in self._computed(node):
            return self._compute(node, computed)
        try:
            return node.entry.attributes.xattrs[name]
        except KeyError:
            raise NotFoundError(f"{node.place}: no attribute {name!r}") from None

    # Names

    def _child(self, directory: Node, name: bytes, names: Children, entries: Mapping[bytes, Entry]) -> Node:
        """What `name` is in a directory that holds `names`, and below them `entries`."""
        path = join(directory.path, name)
        if name in names:
            leaf = names[name]
            if isinstance(leaf, Version):
                return Node(directory.area, path, self._store.root_entry(leaf), leaf, len(path))
            if isinstance(leaf, Link):
                return self._link(path, leaf)
        entry = entries.get(name)
        if entry is not None and (name not in names or entry.type is EntryType.DIRECTORY):
            return Node(directory.area, path, entry, directory.version, directory.bound)
        if name in names:
            return self._directory_of_names(directory.area, path)
        if directory.is_root and name in _VIRTUAL:
            return self._directory_of_names(_VIRTUAL[name], b"")
        raise NotFoundError(f"{directory.place}: no {name!r} in it")

    def _names(self, directory: Node, wait: bool) -> Children:
        """What names make of a directory, over what its snapshot holds."""
        if not wait and not self.view.built(directory.area):
            raise NotCachedError
        view = self._current(directory)
        return view.directories.get(directory.path, {}) if view is not None else {}

    def _current(self, directory: Node) -> NameTree | None:
        """The names of a node's area, or None when its snapshot's name has come to mean something else.

        Such a node lives on for those who have it open; what is named below it belongs to the newer version.
        """
        view = self.view.area(directory.area)
        if directory.version is None:
            return view
        leaf = view.leaves.get(directory.path[: directory.bound])
        return view if isinstance(leaf, Version) and leaf.sequence == directory.version.sequence else None

    def _directory_of_names(self, area: Area, path: bytes) -> Node:
        uid, gid = self._owner
        return Node(area, path, Entry(path.rpartition(b"/")[2], EntryType.DIRECTORY, Attributes(0o755, uid, gid)))

    def _link(self, path: bytes, link: Link) -> Node:
        uid, gid, time_ns = *self._owner, link.version.time_ns
        attributes = Attributes(0o777, uid, gid, time_ns, time_ns)
        return Node(Area.LATEST, path, Entry(b"latest", EntryType.SYMLINK, attributes, target=link.target))

    # Contents of snapshots

    def _entries(self, directory: Node, wait: bool) -> Mapping[bytes, Entry]:
        if directory.version is None or not directory.is_directory:
            return {}
        if directory.area is Area.EXPERTS:
            return self._expert_entries(directory.entry, wait)
        return self._directory(directory.entry.child, wait)

    def _expert_entries(self, entry: Entry, wait: bool) -> Mapping[bytes, Entry]:
        home, layer = (entry.home, entry.layer) if isinstance(entry, ExpertEntry) else (entry.child, b"")
        if home == NO_ID:
            return {}
        table = self._experts.known(home)
        if table is None:
            if not wait:
                raise NotCachedError
            table = self._experts.load(home, self._directory(home, wait))
        return table.entries(layer)

    def _directory(self, object_id: ObjectId, wait: bool) -> Mapping[bytes, Entry]:
        if object_id == NO_ID:
            return {}
        entries = self._directories.get(object_id)
        if entries is None:
            if not wait:
                raise NotCachedError
            entries = self._store.directory(object_id)
            weight = min(directory_weight(entries), limits.DIRECTORY_CACHE_ENTRIES // 2)  # the largest is kept too
            self._directories.put(object_id, entries, weight)
        return entries

    def _count_subdirectories(self, node: Node, wait: bool) -> int:
        names = self._names(node, wait)
        if not names:
            return self._own_subdirectories(node, wait)
        try:
            entries = self._entries(node, wait)
        except CorruptError:
            entries = {}
        own = {name for name, entry in entries.items() if entry.type is EntryType.DIRECTORY}
        return len(own | {name for name, leaf in names.items() if not isinstance(leaf, Link)})

    def _own_subdirectories(self, node: Node, wait: bool) -> int:
        if node.version is None:
            return 0
        object_id = node.entry.child
        count = self._subdirectories.get(object_id)
        if count is None:
            try:
                entries = self._directory(object_id, wait)
            except CorruptError:
                entries = {}  # whoever opens it is told; its parent can still be listed
            count = sum(entry.type is EntryType.DIRECTORY for entry in entries.values())
            self._subdirectories.put(object_id, count)
        return count

    def _group_sizes(self, node: Node, wait: bool) -> Counter[int]:
        """How many names each group of hard links has in a node's snapshot."""
        version = node.version
        if version is None:
            return Counter()
        sizes = self._groups.get(version.root)
        if sizes is None:
            if not wait:
                raise NotCachedError
            sizes = Counter(entry.link_group for entry in self._readable(version.root) if entry.link_group)
            self._groups.put(version.root, sizes, min(len(sizes) + 1, limits.DIRECTORY_CACHE_ENTRIES // 2))
        return sizes

    def _readable(self, root: ObjectId) -> Iterator[Entry]:
        """All entries below a directory object, except in damaged directories: whoever opens one of these is told."""
        directories = [(root, 0)]
        while directories:
            object_id, depth = directories.pop()
            try:
                entries = self._store.directory(object_id) if object_id != NO_ID else {}
            except CorruptError:
                continue
            for entry in entries.values():
                yield entry
                if entry.type is EntryType.DIRECTORY and depth < limits.PATH_DEPTH:
                    directories.append((entry.child, depth + 1))

    # Computed attributes

    def _computed(self, node: Node) -> list[bytes]:
        names = [b"store"]
        if node.version is not None:
            names += [b"snapshot", b"version"]
            if node.entry.child != NO_ID:
                names.append(b"object")
            if node.entry.type is EntryType.FILE and not isinstance(node.entry, ExpertEntry):
                names.append(b"stored_size")
        return names

    def _compute(self, node: Node, name: bytes) -> bytes:
        version = node.version
        if name == b"store" or version is None:
            return os.fsencode(os.path.abspath(self._store.path))
        if name == b"snapshot":
            return path_bytes(version.path)
        if name == b"version":
            return str(version.number).encode()
        if name == b"object":
            return node.entry.child.hex().encode()
        return str(self._stored_size(node.entry)).encode()

    def _stored_size(self, entry: Entry) -> int:
        """Bytes in packs of the objects that a file refers to; what it shares with others counts in full."""
        ids = [*self._store.recipe(entry).object_ids(), entry.child]
        return sum(place.encoded_length for place in self._store.index.find_many(ids).values())


_VIRTUAL = {area.value: area for area in Area if area.value}
