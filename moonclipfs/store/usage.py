"""What snapshots cost, alone and together, and what was saved by which means.

Stored bytes are what objects take in packs, record header and footer row included; of an object that several packs
hold, one copy counts and the others are dead. A version is charged with the directories, recipes and data that it
leads to, and with the bases behind them. What layers need too is not freed when a version goes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from moonclipfs.errors import CorruptError
from moonclipfs.store.reachable import Needed, PackTable
from moonclipfs.store.store import Store
from moonclipfs.store.survey import Survey
from moonclipfs.types import NO_ID, Entry, EntryType, Kind, ObjectId, Version


@dataclass(frozen=True, slots=True)
class VersionUsage:
    """Bytes of one version: `logical` as plain files (each hard link group once), `stored` in packs, of which
    `exclusive` are freed if this version alone goes, and `shared` serve other kept versions or layers too."""

    version: Version
    logical: int
    stored: int
    exclusive: int

    @property
    def shared(self) -> int:
        """Stored bytes that other kept versions, or layers, need too."""
        return self.stored - self.exclusive


@dataclass(frozen=True, slots=True)
class SetUsage:
    """Bytes of some versions together, counted as for one: what several of them need counts once in `stored`, and
    `exclusive` is freed if all of them go."""

    versions: Sequence[VersionUsage]
    stored: int
    exclusive: int

    @property
    def logical(self) -> int:
        """Bytes as plain files."""
        return sum(usage.logical for usage in self.versions)

    @property
    def shared(self) -> int:
        """Stored bytes that versions outside the set, or layers, need too."""
        return self.stored - self.exclusive


def du(store: Store, versions: Collection[Version]) -> SetUsage:
    """Tell what `versions` cost beside all that are kept. Raises CorruptError when one cannot be read."""
    survey = Survey(store)
    names = survey.mark()
    table = survey.footers.table()
    choice = survey.choose(table)
    kept = list(names.all_versions())
    asked = {(version.path, version.number) for version in versions}
    together = np.zeros(len(table.entries), np.int32)
    users = np.zeros(len(table.entries), np.int32)
    user = np.zeros(len(table.entries), np.int32)
    stored = {}
    for number, version in enumerate(kept):
        needed = Needed()
        needed.add_version(store, version)
        rows = np.flatnonzero(table.closure(needed.ids(), choice).live)
        users[rows] += 1
        user[rows] = number
        together[rows] += (version.path, version.number) in asked
        stored[version.path, version.number] = int(table.stored[rows].sum())
    rows = np.flatnonzero(table.closure(survey.of_layers().ids(), choice).live)
    users[rows] += 1
    user[rows] = len(kept)
    alone = users == 1
    exclusive = np.bincount(user[alone], table.stored[alone], len(kept) + 1).astype(np.int64)
    numbers = {(version.path, version.number): number for number, version in enumerate(kept)}
    usages = [
        VersionUsage(
            version,
            sum(entry.size for entry in _files(store, version)),
            stored[version.path, version.number],
            int(exclusive[numbers[version.path, version.number]]),
        )
        for version in versions
    ]
    freed = (together > 0) & (together == users)
    return SetUsage(usages, int(table.stored[together > 0].sum()), int(table.stored[freed].sum()))


def _files(store: Store, version: Version) -> Sequence[Entry]:
    """The file entries of a version, of hard links the first alone."""
    groups: set[int] = set()
    found = []
    for _, entry in store.walk(version):
        if entry.type is EntryType.FILE and (entry.link_group == 0 or entry.link_group not in groups):
            groups.add(entry.link_group)
            found.append(entry)
    return found


@dataclass(slots=True)
class Part:
    """Some objects: how many, their raw bytes, and what they take in packs."""

    objects: int = 0
    raw: int = 0
    stored: int = 0

    def add(self, raw: int, stored: int) -> None:
        """Count one object in."""
        self.objects += 1
        self.raw += raw
        self.stored += stored


@dataclass(slots=True)
class StoreStats:
    """What is in a store and what was saved, in bytes.

    `logical` is all files of all kept versions as plain files. It is the sum of: `shared`, referred to again after
    the first time; `holes` and `literals` (kept in recipes); and the raw bytes of `full` and `delta` objects, and of
    those that the base store of a private one holds (`in_base`), which take nothing here. Packs
    are the sum of: what `full`, `delta`, `trees` (directories and recipes), `only_bases` (needed for deltas alone)
    and `layers` (needed by no version) take; `dead`, which gc frees in time, condemned packs included; and
    `overhead`, headers and trailers.
    """

    versions: int = 0
    files: int = 0
    logical: int = 0
    shared: int = 0
    holes: int = 0
    literals: int = 0
    full: Part = field(default_factory=Part)
    delta: Part = field(default_factory=Part)
    in_base: Part = field(default_factory=Part)
    trees: Part = field(default_factory=Part)
    only_bases: Part = field(default_factory=Part)
    layers: Part = field(default_factory=Part)
    dtypes: dict[str, Part] = field(default_factory=dict)
    dead: int = 0
    overhead: int = 0
    packs: int = 0
    pack_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Logical bytes for each byte of packs that is not there for layers alone; 0 for none."""
        return self.logical / self.version_bytes if self.version_bytes else 0.0

    @property
    def version_bytes(self) -> int:
        """Bytes of packs, but for what layers alone need: their files are in no version yet."""
        return self.pack_bytes - self.layers.stored


