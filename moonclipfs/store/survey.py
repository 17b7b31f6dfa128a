"""What is needed and what there is, as gc and reports look at it."""

from __future__ import annotations

from collections.abc import Collection

from moonclipfs.errors import CorruptError, MissingObjectError
from moonclipfs.store.log import Names
from moonclipfs.store.reachable import Closure, Footers, Needed, PackTable
from moonclipfs.store.store import Store
from moonclipfs.store.treecheck import affected_files
from moonclipfs.store.waste import Waste, measure, removable
from moonclipfs.types import ObjectId, Version

_NAMED = 10
"""Damaged versions that an error names."""


class Survey:
    """What is needed and what there is; what was marked or read once is not again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.needed = Needed()
        self.footers = Footers(store.backend, store.packs, store.index.damaged())
        self.left_alone: dict[str, str] = {}
        """Packs that cannot be repacked, and why."""
        self.condemned: dict[str, int] = {}
        """Condemned packs and their records. The log may forget one that is gone while our table still has it."""
        self._kept: list[Version] = []

    def mark(self, names: Names | None = None, without: Collection[tuple[str, int]] = ()) -> Names:
        """Mark what all kept versions need, but those of `without`; returns the names, the newest unless given.

        Raises CorruptError when a log record or a directory or recipe cannot be read.
        """
        names = names or self._store.names()
        if names.damaged:
            raise CorruptError(f"{names.damaged[0]}: what snapshots need is not known, so nothing is deleted")
        self.condemned |= names.condemned()
        skipped = frozenset(without)
        self._kept = [one for one in names.all_versions() if (one.path, one.number) not in skipped]
        for version in self._kept:
            try:
                self.needed.add_version(self._store, version)
            except CorruptError as error:
                advice = "so nothing is deleted: restore it, or forget this version"
                raise type(error)(f"{error}; what it needs is not known, {advice}") from error
        return names

    def measure(self, table: PackTable, young_ns: int | None = None) -> Waste:
        """Tell needed from dead. Packs younger than `young_ns`, damaged and unreadable ones are spared.

        Raises MissingObjectError when a kept version lacks an object.
        """
        condemned = table.mask(self.condemned)
        spared = table.mask([*self.footers.damaged, *self.left_alone])
        if young_ns is not None:
            spared |= table.modified_ns > young_ns
        closure = table.closure(self.needed.ids(), table.choose(condemned))
        self._require_whole(closure)
        return measure(table, closure, condemned, spared)

    def removable(self, table: PackTable, condemned: Collection[str], packs: Collection[str]) -> list[str]:
        """See `waste.removable`. Raises MissingObjectError when a kept version lacks an object."""
        self._require_whole(table.closure(self.needed.ids(), table.choose(table.mask(condemned))))
        return removable(table, self.needed.ids(), condemned, packs)

    def _require_whole(self, closure: Closure) -> None:
        """An object that is in no pack may be in one that comes back: what it is encoded against is not known."""
        if not closure.missing:
            return
        lost: set[ObjectId] = {*closure.missing, *closure.unresolved}
        found = [next(affected_files(self._store, [version], lost), None) for version in self._kept]
        damaged = [one for one in found if one is not None]
        if not damaged:
            return  # versions that were forgotten since they were marked
        files = ", ".join(name for _, name in damaged[:_NAMED])
        more = f" and {len(damaged) - _NAMED} other versions" if len(damaged) > _NAMED else ""
        missing = next((one for one, _ in damaged if one in set(closure.missing)), closure.missing[0])
        raise MissingObjectError(
            f"{files}{more}: object {missing.hex()} is in no pack, and what it is stored against is not known, so "
            "nothing is deleted: bring back the pack that held it, or `moonclipfs forget` these versions, all at once"
        )
