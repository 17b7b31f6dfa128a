"""The experts of a layer that this process has at work, for paths without a mount (`layerpath.py`)."""

from __future__ import annotations

from typing import cast

from moonclipfs import limits
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.overlayexperts import OverlayExperts
from moonclipfs.layers.room import Encoding, Holder
from moonclipfs.store.cache import BoundedCache


class HeldExperts:
    """A `room.Holder` whose layer is the tree of the experts of another one's."""

    def __init__(self, holder: Holder) -> None:
        """`holder` has the layer that holds the checkpoint."""
        self._holder = holder
        self.layer = cast("Layer", OverlayExperts(holder.layer, BoundedCache(limits.EXPERT_CACHE_PARTS)))

    @property
    def encoder(self) -> Encoding:
        """What encodes in the background."""
        return self._holder.encoder

    def make_room(self, length: int) -> int:
        """Free about so many bytes of the disk; returns how many."""
        return self._holder.make_room(length)
