"""What Python readers of a store have open is kept from being reclaimed; nothing else is, however long they idle.

A reader claims the versions that it has open. While it runs, a thread follows the log on its behalf: it lets the lease
say what was seen, and moves the claims on to the newest log record for as long as that still keeps their version. So
an idle reader stands in the way of gc only with versions that were forgotten while it had them open.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from moonclipfs import limits
from moonclipfs.errors import LeaseLostError, MoonclipError, UsageError
from moonclipfs.store.leases import Hold
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, ObjectId

_following = threading.Lock()
"""Held by a thread that follows a log, and during a fork: else a child could inherit a lock of the store as taken."""
os.register_at_fork(before=_following.acquire, after_in_parent=_following.release, after_in_child=_following.release)


class Claim:
    """Keeps what a directory object leads to for as long as this object lives, and its store open."""

    __slots__ = ("_claims", "_root")

    def __init__(self, claims: Claims, root: ObjectId) -> None:
        self._claims = claims
        self._root = root

    def __del__(self) -> None:
        # Whoever collects garbage may be anywhere, also inside the lock of the lease: no locks and no I/O here.
        self._claims._dropped.append(self._root)


class Claims:
    """The claims of one reader on one store. Thread-safe; a forked child has none, as it has no lease."""

    def __init__(self, store: Store, *, owned: bool) -> None:
        """`owned`: the store was opened for this reader. It is closed when nobody has a claim any more, and its lease
        follows the log; the lease of another store says by itself what was seen.
        """
        self.store = store
        self._owned = owned
        self._lock = threading.Lock()
        self._users: Counter[ObjectId] = Counter()
        self._holds: dict[ObjectId, Hold] = {}
        self._dropped: deque[ObjectId] = deque()
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="moonclipfs claims", daemon=True).start()

    @contextmanager
    def held(self) -> Iterator[int]:
        """What names that are read inside the block lead to stays until its end; `claim` with the record yielded makes
        it stay for longer. Raises LeaseLostError.
        """
        sequence = self.store.log.names.sequence
        if self.store.lease is None:
            yield sequence
            return
        with self.store.lease.hold(sequence):
            yield sequence

    def claim(self, root: ObjectId, sequence: int) -> Claim:
        """Claim what the directory object `root` leads to, as of a record that is held; NO_ID only keeps the
        store open.

        Raises UsageError after the end of all claims, LeaseLostError.
        """
        with self._lock:
            if self._stop.is_set():
                raise UsageError(f"this reader of {self.store.path} is closed: open the store again")
            if root not in self._holds and root != NO_ID and self.store.lease is not None:
                self._holds[root] = self.store.lease.hold(sequence)
            self._users[root] += 1
        return Claim(self, root)

    def follow(self) -> None:
        """Read the log, release what nobody claims, and move on what is still kept. Raises BackendError and so on."""
        with self._lock:
            self._sweep()
            if self._stop.is_set() or self.store.lease is None:
                return
            names = self.store.names() if self._owned else self.store.log.refresh()
            behind = [root for root, hold in self._holds.items() if hold.sequence < names.sequence]
            kept = {version.root for version in names.all_versions()} if behind else set()
            for root in behind:
                if root in kept:
                    old, self._holds[root] = self._holds[root], self.store.lease.hold(names.sequence)
                    old.release()

    def close(self) -> None:
        """End all claims, and close the store if it is owned. Harmless when done before."""
        with self._lock:
            self._end()

    def _run(self) -> None:
        while not self._stop.wait(limits.LEASE_REFRESH_SECONDS):
            with _following:
                try:
                    self.follow()
                except LeaseLostError:
                    return  # there is nothing left to say; the reader's own next call tells its caller
                except MoonclipError:
                    continue  # what was said before still stands

    def _sweep(self) -> None:
        """Take note of claims that were dropped; after the last one there is nothing left to do."""
        while self._dropped:
            root = self._dropped.popleft()
            self._users[root] -= 1
            if not self._users[root]:
                del self._users[root]
                if root in self._holds:
                    self._holds.pop(root).release()
                if not self._users:
                    self._end()

    def _end(self) -> None:
        self._stop.set()
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()
        if self._owned:
            self.store.close()
