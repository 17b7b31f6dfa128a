"""Saves are stored plain while somebody waits for them, and encoded when nobody does.

The newest snapshot of a run stays plain, and is read at the speed of the disk, until the next one is there or the
manager is closed.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MoonclipError
from moonclipfs.store.bases import AT_ONCE, NEAR, QUICK, THOROUGH, Effort
from moonclipfs.store.packs import Location
from moonclipfs.store.store import Store
from moonclipfs.store.target import is_store
from moonclipfs.store.tighten import plain_objects, tighten
from moonclipfs.torch import runs
from moonclipfs.torch.place import Place
from moonclipfs.torch.tidying import Tidying
from moonclipfs.types import Version

log = logging.getLogger(__name__)


class Tightening:
    """Encodes what earlier saves of a run have stored plain, on a thread that pauses for saves. Thread-safe."""

    def __init__(self, place: Place, name: str, pool: Executor, tidying: Tidying) -> None:
        self._place = place
        self._name = name
        self._pool = pool
        self._tidying = tidying
        self._changed = threading.Condition()
        self._saving = 0
        self._plain: list[Version] | None = None
        """Snapshots that are, in the order of saving; None before it was looked for them."""
        self._last: Version | None = None
        """The newest snapshot: it is left alone."""
        self._thread: threading.Thread | None = None
        self._until: float | None = None
        """When to stop, once the end of the manager or of the program has come."""
        self._closed = False
        self._pid = os.getpid()
        atexit.register(_close, weakref.ref(self))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, nothing more is begun."""
        with self._changed:
            self._saving += 1
        try:
            yield
        finally:
            with self._changed:
                self._saving -= 1
                self._changed.notify_all()

    def effort(self, size: int) -> Effort:
        """How a save of `size` bytes is to be stored."""
        store = self._place.for_saving()
        with self._changed:
            if self._plain is None:
                self._plain = self._left_behind(store)
            waiting = len(self._plain)
        disk = os.statvfs(store.path)
        room = disk.f_bavail * disk.f_frsize >= limits.PLAIN_DISK_SHARE * size
        return AT_ONCE if room and waiting < limits.PLAIN_SNAPSHOTS else QUICK

    def saved(self, version: Version, effort: Effort) -> None:
        """A save became a version: those before it are encoded from here on."""
        with self._changed:
            self._last = version
            if effort.plain and self._plain is not None:
                self._plain.append(version)
            if self._thread is None and self._next() is not None:
                self._thread = threading.Thread(target=self._run, name="moonclipfs encoding", daemon=False)
                self._thread.start()

    def wait(self) -> None:
        """Return when only the newest snapshot is plain, if that."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Encode what is left, the newest snapshot too, so far as it can be done in `limits.PLAIN_CLOSE_SECONDS`; the
        next manager of the run goes on with the rest. At the end of a program that has not closed it, this is done.
        """
        if self._closed:
            return
        self._closed = True
        self._until = time.monotonic() + limits.PLAIN_CLOSE_SECONDS
        self.wait()
        with self._changed:
            newest, self._last = self._last, None
            if newest is not None and self._plain is not None and newest not in self._plain:
                self._plain.append(newest)  # it may share objects with one that was plain, and is forgotten
        self._work(newest)

    def _left_behind(self, store: Store) -> list[Version]:
        """What a manager before this one has left plain: it was among the last that it saved."""
        last = runs.saved_versions(store.names(), self._name)[-limits.PLAIN_SNAPSHOTS - 1 :]
        return [version for version in last if _plain_of(store, version)]

    def _next(self) -> Version | None:
        return next((one for one in self._plain or () if one is not self._last), None)

    def _run(self) -> None:
        self._work(None)

    def _work(self, newest: Version | None) -> None:
        """Encode one snapshot after the other. The objects of `newest` get one link at most."""
        while (version := self._take()) is not None:
            store = self._place.for_saving()
            objects = partial(_plain_of, store, version)
            effort = NEAR if version is newest else THOROUGH
            try:
                # A save ends this, and it is begun anew after that: what keeps gc from deleting is held for moments.
                done = tighten(store, objects, self._pool, effort, self._undisturbed)
                if done.stopped:
                    self._put_back(version)
                self._tidying.dropped(int(done.objects > 0))
            except MoonclipError as error:
                if is_store(self._place.path):
                    log.warning("%s takes more room than it has to: %s", runs.id_of(version), error)

    def _take(self) -> Version | None:
        """The next one to encode, which does not count as plain any more; None when this thread is done."""
        going_on = self._go_on() and is_store(self._place.path)  # who removes a store wants nothing more of it
        with self._changed:
            version = self._next() if going_on else None
            if version is None:
                self._thread = None
            elif self._plain is not None:
                self._plain.remove(version)
            return version

    def _put_back(self, version: Version) -> None:
        with self._changed:
            if self._plain is not None:
                self._plain.insert(0, version)

    def _undisturbed(self) -> bool:
        with self._changed:
            self._look_for_end()
            return not self._saving if self._until is None else time.monotonic() < self._until

    def _go_on(self) -> bool:
        """Wait for saves; False when it is time to end."""
        with self._changed:
            while self._saving and self._until is None:
                self._changed.wait(1)
                self._look_for_end()
            self._look_for_end()
            return self._until is None or time.monotonic() < self._until

    def _look_for_end(self) -> None:
        if self._until is None and not threading.main_thread().is_alive():
            self._until = time.monotonic() + limits.PLAIN_CLOSE_SECONDS


def _close(tightening: weakref.ref[Tightening]) -> None:
    """At the end of the program."""
    found = tightening()
    if found is not None and found._pid == os.getpid() and not found._closed:
        found.close()
        found._tidying.close()


def _plain_of(store: Store, version: Version) -> list[Location]:
    """The plain objects of a version, unless it was forgotten, or is damaged."""
    if all((one.path, one.number) != (version.path, version.number) for one in store.names().all_versions()):
        return []
    try:
        return plain_objects(store, [version])
    except CorruptError:
        return []
