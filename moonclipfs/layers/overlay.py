"""An overlay at work: a layer over a fixed base, under a name, that can be committed, discarded and renamed.

It costs what changed in it. At rest it has no process and no thread; whoever has many of them open (`overlays.py`)
calls `tick` now and then.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import BusyError, MoonclipError, NotFoundError, UsageError
from moonclipfs.layers.base import Caches
from moonclipfs.layers.basing import BaseOf, capture, held, store_frozen
from moonclipfs.layers.encoder import Encoder
from moonclipfs.layers.freezing import freeze, thaw
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.overlayencoder import OverlayEncoder
from moonclipfs.layers.overlayopening import make_layer, move_onto, new_info, require_no_writers, take_layer
from moonclipfs.layers.reclaim import Reclaimer
from moonclipfs.layers.room import with_room
from moonclipfs.store.backend import FileOps
from moonclipfs.store.overlaydirs import (
    OverlayInfo,
    is_named,
    naming,
    remove_overlay,
    rename_overlay,
    set_info,
)
from moonclipfs.store.paths import check_path
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, ObjectId, Version

_REBASE_ATTEMPTS = 5


class Overlay:
    """An overlay that this process holds. A context manager; thread-safe."""

    def __init__(self, store: Store, info: OverlayInfo, layer: Layer, mountpoint: str) -> None:
        """Use `create` or `open`."""
        self.store = store
        self.info = info
        self.layer = layer
        self.mountpoint = mountpoint
        self.encoder = OverlayEncoder(layer)
        self.make_room: Callable[[int], int] = Reclaimer(layer, self.encoder).make_room
        """Frees space of the store's disk for so many bytes; returns how many. A mount has a better one."""
        self._committing = threading.Lock()
        self._naming = threading.Lock()
        """Held while its name comes to tell something else, changes or goes."""
        self._synced_at = time.monotonic()
        self._synced_counter = layer.counter
        self._let_go = 0
        """Of the bytes that were dropped, those that the journal does not name any more."""
        self._closed = self._ending = False
        self._tell()

    @classmethod
    def create(
        cls,
        store: Store,
        name: str,
        base: BaseOf,
        *,
        quota: int | None = None,
        ephemeral: bool = False,
        dry_run: bool = False,
        mountpoint: str = "",
        owner: Mapping[str, object] | None = None,
        caches: Caches | None = None,
        ops: FileOps | None = None,
    ) -> Overlay:
        """Make an overlay on a base of a store that is open for writing, and open it; `base` is `held` meanwhile.

        Takes no longer for a large base. Raises ExistsError, UsageError for a bad name, NoSpaceError,
        PermissionDeniedError, BackendError; then nothing is there.
        """
        info = new_info(
            name, base, quota=quota, ephemeral=ephemeral, dry_run=dry_run, mountpoint=mountpoint, owner=owner
        )
        return cls(store, info, make_layer(store, info, base, mountpoint, caches, ops), mountpoint)

    @classmethod
    def open(
        cls,
        store: Store,
        name: str,
        *,
        mountpoint: str = "",
        caches: Caches | None = None,
        ops: FileOps | None = None,
    ) -> Overlay:
        """Take an overlay of a store that is open for writing. Raises NotFoundError, BusyError, which names the holder,
        CorruptError, NoSpaceError, PermissionDeniedError, BackendError.
        """
        info, layer = take_layer(store, name, mountpoint, caches, ops)
        try:
            overlay = cls(store, info, layer, mountpoint)
            overlay._settle()
        except BaseException:
            layer.close()
            raise
        return overlay

    def __enter__(self) -> Overlay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """What it is called now."""
        return self.info.name

    @property
    def base_root(self) -> ObjectId:
        """The directory object that it stands on."""
        based = self.layer.state.based
        assert based is not None
        return based.base

    @property
    def used(self) -> int:
        """Bytes that it has of its own: those that count against its quota."""
        quota = self.layer.files.quota
        return 0 if quota is None else quota.used

    @property
    def closed(self) -> bool:
        """Whether it was let go, or discarded."""
        return self._closed

    def close(self) -> None:
        """Let go of it, as it is. What is staged stays so, durably. Harmless when done before. Raises NoSpaceError,
        BackendError when it is not all durable; it is closed all the same.
        """
        if not self._closed:
            self._closed = True
            self.encoder.end()
            try:
                self.layer.sync_all()
            finally:
                self.layer.close()

    # What it shows, stored

    def flush(self) -> None:
        """Return when everything written so far is encoded and durable. Raises what kept some of it from that."""

        def work() -> None:
            self.layer.sync_all()
            self.encoder.drain()
            self.layer.sync_all()

        with_room(self, work, self.layer.staging.used)

    @contextmanager
    def _storing(self) -> Iterator[Encoder]:
        """What is stored meanwhile is kept from gc, and journalled at the end; one at a time. Raises NotFoundError for
        what went wrong because the overlay was discarded meanwhile.
        """
        try:
            with self._committing, held(self.store), self.encoder.running() as encoder:
                yield encoder
                self.layer.sync_all()
        except MoonclipError as error:
            if self.is_ending:
                raise NotFoundError(f"overlay {self.name} was discarded meanwhile, or let go") from error
            raise

    def current_root(self) -> ObjectId:
        """Store what it shows at this moment, without a name; returns the directory object.

        Whoever uses that keeps it from gc by `basing.held`, from before this call on.
        """
        return self.as_base().root

    def as_base(self) -> BaseOf:
        """What it shows at this moment, as the base of another overlay; `held` until that is made."""
        label, layer = f"overlay {self.name}", self.layer
        with layer.lock:
            based, top = layer.state.based, layer.root
            if based is not None and not top.below:
                times = (top.mtime_ns, top.ctime_ns)
                return BaseOf(label, based.shown, Attributes(top.mode, top.uid, top.gid, *times, dict(top.xattrs)))
        with self._storing() as encoder:
            root, entry = capture(layer, encoder, layer.root)
        return BaseOf(label, root, entry.attributes)

    def commit(
        self, name: str | None = None, *, metadata: Mapping[str, object] | None = None, allow: bool = False
    ) -> Version:
        """Make what it shows at this moment the next version of a snapshot, by default one of its own name, and return
        that; the newest version when it is the same. The overlay goes on as it was.

        A dry run is committed with `allow` only. Raises UsageError, and what keeps files from being stored: then
        nothing was committed.
        """
        self.require_committable(allow)
        path = check_path((self.name if name is None else name).strip("/"))
        fields: dict[str, object] = {"automatic": False, "overlay": self.name, "base": self.info.base}
        with self.layer.lock:
            directories = [inode.number for inode in self.layer.state.own.values() if inode.is_directory]
        if provenance := self.layer.captures.writers.provenance(directories):
            fields["provenance"] = provenance
        fields.update(metadata or {})
        return with_room(self, lambda: self._commit(path, fields), self.layer.staging.used)

    def _commit(self, path: str, fields: Mapping[str, object]) -> Version:
        layer = self.layer
        with self._storing() as encoder:
            frozen = freeze(layer, layer.files, layer.root)
            try:
                answer = store_frozen(
                    layer, encoder, frozen, "commit", path=os.fsencode(path), metadata=json.dumps(fields)
                )
            finally:
                thaw(layer, layer.files, frozen)
            layer.sync_all()
            found = [one for one in self.store.names().versions(path) if one.sequence == answer["sequence"]]
        if not found:
            raise NotFoundError(f"{path} was committed, and another process has forgotten that version since")
        return found[0]

    def rebase(self, base: BaseOf, merge: Callable[[ObjectId, ObjectId], ObjectId]) -> None:
        """Put it onto another base, `held` meanwhile: `merge` makes what it shows from then on of what it stood on and
        what it shows. It may be called again, when something was changed meanwhile.

        What it shows gets other inodes. Raises BusyError while files are open for writing, or are always changed, and
        whatever `merge` raises: then nothing has changed.
        """
        layer = self.layer
        with self._storing() as encoder:
            for _ in range(_REBASE_ATTEMPTS):
                with layer.lock:
                    require_no_writers(self.name, layer)
                frozen = freeze(layer, layer.files, layer.root)
                try:
                    ours = store_frozen(layer, encoder, frozen, "capture")["root"]
                    shown = merge(self.base_root, ours)
                    if move_onto(self.info, layer, base, shown, frozen):
                        break
                finally:
                    thaw(layer, layer.files, frozen)
            else:
                raise BusyError(f"overlay {self.name} is being changed: try again when it is not")
            self._settle()

    def _settle(self) -> None:
        """Let the name tell what the journal says, which is the truth."""
        based = self.layer.state.based
        assert based is not None
        with self._naming:
            info = replace(OverlayInfo.parse(self.name, based.settings), layer=self.info.layer)
            if info == self.info:
                return
            with naming(self.store.backend):
                if self._closed:  # its name may be gone, and must not come back
                    raise NotFoundError(f"overlay {self.name} was discarded meanwhile, or let go")
                set_info(self.store.backend, info)
            self.info = info

    def require_committable(self, allow: bool) -> None:
        """Raise UsageError for a dry run, unless whoever asks was told to commit it."""
        if self.info.dry_run and not allow:
            raise UsageError(f"{self.name} is a dry run: it is committed only if that was asked for with --commit")

    # Its life

    @property
    def is_ending(self) -> bool:
        """Whether it was closed or discarded, or is about to be."""
        return self._closed or self._ending

    @property
    def is_storing(self) -> bool:
        """Whether it is being committed, rebased, or captured as a base."""
        return self._committing.locked()

    def end(self) -> None:
        """Store nothing any more, it is about to be discarded: that may take a while."""
        self._ending = True
        self.encoder.end()

    def discard(self) -> None:
        """Throw it away, with all that was not committed. Raises BusyError, PermissionDeniedError, BackendError: then
        it goes on as it was, unless its name is gone already.
        """
        self.end()
        with self._naming:
            try:
                remove_overlay(self.store.backend, self.name)
            finally:
                if is_named(self.store.path, self.name):
                    self._ending = False
                    self.encoder.resume()
                else:
                    self._closed = True
                    self.layer.close()

    def rename(self, new: str) -> None:
        """Call it otherwise. Raises ExistsError, UsageError."""
        with self._naming:
            self.info = rename_overlay(self.store.backend, self.name, new)
        self._tell()

    def _tell(self) -> None:
        """Let computed attributes say what this is."""
        facts = {b"overlay": self.name.encode()}
        self.layer.facts = {**facts, b"dry_run": b"1"} if self.info.dry_run else facts

    def tick(self, now: float) -> bool:
        """Make durable what was closed, now and then, by the monotonic clock; returns whether staged bytes are to be
        encoded (`relieve`). Cheap when nothing changed. Raises NoSpaceError, BackendError.
        """
        self.layer.captures.writers.look()
        counter, behind = self.layer.counter, self.layer.files.log.is_behind
        if now - self._synced_at >= limits.SYNC_SECONDS and (behind or counter != self._synced_counter):
            self._synced_at = now
            self.layer.sync_all()
            self._synced_counter = counter
        self.let_go(limits.RECLAIM_BYTES)
        return self.encoder.is_due(now)

    @property
    def churn(self) -> int:
        """Grows with the bytes that come and go in the store because of it."""
        return self.layer.files.jobs.dropped + self.encoder.encoded_bytes

    def let_go(self, least: int = 1) -> None:
        """Let gc have what was stored of files that have changed or are gone since: the journal, which names it, is
        written anew if that is `least` bytes. Raises NoSpaceError, BackendError.
        """
        dropped = self.layer.files.jobs.dropped
        if dropped - self._let_go >= least:
            self.layer.files.checkpoint()
            self._let_go = dropped

    def relieve(self, stopping: threading.Event) -> None:
        """Encode what is staged in the background. Raises what keeps some of it from that."""
        self.encoder.relieve(stopping)

    def status(self) -> dict[str, Any]:
        """What it is, what is staged and failed: JSON values."""
        info = self.info
        return {
            "name": info.name,
            "base": info.base,
            "store": os.fspath(self.store.path),
            "created_ns": info.created_ns,
            "quota": info.quota,
            "used": self.used,
            "ephemeral": info.ephemeral,
            "dry_run": info.dry_run,
            **self.layer.staged(),
            "encoder": self.encoder.status(),
        }
