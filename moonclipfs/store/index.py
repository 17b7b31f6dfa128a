"""Where each object is stored: a cache in SQLite, made of the footers of packs alone.

It is never truth. It is made anew when it is missing, damaged or of another version, it goes on in memory where it
cannot be written, and what it says of an object is checked against the pack when that is read. Opening it compares
it with the list of packs, so it never names a pack that vanished before.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MissingObjectError
from moonclipfs.store import packfile
from moonclipfs.store.backend import Backend, KeyInfo
from moonclipfs.store.cachedb import OWNER, CacheDatabase, transaction
from moonclipfs.store.packs import Location, PackReader, pack_key, pack_of_key
from moonclipfs.types import NO_ID, DType, Kind, ObjectId

log = logging.getLogger(__name__)

_VERSION = 2
_SCHEMA = """
CREATE TABLE packs (
    number INTEGER PRIMARY KEY,     -- in the order in which this host met them
    name TEXT NOT NULL UNIQUE,
    bytes INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    damaged INTEGER NOT NULL        -- 1: its footer is, and the entries were found by scanning
);
CREATE TABLE objects (
    row INTEGER PRIMARY KEY,        -- the pack's number << 22 | the entry's: sorted by pack, newest last
    key INTEGER NOT NULL,           -- the first 8 bytes of the id
    label INTEGER,                  -- NULL for 0
    elements INTEGER,               -- of data objects that have a sketch
    entry BLOB NOT NULL             -- packfile.ENTRY
);
CREATE TABLE damaged_copies (
    pack TEXT NOT NULL,
    offset INTEGER NOT NULL,
    PRIMARY KEY (pack, offset)
) WITHOUT ROWID
"""
_INDEXES = (
    "CREATE INDEX IF NOT EXISTS by_key ON objects (key)",
    "CREATE INDEX IF NOT EXISTS by_label ON objects (label) WHERE label IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS by_elements ON objects (elements) WHERE elements IS NOT NULL",
)
_ROW_BITS = 22
_ENTRIES = f"SELECT row, name, entry FROM objects JOIN packs ON number = row >> {_ROW_BITS}"
_KEYS_AT_ONCE = 256
_ROWS_AT_ONCE = 4096
_INSERT_AT_ONCE = 1 << 17
"""Entries that one transaction adds, about: it bounds memory, and how long other processes wait."""
_WIDTHS = np.array([max(1, DType(code).width) for code in range(len(DType))])


Place = tuple[str, int]
"""A pack, and the offset of an object in it."""


@dataclass(frozen=True, slots=True)
class PackInfo:
    """One pack: its length in bytes, how many objects it holds, whether its footer is damaged."""

    bytes: int
    entries: int
    damaged: bool = False


class Index:
    """Finds objects. Thread-safe; processes of one host share the file. Not to be used in a forked child.

    Methods raise BusyError when another process holds the file for a minute, BackendError when the packs cannot
    be listed or read.
    """

    def __init__(self, path: Path | None, backend: Backend, packs: PackReader, store_id: str) -> None:
        """Nothing is read before the first use. `path` None keeps the index in memory."""
        self._backend = backend
        self._packs = packs
        self._database = CacheDatabase(path, _SCHEMA, _VERSION, store_id, self._sync)
        self._condemned: frozenset[str] = frozenset()
        self._rebuilt = False
        self._resized: set[str] = set()
        """Packs that were found with another length than the index had noted."""

    # Finding

    def find(self, object_id: ObjectId, *, usable: bool = False) -> Location | None:
        """Return where an object is, or None. See `find_many`."""
        return self.find_many([object_id], usable=usable).get(object_id)

    def find_many(self, ids: Iterable[ObjectId], *, usable: bool = False) -> dict[ObjectId, Location]:
        """Return where objects are; those that are in no pack are left out.

        With `usable`, only encodings that something new may refer to: neither they nor any base behind them lie in
        condemned packs, are missing or known as damaged, and the bases are CHAIN_DEPTH at most. Such an answer holds
        if the names were read, given to `set_condemned`, and followed by `sync`, all after a lease began to hold the
        log's state.
        """
        wanted = set(ids)
        return self._database.run(lambda connection: self._find(connection, wanted, usable, limits.CHAIN_DEPTH))

    def usable_within(self, ids: Iterable[ObjectId], links: int) -> set[ObjectId]:
        """Those of `ids` that something new may refer to, with `links` bases behind them at most. See `find_many`."""
        wanted = set(ids)
        return set(self._database.run(lambda connection: self._find(connection, wanted, True, links)))

    def locate(self, object_id: ObjectId) -> Location:
        """Return where an object is that must be somewhere: looks for new packs, and makes the index anew, if need be.

        Raises MissingObjectError.
        """
        location = self.find(object_id)
        if location is None:
            self.sync()
            location = self.find(object_id)
        if location is None and not self._rebuilt:
            log.info("object %s is not in the index: it is made anew from the packs", object_id.hex())
            self.rebuild()
            location = self.find(object_id)
        if location is None:
            raise MissingObjectError(f"object {object_id.hex()} is in no pack of {self._backend.path('packs')}")
        return location

    def copies(self, object_id: ObjectId) -> list[Location]:
        """Return all places of an object, the best first, after a look for new packs. Bases may be missing."""

        def look(connection: sqlite3.Connection) -> list[Location]:
            self._sync(connection)
            return self._candidates(connection, {object_id}).get(object_id, [])

        return self._database.run(look)

    def relocate(self, location: Location) -> Location | None:
        """Return a better answer than `location`, whose bytes were not there or not right; None when there is none.

        The footer of its pack is read again. When that says the same, another pack may still hold the object.
        Raises MissingObjectError when no pack holds it.
        """

        def again(connection: sqlite3.Connection) -> list[Location]:
            self._drop(connection, [location.pack])
            self._sync(connection)
            return self._candidates(connection, {location.object_id}).get(location.object_id, [])

        found = self._database.run(again)
        if location in found and not self._in_footer(location):
            log.info("the index contradicts the footer of pack %s: it is made anew", location.pack)
            self.rebuild()
            found = self._database.run(again)
        found = found or [self.locate(location.object_id)]
        return next((other for other in found if other != location), None)

    def elsewhere(self, ids: Iterable[ObjectId]) -> set[ObjectId]:
        """Those of `ids` that another store keeps for this one, with all bases behind them. See `PairedIndex`."""
        return set()

    def by_label(self, label: int, limit: int = 8) -> list[Location]:
        """Return usable objects with this label (not 0), the newest first."""
        return self._recent("label", label - (1 << 64) if label >> 63 else label, limit) if label else []

    def by_elements(self, elements: int, limit: int = 256) -> list[Location]:
        """Return usable data objects that have a sketch and so many elements, the newest first."""
        return self._recent("elements", elements, limit)

    def iterate(self) -> Iterator[Location]:
        """Yield every entry of every pack: an object that several packs hold comes several times."""
        after, locations = self._database.run(partial(_page, after=-1))
        while locations:
            yield from locations
            after, locations = self._database.run(partial(_page, after=after))

    def packs(self) -> dict[str, PackInfo]:
        """Return the packs that the index knows."""
        query = "SELECT name, bytes, entries, damaged FROM packs"
        rows = self._database.run(lambda connection: connection.execute(query).fetchall())
        return {name: PackInfo(size, entries, bool(damaged)) for name, size, entries, damaged in rows}

    # Keeping up with the packs

    def set_condemned(self, packs: Collection[str]) -> None:
        """Say which packs are condemned. One that was stays so until it is gone: the log may forget it before we do."""
        self._condemned |= frozenset(packs)

    def sync(self) -> None:
        """Compare with the list of packs: read the footers of new ones, drop those that vanished."""
        self._database.run(self._sync)

    def add_pack(self, pack: str, entries: NDArray[np.void]) -> None:
        """Learn of a pack that was just published; `entries` is its footer."""
        info = PackInfo(self._backend.size(pack_key(pack)), len(entries))
        self._database.run(lambda connection: self._insert(connection, [(pack, info, entries)]))

    def drop_pack(self, pack: str) -> None:
        """Forget a pack that was deleted, and what is known of damage in it."""

        def work(connection: sqlite3.Connection) -> None:
            self._drop(connection, [pack])
            connection.execute("DELETE FROM damaged_copies WHERE pack = ?", (pack,))

        self._database.run(work)

    def rebuild(self) -> None:
        """Make the index anew from the footers of all packs. The damage that is known stays known."""
        self._rebuilt = True
        damaged = self.damaged()
        self._database.discard()
        self.set_damaged(damaged)

    # Known damage

    def damaged(self) -> set[Place]:
        """Return the places of copies that are known as damaged."""
        return self._database.run(_damaged)

    def suffers(self, object_id: ObjectId) -> bool:
        """Whether damage is known, and an object that is not usable has copies outside condemned packs."""

        def look(connection: sqlite3.Connection) -> bool:
            if connection.execute("SELECT 1 FROM damaged_copies LIMIT 1").fetchone() is None:
                return False
            found = self._candidates(connection, {object_id}).get(object_id, [])
            return any(location.pack not in self._condemned for location in found)

        return self._database.run(look)

    def set_damaged(self, places: Collection[Place]) -> None:
        """Note which copies are damaged, and that no others are: what is stored next does not refer to them."""

        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                connection.execute("DELETE FROM damaged_copies")
                connection.executemany("INSERT INTO damaged_copies VALUES (?, ?)", sorted(places))

        if places or self.damaged():
            self._database.run(work)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        self._database.close()

    def _in_footer(self, location: Location) -> bool:
        read = self._read_entries(location.pack)
        rows = read[0][read[0]["offset"] == location.offset] if read is not None else ()
        return any(Location.from_entry(location.pack, row.tobytes()) == location for row in rows)

    # Queries

    def _candidates(self, connection: sqlite3.Connection, ids: set[ObjectId]) -> dict[ObjectId, list[Location]]:
        """All locations of objects: damaged ones last, condemned ones before these, and plain ones before these;
        shorter chains first.
        """
        found: dict[ObjectId, list[Location]] = {}
        keys = [int.from_bytes(object_id[:8], "little", signed=True) for object_id in ids]
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            part = keys[start : start + _KEYS_AT_ONCE]
            marks = ",".join("?" * len(part))
            for location in _locations(connection.execute(f"{_ENTRIES} WHERE key IN ({marks})", part)):
                if location.object_id in ids:
                    found.setdefault(location.object_id, []).append(location)
        damaged = _damaged_among(connection, [one for locations in found.values() for one in locations])
        for locations in found.values():
            locations.sort(
                key=lambda one: (_place(one) in damaged, one.pack in self._condemned, one.is_plain, one.depth)
            )
        return found

    def _find(
        self, connection: sqlite3.Connection, ids: set[ObjectId], usable: bool, links: int
    ) -> dict[ObjectId, Location]:
        candidates = self._candidates(connection, ids).values()
        found = [location for many in candidates for location in many]
        if usable:
            found = self._usable(connection, found, links)
        else:
            # Of an object that was stored anew, the older copy may have outlived its base.
            several = [location for many in candidates if len(many) > 1 for location in many]
            found = [*self._usable(connection, several, links), *found]
        answer: dict[ObjectId, Location] = {}
        for location in found:
            answer.setdefault(location.object_id, location)
        return answer

    def _usable(self, connection: sqlite3.Connection, locations: Sequence[Location], links: int) -> list[Location]:
        """Whole ones outside condemned packs whose bases are all usable too, `links` deep at most.

        A delta that nothing refers to may outlive its base: gc keeps what is referred to, and deletes whole packs.
        """
        damaged = _damaged_among(connection, locations)
        kept = [one for one in locations if one.pack not in self._condemned and _place(one) not in damaged]
        bases = {location.base for location in kept if location.base != NO_ID}
        if not bases:
            return kept
        known = set(self._find(connection, bases, True, links - 1)) if links else set()
        if links and (rest := bases - known):
            known |= self._usable_elsewhere(rest, links - 1)
        return [location for location in kept if location.base == NO_ID or location.base in known]

    def _usable_elsewhere(self, ids: set[ObjectId], links: int) -> set[ObjectId]:
        """Those of `ids` that may be bases though they lie in another store. See `PairedIndex`."""
        return set()

    def _recent(self, column: str, value: int, limit: int) -> list[Location]:
        def work(connection: sqlite3.Connection) -> list[Location]:
            found: dict[ObjectId, Location] = {}
            cursor = connection.execute(f"{_ENTRIES} WHERE {column} = ? ORDER BY row DESC", (value,))
            while len(found) < limit and (rows := cursor.fetchmany(limit)):
                for location in self._usable(connection, list(_locations(rows)), limits.CHAIN_DEPTH):
                    found.setdefault(location.object_id, location)
            return list(found.values())[:limit]

        return self._database.run(work)

    # Checking

    def contradiction(self, footers: Mapping[str, NDArray[np.void]], damaged: Collection[str]) -> str:
        """Return how the index contradicts the `footers` of packs, or itself; empty when it does not.

        `damaged` are packs whose footer is. A pack that the index knows and `footers` do not may be new, and one that
        is gone is not looked for. When SQLite found damage before, that is the answer, once: it was made anew then.
        """
        wrong = self._database.run(lambda connection: self._contradiction(connection, footers, damaged))
        failure, self._database.failure = self._database.failure, ""
        resized, self._resized = self._resized & footers.keys() - set(damaged), set()
        return wrong or failure or (f"it had another length of pack {min(resized)}" if resized else "")

    def _contradiction(
        self, connection: sqlite3.Connection, footers: Mapping[str, NDArray[np.void]], damaged: Collection[str]
    ) -> str:
        self._sync(connection)
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            return f"SQLite says: {found}"
        if _tables(connection) != _expected_tables():
            return "its tables are not those that it was made with"
        count = 0
        for number, name, *info in connection.execute("SELECT number, name, entries, damaged FROM packs").fetchall():
            count += info[0]
            if name not in footers:
                continue
            query = "SELECT row, key, label, elements, entry FROM objects WHERE row >= ? AND row < ? ORDER BY row"
            rows = connection.execute(query, (number << _ROW_BITS, (number + 1) << _ROW_BITS))
            expected = _rows(number, footers[name])
            same = all(one == other for one, other in zip_longest(rows, expected))
            if not same or info != [len(footers[name]), name in damaged]:
                return f"it contradicts the footer of pack {name}"
        if connection.execute("SELECT count(*) FROM objects").fetchone() != (count,):
            return "it has objects of no pack"
        return ""

    # Changes

    def _sync(self, connection: sqlite3.Connection) -> None:
        present: dict[str, KeyInfo] = {}
        for info in self._backend.list("packs/"):
            pack = pack_of_key(info.key)
            if pack is not None:
                present[pack] = info
        known = dict(connection.execute("SELECT name, bytes FROM packs").fetchall())
        # A pack of another length than it had was cut off: what is left of it is read anew.
        stale = {pack for pack, size in known.items() if pack not in present or present[pack].size != size}
        self._drop(connection, stale)
        self._resized |= stale & present.keys()
        self._condemned &= present.keys()
        new = present.keys() - (known.keys() - stale)
        batch, count = [], 0
        for pack in sorted(new, key=lambda pack: (present[pack].modified_ns, pack)):
            read = self._read_entries(pack)
            if read is not None:
                entries, damaged = read
                batch.append((pack, PackInfo(present[pack].size, len(entries), damaged), entries))
                count += len(entries)
            if count >= _INSERT_AT_ONCE:
                self._insert(connection, batch)
                batch, count = [], 0
        self._insert(connection, batch)
        for statement in _INDEXES:
            connection.execute(statement)

    def _read_entries(self, pack: str) -> tuple[NDArray[np.void], bool] | None:
        """The entries of a pack and whether its footer is damaged; None when it was deleted since it was listed."""
        try:
            return self._packs.entries(pack), False
        except MissingObjectError:
            return None
        except CorruptError as error:
            log.warning("%s; its objects are found by scanning it: run `moonclipfs verify`", error)
        try:
            return self._packs.scan(pack), True
        except MissingObjectError:
            return None

    def _insert(self, connection: sqlite3.Connection, new: Iterable[tuple[str, PackInfo, NDArray[np.void]]]) -> None:
        with transaction(connection):
            for pack, info, entries in new:
                if connection.execute("SELECT 1 FROM packs WHERE name = ?", (pack,)).fetchone():
                    continue  # another process was faster
                (number,) = connection.execute("SELECT coalesce(max(number), 0) + 1 FROM packs").fetchone()
                values = (number, pack, info.bytes, info.entries, info.damaged)
                connection.execute("INSERT INTO packs VALUES (?, ?, ?, ?, ?)", values)
                connection.executemany("INSERT INTO objects VALUES (?, ?, ?, ?, ?)", _rows(number, entries))

    def _drop(self, connection: sqlite3.Connection, packs: Collection[str]) -> None:
        if not packs:
            return
        self._packs.forget(packs)
        with transaction(connection):
            for pack in packs:
                gone = connection.execute("DELETE FROM packs WHERE name = ? RETURNING number", (pack,)).fetchall()
                for (number,) in gone:
                    rows = (number << _ROW_BITS, (number + 1) << _ROW_BITS)
                    connection.execute("DELETE FROM objects WHERE row >= ? AND row < ?", rows)


def _place(location: Location) -> Place:
    return location.pack, location.offset


def _damaged(connection: sqlite3.Connection) -> set[Place]:
    return set(connection.execute("SELECT CAST(pack AS TEXT), CAST(offset AS INTEGER) FROM damaged_copies"))


def _damaged_among(connection: sqlite3.Connection, locations: Iterable[Location]) -> set[Place]:
    """Those of the places of `locations` that are known as damaged; nearly always there are none at all."""
    if connection.execute("SELECT 1 FROM damaged_copies LIMIT 1").fetchone() is None:
        return set()
    query = "SELECT 1 FROM damaged_copies WHERE pack = ? AND offset = ?"
    return {place for place in map(_place, locations) if connection.execute(query, place).fetchone()}


def _tables(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """The definitions of all tables and indexes."""
    query = "SELECT type, name, sql FROM sqlite_schema"
    return set(connection.execute(query).fetchall())


def _expected_tables() -> set[tuple[str, str, str]]:
    with closing(sqlite3.connect(":memory:")) as fresh:
        for statement in (*_SCHEMA.split(";"), OWNER, *_INDEXES):
            fresh.execute(statement)
        return _tables(fresh)


def _page(connection: sqlite3.Connection, after: int) -> tuple[int, list[Location]]:
    """The locations of some rows past row `after`, and the last of these rows."""
    query = f"{_ENTRIES} WHERE row > ? ORDER BY row LIMIT ?"
    rows = connection.execute(query, (after, _ROWS_AT_ONCE)).fetchall()
    return rows[-1][0] if rows else after, list(_locations(rows))


def _locations(rows: Iterable[tuple[int, str, bytes]]) -> Iterator[Location]:
    """Locations of rows as `_ENTRIES` gives them. Raises sqlite3.DatabaseError for rows that nobody wrote like this."""
    for _, name, entry in rows:
        try:
            yield Location.from_entry(name, entry)
        except (struct.error, TypeError, CorruptError) as error:
            raise sqlite3.DatabaseError(f"a row makes no sense: {error}") from error


def _rows(number: int, entries: NDArray[np.void]) -> Iterator[tuple[int, int, int | None, int | None, bytes]]:
    """Rows of the table of objects for a pack's footer."""
    raw, length = entries.tobytes(), packfile.ENTRY.itemsize
    keys = np.frombuffer(entries["id"].tobytes(), "<i8")[::4]
    sketches = np.frombuffer(entries["sketch"].tobytes(), np.uint8).reshape(-1, 32)
    sketched = sketches.any(axis=1) & (entries["kind"] == Kind.DATA)
    elements = np.where(sketched, entries["raw_length"].astype(np.int64) // _WIDTHS[entries["dtype"]], 0)
    first = number << _ROW_BITS
    columns = zip(keys.tolist(), entries["label"].astype("<i8").tolist(), elements.tolist(), strict=True)
    for row, (key, label, count) in enumerate(columns):
        yield first + row, key, label or None, count or None, raw[row * length : (row + 1) * length]
