"""Space without cron: what was removed is kept for a while, and goes at once when the disk is needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from moonclipfs import limits
from moonclipfs.store import forget
from moonclipfs.store.gc import collect, preview
from moonclipfs.store.log import Names
from moonclipfs.store.store import Store
from moonclipfs.types import Version

if TYPE_CHECKING:
    from moonclipfs.layers.encoder import Encoder
    from moonclipfs.layers.layer import Layer


def reclaim(store: Store, arguments: Mapping[str, Any]) -> dict[str, int]:
    """In the encoder process: forget the versions `forget`, (path, number) each, and run gc; or, with `preview`, only
    tell what that would free. Returns {"freed": bytes}.
    """
    names = store.names()
    wanted = {(os.fsdecode(path), number) for path, number in arguments["forget"]}
    versions = [version for version in names.all_versions() if (version.path, version.number) in wanted]
    if arguments.get("preview"):
        return {"freed": max(0, preview(store, [(one.path, one.number) for one in versions]).freed_bytes)}
    if versions:
        return {"freed": forget.forget(store, versions).gc.freed_bytes}
    return {"freed": collect(store).freed_bytes}


class Reclaimer:
    """Decides what of a store is reclaimed when, for a layer at work. Thread-safe."""

    def __init__(self, layer: Layer, encoder: Encoder, *, keep_deleted: float = limits.KEEP_DELETED_SECONDS) -> None:
        """Removed versions are kept for `keep_deleted` seconds while the disk has room."""
        self._layer = layer
        self._encoder = encoder
        self._keep_deleted = keep_deleted
        self._lock = threading.Lock()
        self._estimated = -1
        self.reclaimable = 0
        """Bytes that could be freed at once; an estimate."""

    def tick(self, now: float) -> None:
        """Look whether anything is due: cheap when no name changed."""
        names = self._layer.store.log.names
        if names.sequence != self._estimated:
            self._estimate(names)

    def make_room(self, length: int) -> int:
        """Forget what was removed, the oldest first, until about `length` bytes are free. Returns bytes freed."""
        with self._lock:
            freed = self._call(())
            for version in sorted(_removed(self._layer.store.names()), key=lambda one: one.removed):
                if freed >= length:
                    break
                freed += self._call([version])
            self._estimated = -1
            return freed

    def _estimate(self, names: Names) -> None:
        with self._lock:
            answer = self._encoder.call("reclaim", forget=_keys(_removed(names)), preview=True)
            self.reclaimable = answer["freed"]
            self._estimated = names.sequence

    def _call(self, versions: Iterable[Version]) -> int:
        return int(self._encoder.call("reclaim", forget=_keys(versions))["freed"])


def _removed(names: Names) -> list[Version]:
    return [version for version in names.all_versions() if version.removed]


def _keys(versions: Iterable[Version]) -> list[tuple[bytes, int]]:
    return [(os.fsencode(version.path), version.number) for version in versions]
