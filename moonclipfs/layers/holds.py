"""What open files refer to, kept from being reclaimed: holds of the lease, one for each state of the log in use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moonclipfs.store.leases import Hold, Lease


class Holds:
    """Counts who uses the names as of a log record. `pin` and `unpin` do no I/O; thread-safe, but for `move`."""

    def __init__(self, lease: Lease | None) -> None:
        """Without a lease (the store cannot be written to, or its disk is full) users are counted, and nothing is held:
        whoever can write may reclaim what they use. `move` makes up for it.
        """
        self._lease = lease
        self._lock = threading.Lock()
        self._users: dict[int, int] = {}
        self._holds: dict[int, Hold] = {}

    def add(self, sequence: int) -> None:
        """Hold the names as of `sequence` for a first user. Raises LeaseLostError."""
        if self._lease is not None and sequence not in self._holds:
            self._holds[sequence] = self._lease.hold(sequence)
        self.pin(sequence)

    def move(self, lease: Lease | None) -> None:
        """Hold what is in use by this lease from here on, if it is another one than before. Raises LeaseLostError."""
        if lease is self._lease:
            return
        with self._lock:
            used = [sequence for sequence, users in self._users.items() if users]
        self._holds = {} if lease is None else {sequence: lease.hold(sequence) for sequence in used}
        self._lease = lease

    def pin(self, sequence: int) -> None:
        """One more user of names that are held."""
        with self._lock:
            self._users[sequence] = self._users.get(sequence, 0) + 1

    def unpin(self, sequence: int) -> None:
        """One user less; what nobody uses is let go by the next `sweep`."""
        with self._lock:
            self._users[sequence] -= 1

    @contextmanager
    def pinned(self, sequence: int) -> Iterator[None]:
        """Be a user of names that are held, for as long as the block runs."""
        self.pin(sequence)
        try:
            yield
        finally:
            self.unpin(sequence)

    def sweep(self) -> None:
        """Release what nobody uses."""
        with self._lock:
            unused = [sequence for sequence, users in self._users.items() if not users]
            for sequence in unused:
                del self._users[sequence]
            holds = [self._holds.pop(sequence) for sequence in unused if sequence in self._holds]
        for hold in holds:
            hold.release()
