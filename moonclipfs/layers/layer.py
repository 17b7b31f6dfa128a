"""A writable copy-on-write tree over a store: the live layer of a mount, without the mount, or an overlay.

What a layer shows is told by `lookup.py`, how it changes by `changes.py` and `adopting.py`, and how it and the names
of the log follow each other by `namesync.py`. Every change is a journal record that is appended, then applied
(`state.py`); opening a layer applies them all again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.layers.base import Caches
from moonclipfs.layers.capture import Captures
from moonclipfs.layers.changes import Changes
from moonclipfs.layers.files import Files, OpenFile
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.jobs import Job
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.records import Based, SetAttributes, Whole
from moonclipfs.layers.replay import Recovery, replay
from moonclipfs.layers.staging import Staging
from moonclipfs.layers.stagingplace import note_place
from moonclipfs.layers.wholes import apply_whole, based_refs
from moonclipfs.store import reserve
from moonclipfs.store.backend import FileOps
from moonclipfs.store.layerdirs import LayerLock, find_layer, make_layer
from moonclipfs.store.log import Log
from moonclipfs.store.overlaydirs import is_overlay_layer
from moonclipfs.store.store import Store
from moonclipfs.types import ObjectId


@dataclass(frozen=True, slots=True)
class Fixed:
    """What makes a layer an overlay: `base`, of one that is new; what is known of directories, shared by many; and how
    many bytes it may have of its own.
    """

    base: Based | None = None
    caches: Caches | None = None
    quota: int | None = None


class Layer(Changes):
    """A layer that this process holds. Thread-safe."""

    files: Files
    captures: Captures
    recovery: Recovery
    """What opening it found."""
    _lock_file: LayerLock
    _closed = False

    @classmethod
    def open(
        cls,
        store: Store,
        name: str,
        *,
        mountpoint: str = "",
        staging: Path | None = None,
        staging_limit: int = limits.STAGING_BYTES,
        ops: FileOps | None = None,
        fixed: Fixed | None = None,
        names_log: Log | None = None,
    ) -> Layer:
        """Take a layer of a store that is open for writing, which is made unless it is there, and replay its journal.

        `mountpoint` is for those who find it taken. `staging` is where bytes wait to be encoded, of at most
        `staging_limit`; else a directory of the layer. `fixed` makes it an overlay; `names_log` is in the place of
        the store's log. Raises BusyError when another process has it, UsageError for a bad name, and when bytes wait
        at another place, CorruptError, NoSpaceError, PermissionDeniedError, BackendError.
        """
        ops = ops or FileOps()
        if fixed is None and names_log is None and is_overlay_layer(name):
            raise UsageError(f"{name} is the layer of an overlay: work with that by its name")
        is_there = fixed is not None and fixed.base is None
        directory, layer_id = (find_layer if is_there else make_layer)(store, name)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "mountpoint": mountpoint}
        lock = LayerLock.acquire(directory, holder)
        # An overlay relies on its journal alone, a live layer on the names that it shows too.
        follows = fixed is None and names_log is None
        store.layers += follows
        try:
            layer = cls(
                store,
                name,
                layer_id,
                directory,
                fixed=fixed is not None,
                caches=None if fixed is None else fixed.caches,
                names_log=names_log,
            )
            layer._lock_file = lock
            place = directory / "staging" if staging is None else staging / f"{store.config.store_id}-{name}"
            note_place(directory, place.absolute())
            layer.staging = Staging(place, staging_limit, ops)
            layer.journal = Journal(
                directory / "journal", ops, lambda: layer._before_commit(), lock=layer.lock, layer_id=layer_id,
                reserve=fixed is None, borrow=lambda: fixed is not None and reserve.lend(store.path),
            )  # fmt: skip
            layer.files = Files(layer)
            if fixed is not None:
                layer.files.count(fixed.quota)
            layer.captures = Captures(layer, layer.files)
            layer.files.captured = layer.captures.records
            try:
                layer._recover(fixed)
            except BaseException:
                layer.journal.close()
                raise
        except BaseException:
            store.layers -= follows
            lock.release()
            raise
        return layer

    def close(self) -> None:
        """Let go of the layer, as it is: the next one who opens it goes on from here. Harmless when done before."""
        if not self._closed:
            self._closed = True
            try:
                self.journal.close()
            finally:
                self.store.layers -= not self.fixed and self.names_log is self.store.log
                self._lock_file.release()

    # Contents of files, see `files.py`, `contentlog.py` and `jobs.py`

    def open_file(self, inode: Inode, *, write: bool, privileged: bool = False, wait: bool = True) -> OpenFile:
        """See `Files.open`."""
        return self.files.open(inode, write=write, privileged=privileged, wait=wait)

    def truncate(self, inode: Inode, size: int, now_ns: int, *, privileged: bool = False, wait: bool = True) -> None:
        """See `Files.truncate`."""
        self.files.truncate(inode, size, now_ns, privileged=privileged, wait=wait)

    def sync_all(self) -> None:
        """See `Files.sync_all`."""
        self.files.sync_all()

    def sync_directory(self, directory: Inode) -> None:
        """The names in a directory, and all else that is in the journal, are durable when this returns."""
        self.files.log.commit()

    def take_jobs(
        self, now: float, *, urgent: bool = False, inodes: Collection[Inode] | None = None, pressure: bool = False
    ) -> list[Job]:
        """See `Jobs.take`."""
        return self.files.jobs.take(now, urgent=urgent, inodes=inodes, pressure=pressure)

    def stored(self, job: Job, recipe: ObjectId, size: int) -> None:
        """See `Jobs.stored`."""
        self.files.jobs.stored(job, recipe, size)

    def give_up(self, job: Job, message: str) -> None:
        """See `Jobs.give_up`."""
        self.files.jobs.give_up(job, message)

    def staged(self) -> dict[str, Any]:
        """See `Jobs.staged`."""
        return self.files.jobs.staged()

    def _before_commit(self) -> bool:
        captured, ordered = self.captures.before_commit(), self.files.log.before_commit()
        return captured or ordered

    def _recover(self, fixed: Fixed | None) -> None:
        state = self.state
        state.handle(Whole, partial(apply_whole, state))
        self.recovery = replay(self, self.files, self.captures.generations)
        with self.lock:
            self.captures.recover()
        if self.files.quota is not None:
            with self.lock:
                self.files.quota.recount()
        if fixed is not None:
            self._stand_on(fixed.base)
        elif not self.recovery.records:
            now_ns, root = time.time_ns(), self.root
            self.record(SetAttributes(root.number, root.mode, root.uid, root.gid, now_ns, now_ns, now_ns))
        self._catch_up()

    def _stand_on(self, base: Based | None) -> None:
        """A new overlay gets its base; one that was there has it in its journal."""
        if self.recovery.records or base is None:
            if self.state.based is None:
                raise CorruptError(f"the journal of {self.name} does not say what it stands on")
            return
        self.record(base, based_refs(base))
        self.journal.commit()
