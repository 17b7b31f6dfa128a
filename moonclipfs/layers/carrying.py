"""Committing an overlay into another store: what that lacks is copied there, and a version is bound there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from moonclipfs.layers.basing import held
from moonclipfs.layers.overlay import Overlay
from moonclipfs.store.alternates import copy_version_into
from moonclipfs.store.paths import check_path
from moonclipfs.store.store import Store, root_metadata
from moonclipfs.types import EntryType, Version


def commit_into(
    overlay: Overlay,
    target: Store,
    name: str | None = None,
    *,
    metadata: Mapping[str, object] | None = None,
    allow: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Version:
    """Make what an overlay shows at this moment the next version of a snapshot of `target`, which is open for writing;
    by default one of the overlay's name. Returns it, or the newest version when that is the same.

    The copy needs neither the overlay's store nor a base store behind that. `progress` is told encoded bytes (done,
    total). A dry run is committed with `allow` only. Raises UsageError, and what `copy_version_into` raises: then
    nothing was committed.
    """
    overlay.require_committable(allow)
    path = check_path((name or overlay.name).strip("/"))
    store = overlay.store
    with held(store):
        shown = overlay.as_base()
        assert shown.attributes is not None  # those of the overlay's own directory
        sizes = [entry.size for _, entry in store.walk_directory(shown.root) if entry.type is EntryType.FILE]
        fields = {
            "automatic": False,
            "overlay": overlay.name,
            "base": overlay.info.base,
            "from": os.fspath(store.path),
            **(metadata or {}),
            "attributes": root_metadata(shown.attributes),
            "files": len(sizes),
            "bytes": sum(sizes),
        }
        return copy_version_into(store, shown.root, target, path, fields, progress=progress)
