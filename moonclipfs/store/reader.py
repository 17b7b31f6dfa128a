"""Reading objects: chains of deltas decoded block by block, each block once, into a bounded cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from moonclipfs import limits
from moonclipfs.codec.encoded import PREFIX_BYTES, Encoded, decode_blocks, decode_each, head_length, parse
from moonclipfs.errors import CorruptError, DeltaCycleError, MissingObjectError
from moonclipfs.store.cache import BoundedCache
from moonclipfs.store.objects import object_id as id_of
from moonclipfs.store.packs import Location
from moonclipfs.types import NO_ID, Buffer, Kind, ObjectId

T = TypeVar("T")

_HEAD_GUESS = 4 * limits.KIB
"""Bytes read at once to find the head of an object."""
_LINK_BYTES = 1 * limits.KIB
"""Memory that a parsed head takes beside its bytes, about."""
_DOUBTED = 4096
"""Damaged objects remembered at most."""
_SEARCH_HEADS = 256
"""Heads read at most to find a chain that ends, when the first one does not."""
_RUN_BLOCKS = 16
"""Blocks decoded by one call at most: it bounds the buffers of a chain to this many blocks a link."""
_MAX_BYTES = {
    Kind.DATA: limits.OBJECT_BYTES,
    Kind.RECIPE: limits.RECIPE_BYTES,
    Kind.DIRECTORY: limits.DIRECTORY_BYTES,
}


class Places(Protocol):
    """Tells where objects are stored."""

    def locate(self, object_id: ObjectId) -> Location:
        """Return where an object is. Raises MissingObjectError."""
        ...

    def copies(self, object_id: ObjectId) -> list[Location]:
        """Return all places of an object, the best first."""
        ...

    def relocate(self, location: Location) -> Location | None:
        """Return a better answer than `location`, whose bytes were not there or not right, or None."""
        ...


class Packs(Protocol):
    """Gives encoded bytes."""

    def read(self, location: Location, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset` of the encoded object; raises CorruptError."""
        ...


@dataclass(slots=True)
class ReadCounters:
    """What reading has cost so far."""

    blocks_decoded: int = 0
    cache_hits: int = 0
    encoded_bytes_read: int = 0
    bytes_decoded: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """One object of a chain: where it is, and its parsed head."""

    location: Location
    encoded: Encoded
    head: bytes


class _BadLinkError(Exception):
    """What is stored at a location is missing or damaged, as `error` says."""

    def __init__(self, location: Location, error: CorruptError) -> None:
        super().__init__(str(error))
        self.location = location
        self.error = error


Chain = tuple[Link, ...]
"""An object, its base, the base of that, and so on to a full encoding."""
_Block = tuple[ObjectId, int]


