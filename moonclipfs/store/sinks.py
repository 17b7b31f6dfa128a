"""Where an ingest puts new objects: into packs, or, for a prediction, nowhere."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.codec.choose import Base, encode, predict
from moonclipfs.codec.plain import encode_plain
from moonclipfs.codec.sketch import NO_SKETCH
from moonclipfs.errors import CorruptError, MissingObjectError
from moonclipfs.store.backend import Backend
from moonclipfs.store.bases import THOROUGH, Candidate, Effort, Known, pick
from moonclipfs.store.index import Index
from moonclipfs.store.packs import PLAIN, Location, PackReader, PackWriter
from moonclipfs.store.reader import ObjectReader
from moonclipfs.types import NO_ID, Buffer, DType, Kind, ObjectId, Source

log = logging.getLogger(__name__)

_CACHE_BYTES = 16 * limits.MIB
"""Decoded blocks kept for samples of bases: neighbours of one piece may share them."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What helps to encode an object, and to find it as a base later. `origin` is where its bytes can be read again."""

    dtype: DType = DType.BYTES
    label: int = 0
    sketch: bytes = NO_SKETCH
    bases: tuple[Candidate, ...] = ()
    effort: Effort = THOROUGH
    origin: tuple[Source, int] | None = None


class Sink(Known, Protocol):
    """Knows the objects that exist, and takes new ones. Thread-safe."""

    def put(self, kind: Kind, raw: Buffer, object_id: ObjectId, hints: Hints) -> Location:
        """Encode and keep a new object. Raises NoSpaceError, BackendError."""
        ...


class _Fresh:
    """Objects that the index does not know yet, found as the index finds them, newest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[ObjectId, Location] = {}
        self._by_label: dict[int, list[Location]] = defaultdict(list)
        self._by_elements: dict[int, list[Location]] = defaultdict(list)

    def add(self, location: Location) -> None:
        with self._lock:
            self._by_id[location.object_id] = location
            if location.label:
                self._by_label[location.label].append(location)
            if location.sketch != NO_SKETCH:
                self._by_elements[location.raw_length // location.dtype.width].append(location)

    def drop_pack(self, pack: str) -> None:
        """Forget the objects of a pack."""
        with self._lock:
            self._by_id = {key: place for key, place in self._by_id.items() if place.pack != pack}
            for table in (self._by_label, self._by_elements):
                for key in list(table):
                    table[key] = [place for place in table[key] if place.pack != pack]
                    if not table[key]:
                        del table[key]

    def find(self, object_id: ObjectId) -> Location | None:
        with self._lock:
            return self._by_id.get(object_id)

    def by_label(self, label: int, limit: int) -> list[Location]:
        with self._lock:
            return self._by_label.get(label, [])[: -limit - 1 : -1]

    def by_elements(self, elements: int, limit: int) -> list[Location]:
        with self._lock:
            return self._by_elements.get(elements, [])[: -limit - 1 : -1]


class _Seen:
    """What an ingest may refer to: its own fresh objects, and those of the index that are not condemned."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._fresh = _Fresh()

    def find(self, object_id: ObjectId) -> Location | None:
        """See `Known.find`."""
        return self._fresh.find(object_id) or self._index.find(object_id, usable=True)

    def by_label(self, label: int, limit: int) -> Sequence[Location]:
        """See `Known.by_label`."""
        found = self._fresh.by_label(label, limit)
        return found + self._index.by_label(label, limit - len(found)) if len(found) < limit else found

    def by_elements(self, elements: int, limit: int) -> Sequence[Location]:
        """See `Known.by_elements`."""
        found = self._fresh.by_elements(elements, limit)
        return found + self._index.by_elements(elements, limit - len(found)) if len(found) < limit else found

    def locate(self, object_id: ObjectId) -> Location:
        """See `reader.Places.locate`."""
        return self._fresh.find(object_id) or self._index.locate(object_id)

    def copies(self, object_id: ObjectId) -> list[Location]:
        """See `reader.Places.copies`."""
        fresh = self._fresh.find(object_id)
        return [*([] if fresh is None else [fresh]), *self._index.copies(object_id)]

    def relocate(self, location: Location) -> Location | None:
        """See `reader.Places.relocate`."""
        return self._index.relocate(location)


