"""A writable copy-on-write tree over a store: the live layer of a mount, without the mount.

What a layer shows is told by `lookup.py`, how it changes by `changes.py`, and how it and the names of the log follow
each other by `namesync.py`. Every change is a journal record that is appended, then applied (`state.py`); opening a
layer applies them all again.
"""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from pathlib import Path

from moonclipfs import limits
from moonclipfs.layers.changes import Changes
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.records import SetAttributes, Whole
from moonclipfs.layers.staging import Staging
from moonclipfs.layers.wholes import apply_whole
from moonclipfs.store.backend import FileOps
from moonclipfs.store.layerdirs import LayerLock, make_layer
from moonclipfs.store.store import Store


class Layer(Changes):
    """A layer that this process holds. Thread-safe."""

    _lock_file: LayerLock

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
    ) -> Layer:
        """Take a layer of a store that is open for writing, which is made unless it is there, and replay its journal.

        `mountpoint` is for those who find it taken. `staging` is where bytes wait to be encoded, of at most
        `staging_limit`; else a directory of the layer. Raises BusyError when another process has it, UsageError for
        a bad name, CorruptError, NoSpaceError, PermissionDeniedError, BackendError.
        """
        ops = ops or FileOps()
        directory, layer_id = make_layer(store, name)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "mountpoint": mountpoint}
        lock = LayerLock.acquire(directory, holder)
        try:
            layer = cls(store, name, layer_id, directory)
            layer._lock_file = lock
            place = directory / "staging" if staging is None else staging / f"{store.config.store_id}-{name}"
            layer.staging = Staging(place, staging_limit, ops)
            layer.journal = Journal(directory / "journal", ops, lock=layer.lock, layer_id=layer_id)
            try:
                layer._recover()
            except BaseException:
                layer.journal.close()
                raise
        except BaseException:
            lock.release()
            raise
        return layer

    def close(self) -> None:
        """Let go of the layer, as it is: the next one who opens it goes on from here. Harmless when done before."""
        self.journal.close()
        self._lock_file.release()

    def _recover(self) -> None:
        state, fresh = self.state, True
        state.handle(Whole, partial(apply_whole, state))
        for record in self.journal.replay():
            state.apply(record)
            fresh = False
        if fresh:
            now_ns, root = time.time_ns(), self.root
            self.record(SetAttributes(root.number, root.mode, root.uid, root.gid, now_ns, now_ns, now_ns))
        self._catch_up()
