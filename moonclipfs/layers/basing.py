"""What overlays stand on: a snapshot, another overlay or a directory of the live layer as it is at one moment, or
nothing.

What is no snapshot is captured: encoded and stored, but bound nowhere. Until a journal names it, whoever asked for it
holds the lease (`held`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from moonclipfs.errors import LeaseLostError, NotFoundError, UsageError
from moonclipfs.layers.captured import CapturedEntry, encode_tree
from moonclipfs.layers.freezing import Frozen, freeze, resolved, staged_paths, thaw
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.records import Based
from moonclipfs.store.overlaydirs import OverlayInfo
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, ObjectId, Version

if TYPE_CHECKING:
    from collections.abc import Collection

    from moonclipfs.layers.layer import Layer

_ANCHOR = b"base"
"""Begins the anchors of what shows through an overlay (see `inodes.Lower`)."""


@dataclass(frozen=True, slots=True)
class BaseOf:
    """What an overlay is to stand on. `label` is for people; `version` is the snapshot, if it is one, of the base store
    of a private one if it is `foreign`: then nothing keeps it.

    `root` is a directory object, NO_ID for an empty base; None for `attributes` means those of a new directory.
    """

    label: str = ""
    root: ObjectId = NO_ID
    attributes: Attributes | None = None
    version: Version | None = None
    foreign: bool = False


class Worker(Protocol):
    """What a capture needs of an encoder."""

    def drain(
        self, inodes: Collection[Inode] | None = None, timeout: float | None = None, *, urgent: bool = True
    ) -> None:
        """Store all that is staged, of these files; with all cores if `urgent`."""

    def call(self, op: str, **arguments: Any) -> Any:
        """Run an operation that writes to the store."""


@contextmanager
def held(store: Store) -> Iterator[None]:
    """Keep all that is stored meanwhile from gc, until a journal names it. Raises LeaseLostError."""
    if store.lease is None:
        raise LeaseLostError(f"{store.path} is not open for writing")
    with store.lease.hold(store.log.names.sequence):
        yield


def of_version(store: Store, spec: str) -> BaseOf:
    """The snapshot NAME or NAME@NUMBER as a base; `held` meanwhile. Of a private store also one of its base store,
    which nothing keeps there. Raises NotFoundError.
    """
    try:
        version = store.resolve(spec)
    except NotFoundError:
        if store.base is None:
            raise
        there = of_version(store.base, spec)
        return replace(there, label=f"{there.label} of {store.base.path}", foreign=True)
    attributes = store.root_entry(version).attributes
    return BaseOf(f"{version.path}@{version.number}", version.root, attributes, version)


def capture(layer: Layer, worker: Worker, directory: Inode) -> tuple[ObjectId, CapturedEntry]:
    """Store what a directory of a layer shows at this moment; returns its directory object, and its entry.

    Nothing about the layer changes but that what it had staged is stored. `held` meanwhile, and as long as the object
    is used. Raises what keeps files from being stored.
    """
    frozen = freeze(layer, layer.files, directory)
    try:
        return store_frozen(layer, worker, frozen, "capture")["root"], frozen.tree
    finally:
        thaw(layer, layer.files, frozen)


def store_frozen(layer: Layer, worker: Worker, frozen: Frozen, op: str, **arguments: Any) -> Mapping[str, Any]:
    """Let the encoder's process do an operation of `committing.py` with a frozen directory; returns its answer."""
    with layer.lock:
        numbers = {entry.inode for entry in frozen.tree.walk() if entry.parts}
        inodes = [inode for number in numbers if (inode := layer.state.own.get(number)) is not None]
    if inodes:
        worker.drain(inodes)
    with layer.lock:
        tree = encode_tree(resolved(layer, frozen.tree, frozen.counter))
    answer: Mapping[str, Any] = worker.call(op, tree=tree, staged=staged_paths(frozen.pinned), **arguments)
    before = {entry.inode: entry.child for entry in frozen.tree.walk()}
    with layer.lock:
        for number, freeze_number, recipe, size in answer["files"]:
            inode = layer.state.own.get(number)
            if inode is not None:
                layer.files.jobs.encoded(inode, freeze_number, before[number], recipe, size)
    return answer


def of_directory(layer: Layer, worker: Worker, path: str, label: str) -> BaseOf:
    """A directory of a layer, captured, as a base; `held` meanwhile. Raises NotFoundError, UsageError for a file."""
    directory = layer.resolve(os.fsencode(path.strip("/")))
    if not directory.is_directory:
        raise UsageError(f"{path} is no directory: an overlay stands on a whole directory")
    root, entry = capture(layer, worker, directory)
    return BaseOf(label, root, entry.attributes)


def new_record(base: BaseOf, info: OverlayInfo, now_ns: int) -> Based:
    """The first record of the journal of an overlay on a base."""
    given = base.attributes or Attributes(0o755, os.geteuid(), os.getegid(), now_ns, now_ns)
    return _record(base.root, base.root, given, _ANCHOR, info)


def next_record(before: Based, base: BaseOf, shown: ObjectId, top: Attributes, info: OverlayInfo) -> Based:
    """The record of an overlay that is put onto another base, and shows `shown` from here on."""
    # Another anchor: what is at a path may have other bytes, and so is another inode.
    number = int(before.anchor.removeprefix(_ANCHOR) or b"0") + 1
    return _record(base.root, shown, top, _ANCHOR + b"%d" % number, info)


def _record(base: ObjectId, shown: ObjectId, given: Attributes, anchor: bytes, info: OverlayInfo) -> Based:
    xattrs = tuple(sorted(given.xattrs.items()))
    return Based(
        base, shown, given.mode, given.uid, given.gid, given.mtime_ns, given.ctime_ns, xattrs, anchor, info.settings()
    )