class ObjectReader:
    """Decodes objects. Thread-safe; a block that several threads want is decoded by one of them."""

    def __init__(self, places: Places, packs: Packs, cache_bytes: int = limits.BLOCK_CACHE_BYTES) -> None:
        self._places = places
        self._packs = packs
        self._blocks: BoundedCache[_Block, Buffer] = BoundedCache(cache_bytes)
        self._links: BoundedCache[ObjectId, Link] = BoundedCache(limits.HEAD_CACHE_BYTES)
        self._doubted: BoundedCache[tuple[str, int], bool] = BoundedCache(_DOUBTED)
        self._lock = threading.Lock()
        self._flights: dict[_Block, Future[Buffer]] = {}
        self.counters = ReadCounters()

    def load(self, object_id: ObjectId, kind: Kind) -> bytes:
        """Return a whole object, past the cache of blocks. Raises CorruptError, also when it is of another kind.

        Recipes and directories are also checked against their id.
        """
        return self._mending(lambda: self._load(object_id, kind))

    def read_into(self, object_id: ObjectId, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes at `offset` of a data object. Raises CorruptError, never gives other bytes."""
        self._mending(lambda: self._read_into(object_id, offset, out))

    def stream_into(self, object_id: ObjectId, offset: int, out: memoryview) -> None:
        """As `read_into`, but keep nothing: for bytes that are read once."""
        self._mending(lambda: self._stream_into(object_id, offset, out))

    def prefetch(self, object_id: ObjectId, offset: int, length: int) -> None:
        """Decode the blocks of a range into the cache."""

        def fetch() -> None:
            chain = self._chain(object_id)
            for first, count in _runs(_blocks_of(chain[0], offset, length)):
                self._fetch(chain, first, count)

        self._mending(fetch)

    def cached(self, object_id: ObjectId, offset: int, length: int) -> list[memoryview] | None:
        """Return the bytes of a range as parts of cached blocks, or None unless all are cached. No I/O, no decoding."""
        link = self._links.get(object_id)
        if link is None or not 0 <= offset <= offset + length <= link.encoded.raw_length:
            return None
        parts = []
        for block in _blocks_of(link, offset, length):
            data = self._blocks.get((object_id, block))
            if data is None:
                return None
            parts.append(_part(link, block, data, offset, length))
        self._count(hits=len(parts))
        return parts

    def chain(self, object_id: ObjectId) -> Chain:
        """Return the links from an object to the full encoding behind it.

        Raises DeltaCycleError when they lead back or are too many, MissingObjectError when one is in no pack.
        """
        return self._mending(lambda: self._chain(object_id))

    def _chain(self, object_id: ObjectId) -> Chain:
        try:
            return self._first_chain(object_id)
        except (MissingObjectError, DeltaCycleError):
            # An object may be stored twice, against bases of which one is gone by now, or was stored against it later.
            chain = self._other_chain(object_id, (), [_SEARCH_HEADS])
            if chain is None:
                raise
            for link in chain:
                self._keep_link(link)
            return chain

    def _other_chain(self, object_id: ObjectId, above: tuple[ObjectId, ...], heads_left: list[int]) -> Chain | None:
        """A chain that ends, over any copies of the objects in it; `above` are those that it comes from."""
        for location in self._places.copies(object_id):
            if heads_left[0] <= 0 or location.base in (object_id, *above) or len(above) > limits.CHAIN_READ_DEPTH:
                continue
            heads_left[0] -= 1
            try:
                link = self._read_link(location)
            except _BadLinkError:
                continue
            if location.base == NO_ID:
                return (link,)
            rest = self._other_chain(location.base, (*above, object_id), heads_left)
            if rest is not None:
                return (link, *rest)
        return None

    def _first_chain(self, object_id: ObjectId) -> Chain:
        links = [self._link(object_id)]
        seen = {object_id}
        while (base := links[-1].location.base) != NO_ID:
            if base in seen:
                raise DeltaCycleError(f"{links[0].location}: its bases lead back to object {base.hex()}")
            if len(links) > limits.CHAIN_READ_DEPTH:
                raise DeltaCycleError(f"{links[0].location}: more than {limits.CHAIN_READ_DEPTH} bases behind it")
            seen.add(base)
            try:
                links.append(self._link(base))
            except MissingObjectError as error:
                raise MissingObjectError(f"{links[-1].location}: its base, {error}") from error
        return tuple(links)

    def _mending(self, action: Callable[[], T]) -> T:
        """Do `action`; when an object was moved by gc, or is damaged in one place and whole in another, do it again."""
        left = limits.CHAIN_READ_DEPTH + 1
        while True:
            try:
                return action()
            except _BadLinkError as bad:
                if not left or not self._mend(bad):
                    raise bad.error from bad.error.__cause__
                left -= 1

    def _mend(self, bad: _BadLinkError) -> bool:
        """Look for another place of an object; False when there is nothing else to try."""
        location = bad.location
        self._links.drop(location.object_id)
        if not isinstance(bad.error, MissingObjectError):
            # Looking again reads the pack's list of objects anew: once for each damaged object is enough.
            if self._doubted.get((location.pack, location.offset)):
                return False
            self._doubted.put((location.pack, location.offset), True)
        try:
            better = self._places.relocate(location)
        except MissingObjectError:
            return True  # what it is a base of may have other copies, against another base
        if better is None:
            return False
        try:
            self._keep_link(self._read_link(better))
        except _BadLinkError:
            return False
        return True

    def _link(self, object_id: ObjectId) -> Link:
        link = self._links.get(object_id)
        if link is not None:
            return link
        link = self._read_link(self._places.locate(object_id))
        self._keep_link(link)
        return link

    def _keep_link(self, link: Link) -> None:
        self._links.put(link.location.object_id, link, len(link.head) + _LINK_BYTES + 8 * link.encoded.blocks)

    def _read_link(self, location: Location) -> Link:
        prefix = self._read_pack(location, 0, min(location.encoded_length, _HEAD_GUESS))
        try:
            length = head_length(prefix[:PREFIX_BYTES])
            if length > location.encoded_length:
                raise CorruptError("its head is longer than the object")
            if length > len(prefix):
                prefix += self._read_pack(location, len(prefix), length - len(prefix))
            head = prefix[:length]
            encoded = parse(head, location.encoded_length)
            if encoded.raw_length != location.raw_length or encoded.is_delta != (location.base != NO_ID):
                raise CorruptError("its head contradicts the pack's list of objects")
        except CorruptError as error:
            raise _BadLinkError(location, CorruptError(f"{location}: {error}")) from error
        return Link(location, encoded, head)

    def _read_pack(self, location: Location, offset: int, length: int) -> bytes:
        try:
            data = self._packs.read(location, offset, length)
        except CorruptError as error:
            raise _BadLinkError(location, error) from error
        self._count(encoded=length)
        return data

    def _load(self, object_id: ObjectId, kind: Kind) -> bytes:
        chain = self._chain(object_id)
        location, length = chain[0].location, chain[0].encoded.raw_length
        if location.kind is not kind:
            raise CorruptError(f"{location}: a {location.kind.name} where a {kind.name} is wanted")
        if length > _MAX_BYTES[kind]:
            raise CorruptError(f"{location}: {length} bytes, longer than any {kind.name}")
        data = bytes(self._passing(chain, 0, 0, length))
        if kind is not Kind.DATA and id_of(kind, data) != object_id:
            raise CorruptError(f"{location}: its bytes do not have its id")
        return data

    def _stream_into(self, object_id: ObjectId, offset: int, out: memoryview) -> None:
        chain = self._chain(object_id)
        _check_range(chain[0], offset, len(out))
        encoded = chain[0].encoded
        for first, count in _runs(_blocks_of(chain[0], offset, len(out))):
            start = first * encoded.block_bytes
            length = encoded.raw_bytes(first, count)
            if offset <= start and start + length <= offset + len(out):
                self._fill(chain, 0, range(first, first + count), out[start - offset : start - offset + length])
            else:
                low, high = max(offset, start), min(offset + len(out), start + length)
                out[low - offset : high - offset] = self._passing(chain, 0, low, high - low)

    def _read_into(self, object_id: ObjectId, offset: int, out: memoryview) -> None:
        chain = self._chain(object_id)
        link = chain[0]
        _check_range(link, offset, len(out))
        for first, count in _runs(_blocks_of(link, offset, len(out))):
            for block, data in enumerate(self._fetch(chain, first, count), first):
                part = _part(link, block, data, offset, len(out))
                start = max(0, block * link.encoded.block_bytes - offset)
                out[start : start + len(part)] = part

    def _fetch(self, chain: Chain, first: int, count: int) -> list[Buffer]:
        """Return blocks from the cache, from the threads that decode them, or decode them and keep them."""
        object_id = chain[0].location.object_id
        keys = [(object_id, block) for block in range(first, first + count)]
        found: dict[_Block, Buffer] = {}
        others: dict[_Block, Future[Buffer]] = {}
        mine: dict[_Block, Future[Buffer]] = {}
        with self._lock:
            for key in keys:
                if (data := self._blocks.get(key)) is not None:
                    found[key] = data
                elif (flight := self._flights.get(key)) is not None:
                    others[key] = flight
                else:
                    mine[key] = self._flights[key] = Future()
            self.counters.cache_hits += len(found)
        try:
            for run_first, run_count in _runs([block for _, block in mine]):
                for block, data in enumerate(self._decode_apart(chain, run_first, run_count), run_first):
                    self._blocks.put((object_id, block), data, len(data))
                    found[object_id, block] = data
                    mine[object_id, block].set_result(data)
        except BaseException as error:
            for flight in mine.values():
                if not flight.done():
                    flight.set_exception(error)
            raise
        finally:
            with self._lock:
                for key in mine:
                    del self._flights[key]
        # All own blocks are done by here, so threads that wait for each other's blocks cannot wait in a circle.
        for key, flight in others.items():
            found[key] = flight.result()
        return [found[key] for key in keys]

    def _decode_apart(self, chain: Chain, first: int, count: int) -> list[Buffer]:
        """Decode blocks into buffers of their own, so that each can leave the cache alone."""
        link = chain[0]
        payload, base = self._encoded(chain, 0, first, count)
        with _faults_of(link):
            found: list[Buffer] = [*decode_each(link.encoded, link.head, first, count, payload, base)]
        self._count(blocks=count, decoded=sum(map(len, found)))
        return found

    def _decode(self, chain: Chain, level: int, first: int, count: int, out: memoryview) -> None:
        """Decode blocks of link `level` of a chain into `out`, and for that only what they need of the links behind."""
        link = chain[level]
        payload, base = self._encoded(chain, level, first, count)
        with _faults_of(link):
            decode_blocks(link.encoded, link.head, first, count, payload, out, base)
        self._count(blocks=count, decoded=len(out))

    def _encoded(self, chain: Chain, level: int, first: int, count: int) -> tuple[bytes, Buffer | None]:
        """What blocks of link `level` are decoded from: their bytes in the pack, and for a delta those of its base."""
        link = chain[level]
        base = self._base_bytes(chain, level, first, count) if link.encoded.is_delta else None
        return self._read_pack(link.location, *link.encoded.payload_range(first, count)), base

    def _base_bytes(self, chain: Chain, level: int, first: int, count: int) -> Buffer:
        """The bytes that blocks of a delta are decoded against, clipped to the base."""
        start, length = chain[level].encoded.base_range(first, count)
        end = min(start + length, chain[level + 1].encoded.raw_length)
        return self._passing(chain, level + 1, start, end - start) if start < end else b""

    def _passing(self, chain: Chain, level: int, start: int, length: int) -> memoryview:
        """A range of link `level` of a chain."""
        encoded = chain[level].encoded
        blocks = _blocks_of(chain[level], start, length)
        out = memoryview(bytearray(encoded.raw_bytes(blocks.start, len(blocks))))
        self._fill(chain, level, blocks, out)
        at = start - blocks.start * encoded.block_bytes
        return out[at : at + length]

    def _fill(self, chain: Chain, level: int, blocks: range, out: memoryview) -> None:
        """Fill `out` with blocks of link `level`: from the cache where they are there, but without keeping anything."""
        link = chain[level]
        size = link.encoded.block_bytes
        missing = []
        for block in blocks:
            data = self._blocks.get((link.location.object_id, block))
            if data is None:
                missing.append(block)
            else:
                at = (block - blocks.start) * size
                out[at : at + len(data)] = data
        self._count(hits=len(blocks) - len(missing))
        for first, count in _runs(missing):
            at = (first - blocks.start) * size
            self._decode(chain, level, first, count, out[at : at + link.encoded.raw_bytes(first, count)])

    def _count(self, *, blocks: int = 0, hits: int = 0, encoded: int = 0, decoded: int = 0) -> None:
        with self._lock:
            self.counters.blocks_decoded += blocks
            self.counters.cache_hits += hits
            self.counters.encoded_bytes_read += encoded
            self.counters.bytes_decoded += decoded


@contextmanager
def _faults_of(link: Link) -> Iterator[None]:
    """Say of what cannot be decoded where it is."""
    try:
        yield
    except CorruptError as error:
        raise _BadLinkError(link.location, CorruptError(f"{link.location}: {error}")) from error


def _check_range(link: Link, offset: int, length: int) -> None:
    if not 0 <= offset <= offset + length <= link.encoded.raw_length:
        wanted = f"bytes {offset} to {offset + length} of {link.encoded.raw_length}"
        raise CorruptError(f"{link.location}: {wanted} are wanted")


def _blocks_of(link: Link, offset: int, length: int) -> range:
    """Numbers of the blocks that hold a range."""
    if not length:
        return range(0)
    size = link.encoded.block_bytes
    return range(offset // size, (offset + length - 1) // size + 1)


def _part(link: Link, block: int, data: Buffer, offset: int, length: int) -> memoryview:
    """The bytes of block `block` that belong to a range of the object."""
    start = block * link.encoded.block_bytes
    return memoryview(data)[max(0, offset - start) : offset + length - start]


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Group ascending block numbers into (first, count) of neighbours, `_RUN_BLOCKS` at most."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block and runs[-1][1] < _RUN_BLOCKS:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
