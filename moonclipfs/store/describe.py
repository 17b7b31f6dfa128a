"""How the files and tensors of a snapshot are stored: whole, as deltas and against what, or shared and with whom."""

from __future__ import annotations

import enum
import os
from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from moonclipfs.formats.layout import Tensor
from moonclipfs.store.packs import Location
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Entry, EntryType, ObjectId, Version


class How(enum.StrEnum):
    """How some bytes of a file are stored."""

    FULL = "full"
    DELTA = "delta"
    SHARED = "shared"
    LITERAL = "literal"
    HOLE = "hole"


@dataclass(frozen=True, slots=True)
class Origin:
    """The first place, in the order of binding, where an object is used; `offset` is in the file."""

    version: Version
    path: bytes
    entry: Entry
    offset: int


@dataclass(slots=True)
class Storage:
    """How a range of a file is stored. `raw` counts its bytes by kind; `stored` are the encoded bytes behind them,
    `new` those of them that no earlier place uses. `bases` and `sharers` name places as NAME@N[/PATH][:TENSOR]."""

    raw: dict[How, int] = field(default_factory=dict)
    stored: float = 0.0
    new: float = 0.0
    depth: int = 0
    bases: list[str] = field(default_factory=list)
    sharers: list[str] = field(default_factory=list)

    def add(self, how: How, length: int) -> None:
        """Count `length` raw bytes."""
        self.raw[how] = self.raw.get(how, 0) + length


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor and how it is stored."""

    tensor: Tensor
    storage: Storage


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file: `format` and `reason` are those of its layout; `storage` is of all its bytes."""

    path: bytes
    size: int
    format: str
    reason: str
    storage: Storage
    tensors: tuple[TensorReport, ...]


def describe(store: Store, version: Version, path: bytes = b"") -> Iterator[FileReport]:
    """Report on the file at `path`, or on all files below it, of one version.

    Reads the recipes of all kept versions up to this one, and file headers; no tensors. Raises NotFoundError,
    CorruptError.
    """
    files = list(_files(store, version, path))
    recipes = [store.recipe(entry) for _, entry in files]
    used = {object_id for recipe in recipes for object_id in recipe.object_ids()}
    locations = store.index.find_many(used)
    bases = {location.base for location in locations.values() if location.base != NO_ID}
    describer = _Describer(store, version, locations, find_origins(store, version, used | bases))
    for (found, entry), recipe in zip(files, recipes, strict=True):
        layout = store.layout(entry)
        tensors = tuple(
            TensorReport(tensor, describer.storage(found, tensor.name, recipe, tensor.offset, tensor.length))
            for tensor in layout.tensors
        )
        whole = describer.storage(found, "", recipe, 0, entry.size)
        yield FileReport(found, entry.size, layout.format, layout.reason, whole, tensors)


def _files(store: Store, version: Version, path: bytes) -> Iterator[tuple[bytes, Entry]]:
    top = store.lookup(version, path)
    if top.type is EntryType.FILE:
        yield path, top
        return
    below = path + b"/" if path else b""
    for found, entry in store.walk(version):
        if entry.type is EntryType.FILE and found.startswith(below):
            yield found, entry


def find_origins(store: Store, until: Version, wanted: Collection[ObjectId]) -> dict[ObjectId, Origin]:
    """Where each of the `wanted` objects is used first, among the kept versions bound up to `until`.

    Every distinct recipe is read once.
    """
    origins: dict[ObjectId, Origin] = {}
    seen: set[ObjectId] = set()
    kept = (version for version in store.log.names.all_versions() if version.sequence <= until.sequence)
    for version in sorted(kept, key=lambda version: version.sequence):
        if len(origins) == len(wanted):
            break
        for path, entry in _files(store, version, b""):
            if entry.child in seen:
                continue
            seen.add(entry.child)
            offset = 0
            for extent in store.recipe(entry).extents:
                object_id = extent.object_id
                if object_id is not None and object_id in wanted and object_id not in origins:
                    origins[object_id] = Origin(version, path, entry, offset)
                offset += extent.length
    return origins


class _Describer:
    """Follows the extents of one version's files."""

    def __init__(
        self, store: Store, version: Version, locations: dict[ObjectId, Location], origins: dict[ObjectId, Origin]
    ) -> None:
        self._store = store
        self._version = version
        self._locations = locations
        self._origins = origins
        self._tensors: dict[ObjectId, tuple[list[int], list[Tensor]]] = {}

    def storage(self, path: bytes, tensor: str, recipe: Recipe, offset: int, length: int) -> Storage:
        """How `length` bytes at `offset` of the file at `path` are stored; `tensor` names the range, if one does."""
        found = Storage()
        at = offset
        for extent, inside, count in recipe.locate(offset, length):
            start, at = at - inside, at + count
            if extent.object_id is None:
                found.add(How.HOLE if extent.is_hole else How.LITERAL, count)
                continue
            location = self._locations.get(extent.object_id)
            if location is None:
                continue  # in no pack: reading fails, and verify names it; there is nothing to tell of it here
            stored = location.encoded_length * count / max(1, location.raw_length)
            found.stored += stored
            origin = self._origins.get(extent.object_id)
            if origin is not None and (origin.version, origin.path, origin.offset) != (self._version, path, start):
                found.add(How.SHARED, count)
                _note(found.sharers, self._name(origin, inside, path, tensor))
                continue
            found.new += stored
            found.depth = max(found.depth, location.depth)
            found.add(How.DELTA if location.depth else How.FULL, count)
            if location.base != NO_ID:
                base = self._origins.get(location.base)
                _note(found.bases, self._name(base, inside, path, tensor) if base else "a base kept only for deltas")
        return found

    def _name(self, origin: Origin, inside: int, path: bytes, tensor: str) -> str:
        """NAME@N of an origin; its path and tensor too where they differ from ours."""
        here = origin.version == self._version
        name = "this file" if here and origin.path == path else f"{origin.version.path}@{origin.version.number}"
        if origin.path != path:
            name += "/" + os.fsdecode(origin.path)
        theirs = self._tensor_at(origin.entry, origin.offset + inside) if tensor else tensor
        return name if theirs == tensor else f"{name}:{theirs}"

    def _tensor_at(self, entry: Entry, offset: int) -> str:
        """The tensor that has the byte at `offset` of a file; empty when none has."""
        if entry.child not in self._tensors:
            tensors = sorted(self._store.layout(entry).tensors, key=lambda tensor: tensor.offset)
            self._tensors[entry.child] = ([tensor.offset for tensor in tensors], tensors)
        offsets, tensors = self._tensors[entry.child]
        number = bisect_right(offsets, offset) - 1
        if number < 0 or offset >= tensors[number].offset + tensors[number].length:
            return ""
        return tensors[number].name


def _note(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)
