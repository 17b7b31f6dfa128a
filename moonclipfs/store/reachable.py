"""What snapshots need: the objects that roots lead to, where copies of them lie, and the bases behind those.

Memory: about 150 bytes for each object that is needed, and 160 for each that any pack holds, so a few hundred MB for
a million objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MissingObjectError
from moonclipfs.store.packfile import ENTRY, RECORD_BYTES
from moonclipfs.store.packs import PLAIN, Location, pack_of_key
from moonclipfs.store.store import Store
from moonclipfs.types import ID_BYTES, NO_ID, EntryType, Kind, ObjectId, Version

_ID = f"S{ID_BYTES}"
_NO_BASE = -1
_ABSENT = -2
_ELSEWHERE = -3
_PLAIN = 1 << 8
_BORNE = 1 << 10
_GOING = 1 << 20
_CONDEMNED = 1 << 40
_DAMAGED = 1 << 50
_NEVER = 1 << 60
"""Costs: of a copy that is plain until it is stored anew, of a base that nothing but deltas needs, of a copy in a pack
that is about to go, in one that is condemned, of one that is known as damaged, and of what has no chain of bases to its
end."""

Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]

OBJECT_OVERHEAD = RECORD_BYTES + ENTRY.itemsize
"""Bytes that an object takes in its pack beside the encoding."""


@dataclass(slots=True)
class Needed:
    """The objects that trees are made of, by kind; bases are not among them."""

    directories: set[ObjectId] = field(default_factory=set)
    recipes: set[ObjectId] = field(default_factory=set)
    data: set[ObjectId] = field(default_factory=set)
    beside: Needed | None = None
    """What this does not take in again."""

    def ids(self) -> Iterable[ObjectId]:
        """All of them."""
        yield from self.directories
        yield from self.recipes
        yield from self.data

    def add_version(self, store: Store, version: Version) -> None:
        """Add everything that a version leads to; what is here already is not read again.

        Raises CorruptError, naming the version, when a directory or recipe cannot be read: then what the version
        needs is not known, and nothing may be deleted.
        """
        try:
            self._add_tree(store, version.root)
        except CorruptError as error:
            raise type(error)(f"{version.path}@{version.number}: {error}") from error

    def add(self, store: Store, kind: Kind, object_id: ObjectId) -> None:
        """Add an object and everything that it leads to. Raises CorruptError as `add_version` does."""
        if kind is Kind.DIRECTORY:
            self._add_tree(store, object_id)
        elif kind is Kind.RECIPE:
            self._add_recipe(store, object_id)
        elif self.beside is None or object_id not in self.beside.data:
            self.data.add(object_id)

    def _add_tree(self, store: Store, root: ObjectId) -> None:
        # A directory counts as done only when all below it is, so that a failure leaves nothing half known.
        todo = [(root, False)]
        while todo:
            directory, done = todo.pop()
            if done:
                self.directories.add(directory)
            elif directory not in self.directories and (
                self.beside is None or directory not in self.beside.directories
            ):
                todo.append((directory, True))
                for entry in store.directory(directory).values():
                    if entry.type is EntryType.DIRECTORY:
                        todo.append((entry.child, False))
                    elif entry.type is EntryType.FILE and entry.child != NO_ID:
                        self._add_recipe(store, entry.child)

    def _add_recipe(self, store: Store, recipe: ObjectId) -> None:
        beside = self.beside
        if recipe in self.recipes or (beside is not None and recipe in beside.recipes):
            return
        found = store.recipe_object(recipe).object_ids()
        self.data.update(found if beside is None else (one for one in found if one not in beside.data))
        self.recipes.add(recipe)


class Footers:
    """The entries of packs, read once: packs never change."""

    def __init__(self, store: Store, damaged_copies: Collection[tuple[str, int]] = ()) -> None:
        """`damaged_copies` are places (pack, offset) of copies that are not to be chosen over others."""
        self._backend = store.backend
        self._packs = store.packs
        self._elsewhere = store.index.elsewhere
        self._damaged_copies = damaged_copies
        self._known: dict[str, NDArray[np.void]] = {}
        self.damaged: dict[str, str] = {}
        """Packs whose footer is damaged, so that their entries were found by scanning, and what is wrong."""

    def table(self) -> PackTable:
        """The entries of all packs that there are. Raises BackendError, and MissingObjectError when a base store is
        gone: what lies there is not known then.
        """
        listed = [info for info in self._backend.list("packs/") if pack_of_key(info.key)]
        names, sizes, modified, tables = [], [], [], []
        # The newest last: of equally good copies the newest counts, which is the one that repacking made.
        for info in sorted(listed, key=lambda info: (info.modified_ns, info.key)):
            name = pack_of_key(info.key) or ""
            entries = self._entries(name)
            if entries is not None:
                names.append(name)
                sizes.append(info.size)
                modified.append(info.modified_ns)
                tables.append(entries)
        self._known = dict(zip(names, tables, strict=True))
        return PackTable(names, sizes, modified, tables, self._damaged_copies, self._elsewhere)

    def packs(self) -> list[str]:
        """The packs of the last table."""
        return list(self._known)

    def entries(self, pack: str) -> NDArray[np.void]:
        """The entries of a pack of the last table."""
        return self._known[pack]

    def _entries(self, pack: str) -> NDArray[np.void] | None:
        if pack in self._known:
            return self._known[pack]
        try:
            try:
                return self._packs.entries(pack)
            except MissingObjectError:
                raise
            except CorruptError as error:
                self.damaged[pack] = str(error)
                return self._packs.scan(pack)
        except MissingObjectError:
            return None  # deleted since the listing


class PackTable:
    """Every object that any pack holds, one row each copy, sorted by id; packs and objects are numbers.

    What the base store of a private one holds is no part of it, and not missing either: a base that lies there counts
    as none.
    """

    def __init__(
        self,
        names: list[str],
        sizes: list[int],
        modified_ns: list[int],
        tables: list[NDArray[np.void]],
        damaged_copies: Collection[tuple[str, int]] = (),
        elsewhere: Callable[[Collection[ObjectId]], Collection[ObjectId]] = lambda ids: (),
    ) -> None:
        """`elsewhere` tells which of some objects a base store holds."""
        self.names = names
        self.numbers: Mapping[str, int] = {name: number for number, name in enumerate(names)}
        self.sizes = np.array(sizes, np.int64)
        self.modified_ns = np.array(modified_ns, np.int64)
        entries = np.concatenate(tables) if tables else np.zeros(0, ENTRY)
        packs = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        order = np.argsort(entries["id"].view(_ID), kind="stable")
        self.entries = entries[order]
        self.pack = packs[order]
        self._damaged = np.zeros(len(self.entries), np.bool_)
        for pack in {pack for pack, _ in damaged_copies} & self.numbers.keys():
            offsets = [offset for one, offset in damaged_copies if one == pack]
            self._damaged |= (self.pack == self.numbers[pack]) & np.isin(self.entries["offset"], offsets)
        self.stored = self.entries["encoded_length"].astype(np.int64) + OBJECT_OVERHEAD
        """Bytes that each row takes in its pack."""
        ids = np.ascontiguousarray(self.entries["id"]).view(_ID)
        new = np.ones(len(ids), np.bool_)
        new[1:] = ids[1:] != ids[:-1]
        self._first = np.flatnonzero(new)
        self._ids = ids[self._first]
        self._object = np.repeat(np.arange(len(self._first)), np.diff(self._first, append=len(ids)))
        bases = np.ascontiguousarray(self.entries["base"]).view(_ID)
        self._base = np.where(bases == b"", _NO_BASE, self._lookup(bases))
        self._elsewhere = elsewhere
        self._base[self._are_elsewhere(bases, self._base == _ABSENT)] = _ELSEWHERE

    def mask(self, packs: Collection[str]) -> Flags:
        """One flag a pack: whether it is among `packs`."""
        flags = np.zeros(len(self.names), np.bool_)
        flags[[self.numbers[pack] for pack in packs if pack in self.numbers]] = True
        return flags

    def location(self, row: int) -> Location:
        """Where the object of a row is. Raises CorruptError for a kind or dtype that is not known."""
        return Location.from_entry(self.names[self.pack[row]], self.entries[row].tobytes())

    def raw_lengths(self, ids: Sequence[ObjectId]) -> list[int | None]:
        """The decoded length of each of `ids`; None for one that no pack holds."""
        found = self._lookup(np.frombuffer(b"".join(ids), _ID)).tolist()
        lengths = self.entries["raw_length"]
        return [None if number < 0 else int(lengths[self._first[number]]) for number in found]

    def bases(self, rows: Rows) -> dict[ObjectId, ObjectId]:
        """The base of each object of `rows` that has one."""
        rows = rows[(self._base[rows] >= 0) | (self._base[rows] == _ABSENT)]
        return dict(zip(_to_ids(self.entries["id"][rows]), _to_ids(self.entries["base"][rows]), strict=True))

    def flags(self, ids: Iterable[ObjectId]) -> Flags:
        """One flag an object: whether it is among `ids`."""
        flags = np.zeros(len(self._first), np.bool_)
        numbers = self._lookup(np.frombuffer(b"".join(ids), _ID))
        flags[numbers[numbers >= 0]] = True
        return flags

    def object_numbers(self, rows: Rows) -> Rows:
        """The object that each of `rows` is a copy of."""
        return self._object[rows]

    def base_numbers(self, rows: Rows) -> Rows:
        """The base of each of `rows`, as an object; negative for none, or one that no pack holds."""
        return self._base[rows]

    def sketches(self, rows: Rows) -> NDArray[np.uint8]:
        """The sketches of `rows`, one a line."""
        return np.frombuffer(self.entries["sketch"][rows].tobytes(), np.uint8).reshape(len(rows), -1)

    def newest_first(self, rows: Rows) -> Rows:
        """Rows in the order in which they were stored, the last first."""
        return rows[np.lexsort((self.entries["offset"][rows], self.pack[rows]))[::-1]]

    def choose(self, condemned: Flags, going: Flags | None = None, needed: Flags | None = None) -> Choice:
        """Choose the copy of each object that is to stay, so that the bases behind each lead to a full encoding.

        `condemned` and `going` have a flag a pack: copies there, and what needs such ones, are chosen only when there
        is nothing else, condemned ones after these, and copies that are known as damaged last of all. Then bases that
        are not `needed` themselves (a flag an object) are avoided, then plain copies. Otherwise the fewest bases
        decide, then the newest pack.
        """
        # Two copies of an object may have different bases, and one of them may need the object itself by now. The
        # chosen copy of a base always costs less than what needs it, so the chosen ones never lead back.
        price = condemned * _CONDEMNED if going is None else condemned * _CONDEMNED + going * _GOING
        own = price[self.pack] + self._damaged * _DAMAGED + (self.entries["generation"] == PLAIN) * _PLAIN
        cost = np.full(len(self._first), _NEVER, np.int64)
        each = np.zeros(0, np.int64)
        there = self._base >= 0
        link = np.ones(int(there.sum()), np.int64)
        if needed is not None:
            link += ~needed[self._base[there]] * np.int64(_BORNE)
        for _ in range(limits.CHAIN_READ_DEPTH + 1):
            behind = np.where((self._base == _NO_BASE) | (self._base == _ELSEWHERE), 0, _NEVER)
            behind[there] = cost[self._base[there]] + link
            each = np.minimum(own + behind, _NEVER)
            best = np.minimum.reduceat(each, self._first) if len(each) else cost
            if (best == cost).all():
                break
            cost = best
        order = np.lexsort((-self.pack, each, self._object))
        return Choice(order[self._first], cost < _NEVER)

    def closure(self, ids: Iterable[ObjectId], choice: Choice) -> Closure:
        """The chosen copies of `ids`, and of all bases behind these; all copies of an object that cannot be decoded."""
        wanted = np.frombuffer(b"".join(ids), _ID)
        numbers = self._lookup(wanted)
        missing = set(_to_ids(wanted[(numbers < 0) & ~self._are_elsewhere(wanted, numbers < 0)]))
        live = np.zeros(len(self._first), np.bool_)
        rows_live = np.zeros(len(self.entries), np.bool_)
        numbers = np.unique(numbers[numbers >= 0])
        while len(numbers):
            live[numbers] = True
            rows = choice.rows[numbers]
            broken = numbers[~choice.resolved[numbers]]
            if len(broken):
                rows = np.concatenate([rows, np.flatnonzero(np.isin(self._object, broken))])
            rows_live[rows] = True
            bases = self._base[rows]
            missing.update(_to_ids(self.entries["base"][rows[bases == _ABSENT]]))
            numbers = np.unique(bases[bases >= 0])
            numbers = numbers[~live[numbers]]
        unresolved = _to_ids(self._ids[live & ~choice.resolved])
        return Closure(rows_live, sorted(missing), unresolved)

    def elsewhere(self, ids: Iterable[ObjectId]) -> set[ObjectId]:
        """Those of `ids` that no pack here holds, and a base store does."""
        wanted = np.frombuffer(b"".join(ids), _ID)
        return set(_to_ids(wanted[self._are_elsewhere(wanted, self._lookup(wanted) < 0)]))

    def depths_elsewhere(self, rows: Rows) -> Rows:
        """For each of `rows` whose base a base store holds the links behind it, as noted when it was stored; else 0."""
        return np.where(self._base[rows] == _ELSEWHERE, self.entries["depth"][rows], 0).astype(np.int64)

    def _are_elsewhere(self, ids: NDArray[np.bytes_], asked: Flags) -> Flags:
        """Which of those of `ids` that are `asked` for a base store holds."""
        found = self._elsewhere(_to_ids(ids[asked])) if asked.any() else ()
        return asked & np.isin(ids, np.array([*found], _ID)) if found else np.zeros(len(ids), np.bool_)

    def _lookup(self, ids: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """The number of each object, or _ABSENT."""
        if not len(self._ids):
            return np.full(len(ids), _ABSENT, np.int64)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[at] == ids, at, _ABSENT)


@dataclass(frozen=True, slots=True)
class Choice:
    """For each object the row that stays, and whether it can be decoded: a chain of bases leads to a full encoding."""

    rows: Rows
    resolved: Flags


@dataclass(frozen=True, slots=True)
class Closure:
    """`live` has a flag for each row of the table. `missing` are objects that no pack holds, `unresolved` those that
    are there but cannot be decoded, since what they are encoded against is missing or leads back to them."""

    live: Flags
    missing: list[ObjectId]
    unresolved: list[ObjectId]


def _to_ids(found: NDArray[Any]) -> list[ObjectId]:
    raw = found.tobytes()
    return [raw[at : at + ID_BYTES] for at in range(0, len(raw), ID_BYTES)]
