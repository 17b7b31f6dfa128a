"""What open files refer to, kept from being reclaimed: holds of the lease, one for each state of the log in use."""

from __future__ import annotations

import threading

from moonclipfs.store.leases import Hold, Lease


class Holds:
    """Counts who uses the names as of a log record. `pin` and `unpin` do no I/O; thread-safe."""

    def __init__(self, lease: Lease | None) -> None:
        """Without a lease (a store that cannot be written to) nothing is held: nobody can reclaim there either."""
        self._lease = lease
        self._lock = threading.Lock()
        self._users: dict[int, int] = {}
        self._holds: dict[int, Hold] = {}

    def add(self, sequence: int) -> None:
        """Hold the names as of `sequence` for a first user. Raises LeaseLostError."""
        if self._lease is not None and sequence not in self._holds:
            self._holds[sequence] = self._lease.hold(sequence)
        self.pin(sequence)

    def pin(self, sequence: int) -> None:
        """One more user of names that are held."""
        with self._lock:
            self._users[sequence] = self._users.get(sequence, 0) + 1

    def unpin(self, sequence: int) -> None:
        """One user less; what nobody uses is let go by the next `sweep`."""
        with self._lock:
            self._users[sequence] -= 1

    def sweep(self) -> None:
        """Release what nobody uses."""
        with self._lock:
            unused = [sequence for sequence, users in self._users.items() if not users]
            for sequence in unused:
                del self._users[sequence]
            holds = [self._holds.pop(sequence) for sequence in unused if sequence in self._holds]
        for hold in holds:
            hold.release()
