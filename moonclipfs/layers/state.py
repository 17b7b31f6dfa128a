"""What a layer consists of, in memory: its inodes, and how each journal record changes them.

Everything here happens under the layer's lock, and nothing here waits. A change is checked before its record is
appended; what is applied then is what is replayed later, by the same code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from moonclipfs.errors import CorruptError
from moonclipfs.layers.inodes import ROOT_NUMBER, Inode, Lower, inode_number
from moonclipfs.layers.names import join
from moonclipfs.layers.records import (
    Adopt,
    Based,
    Counters,
    Dropped,
    Kept,
    Link,
    Make,
    Moving,
    Record,
    Remove,
    Rename,
    SetAttributes,
    SetXattr,
    Unbinding,
    Unbound,
)
from moonclipfs.types import NO_ID, EntryType


class State:
    """The own inodes of a layer, and the numbers that it gave out."""

    def __init__(self, layer_id: bytes, root: int = ROOT_NUMBER) -> None:
        """An empty layer, whose root has the number `root`. `layer_id` keys the inode numbers."""
        self.layer_id = layer_id
        self.root = Inode(root, EntryType.DIRECTORY, 0o755, os.geteuid(), os.getegid())
        self.root.own = True
        self.own: dict[int, Inode] = {root: self.root}
        self.seen: WeakValueDictionary[int, Inode] = WeakValueDictionary()
        """All inodes, by number. One that is not own stays while the kernel, a handle or a child refers to it."""
        self.remembered: dict[int, Inode] = {}
        """Those that the kernel knows."""
        self.change = 0
        """Counts changes of own state."""
        self.inodes = 0
        """How many new inodes were made ever."""
        self.generations = 0
        """The last number given to a staging generation, and to a capture below."""
        self.captures = 0
        self.unbinding: dict[int, bytes] = {}
        """Snapshots that were removed here, by the log record that bound them, until the log was told: their paths."""
        self.captured: dict[int, int] = {}
        """The directory (an inode number) of each capture that is not published yet, by the number of the capture."""
        self.moving: Moving | None = None
        self.based: Based | None = None
        """What an overlay stands on; None for a live layer."""
        self.names_version = 1
        """Changes whenever the names of the log mean something else, or lower directories do."""
        self.on_gone: Callable[[Inode], None] = lambda inode: None
        """Called for a file that has no names and no handles any more, and that the kernel has forgotten."""
        self._apply: dict[type[Any], Callable[[Any], object]] = {
            Make: self._make,
            Adopt: self._adopt,
            Link: self._link,
            Remove: self._remove,
            Rename: self._rename,
            SetAttributes: self._set_attributes,
            SetXattr: self._set_xattr,
            Dropped: self._drop,
            Kept: self._keep,
            Unbound: lambda record: self.unbinding.pop(record.sequence, None),
            Unbinding: lambda record: self.unbinding.update({record.sequence: record.path}),
            Moving: self._move,
            Based: self._base,
            Counters: self._count,
        }

    def handle(self, type_: type[Any], function: Callable[[Any], object]) -> None:
        """Let `function` apply the records of a type that this module does not know."""
        self._apply[type_] = function

    def apply(self, record: Record) -> None:
        """Change the state as a record says. Raises CorruptError when the record contradicts the state."""
        self.change += 1
        try:
            self._apply[type(record)](record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"journal: {record!r} does not fit the records before it ({error!r})") from error

    # Looking

    def find(self, number: int) -> Inode | None:
        """The inode with a number, own or not."""
        return self.own.get(number) or self.seen.get(number)

    def new_number(self) -> int:
        """The number of the next new inode."""
        while True:
            number = inode_number(self.layer_id, b"new", b"%d" % (self.inodes + 1))
            if number not in self.own and number not in self.seen:
                return number
            self.inodes += 1

    def path(self, inode: Inode) -> bytes | None:
        """The path from the layer's root, of a file by any of its names; None for what has no name any more."""
        parts: list[bytes] = []
        while inode is not self.root:
            link = next(iter(inode.links), None)
            if link is None:
                return None
            inode, name = link
            parts.append(name)
        return b"/".join(reversed(parts))

    # Changing

    def changed(self, inode: Inode) -> None:
        """Note that attributes or contents of an inode changed with this record."""
        inode.changed = self.change
        self._raise_below(inode)

    def name_changed(self, directory: Inode, name: bytes, time_ns: int) -> None:
        """Note that a name of a directory came, went or changed its inode with this record."""
        directory.names_changed[name] = self.change
        directory.mtime_ns = directory.ctime_ns = time_ns
        self.changed(directory)

    def release(self, inode: Inode) -> None:
        """Let go of an inode that nobody needs any more; harmless for any other.

        While the kernel knows it, an open that it has found before the last name went may still come.
        """
        if inode.links or inode.handles or inode.lookups or inode is self.root:
            return
        if inode.is_file:
            self.on_gone(inode)
        self.own.pop(inode.number, None)

    def _raise_below(self, inode: Inode) -> None:
        change, todo = self.change, [inode]
        while todo:
            inode = todo.pop()
            if inode.below != change:
                inode.below = change
                todo += [parent for parent, _ in inode.links]

    def attach(self, directory: Inode, name: bytes, inode: Inode) -> None:
        """Make `inode` the own entry `name` of a directory."""
        directory.entries[name] = inode
        inode.links.add((directory, name))

    def detach(self, directory: Inode, name: bytes) -> Inode | None:
        """Take an own entry out of a directory; None when there is none."""
        inode = directory.entries.pop(name, None)
        if inode is not None:
            inode.links.discard((directory, name))
        return inode

    def _make(self, record: Make) -> None:
        directory = self.directory(record.parent)
        if record.name in directory.entries:
            raise ValueError(f"{record.name!r} is there")
        type_, time_ns = EntryType(record.type), record.time_ns
        inode = Inode(record.number, type_, record.mode, record.uid, record.gid, time_ns)
        inode.target = record.target
        self.inodes += 1
        self.take_over(inode)
        self.attach(directory, record.name, inode)
        directory.subdirectories += inode.is_directory
        inode.counted = self.names_version if inode.is_directory else 0
        self.name_changed(directory, record.name, time_ns)
        self.changed(inode)

    def take_over(self, inode: Inode) -> None:
        """Make an inode own."""
        inode.own = True
        self.own[inode.number] = inode
        self.seen[inode.number] = inode

    def _adopt(self, record: Adopt) -> None:
        directory = self.directory(record.parent)
        if record.name in directory.entries:
            raise ValueError(f"{record.name!r} is there")
        inode = self.find(record.number)
        if inode is None:
            inode = Inode(record.number, EntryType(record.type), record.mode, record.uid, record.gid)
        if not inode.own:
            _fill(inode, record)
            self.take_over(inode)
        self.attach(directory, record.name, inode)

    def _link(self, record: Link) -> None:
        inode, directory = self.own[record.number], self.directory(record.parent)
        if record.name in directory.entries:
            raise ValueError(f"{record.name!r} is there")
        self.attach(directory, record.name, inode)
        inode.ctime_ns = record.time_ns
        self.name_changed(directory, record.name, record.time_ns)
        self.changed(inode)

    def _remove(self, record: Remove) -> None:
        directory, name = self.directory(record.parent), record.name
        inode = self.detach(directory, name)
        if record.whiteout:
            directory.removed.add(name)
        self._unbind(directory, name, record.unbind)
        self.name_changed(directory, name, record.time_ns)
        self._forget_change(directory, name, record.whiteout)
        if inode is not None:
            self._left(inode, directory, record.time_ns)

    def _forget_change(self, directory: Inode, name: bytes, whiteout: bool) -> None:
        """A name that came and went is no change, unless a capture has seen it: else temporary names would add up."""
        if not whiteout and not self.captured:
            directory.names_changed.pop(name, None)

    def _left(self, inode: Inode, directory: Inode, time_ns: int) -> None:
        """An own inode lost a name in `directory`."""
        inode.ctime_ns = time_ns
        directory.subdirectories -= inode.is_directory
        self.changed(inode)
        self.release(inode)

    def _unbind(self, directory: Inode, name: bytes, sequence: int) -> None:
        if sequence:
            self.unbinding[sequence] = self._named(directory, name)
            self.names_version += 1

    def _rename(self, record: Rename) -> None:
        old, new = self.directory(record.parent), self.directory(record.new_parent)
        self._end_move({self._named(old, record.name), self._named(new, record.new_name)})
        inode = self.detach(old, record.name)
        if inode is None:
            raise ValueError(f"{record.name!r} is not there")
        victim = self.detach(new, record.new_name)
        self.attach(new, record.new_name, inode)
        change = int(inode.is_directory)
        old.subdirectories -= change
        new.subdirectories += change
        inode.ctime_ns = record.time_ns
        if record.whiteout:
            old.removed.add(record.name)
        if record.exchange:
            if victim is None:
                raise ValueError(f"{record.new_name!r} is not there")
            self.attach(old, record.name, victim)
            change = int(victim.is_directory)
            old.subdirectories += change
            new.subdirectories -= change
            victim.ctime_ns = record.time_ns
            self.changed(victim)
        self._unbind(new, record.new_name, record.unbind)
        self.name_changed(old, record.name, record.time_ns)
        self.name_changed(new, record.new_name, record.time_ns)
        if not record.exchange:
            self._forget_change(old, record.name, record.whiteout)
        self.changed(inode)
        if victim is not None and not record.exchange:
            self._left(victim, new, record.time_ns)

    def _set_attributes(self, record: SetAttributes) -> None:
        inode = self._any(record.number)
        for name in ("mode", "uid", "gid", "atime_ns", "mtime_ns"):
            value = getattr(record, name)
            if value is not None:
                setattr(inode, name, value)
        inode.ctime_ns = record.ctime_ns
        self.changed(inode)

    def _set_xattr(self, record: SetXattr) -> None:
        inode = self._any(record.number)
        xattrs = dict(inode.xattrs)
        if record.value is None:
            del xattrs[record.name]
        else:
            xattrs[record.name] = record.value
        inode.xattrs = xattrs
        inode.ctime_ns = record.ctime_ns
        self.changed(inode)

    def directory(self, number: int) -> Inode:
        """The own directory with a number. Raises KeyError, ValueError."""
        inode = self.own[number]
        if not inode.is_directory:
            raise ValueError(f"{inode} is no directory")
        return inode

    def _any(self, number: int) -> Inode:
        inode = self.find(number)
        if inode is None:
            raise KeyError(number)
        return inode

    def _drop(self, record: Dropped) -> None:
        directory = self.directory(record.parent)
        inode = directory.entries[record.name]
        self.detach(directory, record.name)
        self._disown(inode)
        directory.counted = 0

    def _disown(self, inode: Inode) -> None:
        """An inode that lost a name is own no more, with all that is in it alone."""
        todo = [inode]
        while todo:
            inode = todo.pop()
            for name, child in list(inode.entries.items()):
                self.detach(inode, name)
                todo.append(child)
            if not inode.links:
                inode.own = False
                inode.removed.clear()
                inode.names_changed.clear()
                inode.changed = inode.below = inode.sealed = inode.counted = 0
                self.own.pop(inode.number, None)
                self.release(inode)

    def _keep(self, record: Kept) -> None:
        inode = self.directory(record.number)
        inode.sealed = 0
        self.changed(inode)

    def _move(self, record: Moving) -> None:
        self.moving = record if record.old else None

    def _base(self, record: Based) -> None:
        root = self.root
        for name, inode in list(root.entries.items()):
            self.detach(root, name)
            self._disown(inode)
        self.based = record
        root.mode, root.uid, root.gid, root.xattrs = record.mode, record.uid, record.gid, dict(record.xattrs)
        root.atime_ns = root.mtime_ns = record.mtime_ns
        root.ctime_ns = record.ctime_ns
        root.lower = Lower(record.anchor, b"", record.shown, record.shown)
        root.removed.clear()
        root.names_changed.clear()
        root.changed = root.below = root.counted = 0
        self.names_version += 1

    def _end_move(self, paths: set[bytes]) -> None:
        if self.moving is not None and {self.moving.old, self.moving.new} == paths:
            self.moving = None

    def _named(self, directory: Inode, name: bytes) -> bytes:
        return join(self.path(directory) or b"", name)

    def _count(self, record: Counters) -> None:
        self.inodes, self.generations = record.inode, record.generation
        self.captures, self.change = record.capture, record.change


def _fill(inode: Inode, record: Adopt) -> None:
    inode.mode, inode.uid, inode.gid = record.mode, record.uid, record.gid
    inode.atime_ns = inode.mtime_ns = record.mtime_ns
    inode.ctime_ns = record.ctime_ns
    inode.xattrs = dict(record.xattrs)
    inode.size, inode.target, inode.group, inode.sealed = record.size, record.target, record.group, record.sealed
    if inode.is_directory:
        inode.lower = None
        if record.child != NO_ID:
            inode.lower = Lower(record.anchor, record.path, record.child, record.root)
    else:
        inode.child = record.child
        inode.lower = Lower(record.anchor, b"", NO_ID, record.root) if record.group else None
