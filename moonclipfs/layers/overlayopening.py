"""Making the layer of an overlay, taking one that is there, and putting it onto another base: for `Overlay`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from moonclipfs.errors import BusyError, CorruptError, MoonclipError, NotFoundError, UsageError
from moonclipfs.layers.base import Caches
from moonclipfs.layers.basing import BaseOf, new_record, next_record
from moonclipfs.layers.freezing import Frozen
from moonclipfs.layers.layer import Fixed, Layer
from moonclipfs.layers.wholes import based_refs
from moonclipfs.store.backend import FileOps
from moonclipfs.store.layerdirs import DIRECTORY as LAYERS
from moonclipfs.store.layerdirs import layer_holder
from moonclipfs.store.overlaydirs import (
    OverlayInfo,
    add_name,
    check_overlay_name,
    discard_layer,
    find_overlay,
    naming,
    new_layer_name,
    remove_overlay,
    require_free,
)
from moonclipfs.store.store import Store
from moonclipfs.types import ObjectId


def new_info(
    name: str, base: BaseOf, *, quota: int | None, ephemeral: bool, dry_run: bool, mountpoint: str,
    owner: Mapping[str, object] | None,
) -> OverlayInfo:  # fmt: skip
    """What is to be known of an overlay that is to be made. Raises UsageError for a bad name."""
    check_overlay_name(name)
    who = {"pid": os.getpid(), "host": socket.gethostname(), "mountpoint": mountpoint, **(owner or {})}
    info = OverlayInfo(
        name, new_layer_name(), created_ns=time.time_ns(), quota=quota, ephemeral=ephemeral, dry_run=dry_run, owner=who
    )
    return standing_on(info, base)


def standing_on(info: OverlayInfo, base: BaseOf) -> OverlayInfo:
    """The same of an overlay that stands on a base."""
    one = base.version
    path, number, sequence = (None, None, None) if one is None else (one.path, one.number, one.sequence)
    sequence = None if base.foreign else sequence  # which counts in another log
    return replace(
        info, base=base.label, base_root=base.root, base_path=path, base_number=number, base_sequence=sequence
    )


def make_layer(
    store: Store, info: OverlayInfo, base: BaseOf, mountpoint: str, caches: Caches | None, ops: FileOps | None
) -> Layer:
    """Make the layer of an overlay, then its name. When this raises, neither is there."""
    _require_writable(store)
    require_free(store.path, info.name)
    fixed = Fixed(new_record(base, info, info.created_ns), caches, info.quota)
    layer: Layer | None = None
    try:
        with naming(store.backend):
            require_free(store.path, info.name)
            layer = Layer.open(store, info.layer, mountpoint=mountpoint, ops=ops, fixed=fixed)
            add_name(store.backend, info)
    except BaseException:
        if layer is not None:
            layer.close()
        with suppress(MoonclipError):  # what stays belongs to nobody: the next `sweep` clears it away
            _undo(store, info)
        raise
    return layer


def _undo(store: Store, info: OverlayInfo) -> None:
    with suppress(NotFoundError):
        if find_overlay(store.path, info.name).layer == info.layer:
            remove_overlay(store.backend, info.name)
            return
    discard_layer(store.backend, info.layer)


def take_layer(
    store: Store, name: str, mountpoint: str, caches: Caches | None, ops: FileOps | None
) -> tuple[OverlayInfo, Layer]:
    """Take the layer of an overlay that is there. Raises as `Overlay.open` does."""
    _require_writable(store)
    info = find_overlay(store.path, name)
    try:
        layer = Layer.open(store, info.layer, mountpoint=mountpoint, ops=ops, fixed=Fixed(None, caches, info.quota))
    except BusyError:
        raise BusyError(_busy(store, info)) from None
    except NotFoundError:
        find_overlay(store.path, name)  # discarded meanwhile?
        raise CorruptError(f"overlay {name}: its directory layers/{info.layer} is gone: restore it") from None
    try:
        if find_overlay(store.path, name).layer != info.layer:
            raise NotFoundError(f"no overlay {name} in {store.path}")
    except BaseException:
        layer.close()
        raise
    return info, layer


def move_onto(info: OverlayInfo, layer: Layer, base: BaseOf, shown: ObjectId, frozen: Frozen) -> bool:
    """Journal, durably, that an overlay stands on another base and shows `shown`; False when something was changed
    since what it showed was frozen. Raises BusyError while files are open for writing, NoSpaceError, BackendError.
    """
    based = layer.state.based
    assert based is not None
    with layer.lock:
        if layer.root.below > frozen.counter:
            return False
        require_no_writers(info.name, layer)
        record = next_record(based, base, shown, frozen.tree.attributes, standing_on(info, base))
        layer.record(record, based_refs(record))
        if layer.files.quota is not None:  # what the kernel still knows of what was there before counts no more
            layer.files.quota.recount()
    layer.journal.commit()
    return True


def require_no_writers(name: str, layer: Layer) -> None:
    """Under the lock: raise BusyError while files of an overlay are open for writing."""
    if any(inode.writers for inode in layer.state.own.values()):
        raise BusyError(f"overlay {name} has files that are open for writing: close them first")


def _require_writable(store: Store) -> None:
    if not store.write:
        raise UsageError(f"{store.path} is open for reading only: an overlay keeps its state there")


def _busy(store: Store, info: OverlayInfo) -> str:
    try:
        holder = layer_holder(store.path / LAYERS / info.layer) or {}
    except MoonclipError:
        holder = {}
    where = f", mounted at {holder['mountpoint']}" if holder.get("mountpoint") else ""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{where}"
    return f"overlay {info.name} is in use by {who}: work with it there, or end that first"
