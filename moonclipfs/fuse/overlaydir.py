"""The directory `@overlays` of a mount: what is in it are the overlays of the store.

It stands among the layers of the mount, and is asked and changed as they are; whatever it cannot do is EPERM.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from stat import S_IFDIR
from typing import NoReturn, Protocol, cast

import trio
from pyfuse3 import FUSEError

from moonclipfs import limits
from moonclipfs.errors import (
    CorruptError,
    ExistsError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    TooManyOpenError,
    UsageError,
)
from moonclipfs.fuse.operations import DOTS
from moonclipfs.fuse.served import LIVE_BIT, Served
from moonclipfs.layers.inodes import Inode, inode_number, root_number
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.live import Live
from moonclipfs.layers.lookup import Status
from moonclipfs.layers.tree import XATTR_PREFIX, NotCachedError
from moonclipfs.store.layerdirs import layer_id
from moonclipfs.store.overlaydirs import DIRECTORY, find_overlay
from moonclipfs.types import EntryType

OVERLAYS_NAME = b"@overlays"
OVERLAYS_NUMBER = LIVE_BIT
"""Its inode number; an inode of a layer has the same once in 2**62."""
_MODE = 0o755


class OpenOverlays(Protocol):
    """The overlays that a mount has open. But for what is looked up in the first two, all may block."""

    @property
    def by_name(self) -> Mapping[bytes, Served]:
        """Those that are open."""

    @property
    def by_root(self) -> Mapping[int, Served]:
        """The same, by the numbers of their roots."""

    def names(self) -> list[str]:
        """Of all overlays of the store."""

    def opened(self, name: bytes, /) -> Served | None:
        """An overlay, opened unless it is; None where there is none. Raises BusyError, CorruptError, BackendError."""

    def make(self, name: str, /) -> Served:
        """Make an empty overlay. Raises ExistsError, UsageError."""

    def rename(self, old: str, new: str, /) -> None:
        """Call an overlay otherwise. Raises NotFoundError, ExistsError, UsageError, BusyError."""

    def discard(self, name: str, /) -> None:
        """Throw an overlay away. Raises NotFoundError, BusyError when files in it are open."""

    def make_room(self) -> None:
        """Close some that nobody uses, if many are open."""


class ServedRoots(Served):
    """The roots of overlays that were not open when the kernel was told of them, as requests need them.

    Whoever goes there waits for room on threads of these alone: the kernel is asked to forget names of the directory
    above for that, and does so between requests about these, which must find a thread.
    """

    name_seconds = 0.0
    """Of what is not there, or not open here: other processes make and discard overlays too."""

    def __init__(self, names: OverlayNames, live: Live, place: bytes) -> None:
        super().__init__(cast("Layer", names), live.encoder, live.make_room, place)
        self.names = names
        # An overlay may take long to be opened: no other request is to wait for a thread because of that.
        self.threads = trio.CapacityLimiter(limits.METADATA_THREADS)

    @property
    def epoch(self) -> object:
        """Always the same: what the kernel keeps of this directory is taken back when it changes."""
        return None

    @property
    def staged(self) -> int:
        """None."""
        return 0

    def links(self, inode: Inode) -> list[tuple[Inode, bytes]]:
        """None that the kernel could be asked to forget for room: there are few."""
        return []


class ServedNames(ServedRoots):
    """The directory of overlays, as requests need it."""

    def __init__(
        self, overlays: OpenOverlays, live: Live, names: OverlayNames | None = None, place: bytes = OVERLAYS_NAME
    ) -> None:
        super().__init__(names or OverlayNames(overlays, live.layer), live, place)
        self._overlays = overlays
        self._roots = ServedRoots(self.names, live, place)

    @property
    def attribute_seconds(self) -> float:
        """Every path of an overlay leads through this directory."""
        return limits.NAME_TIMEOUT_SECONDS

    @property
    def listed(self) -> Callable[..., list[tuple[Inode, Status] | None]]:
        """Opens no overlay: what a listing says of one that is not open holds for a moment only."""
        return self.names.listed

    def of(self, inode: Inode) -> Served:
        """The overlay whose root an inode is. One of a listing is none, also when the overlay was opened just then: it
        shows nothing.
        """
        if inode is self.names.root:
            return self
        served = self._overlays.by_root.get(inode.number)
        return served if served is not None and served.layer.root is inode else self._roots


class OverlayNames:
    """What requests use of a layer, for the names of overlays. With `wait=False`, NotCachedError is raised by whatever
    takes longer than a look into memory.
    """

    def __init__(
        self,
        overlays: OpenOverlays,
        live: Layer,
        number: int = OVERLAYS_NUMBER,
        number_of: Callable[[bytes], int] = root_number,
    ) -> None:
        """`live` has the directory above, `number_of` tells the number of a root by the id of the layer."""
        self._overlays = overlays
        self._number_of = number_of
        self._live = live
        self._store = live.store
        self.root = Inode(number, EntryType.DIRECTORY, _MODE, os.geteuid(), os.getegid(), time.time_ns())

    # Looking

    def children(
        self, directory: Inode, names: Iterable[bytes], *, wait: bool = True
    ) -> list[tuple[Inode, Status] | None]:
        """The roots of overlays, which are opened for it. Raises BusyError for one that another process has."""
        self._require_root(directory, wait)
        return [self._child(name, wait) for name in names]

    def listed(
        self, directory: Inode, names: Iterable[bytes], *, wait: bool = True
    ) -> list[tuple[Inode, Status] | None]:
        """The same, but overlays that are not open stay so."""
        self._require_root(directory, wait)
        known = self._overlays.by_name
        return [
            self._child(name, wait) if name in DOTS or name in known else self._closed(name, wait) for name in names
        ]

    def _child(self, name: bytes, wait: bool) -> tuple[Inode, Status] | None:
        if name == b".":
            return self.root, self.stat(self.root, wait=wait)
        if name == b"..":
            return self._live.root, self._live.stat(self._live.root, wait=wait)
        served = self._overlays.by_name.get(name)
        if served is None or served.gone:
            _may_wait(wait)
            try:
                served = self._overlays.opened(name)
            except TooManyOpenError:
                return self._closed(name, wait)
        return None if served is None else (served.layer.root, served.layer.stat(served.layer.root, wait=wait))

    def _closed(self, name: bytes, wait: bool) -> tuple[Inode, Status] | None:
        _may_wait(wait)
        root = Path(self._store.path)
        try:
            number = self._number_of(layer_id(root, find_overlay(root, os.fsdecode(name)).layer))
        except (NotFoundError, UsageError):
            if os.fsdecode(name) not in self._overlays.names():
                return None
            number = inode_number(name, OVERLAYS_NAME)
        except CorruptError:
            number = inode_number(name, OVERLAYS_NAME)  # whoever goes there is told
        inode = Inode(number, EntryType.DIRECTORY, _MODE, self.root.uid, self.root.gid, self.root.mtime_ns)
        return inode, _status(inode, 2, inode.mtime_ns)

    def names_in(self, directory: Inode, *, wait: bool = True) -> list[bytes]:
        """The names of all overlays of the store."""
        self._require_root(directory, wait)
        _may_wait(wait)
        return [os.fsencode(name) for name in self._overlays.names()]

    def stat(self, inode: Inode, *, wait: bool = True) -> Status:
        """Of the directory itself, or of the root of an overlay."""
        served = self._overlays.by_root.get(inode.number)
        if served is not None:
            return served.layer.stat(served.layer.root, wait=wait)
        self._require_root(inode, wait)
        _may_wait(wait)
        try:
            changed = os.stat(self._store.path / DIRECTORY).st_mtime_ns
        except FileNotFoundError:
            changed = inode.mtime_ns
        return _status(inode, 2 + len(self._overlays.names()), changed)

    def readlink(self, inode: Inode) -> bytes:
        """Raises UsageError."""
        raise UsageError(f"{inode} is no symbolic link")

    def xattr_names(self, inode: Inode) -> list[bytes]:
        """None."""
        return []

    def xattr(self, inode: Inode, name: bytes, *, wait: bool = True) -> bytes:
        """`user.moonclip.store`. Raises NotFoundError."""
        if name == XATTR_PREFIX + b"store":
            return os.fsencode(os.path.abspath(self._store.path))
        raise NotFoundError(f"{OVERLAYS_NAME!r}: no attribute {name!r}")

    def path(self, inode: Inode) -> bytes:
        """Of the directory itself."""
        return b""

    # Changing

    def make(
        self,
        directory: Inode,
        name: bytes,
        type_: EntryType,
        mode: int,
        uid: int,
        gid: int,
        now_ns: int,
        *,
        target: bytes = b"",
        wait: bool = True,
    ) -> Inode:
        """mkdir: an empty overlay; its root. Raises NotPermittedError for anything else, ExistsError, UsageError."""
        self._require_root(directory, wait)
        if type_ is not EntryType.DIRECTORY:
            self._refuse()
        _may_wait(wait)
        layer = self._overlays.make(os.fsdecode(name)).layer
        layer.set_attributes(layer.root, mode=mode, uid=uid, gid=gid, now_ns=now_ns)
        return layer.root

    def rmdir(self, directory: Inode, name: bytes, now_ns: int, *, wait: bool = True) -> None:
        """Discard an overlay that shows nothing. Raises NotFoundError, NotEmptyError, BusyError."""
        self._require_root(directory, wait)
        _may_wait(wait)
        served = self._overlays.opened(name)
        if served is None:
            raise NotFoundError(f"no overlay {os.fsdecode(name)}")
        if served.layer.names_in(served.layer.root):
            raise NotEmptyError(f"the overlay {os.fsdecode(name)} is not empty: `moonclipfs overlay discard` takes all")
        self._overlays.discard(os.fsdecode(name))

    def rename(
        self,
        directory: Inode,
        name: bytes,
        target: Inode,
        new_name: bytes,
        now_ns: int,
        *,
        replace: bool = True,
        exchange: bool = False,
        wait: bool = True,
    ) -> None:
        """Call an overlay otherwise. Raises NotFoundError, ExistsError for a name that another one has."""
        self._require_root(directory, wait)
        self._require_root(target, wait)
        if exchange:
            raise UsageError("overlays are not exchanged")
        _may_wait(wait)
        if self._overlays.opened(name) is None:
            raise NotFoundError(f"no overlay {os.fsdecode(name)}")
        if os.fsdecode(new_name) in self._overlays.names():
            if name == new_name and replace:
                return
            raise ExistsError(f"there is an overlay {os.fsdecode(new_name)} already")
        self._overlays.rename(os.fsdecode(name), os.fsdecode(new_name))

    def sync_directory(self, directory: Inode) -> None:
        """Names of overlays are durable when they are made."""

    def _refuse(self, *_arguments: object, **_options: object) -> NoReturn:
        raise NotPermittedError("only overlays stand in @overlays: mkdir makes an empty one")

    link = unlink = set_attributes = set_xattr = remove_xattr = open_file = truncate = _refuse

    # What the kernel knows

    def remember(self, inode: Inode) -> None:
        """Note that the kernel was told of an inode: this one, or the root of an overlay that is not open."""
        inode.lookups += 1

    def forget(self, inode: Inode, count: int) -> None:
        """Note that the kernel forgot `count` mentions of it."""
        inode.lookups -= count

    def _require_root(self, inode: Inode, wait: bool) -> None:
        """Raise ESTALE for the root of an overlay that was not open when it was listed, or looked up while as many were
        open as may be: the kernel looks it up again.
        """
        if inode is not self.root:
            _may_wait(wait)
            self._overlays.make_room()
            raise FUSEError(errno.ESTALE)


def _may_wait(wait: bool) -> None:
    if not wait:
        raise NotCachedError


def _status(inode: Inode, nlink: int, mtime_ns: int) -> Status:
    return Status(
        S_IFDIR | inode.mode, nlink, inode.uid, inode.gid, 0, mtime_ns, mtime_ns, max(mtime_ns, inode.atime_ns), 0
    )
