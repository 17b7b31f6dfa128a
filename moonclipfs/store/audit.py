"""Proof that stored objects are what their ids say: decoded, and hashed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from moonclipfs import limits
from moonclipfs.codec.encoded import decode
from moonclipfs.errors import BackendError, CorruptError, MoonclipError
from moonclipfs.store.cores import usable_cores
from moonclipfs.store.objects import object_id
from moonclipfs.store.packs import Location, PackReader
from moonclipfs.store.pools import submit
from moonclipfs.store.reader import ObjectReader
from moonclipfs.types import NO_ID, Kind

_COST = 2
"""Bytes of memory that one byte of an object or its encoding takes: as much again for its base."""


@dataclass(frozen=True, slots=True)
class Audited:
    """One copy of an object: `encoded` bytes that decode to its id, or the `error`, which names object and place.

    `through_base`: its own bytes are those that were written, but its base cannot be read.
    """

    location: Location
    encoded: bytes = b""
    error: MoonclipError | None = None
    through_base: bool = False


def audit(location: Location, packs: PackReader, objects: ObjectReader) -> Audited:
    """Decode and hash one copy of an object; the base of a delta comes through `objects`."""
    try:
        if location.kind is Kind.DATA and location.raw_length > limits.OBJECT_BYTES:
            raise CorruptError(f"{location}: {location.raw_length} bytes, longer than any object")
        encoded = packs.read(location, 0, location.encoded_length)
        try:
            base = objects.load(location.base, Kind.DATA) if location.base != NO_ID else None
        except (CorruptError, BackendError) as error:
            through = type(error)(f"{location}: its base cannot be read: {error}")
            return Audited(location, error=through, through_base=True)
        _check_id(location, encoded, base)
    except (CorruptError, BackendError) as error:  # damaged, or on a disk that cannot read it
        return Audited(location, error=error)
    return Audited(location, encoded)


def _check_id(location: Location, encoded: bytes, base: bytes | None) -> None:
    try:
        raw = decode(encoded, base)
    except CorruptError as error:
        raise CorruptError(f"{location}: {error}") from error
    if len(raw) != location.raw_length or object_id(location.kind, raw) != location.object_id:
        raise CorruptError(f"{location}: its bytes do not have its id")


def audit_all(locations: Iterable[Location], packs: PackReader, objects: ObjectReader) -> Iterator[Audited]:
    """Audit many objects on all cores, in order. Holds about `limits.INGEST_BYTES` in memory."""
    working: deque[tuple[int, Future[Audited]]] = deque()
    in_work = 0
    pool = ThreadPoolExecutor(usable_cores(), "audit")
    try:
        for location in locations:
            cost = _COST * (location.raw_length + location.encoded_length)
            while working and in_work + cost > limits.INGEST_BYTES:
                freed, future = working.popleft()
                in_work -= freed
                yield future.result()
            working.append((cost, submit(pool, audit, location, packs, objects)))
            in_work += cost
        while working:
            yield working.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)
