"""Storing needed objects anew whose bases nothing else needs, so that these can go.

Objects that deltas connect are a family, together with those of the same label that are alike. When versions are
forgotten, members that are needed may hang on others that are not: those are stored again against needed ones, the
newest in full, since it stays the longest, and each older one against a newer. It is done where samples show that it
frees more than it takes. The new copies depend on needed objects alone, so `PackTable.choose` takes them, and what was
behind the old ones is dead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from moonclipfs import limits
from moonclipfs._codec import can_predict
from moonclipfs.codec.choose import Base, encode, predict
from moonclipfs.codec.sketch import similarity
from moonclipfs.errors import CorruptError
from moonclipfs.store.families import Family
from moonclipfs.store.objects import object_id
from moonclipfs.store.packs import Location, PackWriter
from moonclipfs.store.reachable import OBJECT_OVERHEAD, PackTable
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Kind, ObjectId

_NEAR = 2
"""Bases that are compared by a sample for one object, on each depth and of each dtype."""
_MOST_GENERATIONS = 252
"""See `bases.py`: a byte holds them."""


@dataclass(slots=True)
class Rebased:
    """What was done: objects stored anew, and the bytes that the copies take."""

    objects: int = 0
    bytes: int = 0
    tried: set[ObjectId] = field(default_factory=set)
    """The first hanging object of each family that needs no second look: of all but those for which room lacked."""


def rebase(
    store: Store,
    table: PackTable,
    found: Iterable[Family],
    room: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Rebased:
    """Store the hanging objects of families anew where that pays, in packs of `room` bytes in all; `progress` is told
    the bytes of each object.

    What is damaged is passed over: reading it tells. Raises NoSpaceError, BackendError: what was written until then is
    copies that the next run takes up. Raises CorruptError when a copy does not read back.
    """
    done = Rebased()
    written: list[Location] = []
    writer = PackWriter(store.backend, store.index.add_pack)
    try:
        for family in found:
            first = table.location(family.hanging[0]).object_id
            try:
                work = _Work(store, table, family)
                expected, new = work.plan()
                if expected <= family.taken * limits.REBASE_SHARE:
                    if done.bytes + new > room:
                        continue
                    for location in work.write(writer):
                        written.append(location)
                        done.objects += 1
                        done.bytes += location.encoded_length + OBJECT_OVERHEAD
                        progress(location.encoded_length + OBJECT_OVERHEAD)
            except CorruptError:
                pass  # what is damaged stays as it is; `verify` and whoever reads it tell
            done.tried.add(first)
        writer.flush()
    finally:
        writer.abort()
    for location in written:
        store.packs.read(location, 0, location.encoded_length)
    return done


@dataclass(slots=True)
class _Base:
    """An object that may serve as a base, and how deep its chain is going to be."""

    location: Location
    depth: int
    generation: int
    start: int = 0
    """The element of it that the first one of the new object faces."""


@dataclass(slots=True)
class _Plan:
    """How an object is to be stored: `kept` as it is, else against `base`, or in full."""

    location: Location
    base: _Base | None
    kept: bool = False


class _Work:
    """One family: which object is to be stored against which."""

    def __init__(self, store: Store, table: PackTable, family: Family) -> None:
        self._store = store
        self._hanging = [table.location(row) for row in family.hanging]
        self._bases = [
            _Base(location := table.location(row), depth, location.generation) for row, depth in family.standing
        ]
        self._plans: list[_Plan] = []

    def plan(self) -> tuple[int, int]:
        """Choose a base for each object by samples. Returns the bytes that all are expected to take, and those of
        them that have to be written."""
        expected = new = 0
        for location in self._hanging:
            plan, size = self._choose(location)
            self._plans.append(plan)
            # The nearest first.
            self._bases.insert(0, _as_base(location, plan.base))
            expected += size + OBJECT_OVERHEAD
            new += 0 if plan.kept else size + OBJECT_OVERHEAD
        return expected, new

    def _choose(self, location: Location) -> tuple[_Plan, int]:
        sample, first = self._sample(location)
        scale = location.raw_length / max(1, len(sample))
        best, least = _Plan(location, None), round(predict(sample, location.dtype) * scale)
        for option in self._options(location):
            width = option.location.dtype.width
            raw = self._read(option.location, (option.start + first) * width, len(sample) // location.dtype.width)
            size = round(predict(sample, location.dtype, [Base(raw, option.location.dtype)]) * scale)
            if size < least:
                best, least = _Plan(location, option), size
        behind = self._behind(location)
        if behind is not None and location.encoded_length <= least:
            return _Plan(location, behind, kept=True), location.encoded_length
        return best, least

    def write(self, writer: PackWriter) -> Iterator[Location]:
        """Encode and add each object as planned; what an encoder finds smaller in full is stored so."""
        for plan in self._plans:
            if plan.kept:
                continue
            location, base = plan.location, plan.base
            raw = self._load(location)
            if object_id(Kind.DATA, raw) != location.object_id:
                raise CorruptError(f"{location}: its bytes do not have its id")
            offered = [] if base is None else [Base(self._load(base.location), base.location.dtype, base.start)]
            encoding = encode(raw, location.dtype, offered)
            against = base if encoding.base is not None else None
            yield writer.add(
                encoding.data,
                object_id=location.object_id,
                kind=location.kind,
                raw_length=location.raw_length,
                dtype=location.dtype,
                depth=0 if against is None else against.depth + 1,
                base=NO_ID if against is None else against.location.object_id,
                base_start=0 if against is None else against.start,
                label=location.label,
                sketch=location.sketch,
                generation=0 if against is None else _after(against.generation),
            )

    def _options(self, location: Location) -> list[_Base]:
        """Of the objects of as many elements the most alike, on each depth that leaves room for one more link."""
        elements = location.raw_length // location.dtype.width
        groups: dict[tuple[int, int], list[_Base]] = defaultdict(list)
        for one in self._bases:
            dtype = one.location.dtype
            alike = one.location.raw_length // dtype.width == elements and can_predict(location.dtype, dtype)
            if alike and one.depth < limits.CHAIN_DEPTH:
                groups[dtype, one.depth].append(one)
        options: list[_Base] = []
        for bases in groups.values():
            sketches = np.frombuffer(b"".join(one.location.sketch for one in bases), np.uint8).reshape(len(bases), -1)
            order = np.argsort(-similarity(location.sketch, sketches).astype(np.int64), kind="stable")
            options += [bases[at] for at in order[:_NEAR].tolist()]
        return options

    def _behind(self, location: Location) -> _Base | None:
        """The base that an object has now, if it may stay: what is noted of depths stays true."""
        for one in self._bases:
            if one.location.object_id == location.base and one.depth < min(location.depth, limits.CHAIN_DEPTH):
                return _Base(one.location, one.depth, one.generation, location.base_start)
        return None

    def _sample(self, location: Location) -> tuple[bytes, int]:
        """A block from the middle of an object, and its first element."""
        elements = location.raw_length // location.dtype.width
        first = elements // 2 // limits.BLOCK_ELEMENTS * limits.BLOCK_ELEMENTS
        count = min(limits.BLOCK_ELEMENTS, elements - first)
        return self._read(location, first * location.dtype.width, count), first

    def _read(self, location: Location, offset: int, elements: int) -> bytes:
        out = bytearray(max(0, min(elements * location.dtype.width, location.raw_length - offset)))
        self._store.objects.read_into(location.object_id, offset, memoryview(out))
        return bytes(out)

    def _load(self, location: Location) -> bytes:
        return self._store.objects.load(location.object_id, Kind.DATA)


def _as_base(location: Location, behind: _Base | None) -> _Base:
    if behind is None:
        return _Base(location, 0, 0)
    return _Base(location, behind.depth + 1, _after(behind.generation))


def _after(generation: int) -> int:
    return generation % _MOST_GENERATIONS + 1
