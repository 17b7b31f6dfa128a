"""Proof that stored objects are what their ids say: decoded, and hashed again."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from moonclipfs import limits
from moonclipfs.codec.encoded import decode
from moonclipfs.errors import CorruptError
from moonclipfs.store.objects import object_id
from moonclipfs.store.packs import Location, PackReader
from moonclipfs.store.reader import ObjectReader
from moonclipfs.types import NO_ID, Kind

_COST = 4
"""Bytes of memory that one raw byte takes: itself, its encoding, its base, and what the base is decoded from."""


def audit(location: Location, packs: PackReader, objects: ObjectReader) -> bytes:
    """Return the encoded bytes at `location`, which decode to bytes of the id that stands there.

    The base of a delta comes through `objects`. Raises CorruptError, which names the object and its place.
    """
    if location.raw_length > limits.OBJECT_BYTES and location.kind is Kind.DATA:
        raise CorruptError(f"{location}: {location.raw_length} bytes, longer than any object")
    data = packs.read(location, 0, location.encoded_length)
    base = None
    if location.base != NO_ID:
        try:
            base = objects.load(location.base, Kind.DATA)
        except CorruptError as error:
            raise type(error)(f"{location}: its base cannot be read: {error}") from error
    try:
        raw = decode(data, base)
    except CorruptError as error:
        raise CorruptError(f"{location}: {error}") from error
    if len(raw) != location.raw_length or object_id(location.kind, raw) != location.object_id:
        raise CorruptError(f"{location}: its bytes do not have its id")
    return data


def audit_all(
    locations: Iterable[Location], packs: PackReader, objects: ObjectReader
) -> Iterator[tuple[Location, bytes | CorruptError]]:
    """Audit many objects on all cores, and yield each, in order, with its encoded bytes or what is wrong with it.

    A pack that has gone meanwhile is a MissingObjectError. Holds about `limits.INGEST_BYTES` in memory.
    """

    def one(location: Location) -> bytes | CorruptError:
        try:
            return audit(location, packs, objects)
        except CorruptError as error:
            return error

    working: deque[tuple[Location, Future[bytes | CorruptError]]] = deque()
    in_work = 0
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "audit")
    try:
        for location in locations:
            cost = _COST * location.raw_length
            while working and in_work + cost > limits.INGEST_BYTES:
                done, future = working.popleft()
                in_work -= _COST * done.raw_length
                yield done, future.result()
            working.append((location, pool.submit(one, location)))
            in_work += cost
        while working:
            done, future = working.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
