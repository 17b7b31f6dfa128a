"""The names of a store as one process would have them: what it binds, moves and removes is seen by nobody else, and is
gone when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from moonclipfs.store.log import Log, Names
from moonclipfs.store.records import decode_record, encode_record
from moonclipfs.store.store import Store


class PrivateLog(Log):
    """Begins with the names of a store as they are, and follows them no more. Thread-safe."""

    def __init__(self, store: Store) -> None:
        """Whoever uses what the names lead to holds the lease since before this."""
        super().__init__(store.backend)
        self._names = store.names()

    def refresh(self) -> Names:
        """The names; reads nothing."""
        return self._names

    def settle(self, names: Names) -> None:
        """Nothing is durable."""

    def _create(self, names: Names, type_: str, body: Mapping[str, object]) -> Names:
        sequence = names.sequence + 1
        state = names._state.copy()
        state.apply(decode_record(encode_record(sequence, type_, body), sequence))
        with self._swap:
            self._names = Names(state)
        return self._names

    def _append_checkpoint(self, names: Names) -> None:
        """Nothing is read again."""