class PackSink(_Seen):
    """Encodes objects into packs. They are durable, and visible to others, after `flush`."""

    def __init__(self, backend: Backend, index: Index, packs: PackReader) -> None:
        super().__init__(index)
        self._packs = packs
        self._found_packs: set[str] = set()
        self._found_bases: set[ObjectId] = set()
        self._left_out: set[ObjectId] = set()
        self._writer = PackWriter(backend, self._published)
        self.objects = ObjectReader(self, self, _CACHE_BYTES)
        self._scratch = threading.local()

    def find(self, object_id: ObjectId) -> Location | None:
        """See `Known.find`. What is found counts as referred to: see `require_found`."""
        location = super().find(object_id)
        if location is not None:
            self._found_packs.add(location.pack)
            if location.base != NO_ID:
                self._found_bases.add(location.base)
        elif object_id in self._left_out:
            return Location(object_id, "", 0, 0, 0, Kind.DATA, DType.BYTES)
        return location

    def leave_out(self, object_ids: Iterable[ObjectId]) -> None:
        """Take these, and no others, for found where they are not: another process stores them."""
        self._left_out = set(object_ids)

    def put(self, kind: Kind, raw: Buffer, object_id: ObjectId, hints: Hints) -> Location:
        """See `Sink.put`."""
        if self._index.suffers(object_id):
            # In full, and newer, it is chosen over the damaged copy even by a gc that does not know of the damage.
            hints = replace(hints, bases=())
        if hints.effort.plain:
            return self._put_plain(kind, raw, object_id, hints)
        choice, base = _choose(hints, raw, self._sample, self._whole)
        encoding = encode(raw, hints.dtype, [] if base is None else [base])
        delta = choice if encoding.base is not None else None
        if delta is not None:
            self._found_bases.add(delta.location.object_id)
        location = self._writer.add(
            encoding.data,
            object_id=object_id,
            kind=kind,
            raw_length=len(raw),
            dtype=hints.dtype,
            depth=0 if delta is None else delta.location.depth + 1,
            base=NO_ID if delta is None else delta.location.object_id,
            base_start=0 if delta is None else delta.start,
            label=hints.label,
            sketch=hints.sketch,
            generation=0 if delta is None else delta.generation,
        )
        self._fresh.add(location)
        return location

    def _put_plain(self, kind: Kind, raw: Buffer, object_id: ObjectId, hints: Hints) -> Location:
        location = self._writer.add(
            encode_plain(raw, hints.dtype),
            object_id=object_id,
            kind=kind,
            raw_length=len(raw),
            dtype=hints.dtype,
            label=hints.label,
            sketch=hints.sketch,
            generation=PLAIN,
        )
        self._fresh.add(location)
        return location

    def copy(self, location: Location) -> Location:
        """Store the encoded bytes of an object once more, as they are: for one in a pack that is about to go."""
        return self.adopt(location, self._packs.read(location, 0, location.encoded_length), location.depth)

    def adopt(self, location: Location, encoded: Buffer, depth: int) -> Location:
        """Store an object that is encoded already, with all that `location` tells of it but its place; its base has to
        be here, and `depth` to be one more than that of the base."""
        fresh = self._writer.add(
            encoded,
            object_id=location.object_id,
            kind=location.kind,
            raw_length=location.raw_length,
            dtype=location.dtype,
            depth=depth,
            base=location.base,
            base_start=location.base_start,
            label=location.label,
            sketch=location.sketch,
            generation=location.generation,
        )
        self._fresh.add(fresh)
        return fresh

    def flush(self) -> list[str]:
        """Make all that was put durable, and return the packs it is in."""
        return self._writer.flush()

    def require_found(self) -> None:
        """After `flush`: raise MissingObjectError unless the packs of all that was found, bases included, are there.

        What the index says is no more than what its last look at the list of packs told.
        """
        packs, seen, bases = set(self._found_packs), set[ObjectId](), set(self._found_bases)
        if bases:
            # A base may also lie in a pack that was condemned before we came, and has gone since: not that one.
            self._index.sync()
        while bases:
            seen |= bases
            places = self._index.find_many(bases)
            if lost := bases - places.keys():
                raise MissingObjectError(
                    f"object {min(lost).hex()}, a base of what was found before, is in no pack: try again"
                )
            packs.update(place.pack for place in places.values())
            bases = {place.base for place in places.values() if place.base != NO_ID} - seen
        self._packs.require(packs)

    def abort(self) -> None:
        """Throw away what is not published. Harmless after `flush`."""
        self._writer.abort()

    def read(self, location: Location, offset: int, length: int) -> bytes:
        """See `reader.Packs.read`."""
        data = self._writer.read(location, offset, length)
        return self._packs.read(location, offset, length) if data is None else data

    def _sample(self, option: Candidate, offset: int, length: int) -> Buffer:
        out = bytearray(_clipped(option, offset, length))
        if not out:
            return out  # all of it is past the end of the base
        self.objects.read_into(option.location.object_id, offset, memoryview(out))
        return out

    def _whole(self, choice: Candidate) -> Base:
        """All bytes of a base, in memory that this thread uses again for the next one."""
        length = choice.location.raw_length
        if len(getattr(self._scratch, "memory", b"")) < length:
            self._scratch.memory = bytearray(length)
        raw = memoryview(self._scratch.memory)[:length]
        self.objects.stream_into(choice.location.object_id, 0, raw)
        return Base(raw, choice.location.dtype, choice.start)

    def _published(self, pack: str, entries: NDArray[np.void]) -> None:
        self._index.add_pack(pack, entries)
        self._fresh.drop_pack(pack)


