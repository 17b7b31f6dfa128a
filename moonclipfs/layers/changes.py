"""Changing a layer: making, linking, removing and renaming, attributes and extended attributes.

Errors are those of ext4. Everything is checked first; then the record is journalled and applied. An inode of the base
is adopted before it changes (`adopting.py`).
"""

from __future__ import annotations

import os
from stat import S_ISGID, S_ISUID, S_IXGRP

from moonclipfs import limits
from moonclipfs.errors import (
    CorruptError,
    DirectoryError,
    ExistsError,
    LimitError,
    NameTooLongError,
    NoDirectoryError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    TooManyLinksError,
    UsageError,
)
from moonclipfs.layers.adopting import Adopting
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.names import join
from moonclipfs.layers.records import Link, Make, Moving, Remove, Rename, SetAttributes, SetXattr
from moonclipfs.layers.tree import XATTR_PREFIX, NotCachedError
from moonclipfs.types import EntryType, Version

LINKS = 65000
"""Names of one file, as in ext4."""


class Changes(Adopting):
    """All changes but those of contents. `now_ns` is the time of the change; `wait` is as in `Lookup`."""

    def make(
        self,
        directory: Inode,
        name: bytes,
        type_: EntryType,
        mode: int,
        uid: int,
        gid: int,
        now_ns: int,
        target: bytes = b"",
        *,
        wait: bool = True,
    ) -> Inode:
        """A new inode called `name`; `target` is a symlink's text. In a set-group-ID directory it gets its group.

        Raises ExistsError, NotFoundError for a removed directory, NameTooLongError, NotPermittedError.
        """

        def body() -> Inode:
            self._check_new(directory, name)
            if self._find(directory, name) is not None:
                raise ExistsError(f"{self._place(directory)}: {os.fsdecode(name)!r} is there already")
            owner, bits = gid, mode & 0o7777
            if directory.mode & S_ISGID:
                owner = directory.gid
                bits |= S_ISGID if type_ is EntryType.DIRECTORY else 0
            self._adopt(directory)
            number = self.state.new_number()
            self.record(Make(number, directory.number, name, type_, bits, uid, owner, target, now_ns))
            return self.state.own[number]

        if len(target) >= limits.PATH_BYTES:
            raise NameTooLongError(f"a symbolic link of {len(target)} bytes: longer than {limits.PATH_BYTES - 1}")
        return self.run(body, wait)

    def link(self, inode: Inode, directory: Inode, name: bytes, now_ns: int, *, wait: bool = True) -> None:
        """One more name of a file. Raises NotPermittedError for a directory, TooManyLinksError, and as `make`."""

        def body() -> None:
            self._check_new(directory, name)
            if self._find(directory, name) is not None:
                raise ExistsError(f"{self._place(directory)}: {os.fsdecode(name)!r} is there already")
            if inode.is_directory:
                raise NotPermittedError("a directory has one name only")
            if not inode.links:
                raise NotFoundError(f"{inode} has no name any more")
            if len(inode.links) >= LINKS:
                raise TooManyLinksError(f"{inode} has {LINKS} names")
            self._adopt(inode)
            self._adopt(directory)
            self.record(Link(inode.number, directory.number, name, now_ns))

        self.run(body, wait)

    def unlink(self, directory: Inode, name: bytes, now_ns: int, *, wait: bool = True) -> Inode:
        """Take a name of a file away; returns the file. Raises NotFoundError, DirectoryError for a directory."""

        def body() -> Inode:
            self.check_held(directory, name)
            inode = self._lookup(directory, name)
            if inode.is_directory:
                raise DirectoryError(f"{self._place(inode)} is a directory")
            if inode.own or inode.group or inode.handles:
                self._take(directory, name, inode)
            self._remove(directory, name, inode, 0, now_ns)
            return inode

        return self.run(body, wait)

    def rmdir(self, directory: Inode, name: bytes, now_ns: int, *, wait: bool = True) -> Inode:
        """Remove an empty directory; returns it. A snapshot bound there is unbound by `push_names`.

        Raises NotFoundError, NoDirectoryError, NotEmptyError.
        """

        def body() -> Inode:
            self.check_unmoved()
            inode = self._lookup(directory, name)
            if not inode.is_directory:
                raise NoDirectoryError(f"{self._place(inode)} is no directory")
            if inode is self.root or name in (b".", b".."):
                raise UsageError("the root cannot be removed")
            if not self._is_empty(inode):
                raise NotEmptyError(f"{self._place(inode)} is not empty")
            self._remove(directory, name, inode, self._bound_at(directory, name), now_ns)
            return inode

        return self.run(body, wait)

    def rename(
        self,
        directory: Inode,
        name: bytes,
        new_directory: Inode,
        new_name: bytes,
        now_ns: int,
        *,
        replace: bool = True,
        exchange: bool = False,
        wait: bool = True,
    ) -> None:
        """Call what is `name` in `directory` `new_name` in `new_directory`; atomic, and of one cost for any size.

        What is there is replaced, unless not `replace`, or with `exchange` takes the first place. Snapshots bound in a
        directory move in the log along with it: that waits. Raises NotFoundError, ExistsError, NotEmptyError,
        DirectoryError, NoDirectoryError, UsageError into itself, NotPermittedError, BusyError, BackendError.
        """
        place = (directory, name, new_directory, new_name)

        def body() -> bool:
            for held, held_name in (place[:2], place[2:]):
                self.check_held(held, held_name)
            both = self._check_rename(place, replace, exchange)
            if both is None:
                return False
            inode, victim = both
            if inode.is_directory or (exchange and victim is not None and victim.is_directory):
                self.check_unmoved()
                if self._names_move(place, exchange):
                    return True
            rename = self._prepare_rename(place, inode, victim, exchange, now_ns)
            self.before_rename(inode, victim)
            if exchange and victim is not None:
                self.before_rename(victim, inode)
            self.record(rename)
            self._replaced(new_directory, new_name, victim, exchange, now_ns)
            return False

        if self.run(body, wait):
            if not wait:
                raise NotCachedError
            self._rename_with_names(place, replace, exchange, now_ns)

    def set_attributes(
        self,
        inode: Inode,
        *,
        now_ns: int,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        wait: bool = True,
    ) -> None:
        """chmod, chown and utimens. A chown alone takes set-user-ID and set-group-ID off a file, as in ext4."""

        def body() -> None:
            bits = None if mode is None else mode & 0o7777
            if bits is None and (uid is not None or gid is not None) and not inode.is_directory:
                bits = without_set_ids(inode.mode)
            self._change(inode, SetAttributes(inode.number, bits, uid, gid, atime_ns, mtime_ns, now_ns))

        self.run(body, wait)

    def set_xattr(
        self,
        inode: Inode,
        name: bytes,
        value: bytes,
        now_ns: int,
        *,
        create: bool = False,
        replace: bool = False,
        wait: bool = True,
    ) -> None:
        """Set an extended attribute. Raises ExistsError, NotFoundError, NotPermittedError, LimitError."""

        def body() -> None:
            _check_xattr(inode, name, value)
            if create and name in inode.xattrs:
                raise ExistsError(f"{inode}: attribute {name!r} is there already")
            if replace and name not in inode.xattrs:
                raise NotFoundError(f"{inode}: no attribute {name!r}")
            self._change(inode, SetXattr(inode.number, name, value, now_ns))

        self.run(body, wait)

    def remove_xattr(self, inode: Inode, name: bytes, now_ns: int, *, wait: bool = True) -> None:
        """Remove an extended attribute. Raises NotFoundError, NotPermittedError for a computed one."""

        def body() -> None:
            if name.startswith(XATTR_PREFIX):
                raise NotPermittedError(f"{name!r} is computed")
            if name not in inode.xattrs:
                raise NotFoundError(f"{inode}: no attribute {name!r}")
            self._change(inode, SetXattr(inode.number, name, None, now_ns))

        self.run(body, wait)

    # Under the lock

    def _check_new(self, directory: Inode, name: bytes) -> None:
        """Raise what forbids a new name in a directory."""
        self.check_held(directory, name)
        if not directory.is_directory:
            raise NoDirectoryError(f"{directory} is no directory")
        if len(name) > limits.NAME_BYTES:
            raise NameTooLongError(f"a name of {len(name)} bytes: longer than {limits.NAME_BYTES}")
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            raise UsageError(f"{name!r} cannot be the name of a file")
        if directory is self.root:
            if name.startswith(b"@") and not self.fixed:
                raise NotPermittedError(f"{os.fsdecode(name)!r}: names that begin with @ are taken at the root")
        elif not directory.links:
            raise NotFoundError(f"{directory} was removed")

    def _change(self, inode: Inode, record: SetAttributes | SetXattr) -> None:
        """Change an inode; one without a name is known to nobody after a crash, so no journal needs to know."""
        if inode.links or inode is self.root:
            self._adopt(inode)
            self.record(record)
        else:
            self.state.apply(record)

    def _remove(self, directory: Inode, name: bytes, inode: Inode, unbind: int, now_ns: int) -> None:
        self._adopt(directory)
        whiteout = self._is_below(directory, name)
        self.record(Remove(directory.number, name, unbind, now_ns, whiteout))
        if not inode.own:
            self._replaced(directory, name, inode, False, now_ns)

    def _replaced(self, directory: Inode, name: bytes, victim: Inode | None, exchange: bool, now_ns: int) -> None:
        """Take a name from an inode that is not own: no record does."""
        if victim is not None and not victim.own and not exchange:
            victim.links.discard((directory, name))
            victim.ctime_ns = now_ns
            directory.subdirectories -= victim.is_directory

    def _is_below(self, directory: Inode, name: bytes) -> bool:
        """Whether the lower directory has something at `name`, whiteout or not."""
        if directory.lower is None or name in directory.removed:
            return directory.lower is not None
        try:
            return name in self.base.entries(directory.lower.directory)
        except CorruptError:
            return True

    def _bound_at(self, directory: Inode, name: bytes) -> int:
        """The log record that bound the snapshot at `name`, 0 for none."""
        path = self._names_path(directory)
        leaf = None if path is None else self._leaf(path, name)
        return leaf.sequence if isinstance(leaf, Version) else 0

    def _is_empty(self, directory: Inode) -> bool:
        if directory.entries or self._bound_names(directory):
            return False
        lower = directory.lower
        return lower is None or self.base.entries(lower.directory).keys() <= directory.removed

    # Renaming

    def _check_rename(
        self, place: tuple[Inode, bytes, Inode, bytes], replace: bool, exchange: bool
    ) -> tuple[Inode, Inode | None] | None:
        """What is renamed, and what it meets; None when there is nothing to do."""
        directory, name, new_directory, new_name = place
        inode = self._lookup(directory, name)
        self._check_new(new_directory, new_name)
        victim = self._find(new_directory, new_name)
        if exchange and victim is None:
            raise NotFoundError(f"no {os.fsdecode(new_name)!r} in {self._place(new_directory)}")
        if victim is not None and not (replace or exchange):
            raise ExistsError(f"{self._place(victim)} is there already")
        if inode.is_directory and _is_within(new_directory, inode):
            raise UsageError(f"cannot move {self._place(inode)} into itself")
        if victim is inode:
            return None
        if victim is not None and exchange:
            if victim.is_directory and _is_within(directory, victim):
                raise UsageError(f"cannot move {self._place(victim)} into itself")
        elif victim is not None:
            self._check_replace(inode, victim, _is_within(directory, victim))
        return inode, victim

    def _check_replace(self, inode: Inode, victim: Inode, within: bool) -> None:
        if within:
            raise NotEmptyError(f"{self._place(victim)} is not empty")
        if inode.is_directory and not victim.is_directory:
            raise NoDirectoryError(f"{self._place(victim)} is no directory")
        if victim.is_directory and not inode.is_directory:
            raise DirectoryError(f"{self._place(victim)} is a directory")
        if victim.is_directory and not self._is_empty(victim):
            raise NotEmptyError(f"{self._place(victim)} is not empty")

    def _prepare_rename(
        self, place: tuple[Inode, bytes, Inode, bytes], inode: Inode, victim: Inode | None, exchange: bool, now_ns: int
    ) -> Rename:
        """Make own what a rename touches, and return its record."""
        directory, name, new_directory, new_name = place
        whiteout = not exchange and self._is_below(directory, name)
        unbind = 0
        if victim is not None:
            if exchange or victim.own or victim.group or victim.handles:
                self._take(new_directory, new_name, victim)
            if victim.is_directory and not exchange:
                unbind = self._bound_at(new_directory, new_name)
        self._take(directory, name, inode)
        self._adopt(new_directory)
        return Rename(
            directory.number, name, new_directory.number, new_name, exchange, now_ns, whiteout, unbind
        )  # fmt: skip

    def _names_move(self, place: tuple[Inode, bytes, Inode, bytes], exchange: bool) -> bool:
        """Whether names of the log have to move with a rename."""
        return bool(self.names_at(*place[:2]) or (exchange and self.names_at(*place[2:])))

    def _rename_with_names(
        self, place: tuple[Inode, bytes, Inode, bytes], replace: bool, exchange: bool, now_ns: int
    ) -> None:
        rename: Rename | None = None

        def prepare() -> Moving | None:
            nonlocal rename
            both = self._check_rename(place, replace, exchange)
            if both is None:
                return None
            inode, victim = both
            forth, back = self.names_at(*place[:2]), exchange and self.names_at(*place[2:])
            if forth and back:
                raise UsageError("two directories that both hold snapshots cannot be exchanged: rename them in turn")
            old, new = (join(self.path(at), name) for at, name in (place[:2], place[2:]))
            rename = self._prepare_rename(place, inode, victim, exchange, now_ns)
            if rename.unbind:
                # The log refuses to move names to where others are.
                self._remove(place[2], place[3], victim or inode, rename.unbind, now_ns)
                rename, victim = rename._replace(unbind=0), None
            self.hold(frozenset((place[:2], place[2:])), frozenset(() if victim is None else (victim,)))
            return Moving(new, old, back, exchange) if back else Moving(old, new, forth, exchange)

        def finish() -> Rename:
            assert rename is not None
            return rename

        self.move_names(prepare, finish)


def without_set_ids(mode: int) -> int:
    """The mode that a file has after a write or a chown."""
    return mode & ~(S_ISUID | (S_ISGID if mode & S_IXGRP else 0))


def _is_within(inode: Inode, top: Inode) -> bool:
    """Whether a directory is `top`, or in it."""
    while inode is not top:
        link = next(iter(inode.links), None)
        if link is None:
            return False
        inode = link[0]
    return True


def _check_xattr(inode: Inode, name: bytes, value: bytes) -> None:
    if name.startswith(XATTR_PREFIX):
        raise NotPermittedError(f"{name!r} is computed")
    if not 0 < len(name) <= limits.NAME_BYTES:
        raise NameTooLongError(f"an attribute's name of {len(name)} bytes: longer than {limits.NAME_BYTES}")
    if len(value) > limits.XATTR_BYTES or (name not in inode.xattrs and len(inode.xattrs) >= limits.XATTRS):
        raise LimitError(f"{inode}: attribute {name!r} of {len(value)} bytes is too long, or one too many")
