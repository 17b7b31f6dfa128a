"""Objects that were stored plain, because somebody waited, are encoded when nobody does.

A save that is to be durable soon stores its objects as they are, marked so (`packs.PLAIN`): whole, checked and
readable like any others. Later each is encoded, in full or against what is encoded already, into a pack of its own,
and whoever looks for it prefers that copy. The plain one is dead then, as far as gc is concerned, and goes as anything
dead does. So a crash anywhere leaves a store that is only larger, and whoever comes next goes on.

Nothing is ever encoded against a plain object: that gets a base of its own later, which might lead back. A new copy is
decoded and compared before it is written, its plain bytes have to have their id, and it is read back from its pack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

from moonclipfs import limits
from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.store.bases import QUICK, Candidate, Effort, Known, candidates_for
from moonclipfs.store.objects import object_id
from moonclipfs.store.packs import Location
from moonclipfs.store.pools import submit
from moonclipfs.store.reachable import OBJECT_OVERHEAD, Needed
from moonclipfs.store.sinks import Hints, PackSink
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Kind, ObjectId, Version

_IN_WORK = 4
"""Objects that are worked on at one time."""


@dataclass(slots=True)
class Tightened:
    """What was done: objects that were plain and are encoded now, the bytes of packs that they took and take; `left`
    are those that are plain still, `stopped` says that this is since `go_on` said so.
    """

    objects: int = 0
    bytes_before: int = 0
    bytes: int = 0
    left: int = 0
    stopped: bool = False


def plain_objects(store: Store, versions: Iterable[Version]) -> list[Location]:
    """The objects of versions that are stored plain and not otherwise, in the order of their packs.

    Raises CorruptError for a version whose directories or recipes cannot be read.
    """
    needed = Needed()
    for version in versions:
        needed.add_version(store, version)
    return plain_among(store, needed.data)


def plain_among(store: Store, ids: Iterable[ObjectId]) -> list[Location]:
    """Those of `ids` that are stored plain and not otherwise, in the order of their packs."""
    found = (one for one in store.index.find_many(ids, usable=True).values() if one.is_plain)
    return sorted(found, key=lambda one: (one.pack, one.offset))


def tighten(
    store: Store,
    objects: Callable[[], list[Location]],
    pool: Executor,
    effort: Effort = QUICK,
    go_on: Callable[[], bool] = lambda: True,
) -> Tightened:
    """Encode plain objects anew; gc frees what that leaves. May be called beside any reader, saver and gc.

    `objects` is asked for them, by `plain_objects` or `plain_among`, when nothing that is there can be deleted any
    more. `go_on` is asked before each: it may wait, as for a save that is more urgent, and say False to stop. What is
    damaged is passed over: `verify` and whoever reads it tell. Raises CorruptError when a copy does not read back,
    UsageError for a store that is open for reading only, NoSpaceError, LeaseLostError, BackendError; nothing is lost.
    """
    if store.lease is None or not store.write:
        raise UsageError(f"{store.path} is open for reading only")
    store.names()
    with store.lease.hold(store.log.names.sequence):
        store.names()
        store.index.sync()
        return _Work(store, pool, effort).run(objects(), go_on)


class _Work:
    """One run."""

    def __init__(self, store: Store, pool: Executor, effort: Effort) -> None:
        self._store = store
        self._pool = pool
        self._effort = effort
        self._sink = PackSink(store.backend, store.index, store.packs)
        self._done = Tightened()
        self._written: list[Location] = []
        self._working: deque[tuple[Location, Future[Location]]] = deque()

    def run(self, found: list[Location], go_on: Callable[[], bool]) -> Tightened:
        try:
            for location in found:
                if not go_on():
                    self._done.stopped = True
                    break
                self._working.append((location, submit(self._pool, self._encode, location)))
                if len(self._working) >= _IN_WORK:
                    self._take_in()
            while self._working:
                self._take_in()
            self._sink.flush()
        finally:
            wait([future for _, future in self._working if not future.cancel()])
            self._sink.abort()
        for copy in self._written:
            self._store.packs.read(copy, 0, copy.encoded_length)
        self._done.left = len(found) - self._done.objects
        return self._done

    def _take_in(self) -> None:
        old, future = self._working.popleft()
        try:
            new = future.result()
        except CorruptError:
            return  # stays as it is
        self._written.append(new)
        self._done.objects += 1
        self._done.bytes_before += old.encoded_length + OBJECT_OVERHEAD
        self._done.bytes += new.encoded_length + OBJECT_OVERHEAD

    def _encode(self, old: Location) -> Location:
        raw = self._store.objects.load(old.object_id, Kind.DATA)
        if object_id(Kind.DATA, raw) != old.object_id:
            raise CorruptError(f"{old}: its bytes do not have its id")
        found = candidates_for(self._sink, old.label, old.dtype, old.raw_length, old.sketch, (None, 0), self._effort)
        bases = tuple(one for one in found if not leads_to(self._sink, one, old.object_id))
        return self._sink.put(Kind.DATA, raw, old.object_id, Hints(old.dtype, old.label, old.sketch, bases))


def leads_to(known: Known, candidate: Candidate, wanted: ObjectId) -> bool:
    """Whether an object is among the bases behind a candidate, or what is behind it is not known."""
    location: Location | None = candidate.location
    for _ in range(limits.CHAIN_READ_DEPTH + 1):
        if location is None or location.object_id == wanted:
            return True
        if location.base == NO_ID:
            return False
        location = known.find(location.base)
    return True