def stats(store: Store) -> StoreStats:
    """Count a whole store. Reads the directories and recipes of all kept versions, and the footers of packs.

    Raises CorruptError when these cannot be read, or an object is missing.
    """
    survey = Survey(store)
    names = survey.mark()
    table = survey.footers.table()
    waste = survey.measure(table)
    found = StoreStats(packs=len(table.names), pack_bytes=int(table.sizes.sum()))
    found.dead = int(waste.dead.sum())
    found.overhead = found.pack_bytes - int(table.stored.sum())
    used = _count_files(store, list(names.all_versions()), found)
    for object_id in table.elsewhere(used):
        found.in_base.add(used.pop(object_id), 0)
    _count_objects(table, waste.needed.nonzero()[0].tolist(), used, set(survey.only_layers.ids()), found)
    return found


def _count_files(store: Store, versions: Sequence[Version], found: StoreStats) -> dict[ObjectId, int]:
    """Count logical bytes; returns for each data object the bytes of its first reference."""
    recipes: set[ObjectId] = set()
    used: dict[ObjectId, int] = {}
    for version in versions:
        found.versions += 1
        for entry in _files(store, version):
            found.files += 1
            found.logical += entry.size
            if entry.child in recipes:
                found.shared += entry.size
                continue
            if entry.child != NO_ID:
                recipes.add(entry.child)
            for extent in store.recipe(entry).extents:
                if extent.literal is not None:
                    found.literals += extent.length
                elif extent.object_id is None:
                    found.holes += extent.length
                elif extent.object_id in used:
                    found.shared += extent.length
                else:
                    used[extent.object_id] = extent.length
    return used


def _count_objects(
    table: PackTable, rows: Sequence[int], used: dict[ObjectId, int], layers: set[ObjectId], found: StoreStats
) -> None:
    missing = used.keys() - {table.entries["id"][row].tobytes() for row in rows}
    if missing:
        raise CorruptError(f"object {min(missing).hex()} is in no pack: run `moonclipfs verify`")
    for row in rows:
        location, stored = table.location(row), int(table.stored[row])
        if location.object_id in layers:
            found.layers.add(location.raw_length, stored)
        elif location.kind is not Kind.DATA:
            found.trees.add(location.raw_length, stored)
        elif location.object_id not in used:
            found.only_bases.add(location.raw_length, stored)
        else:
            raw = used[location.object_id]
            part = found.full if location.base == NO_ID else found.delta
            part.add(raw, stored)
            found.dtypes.setdefault(location.dtype.name, Part()).add(raw, stored)
