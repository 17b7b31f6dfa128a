"""Objects that were stored for a snapshot which another process binds: kept from gc until it has."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import AbstractContextManager

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.store.publish import Ingest
from moonclipfs.store.store import Store
from moonclipfs.types import ObjectId


class Holding:
    """An ingest that is open until `end`, by whichever thread comes first."""

    def __init__(self, store: Store, context: AbstractContextManager[Ingest]) -> None:
        self._store = store
        self._context = context
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.ingest = context.__enter__()

    def end(self) -> None:
        """Keep nothing any more. Harmless when done before."""
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self._context.__exit__(None, None, None)

    def until_bound(self, path: str, recipes: Collection[ObjectId]) -> None:
        """End, beside whatever else goes on, when a version of `path` has these recipes, or after a long time."""
        before = self._store.log.names.highest(path)
        threading.Thread(target=self._wait, args=(path, frozenset(recipes), before), daemon=True).start()

    def _wait(self, path: str, recipes: frozenset[ObjectId], before: int) -> None:
        deadline = time.monotonic() + limits.RANKS_WAIT_SECONDS
        try:
            while time.monotonic() < deadline and not self._is_bound(path, recipes, before):
                if self._ended.wait(limits.RANKS_POLL_SECONDS):
                    return
        except MoonclipError:
            pass  # the store is closed, or gone: there is nothing to keep
        self.end()

    def _is_bound(self, path: str, recipes: frozenset[ObjectId], before: int) -> bool:
        for version in self._store.log.refresh().versions(path):
            if version.number > before:
                entries = self._store.directory(version.root).values()
                if recipes <= {entry.child for entry in entries}:
                    return True
        return False
