"""What a layer shows: at every directory its own entries, else bound names of the log at the directory's current path,
else what its lower directory holds, without the whiteouts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from stat import S_IFREG
from typing import NamedTuple

from moonclipfs import limits
from moonclipfs.errors import CorruptError, NameTooLongError, NoDirectoryError, NotFoundError, UsageError
from moonclipfs.layers.base import Base
from moonclipfs.layers.core import Core
from moonclipfs.layers.inodes import Inode, Lower, inode_number
from moonclipfs.layers.names import Area, Children, join, path_bytes
from moonclipfs.layers.tree import XATTR_PREFIX, NotCachedError
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, ObjectId, Version

_NO_NAMES: Children = {}
_BLOCK = 512


class Status(NamedTuple):
    """What stat says of an inode; times in nanoseconds, size in bytes, `mode` with the type bits.

    `blocks`, of 512 bytes, are those that are no holes.
    """

    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    atime_ns: int
    blocks: int
    rdev: int = 0


class Lookup(Core):
    """Looking at a layer. With `wait=False`, calls that need the store raise NotCachedError and wait for nothing."""

    # For callers without the lock

    def lookup(self, directory: Inode, name: bytes, *, wait: bool = True) -> Inode:
        """The inode called `name` in a directory, `.` and `..` too.

        Raises NotFoundError, NoDirectoryError, NameTooLongError, CorruptError.
        """
        inode = directory.entries.get(name)
        return self.run(lambda: self._lookup(directory, name), wait) if inode is None else inode

    def children(
        self, directory: Inode, names: Sequence[bytes], *, wait: bool = True
    ) -> list[tuple[Inode, Status] | None]:
        """Lookup and stat of several names at once; None for one that is not there. Understands `.` and `..`."""
        found: list[tuple[Inode, Status] | None] = []

        def find(end: int) -> None:
            while len(found) < end:  # what was found before something had to be loaded is not looked up again
                inode = self._look(directory, names[len(found)])
                found.append(None if inode is None else (inode, self._status(inode)))

        for at in range(0, len(names), limits.LISTING_BATCH):  # the lock is not held for long
            self.run(partial(find, min(at + limits.LISTING_BATCH, len(names))), wait)
        return found

    def names_in(self, directory: Inode, *, wait: bool = True) -> list[bytes]:
        """The names in a directory, sorted; some may be gone when they are looked up. Raises CorruptError."""
        return self.run(lambda: sorted(self._shown_names(directory)), wait)

    def stat(self, inode: Inode, *, wait: bool = True) -> Status:
        """What stat says of an inode."""
        return self.run(lambda: self._status(inode), wait)

    def resolve(self, path: bytes, *, wait: bool = True) -> Inode:
        """The inode at a path from the layer's root; links are not followed. Raises NotFoundError, NoDirectoryError."""
        inode = self.root
        for name in path.split(b"/") if path else ():
            inode = self.lookup(inode, name, wait=wait)
        return inode

    def readlink(self, inode: Inode) -> bytes:
        """The text of a symlink. Raises UsageError for anything else."""
        if inode.type is not EntryType.SYMLINK:
            raise UsageError(f"{inode} is no symbolic link")
        return inode.target

    def xattr_names(self, inode: Inode) -> list[bytes]:
        """The names that listxattr gives: what a copy should carry, so computed ones are not among them."""
        with self.lock:
            return list(inode.xattrs)

    def xattr(self, inode: Inode, name: bytes, *, wait: bool = True) -> bytes:
        """The value of an extended attribute, stored or computed. Raises NotFoundError."""
        computed = name.removeprefix(XATTR_PREFIX)
        if computed != name:
            value = self._computed(inode, computed, wait)
        else:
            with self.lock:
                value = inode.xattrs.get(name)
        if value is None:
            raise NotFoundError(f"{inode}: no attribute {name!r}")
        return value

    def _computed(self, inode: Inode, name: bytes, wait: bool) -> bytes | None:
        if name == b"store":
            return os.fsencode(os.path.abspath(self.store.path))
        if name in self.facts:
            return self.facts[name]
        if name == b"object" and self.fixed and inode.is_file:
            return self._stored_as(inode)
        with self.lock:
            version, unchanged = self._version_of(inode), not inode.below and inode.content is None
            child = inode.lower.directory if inode.is_directory and inode.lower else inode.child
            size = inode.size
        if version is None or not unchanged:
            return None
        if name == b"snapshot":
            return path_bytes(version.path)
        if name == b"version":
            return str(version.number).encode()
        if name == b"object" and child != NO_ID:
            return child.hex().encode()
        if name != b"stored_size" or not inode.is_file:
            return None
        if not wait:
            raise NotCachedError
        entry = Entry(b"file", EntryType.FILE, Attributes(0), size, child)
        ids = [*self.store.recipe(entry).object_ids(), child]
        return str(sum(place.encoded_length for place in self.store.index.find_many(ids).values())).encode()

    def _stored_as(self, inode: Inode) -> bytes | None:
        """The recipe of a file that is stored as it is, in hexadecimal."""
        with self.lock:
            content = inode.content
            recipe = inode.child if content is None else content.recipe if content.exact else NO_ID
        return recipe.hex().encode() if recipe != NO_ID else None

    def _version_of(self, inode: Inode) -> Version | None:
        """The version that an inode lies in."""
        while not inode.sealed:
            link = next(iter(inode.links), None)
            if link is None:
                return None
            inode = link[0]
        leaf = self.view.area(Area.LIVE).leaves.get(self.state.path(inode) or b"")
        return leaf if isinstance(leaf, Version) and leaf.sequence == inode.sealed else None

    # Under the lock

    def _lookup(self, directory: Inode, name: bytes) -> Inode:
        inode = self._look(directory, name)
        if inode is None:
            raise NotFoundError(f"no {os.fsdecode(name)!r} in {self._place(directory)}")
        return inode

    def _look(self, directory: Inode, name: bytes) -> Inode | None:
        """What a directory has at a name, the dots too; None for nothing."""
        if not directory.is_directory:
            raise NoDirectoryError(f"{directory} is no directory")
        if name == b".":
            return directory
        if name == b"..":
            return next((parent for parent, _ in directory.links), self.root)
        if len(name) > limits.NAME_BYTES:
            raise NameTooLongError(f"a name of {len(name)} bytes: longer than {limits.NAME_BYTES}")
        return self._find(directory, name)

    def _place(self, inode: Inode) -> str:
        """The path of an inode, for messages."""
        path = self.state.path(inode)
        return "a removed directory" if path is None else "/" + os.fsdecode(path)

    def _find(self, directory: Inode, name: bytes) -> Inode | None:
        """What a directory shows as `name`, or None."""
        inode = directory.entries.get(name)
        if inode is not None:
            return inode
        path = self._names_path(directory)
        if path is not None:
            leaf = self._leaf(path, name)
            if isinstance(leaf, Version):
                return self._snapshot(directory, name, leaf)
            if leaf is None:
                return self._passage(directory, name, path)
        entry = self._lower_entry(directory, name)
        return None if entry is None else self._inside(directory, name, entry)

    def _lower_entry(self, directory: Inode, name: bytes) -> Entry | None:
        """What shows through at `name`."""
        lower = directory.lower
        if lower is None or name in directory.removed:
            return None
        return self.base.entries(lower.directory).get(name)

    def _shown_names(self, directory: Inode) -> set[bytes]:
        if not directory.is_directory:
            raise NoDirectoryError(f"{directory} is no directory")
        names = set(directory.entries)
        if directory.lower is not None:
            names |= self.base.entries(directory.lower.directory).keys() - directory.removed
        names.update(self._bound_names(directory))
        return names

    # Names of the log

    def _names_path(self, directory: Inode) -> bytes | None:
        """The path of a directory if there are names of the log in it."""
        if self.fixed:
            return None  # an overlay shows none
        live = self.view.area(Area.LIVE).directories
        if len(live) == 1 and directory is not self.root:
            return None  # no names below any
        path = self.state.path(directory)
        return path if path in live else None

    def _leaf(self, path: bytes, name: bytes) -> Version | _Absent | None:
        """What names of the log make of `name` in the directory at `path`: None for a directory on the way to more."""
        children = self.view.area(Area.LIVE).directories[path]
        leaf = children.get(name, ABSENT)
        if leaf is ABSENT or not self.state.unbinding:
            return leaf  # type: ignore[return-value]  # there are no links among live names
        if isinstance(leaf, Version) and leaf.sequence not in self.state.unbinding:
            return leaf
        return None if self._passes(join(path, name)) else ABSENT

    def _passes(self, path: bytes) -> int:
        """The log record that bound one of the names below `path` that this layer has not removed; 0 for none."""
        live, todo = self.view.area(Area.LIVE).directories, [path]
        while todo:
            path = todo.pop()
            for name, leaf in live.get(path, _NO_NAMES).items():
                if isinstance(leaf, Version) and leaf.sequence not in self.state.unbinding:
                    return leaf.sequence
                todo.append(join(path, name))
        return 0

    def _bound_names(self, directory: Inode) -> list[bytes]:
        """The names of the log in a directory, also those that own entries hide."""
        path = self._names_path(directory)
        if path is None:
            return []
        children = self.view.area(Area.LIVE).directories[path]
        if not self.state.unbinding:
            return list(children)
        return [name for name in children if self._leaf(path, name) is not ABSENT]

    def bound_in(self, directory: Inode) -> list[bytes]:
        """Under the lock: the names of the log in a directory, also those that own entries hide."""
        return self._bound_names(directory)

    def look_inside(self, directory: Inode, name: bytes) -> Inode:
        """Under the lock, inside `run`: what a directory shows at a name. Raises NotFoundError, Missing."""
        return self._lookup(directory, name)

    # Inodes that are not own

    def _snapshot(self, directory: Inode, name: bytes, version: Version) -> Inode:
        """The root of a bound snapshot."""
        text = b"%d" % version.sequence
        inode, salt = self._known((b"snapshot", text), directory, name, EntryType.DIRECTORY)
        if not inode.own:
            entry = self.store.root_entry(version)
            anchor = b"%b.%d" % (text, salt) if salt else text
            _fill(inode, entry, Lower(anchor, b"", version.root, version.root))
            inode.sealed = version.sequence
        return inode

    def _passage(self, directory: Inode, name: bytes, path: bytes) -> Inode:
        """A directory that longer names pass through: one that shows through from below, or else one for them alone."""
        try:
            entry = self._lower_entry(directory, name)
        except CorruptError:
            entry = None  # what names make does not need what the snapshot around it holds
        if entry is not None and entry.type is EntryType.DIRECTORY:
            return self._inside(directory, name, entry)
        identity = (b"names", b"%d" % directory.number, name)
        inode, _ = self._known(identity, directory, name, EntryType.DIRECTORY)
        if not inode.own:
            time_ns = self.view.area(Area.LIVE).mtimes.get(join(path, name), 0)
            attributes = Attributes(0o755, os.geteuid(), os.getegid(), time_ns, time_ns)
            _fill(inode, Entry(name, EntryType.DIRECTORY, attributes), None)
            inode.sealed = 0
        return inode

    def _inside(self, directory: Inode, name: bytes, entry: Entry) -> Inode:
        """What shows through from a lower directory."""
        above = directory.lower
        assert above is not None
        anchor, path = above.anchor, join(above.path, name)
        if entry.link_group:
            identity: tuple[bytes, ...] = (b"link", anchor, b"%d" % entry.link_group)
        elif entry.type is EntryType.DIRECTORY:
            identity = (b"in", anchor, path)
        else:
            # Another file at the same place of a version that others published is another inode.
            identity = (b"in", anchor, path, entry.child, entry.target)
        inode, _ = self._known(identity, directory, name, entry.type, (entry.link_group, above.root))
        if not inode.own:
            is_directory = entry.type is EntryType.DIRECTORY
            lower = Lower(anchor, path, entry.child, above.root) if is_directory else _beside(above)
            _fill(inode, entry, lower)
        return inode

    def _known(
        self,
        identity: tuple[bytes, ...],
        directory: Inode,
        name: bytes,
        type_: EntryType,
        group: tuple[int, ObjectId] = (0, NO_ID),
    ) -> tuple[Inode, int]:
        """The inode of this identity that stands at `name`, a new one if need be; and 0, unless its number is not the
        first choice, since another inode has that.
        """
        salt, link = 0, (directory, name)
        while True:
            number = inode_number(self.id, *identity, *([b"%d" % salt] if salt else []))
            inode = self.state.find(number)
            if inode is None:
                inode = Inode(number, type_, 0)
                self.state.seen[number] = inode
                break
            if inode.type is type_:
                if link in inode.links:
                    return inode, salt
                # In another version, the same number is that of another group.
                if group[0] and inode.links and inode.lower and group == (inode.group, inode.lower.root):
                    break
                # The kernel may have other bytes in its cache for a file that it remembers.
                used = inode.own or inode.handles or inode.content or (inode.lookups and not inode.is_directory)
                if not used and not self._is_shown(inode):
                    break  # it was somewhere else before
            salt += 1
        if not inode.own:
            inode.links.add(link)
        return inode, salt

    def _is_shown(self, inode: Inode) -> bool:
        """Whether an inode stands where its links say; those that are not so any more are taken away."""
        for directory, name in list(inode.links):
            alive = directory is self.root or (directory.links if directory.own else self._is_shown(directory))
            if not alive or self._find(directory, name) is not inode:
                inode.links.discard((directory, name))
        return bool(inode.links)

    # What stat says

    def _status(self, inode: Inode) -> Status:
        size = blocks = 0
        type_, (mtime, ctime) = inode.type, self.times(inode)
        if type_ is EntryType.DIRECTORY:
            nlink = 2 + self._subdirectories(inode) if inode.links or inode is self.root else 0
        else:
            nlink = len(inode.links)
            if inode.group and nlink and inode.lower is not None and not inode.own:
                nlink = max(nlink, len(self.base.groups(inode.lower.root).get(inode.group, ())))
            if type_ is EntryType.FILE:
                size, blocks = _size(inode)
            elif type_ is EntryType.SYMLINK:
                size = len(inode.target)
        mode = (S_IFREG if type_ is EntryType.FILE else type_.st_mode) | inode.mode
        atime = inode.atime_ns if inode.own else mtime
        return Status(mode, nlink, inode.uid, inode.gid, size, mtime, ctime, atime, blocks)

    def times(self, inode: Inode) -> tuple[int, int]:
        """Under the lock: times of modification and change. A directory that is not own is newer when names are in
        it.
        """
        mtime, ctime = inode.mtime_ns, inode.ctime_ns
        if inode.is_directory and not inode.own and (path := self._names_path(inode)) is not None:
            named = self.view.area(Area.LIVE).mtimes.get(path, 0)
            if named > mtime:
                return named, max(ctime, named)
        return mtime, ctime

    def _subdirectories(self, directory: Inode) -> int:
        """How many directories a directory shows."""
        if directory.counted != self.state.names_version:
            directory.subdirectories = self._count_subdirectories(directory)
            directory.counted = self.state.names_version
        return directory.subdirectories

    def _count_subdirectories(self, directory: Inode) -> int:
        entries = directory.entries
        names = {name for name in self._bound_names(directory) if name not in entries}
        count = len(names) + sum(child.is_directory for child in entries.values())
        if directory.lower is None:
            return count
        object_id = directory.lower.directory
        hidden = names.union(entries, directory.removed)
        if hidden:
            count -= _directories_among(self.base, object_id, hidden)
        return count + self.base.subdirectories(object_id)


