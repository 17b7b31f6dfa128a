"""What snapshots need: the objects that roots lead to, where copies of them lie, and the bases behind those.

Memory: about 150 bytes for each object that is needed, and 160 for each that any pack holds, so a few hundred MB for
a million objects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moonclipfs.errors import CorruptError, MissingObjectError
from moonclipfs.store.backend import Backend
from moonclipfs.store.packfile import ENTRY, RECORD_BYTES
from moonclipfs.store.packs import Location, PackReader, pack_of_key
from moonclipfs.store.store import Store
from moonclipfs.types import ID_BYTES, NO_ID, EntryType, ObjectId, Version

_ID = f"S{ID_BYTES}"
_NO_ROWS = np.zeros(0, np.int64)
OBJECT_OVERHEAD = RECORD_BYTES + ENTRY.itemsize
"""Bytes that an object takes in its pack beside the encoding."""


@dataclass(slots=True)
class Needed:
    """The objects that trees are made of, by kind; bases are not among them."""

    directories: set[ObjectId] = field(default_factory=set)
    recipes: set[ObjectId] = field(default_factory=set)
    data: set[ObjectId] = field(default_factory=set)

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

    def _add_tree(self, store: Store, root: ObjectId) -> None:
        # A directory counts as done only when all below it is, so that a failure leaves nothing half known.
        todo = [(root, False)]
        while todo:
            directory, done = todo.pop()
            if done:
                self.directories.add(directory)
            elif directory not in self.directories:
                todo.append((directory, True))
                for entry in store.directory(directory).values():
                    if entry.type is EntryType.DIRECTORY:
                        todo.append((entry.child, False))
                    elif entry.type is EntryType.FILE and entry.child != NO_ID and entry.child not in self.recipes:
                        self.data.update(store.recipe(entry).object_ids())
                        self.recipes.add(entry.child)


class Footers:
    """The entries of packs, read once: packs never change."""

    def __init__(self, backend: Backend, packs: PackReader) -> None:
        self._backend = backend
        self._packs = packs
        self._known: dict[str, NDArray[np.void]] = {}
        self.damaged: dict[str, str] = {}
        """Packs whose footer is damaged, so that their entries were found by scanning, and what is wrong."""

    def table(self) -> PackTable:
        """The entries of all packs that there are. Raises BackendError."""
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
        return PackTable(names, sizes, modified, tables)

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
    """Every object that any pack holds, one row each copy, sorted by id; packs are numbers into `names`."""

    def __init__(
        self,
        names: list[str],
        sizes: list[int],
        modified_ns: list[int],
        tables: list[NDArray[np.void]],
    ) -> None:
        self.names = names
        self.numbers: Mapping[str, int] = {name: number for number, name in enumerate(names)}
        self.sizes = np.array(sizes, np.int64)
        self.modified_ns = np.array(modified_ns, np.int64)
        entries = np.concatenate(tables) if tables else np.zeros(0, ENTRY)
        packs = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        order = np.argsort(entries["id"].view(_ID), kind="stable")
        self.entries = entries[order]
        self.pack = packs[order]
        self.ids = np.ascontiguousarray(self.entries["id"]).view(_ID)
        self._bases = np.ascontiguousarray(self.entries["base"]).view(_ID)
        self.stored = self.entries["encoded_length"].astype(np.int64) + OBJECT_OVERHEAD
        """Bytes that each row takes in its pack."""

    def mask(self, packs: Collection[str]) -> NDArray[np.bool_]:
        """One flag a pack: whether it is among `packs`."""
        flags = np.zeros(len(self.names), np.bool_)
        flags[[self.numbers[pack] for pack in packs if pack in self.numbers]] = True
        return flags

    def location(self, row: int) -> Location:
        """Where the object of a row is. Raises CorruptError for a kind or dtype that is not known."""
        return Location.from_entry(self.names[self.pack[row]], self.entries[row].tobytes())

    def first_rows(self) -> NDArray[np.bool_]:
        """One flag a row: whether it is the first of its object."""
        first = np.ones(len(self.ids), np.bool_)
        first[1:] = self.ids[1:] != self.ids[:-1]
        return first

    def raw_lengths(self, ids: Sequence[ObjectId]) -> list[int | None]:
        """The decoded length of each of `ids`; None for one that no pack holds."""
        wanted = np.frombuffer(b"".join(ids), _ID)
        low = np.searchsorted(self.ids, wanted, "left")
        found = low < np.searchsorted(self.ids, wanted, "right")
        return [
            int(self.entries["raw_length"][row]) if there else None
            for row, there in zip(low.tolist(), found.tolist(), strict=True)
        ]

    def bases(self, rows: NDArray[np.int64]) -> dict[ObjectId, ObjectId]:
        """The base of each object of `rows` that has one, by the copy that readers take: the one of least depth."""
        rows = rows[np.lexsort((self.entries["depth"][rows], self.ids[rows]))]
        first = np.ones(len(rows), np.bool_)
        first[1:] = self.ids[rows][1:] != self.ids[rows][:-1]
        rows = rows[first]
        rows = rows[self._bases[rows] != b""]
        return dict(zip(_to_ids(self.ids[rows]), _to_ids(self._bases[rows]), strict=True))

    def closure(self, ids: Iterable[ObjectId], usable: NDArray[np.bool_]) -> Closure:
        """The copies of `ids`, and of all bases behind these copies.

        `usable` has a flag for each pack. All usable copies of an object count, since a reader may take any of them;
        the copies in other packs count only when there is none.
        """
        live = np.zeros(len(self.ids), np.bool_)
        missing: set[ObjectId] = set()
        wanted = np.unique(np.frombuffer(b"".join(ids), _ID))
        while len(wanted):
            rows, absent = self._copies(wanted, usable)
            missing.update(_to_ids(absent))
            rows = rows[~live[rows]]
            live[rows] = True
            bases = self._bases[rows]
            wanted = np.unique(bases[bases != b""])
            wanted = wanted[~self._reached(wanted, live)]
        return Closure(live, sorted(missing))

    def _copies(
        self, wanted: NDArray[np.bytes_], usable: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.bytes_]]:
        """Rows of the copies that count, and the ids that have none."""
        low = np.searchsorted(self.ids, wanted, "left")
        counts = np.searchsorted(self.ids, wanted, "right") - low
        group = np.repeat(np.arange(len(wanted)), counts)
        if not len(group):
            return _NO_ROWS, wanted
        rows = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts) + low[group]
        good = usable[self.pack[rows]]
        has_good = np.bincount(group[good], minlength=len(wanted)) > 0
        return rows[good | ~has_good[group]], wanted[counts == 0]

    def _reached(self, wanted: NDArray[np.bytes_], live: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which of `wanted` have a live row: of one object, either all rows that count are live or none."""
        low = np.searchsorted(self.ids, wanted, "left")
        counts = np.searchsorted(self.ids, wanted, "right") - low
        total = np.concatenate([[0], np.cumsum(live)])
        reached: NDArray[np.bool_] = total[low + counts] > total[low]
        return reached


@dataclass(frozen=True, slots=True)
class Closure:
    """`live` has a flag for each row of the table; `missing` are objects that no pack holds."""

    live: NDArray[np.bool_]
    missing: list[ObjectId]


def _to_ids(found: NDArray[np.bytes_]) -> list[ObjectId]:
    raw = found.tobytes()
    return [raw[at : at + ID_BYTES] for at in range(0, len(raw), ID_BYTES)]
