"""Space without cron: what was removed is kept for a while, and goes at once when the disk is needed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MoonclipError, NoSpaceError
from moonclipfs.store import forget, reserve
from moonclipfs.store.gc import collect, preview
from moonclipfs.store.log import Names
from moonclipfs.store.overlaydirs import pinned_versions
from moonclipfs.store.store import Store
from moonclipfs.types import Version

if TYPE_CHECKING:
    from moonclipfs.layers.layer import Layer

log = logging.getLogger(__name__)

_State = tuple[int, int, int]
_REST = 20
"""An estimate that took a second is made anew after so many seconds at the earliest, however much changes."""


def reclaim(store: Store, arguments: Mapping[str, Any]) -> dict[str, int]:
    """In the encoder process: forget those of the versions `forget`, (path, number) each, that are removed still, and
    run gc, `pressed` or not. Returns {"freed": bytes, "waiting": bytes that go in a later run}.

    With `preview`, only tells what that would free on a disk that is needed, and `dead`, what gc alone would free,
    and `packs`, what all packs take.
    """
    asked = {(os.fsdecode(path), number) for path, number in arguments["forget"]}
    versions = [(one.path, one.number) for one in _removed(store) if (one.path, one.number) in asked]
    if arguments.get("preview"):
        dead, freed = preview(store), preview(store, versions, pressed=True)
        return {
            "freed": max(0, freed.freed_bytes),
            "dead": max(0, dead.freed_bytes),
            "packs": dead.live_bytes + dead.dead_bytes,
        }
    forget.drop(store, versions)
    report = collect(store, pressed=bool(arguments.get("pressed")))
    return {"freed": max(0, report.freed_bytes), "waiting": report.waiting_bytes}


class Worker(Protocol):
    """What a reclaimer needs of an encoder."""

    @property
    def failures(self) -> int:
        """How many files could not be encoded yet."""

    @property
    def encoded_bytes(self) -> int:
        """Staged bytes encoded so far."""

    def call(self, op: str, **arguments: Any) -> Any:
        """Run an operation that writes to the store."""


class Reclaimer:
    """Decides what of a store is reclaimed when, for a layer at work. Thread-safe."""

    def __init__(self, layer: Layer, encoder: Worker, *, keep_deleted: float = limits.KEEP_DELETED_SECONDS) -> None:
        """Removed versions are kept for `keep_deleted` seconds while the disk has room."""
        self._layer = layer
        self._encoder = encoder
        self._keep_deleted = keep_deleted
        self._began_ns = time.time_ns()
        self._lock = threading.Lock()
        self._estimated: _State | None = None
        """The state that `reclaimable` tells of."""
        self._exhausted: _State | None = None
        """The state in which nothing was left to reclaim."""
        self._clean: tuple[int, int] | None = None
        """Bytes dropped by the layer, and the last removal of a version, when the journal was last written anew."""
        self.others: Callable[[], int] = lambda: 0
        """Grows when others than the layer may have left something in the store to reclaim."""
        self.ask_others: Callable[[], None] = lambda: None
        """Lets others give back what they can, before room is made."""
        self._rest_until = 0.0
        self._again_at = float("inf")
        """When packs that somebody used may be free."""
        self.reclaimable = 0
        """Bytes that could be freed at once; an estimate."""

    def tick(self, now: float) -> None:
        """Do what is due, by the monotonic clock: cheap when nothing changed."""
        # What could not be stored is tried again by itself, but only room helps.
        wanted = self._layer.staging.used if self._encoder.failures else 0
        if self._free() < max(wanted, self._low_mark()) and self._exhausted != self._state():
            self.make_room(wanted)
        with self._lock:
            names = self._layer.store.log.names
            removed = _removed(self._layer.store, names)
            if expired := [one for one in removed if self._is_expired(one)]:
                self._forget_dropped(names)
                self._call(expired)
            elif now >= self._again_at:
                self._collect()
            state = self._state()
            if state != self._estimated and now >= self._rest_until:
                self._estimate(names, now)
                self._estimated = state

    def make_room(self, length: int) -> int:
        """Forget what was removed, the oldest first, until the disk has `length` bytes, and some more, to spare.

        Returns the bytes freed: 0 when nothing is left to reclaim, or when the store's disk is not the one that is
        full. What keeps it from reclaiming is logged. Raises NoSpaceError.
        """
        before = self._free()
        self._layer.staging.close_deleted()
        self.ask_others()
        with self._lock:
            wanted = max(length, self._low_mark())
            freed = max(0, self._free() - before)  # by that, or by whoever had the lock
            if self._free() >= wanted:
                return freed
            try:
                return freed + self._reclaim(wanted)
            except NoSpaceError:
                raise
            except MoonclipError as error:
                if isinstance(error, CorruptError):
                    self._exhausted = self._state()  # whoever needs room need not wait for the same each time
                log.warning("the disk is full, and what was removed cannot be reclaimed: %s", error)
                return freed

    def _reclaim(self, wanted: int) -> int:
        self._with_reserve(self._layer.push_names)  # what was removed just now can go, too
        if self._exhausted == self._state():
            return 0
        freed = 0
        try:
            self._forget_dropped(self._layer.store.names())
        except NoSpaceError:
            freed += self._call((), pressed=True)
            self._forget_dropped(self._layer.store.names())
        for versions in self._steps():
            freed += self._call(versions, pressed=True)
            if self._free() >= wanted:
                break
        else:
            self._exhausted = self._state()
        self.reclaimable = max(0, self.reclaimable - freed)
        self._estimated = None
        return freed

    def leave(self) -> None:
        """Before the layer is closed: let others reclaim what it does not need any more, as far as the disk allows."""
        with self._lock:
            try:
                self._forget_dropped(self._layer.store.names())
            except NoSpaceError as error:
                log.info("the journal goes on naming what was dropped: %s", error)
            if self._layer.store.base is None:  # a private store has none
                reserve.take(self._layer.store.path)

    def _steps(self) -> Iterator[list[Version]]:
        """What to forget, step by step: nothing, one version, two, four, ... the first removed first."""
        yield []
        count = 1
        while left := sorted(_removed(self._layer.store), key=lambda one: (one.removed, one.sequence)):
            yield left[:count]
            count *= 2

    def _estimate(self, names: Names, now: float) -> None:
        started = time.monotonic()
        self._forget_dropped(names, self._low_mark())
        answer = self._encoder.call("reclaim", forget=_keys(_removed(self._layer.store, names)), preview=True)
        self._rest_until = now + _REST * (time.monotonic() - started)
        self.reclaimable = answer["freed"]
        if answer["dead"] >= max(limits.RECLAIM_BYTES, limits.RECLAIM_SHARE * answer["packs"]):
            self._collect()

    def _collect(self) -> None:
        """Free what nothing needs; it is among what is reclaimable, which statfs counts as free beside the disk's."""
        self.reclaimable = max(0, self.reclaimable - self._call(()))

    def _forget_dropped(self, names: Names, least: int = 1) -> None:
        """Write the journal anew if it names `least` bytes that no file of the layer needs any more, or a removed
        snapshot: they are kept until then.
        """
        removed = _removed(self._layer.store, names)
        state = self._layer.files.jobs.dropped, max((one.removed for one in removed), default=0)
        before = self._clean
        if before is not None and state[0] - before[0] < least and state[1] == before[1]:
            return
        self._with_reserve(self._layer.files.checkpoint)
        self._clean = state

    def _with_reserve(self, work: Callable[[], object]) -> None:
        """Do something that takes little space, on a full disk that of the reserves: `gc` and the journal itself take
        them again.
        """
        try:
            work()
        except NoSpaceError:
            reserve.release(self._layer.store.path)
            self._layer.journal.lend_reserve()
            work()

    def _call(self, versions: Iterable[Version], *, pressed: bool = False) -> int:
        answer = self._encoder.call("reclaim", forget=_keys(versions), pressed=pressed)
        self._layer.store.packs.forget_deleted()
        self._again_at = time.monotonic() + limits.RETRY_SECONDS if answer["waiting"] else float("inf")
        return int(answer["freed"])

    def _is_expired(self, version: Version) -> bool:
        # What was removed before versions had a time is kept as if that had been when we began.
        removed_ns = version.removed_ns or self._began_ns
        return time.time_ns() - removed_ns > self._keep_deleted * 1e9

    def _state(self) -> _State:
        """What changes when there may be more to reclaim: names, and objects that come or go."""
        dropped, encoded = self._layer.files.jobs.dropped, self._encoder.encoded_bytes
        return self._layer.store.log.names.sequence, dropped + self.others(), encoded

    def _free(self) -> int:
        disk = os.statvfs(self._layer.store.path)
        return disk.f_bavail * disk.f_frsize

    def _low_mark(self) -> int:
        disk = os.statvfs(self._layer.store.path)
        return min(limits.LOW_SPACE_BYTES, int(disk.f_blocks * disk.f_frsize * limits.LOW_SPACE_SHARE))


def _removed(store: Store, names: Names | None = None) -> list[Version]:
    """The versions that may be forgotten: removed, not pinned, and no overlay stands on them."""
    names = store.names() if names is None else names
    pins, found = names.pins(), [one for one in names.all_versions() if one.removed]
    held = pinned_versions(store.path, names) if found else {}
    return [one for one in found if (key := (one.path, one.number)) not in pins and key not in held]


def _keys(versions: Iterable[Version]) -> list[tuple[bytes, int]]:
    return [(os.fsencode(version.path), version.number) for version in versions]