class _Absent:
    """Stands for no name."""


ABSENT = _Absent()


def _directories_among(base: Base, object_id: bytes, names: Iterable[bytes]) -> int:
    try:
        entries: Mapping[bytes, Entry] = base.entries(object_id)
    except CorruptError:
        return 0  # as `Base.subdirectories` counts
    return sum(name in entries and entries[name].type is EntryType.DIRECTORY for name in names)


def _beside(above: Lower) -> Lower:
    """What a file has in the place of what shows through it: where its tree is. `above` is that of its directory."""
    return Lower(above.anchor, b"", NO_ID, above.root)


def _size(inode: Inode) -> tuple[int, int]:
    """Size in bytes, and blocks that are no holes."""
    content = inode.content
    if content is None:
        return inode.size, -(-inode.size // _BLOCK)
    return content.size, -(-content.held // _BLOCK)


def _fill(inode: Inode, entry: Entry, lower: Lower | None) -> None:
    """Give an inode that is not own the attributes of what it stands for."""
    attributes = entry.attributes
    inode.mode, inode.uid, inode.gid = attributes.mode, attributes.uid, attributes.gid
    inode.mtime_ns = inode.atime_ns = attributes.mtime_ns
    inode.ctime_ns = attributes.ctime_ns
    inode.xattrs = attributes.xattrs
    inode.target, inode.size, inode.group = entry.target, entry.size, entry.link_group
    inode.lower = lower
    if entry.type is not EntryType.DIRECTORY:
        inode.child = entry.child