class EstimateSink(_Seen):
    """Keeps nothing: tells from samples how long each object would be, and reads bases from where they came."""

    def __init__(self, index: Index, reader: ObjectReader) -> None:
        super().__init__(index)
        self._reader = reader
        self._origins: dict[ObjectId, tuple[Source, int]] = {}

    def put(self, kind: Kind, raw: Buffer, object_id: ObjectId, hints: Hints) -> Location:
        """See `Sink.put`; the location's pack is no pack."""
        choice, base = _choose(hints, raw, self._sample, self._whole)
        length = predict(raw, hints.dtype)
        if base is not None:
            least = predict(raw, hints.dtype, [base])
            choice, length = (choice, least) if least < length else (None, length)
        location = Location(
            object_id, "", 0, length, len(raw), kind, hints.dtype,
            0 if choice is None else choice.location.depth + 1,
            NO_ID if choice is None else choice.location.object_id,
            0 if choice is None else choice.start,
            hints.label, hints.sketch, 0 if choice is None else choice.generation,
        )  # fmt: skip
        if hints.origin is not None:
            self._origins[object_id] = hints.origin
        self._fresh.add(location)
        return location

    def _whole(self, choice: Candidate) -> Base:
        return Base(self._sample(choice, 0, choice.location.raw_length), choice.location.dtype, choice.start)

    def _sample(self, option: Candidate, offset: int, length: int) -> Buffer:
        length = _clipped(option, offset, length)
        if not length:
            return b""
        origin = self._origins.get(option.location.object_id)
        if origin is not None:
            source, start = origin
            return source.read(start + offset, length)
        out = bytearray(length)
        self._reader.read_into(option.location.object_id, offset, memoryview(out))
        return out


class _UnreadableError(Exception):
    """A base cannot be read."""

    def __init__(self, option: Candidate) -> None:
        super().__init__()
        self.option = option


def _choose(
    hints: Hints,
    raw: Buffer,
    sample: Callable[[Candidate, int, int], Buffer],
    whole: Callable[[Candidate], Base],
) -> tuple[Candidate | None, Base | None]:
    """The candidate that predicts `raw` best, and its bytes; one that is damaged is passed over, with a warning."""

    def read(option: Candidate, offset: int, length: int) -> Buffer:
        with _reading(option):
            return sample(option, offset, length)

    options = list(hints.bases)
    while True:
        try:
            choice = pick(options, raw, hints.dtype, read, hints.effort)
            if choice is None:
                return None, None
            with _reading(choice):
                return choice, whole(choice)
        except _UnreadableError as bad:
            options.remove(bad.option)


@contextmanager
def _reading(option: Candidate) -> Iterator[None]:
    try:
        yield
    except CorruptError as error:
        log.warning("a base is damaged, so nothing is stored against it: %s", error)
        raise _UnreadableError(option) from error


def _clipped(option: Candidate, offset: int, length: int) -> int:
    return max(0, min(length, option.location.raw_length - offset))
