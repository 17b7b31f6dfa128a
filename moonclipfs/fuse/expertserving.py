"""`@experts/@overlays` of a mount: the experts of its overlays, which can be written to.

Each overlay that is looked at there is served once more, as the tree of its experts. What stands at a name
there follows from the contents of other files: where these change, the kernel is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, Protocol, cast

from moonclipfs import limits
from moonclipfs.errors import NotPermittedError
from moonclipfs.fuse.overlaydir import OVERLAYS_NAME, OVERLAYS_NUMBER, OverlayNames, ServedNames
from moonclipfs.fuse.served import Served
from moonclipfs.layers.expertinodes import ExpertInode, mirror_number
from moonclipfs.layers.inodes import Inode, root_number
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.live import Live
from moonclipfs.layers.names import Area
from moonclipfs.layers.overlayexperts import OverlayExperts, Tables
from moonclipfs.store.cache import BoundedCache

EXPERTS_OVERLAYS_NUMBER = OVERLAYS_NUMBER + 1
"""The inode number of `@experts/@overlays`."""


class ServedExperts(Served):
    """The experts of an open overlay, as requests need them."""

    name_seconds = 0.0
    keeps_pages = False

    def __init__(self, overlay: Served, tables: Tables) -> None:
        """`overlay` is the overlay itself."""
        self.experts = OverlayExperts(overlay.layer, tables)
        super().__init__(cast("Layer", self.experts), overlay.encoding, overlay.make_room)
        self._overlay = overlay

    @property
    def epoch(self) -> object:
        """Always the same: the kernel believes no name."""
        return None

    @property
    def staged(self) -> int:
        """Bytes of the overlay that wait to be stored."""
        return self._overlay.staged

    def links(self, inode: Inode) -> list[tuple[Inode, bytes]]:
        """(directory, name) of an inode."""
        return self.experts.links(inode)

    def place_of(self, inode: Inode) -> str:
        """The path of an inode from the root of the mount, for messages."""
        self.place = Area.EXPERTS.value + b"/" + self._overlay.place
        return super().place_of(inode)

    @property
    def attribute_seconds(self) -> float:
        """How long the kernel may believe what stat said."""
        return limits.EXPERT_TIMEOUT_SECONDS

    def seconds(self, inode: Inode) -> float:
        """Experts for a while, and directories for a moment. What was renamed over an expert has to be looked up again:
        the kernel takes its name along.
        """
        if not isinstance(inode, ExpertInode):
            return 0.0
        return limits.NAME_TIMEOUT_SECONDS if inode.expert is None else limits.EXPERT_TIMEOUT_SECONDS

    def beside(self, inode: Inode, span: tuple[int, int] | None = None) -> tuple[list[tuple[int, bytes]], list[int]]:
        """The files of the overlay that have the bytes which were changed through an expert."""
        return [], list(self.experts.holding(inode))


class ServingOverlays(Protocol):
    """The overlays that a mount has open, each with its experts."""

    @property
    def by_name(self) -> Mapping[bytes, ServedWithExperts]:
        """Those that are open."""

    def names(self) -> list[str]:
        """Of all overlays of the store."""

    def opened(self, name: bytes, /) -> ServedWithExperts | None:
        """An overlay, opened unless it is; None where there is none. Raises BusyError, CorruptError, BackendError."""

    def make_room(self) -> None:
        """Close some that nobody uses, if many are open."""


class ServedWithExperts(Served):
    """An open overlay whose experts are served beside it once they were asked for."""

    experts: ServedExperts | None = None

    @property
    def is_waited_for(self) -> bool:
        """Whether files wait to become experts of it."""
        return self.experts is not None and self.experts.experts.is_waited_for

    def serve_experts(self, tables: Tables) -> ServedExperts:
        """Serve them from here on."""
        if self.experts is None:
            self.experts = ServedExperts(self, tables)
        return self.experts

    def beside(self, inode: Inode, span: tuple[int, int] | None = None) -> tuple[list[tuple[int, bytes]], list[int]]:
        """The experts that the kernel knows, and their names where these may mean others."""
        if self.experts is None:
            return [], []
        tree = self.experts.experts
        found, renamed = tree.depending(inode, span)
        links = [link for expert in found for link in tree.links(expert)] if renamed else []
        return [(directory.number, name) for directory, name in links], [expert.number for expert in found]


class ExpertsOfOverlays:
    """The experts of the overlays that a mount has open, as `overlaydir.OpenOverlays`. Nothing is made here."""

    def __init__(self, overlays: ServingOverlays) -> None:
        self._overlays = overlays
        self._tables: Tables = BoundedCache(limits.EXPERT_CACHE_PARTS)

    @property
    def by_name(self) -> Mapping[bytes, Served]:
        """Those that are open, and whose experts were asked for."""
        found = list(self._overlays.by_name.items())
        return {name: served.experts for name, served in found if served.experts is not None}

    @property
    def by_root(self) -> Mapping[int, Served]:
        """The same, by the numbers of their roots."""
        return {served.layer.root.number: served for served in self.by_name.values()}

    def names(self) -> list[str]:
        """Of all overlays of the store."""
        return self._overlays.names()

    def opened(self, name: bytes) -> Served | None:
        """The experts of an overlay, which is opened unless it is; None where there is none."""
        served = self._overlays.opened(name)
        return None if served is None else served.serve_experts(self._tables)

    def make(self, name: str) -> NoReturn:
        """Raises NotPermittedError."""
        raise NotPermittedError("overlays are made, renamed and discarded in @overlays")

    def rename(self, old: str, new: str) -> NoReturn:
        """Raises NotPermittedError."""
        self.make(new)

    def discard(self, name: str) -> NoReturn:
        """Raises NotPermittedError."""
        self.make(name)

    def make_room(self) -> None:
        """Close some overlays that nobody uses, if many are open."""
        self._overlays.make_room()


class ServedExpertNames(ServedNames):
    """The directory `@experts/@overlays`, as requests need it."""

    def __init__(self, overlays: ExpertsOfOverlays, live: Live) -> None:
        names = OverlayNames(overlays, live.layer, EXPERTS_OVERLAYS_NUMBER, _root_number)
        super().__init__(overlays, live, names, Area.EXPERTS.value + b"/" + OVERLAYS_NAME)


def _root_number(layer_id: bytes) -> int:
    """The number of the root of the experts of an overlay that is not open."""
    return mirror_number(layer_id, root_number(layer_id))
