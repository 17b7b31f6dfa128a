"""The writable layers that a mount serves: which of them an inode or a handle is of, and what makes room there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import trio
from pyfuse3 import FUSEError

from moonclipfs import limits
from moonclipfs.errors import NotFoundError
from moonclipfs.fuse.handles import ReadHandle
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.inodes import ROOT_NUMBER, Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.lookup import Status
from moonclipfs.layers.room import Encoding

LIVE_BIT = 1 << 62
"""Of the numbers of inodes and handles of layers."""


class Served:
    """One layer of a mount, as requests need it."""

    name_seconds = limits.CONTENT_TIMEOUT_SECONDS
    """How long the kernel may believe a name: such a layer changes through the mount only, or the kernel is told."""
    keeps_pages = True
    """Whether the pages that the kernel has of a file are right when it is opened anew."""

    def __init__(self, layer: Layer, encoding: Encoding, make_room: Callable[[int], int], place: bytes = b"") -> None:
        """`place` is the path of the layer's root from the root of the mount, `make_room` as `Live.make_room`."""
        self.layer = layer
        self.encoding = encoding
        self.make_room = make_room
        self.place = place
        self.threads: trio.CapacityLimiter | None = None
        """Those on which requests wait, if not those of all."""
        self.gone = False
        """The layer was discarded, or let go: no request may use it any more."""

    @property
    def attribute_seconds(self) -> float:
        """How long the kernel may believe what stat said."""
        return self.name_seconds

    @property
    def epoch(self) -> object:
        """Another one whenever names of the layer mean something else though nobody changed them through the mount."""
        return self.layer.view

    @property
    def staged(self) -> int:
        """Bytes that wait to be stored."""
        return self.layer.staging.used

    @property
    def listed(self) -> Callable[..., list[tuple[Inode, Status] | None]]:
        """As `layer.children`, for a listing."""
        return self.layer.children

    def of(self, inode: Inode) -> Served:
        """The layer of an inode that was found in a directory of this one."""
        return self

    def seconds(self, inode: Inode) -> float:
        """How long the kernel may believe the name of an inode, and its attributes as they were looked up with it."""
        return self.name_seconds

    def beside(self, inode: Inode, span: tuple[int, int] | None = None) -> tuple[list[tuple[int, bytes]], list[int]]:
        """What depends on the bytes of a file in a range from one offset to another, on all of it, or on the names in a
        directory: names, each with the number of its directory, and numbers of files. After a change, what the kernel
        knows of these is right no more.
        """
        return [], []

    def links(self, inode: Inode) -> list[tuple[Inode, bytes]]:
        """(directory, name) of every name of an inode of the layer."""
        with self.layer.lock:
            return list(inode.links)

    def has_name(self, inode: Inode) -> bool:
        """False for an inode of the layer whose last name is gone."""
        try:
            self.layer.path(inode)
        except NotFoundError:
            return False
        return True

    def place_of(self, inode: Inode) -> str:
        """The path of an inode from the root of the mount, for messages."""
        try:
            path = self.layer.path(inode)
        except NotFoundError:
            return f"a removed file ({inode})"
        return "/" + os.fsdecode(b"/".join(part for part in (self.place, path) if part))


class ServedLayers:
    """The inodes of layers that the kernel was told of, by number. Lives on the thread of the event loop."""

    def __init__(self, live: Served) -> None:
        self.live = live
        self.known: dict[int, Inode] = {ROOT_NUMBER: live.layer.root}
        """The longest known first."""
        self.beside: dict[int, Served] = {}
        """The layers of those that are not of the live one."""

    def find(self, number: int) -> tuple[Inode, Served]:
        """The inode that the kernel means, and its layer. Raises ESTALE for one that it cannot know."""
        try:
            return self.known[number], self.beside.get(number, self.live)
        except KeyError:
            raise FUSEError(errno.ESTALE) from None

    def remember(self, inode: Inode, served: Served) -> None:
        """The kernel is told of an inode once more."""
        served.layer.remember(inode)
        before = self.known.get(inode.number)
        if before is not inode:
            if before is not None:  # what a listing said of an overlay that was not open
                inode.lookups += before.lookups
            self.known[inode.number] = inode
        if served is not self.live:
            self.beside[inode.number] = served

    def forget(self, number: int, count: int) -> None:
        """The kernel knows an inode by so many names less."""
        inode = self.known.get(number)
        if inode is not None:
            self.beside.get(number, self.live).layer.forget(inode, count)
            if inode.lookups <= 0:
                del self.known[number]
                self.beside.pop(number, None)

    def oldest(self, count: int) -> list[tuple[Inode, Served]]:
        """The inodes that the kernel has known for the longest time, files first; they count as new from here on."""
        numbers = [number for number, _ in zip(self.known, range(count + 1), strict=False) if number != ROOT_NUMBER]
        found = [self.find(number) for number in numbers]
        chosen = [(inode, served) for inode, served in found if not inode.is_directory] or found
        for inode, _ in chosen:
            self.known[inode.number] = self.known.pop(inode.number)
        return chosen

    def known_of(self, served: Served) -> list[Inode]:
        """What the kernel knows of a layer beside the live one."""
        return [self.known[number] for number, one in self.beside.items() if one is served]

    def drop(self, served: Served) -> None:
        """Know nothing of a layer any more: whatever the kernel still asks about it is ESTALE."""
        served.gone = True
        for inode in self.known_of(served):
            del self.beside[inode.number], self.known[inode.number]


class LayerFile(ReadHandle):
    """A file of a layer that somebody has open."""

    __slots__ = ("file", "served")

    def __init__(self, served: Served, file: OpenFile, sequence: int) -> None:
        super().__init__(file, sequence)
        self.served = served
        self.file = file
        self.users = 1

    @property
    def inode(self) -> Inode:
        """What is open."""
        return self.file.inode

    @property
    def place(self) -> str:
        """The path from the root of the mount, for messages."""
        return self.served.place_of(self.inode)


class LayerDirectory:
    """An open directory: its names as they were when it was read from its beginning."""

    __slots__ = ("inode", "names", "sequence", "served")

    def __init__(self, inode: Inode, served: Served, sequence: int) -> None:
        self.inode = inode
        self.served = served
        self.names: list[bytes] = []
        self.sequence = sequence
