"""What is needed and what there is, as gc and reports look at it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MissingObjectError
from moonclipfs.store.families import Family, families
from moonclipfs.store.layerdirs import LayerRoots
from moonclipfs.store.log import Names
from moonclipfs.store.overlaydirs import layer_title
from moonclipfs.store.reachable import Choice, Closure, Footers, Needed, PackTable
from moonclipfs.store.store import Store
from moonclipfs.store.treecheck import Top, affected_files, top_of
from moonclipfs.store.waste import Waste, measure, removable
from moonclipfs.types import Kind, ObjectId, Version

_RESTORE = "so nothing is deleted: bring back the pack that held it"
_NAMED = 10
"""Damaged versions that an error names."""


class Survey:
    """What is needed and what there is; what was marked or read once is not again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.needed = Needed()
        """What versions need."""
        self.only_layers = Needed(beside=self.needed)
        """What layers need beside that."""
        self.footers = Footers(store, store.index.damaged())
        self.left_alone: dict[str, str] = {}
        """Packs that cannot be repacked, and why."""
        self.condemned: dict[str, int] = {}
        """Condemned packs and their records. The log may forget one that is gone while our table still has it."""
        self._kept: list[Version] = []
        self._journals = LayerRoots(store.path)
        self._roots: dict[tuple[Kind, ObjectId], str] = {}
        """What journals name, and the layer that does."""
        self._unmarked: dict[tuple[Kind, ObjectId], str] = {}
        """The same, while what it leads to is not marked yet."""

    def mark(self, names: Names | None = None, without: Collection[tuple[str, int]] = ()) -> Names:
        """Mark what all kept versions need, but those of `without`, and all layers; returns the names, the newest
        unless given.

        Raises CorruptError when a log record, a journal, or a directory or recipe cannot be read.
        """
        # Before the names and after them: a seal takes objects from a journal to a name, a change the other way.
        self._read_journals()
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
        self._read_journals()
        self._mark_layers()
        return names

    def _read_journals(self) -> None:
        for layer, kind, object_id in self._journals.more():
            if (kind, object_id) not in self._roots:
                self._unmarked[kind, object_id] = layer

    def _mark_layers(self) -> None:
        for (kind, object_id), layer in list(self._unmarked.items()):
            try:
                self.only_layers.add(self._store, kind, object_id)
            except CorruptError as error:
                title = layer_title(self._store.path, layer)
                raise type(error)(f"{title}: {error}; what it needs is not known, {_RESTORE}") from error
            self._roots[kind, object_id] = self._unmarked.pop((kind, object_id))

    def ids(self) -> Iterator[ObjectId]:
        """The objects that are needed, but for the bases behind them."""
        yield from self.needed.ids()
        yield from self.only_layers.ids()

    def measure(
        self,
        table: PackTable,
        young_ns: int | None = None,
        share_dead: float = limits.REPACK_DEAD_SHARE,
        without: Sequence[int] = (),
    ) -> Waste:
        """Tell needed from dead. Packs younger than `young_ns`, damaged and unreadable ones are spared; the rows
        `without` count as dead. See `waste.measure`.

        Raises MissingObjectError when a kept version lacks an object.
        """
        condemned = table.mask(self.condemned)
        spared = table.mask([*self.footers.damaged, *self.left_alone])
        if young_ns is not None:
            spared |= table.modified_ns > young_ns
        closure = table.closure(self.ids(), self.choose(table))
        self._require_whole(closure)
        closure.live[list(without)] = False
        return measure(table, closure, condemned, spared, share_dead)

    def families(self, table: PackTable) -> list[Family]:
        """See `families.families`."""
        choice = self.choose(table)
        return families(table, choice, table.closure(self.ids(), choice).live, table.flags(self.ids()))

    def choose(self, table: PackTable) -> Choice:
        """The copies that are to stay, with as few bases as can be that nothing but deltas needs."""
        return table.choose(table.mask(self.condemned), needed=table.flags(self.ids()))

    def removable(self, table: PackTable, condemned: Collection[str], packs: Collection[str]) -> list[str]:
        """See `waste.removable`. Raises MissingObjectError when a kept version lacks an object."""
        self._require_whole(table.closure(self.ids(), table.choose(table.mask(condemned))))
        return removable(table, self.ids(), condemned, packs)

    def _require_whole(self, closure: Closure) -> None:
        """An object that is in no pack may be in one that comes back: what it is encoded against is not known."""
        if not closure.missing:
            return
        lost: set[ObjectId] = {*closure.missing, *closure.unresolved}
        found = [next(affected_files(self._store, [top_of(version)], lost), None) for version in self._kept]
        damaged = [one for one in found if one is not None]
        if not damaged:
            self._require_layers(lost, closure.missing)
            return  # versions that were forgotten since they were marked
        files = ", ".join(name for _, name in damaged[:_NAMED])
        more = f" and {len(damaged) - _NAMED} other versions" if len(damaged) > _NAMED else ""
        missing = next((one for one, _ in damaged if one in set(closure.missing)), closure.missing[0])
        raise MissingObjectError(
            f"{files}{more}: object {missing.hex()} is in no pack, and what it is stored against is not known, so "
            "nothing is deleted: bring back the pack that held it, or `moonclipfs forget` these versions, all at once"
        )

    def _require_layers(self, lost: set[ObjectId], missing: Sequence[ObjectId]) -> None:
        titles = {layer: layer_title(self._store.path, layer) for layer in set(self._roots.values())}
        tops = [Top(titles[layer], kind, object_id) for (kind, object_id), layer in self._roots.items()]
        for object_id, name in affected_files(self._store, tops, lost):
            gone = object_id if object_id in missing else missing[0]
            raise MissingObjectError(f"{name}: it needs object {gone.hex()}, which is in no pack, {_RESTORE}")

    def of_layers(self) -> Needed:
        """All that layers need, also of what versions need."""
        found = Needed()
        for kind, object_id in self._roots:
            found.add(self._store, kind, object_id)
        return found
