"""What is needed and what there is, as gc and reports look at it."""

from __future__ import annotations

from collections.abc import Collection

from moonclipfs.errors import CorruptError
from moonclipfs.store.log import Names
from moonclipfs.store.reachable import Footers, Needed, PackTable
from moonclipfs.store.store import Store
from moonclipfs.store.waste import Waste, measure


class Survey:
    """What is needed and what there is; what was marked or read once is not again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.needed = Needed()
        self.footers = Footers(store.backend, store.packs)
        self.left_alone: dict[str, str] = {}
        """Packs that cannot be repacked, and why."""
        self.condemned: dict[str, int] = {}
        """Condemned packs and their records. The log may forget one that is gone while our table still has it."""

    def mark(self, names: Names | None = None, without: Collection[tuple[str, int]] = ()) -> Names:
        """Mark what all kept versions need, but those of `without`; returns the names, the newest unless given.

        Raises CorruptError when a log record or a directory or recipe cannot be read.
        """
        names = names or self._store.names()
        if names.damaged:
            raise CorruptError(f"{names.damaged[0]}: what snapshots need is not known, so nothing is deleted")
        self.condemned |= names.condemned()
        skipped = frozenset(without)
        for version in names.all_versions():
            if (version.path, version.number) not in skipped:
                try:
                    self.needed.add_version(self._store, version)
                except CorruptError as error:
                    advice = "so nothing is deleted: restore it, or forget this version"
                    raise type(error)(f"{error}; what it needs is not known, {advice}") from error
        return names

    def measure(self, table: PackTable, young_ns: int | None = None) -> Waste:
        """Tell needed from dead. Packs as young as `young_ns`, damaged and unreadable ones are spared."""
        condemned = table.mask(self.condemned)
        spared = table.mask([*self.footers.damaged, *self.left_alone])
        if young_ns is not None:
            spared |= table.modified_ns >= young_ns
        closure = table.closure(self.needed.ids(), table.choose(condemned))
        return measure(table, closure, condemned, spared)
