"""The overlays that one process has open, and the one thread that looks after all of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MoonclipError, NoSpaceError, NotFoundError, TooManyOpenError, UsageError
from moonclipfs.layers.base import Caches
from moonclipfs.layers.basing import BaseOf, held, of_directory, of_version
from moonclipfs.layers.live import Live
from moonclipfs.layers.merge import Directories
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.periodic import Periodic
from moonclipfs.layers.rebasing import Conflict, rebase
from moonclipfs.store import reserve
from moonclipfs.store.overlaydirs import (
    OverlayInfo,
    overlay_infos,
    overlay_names,
    remove_damaged,
    sweep,
)
from moonclipfs.store.store import Store
from moonclipfs.types import Kind, ObjectId

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
Json = Mapping[str, Any]


class Overlays:
    """The overlays of one store, opened when they are asked for. A context manager; thread-safe."""

    def __init__(self, store: Store, *, live: Live | None = None, mountpoint: str = "") -> None:
        """Of a store that is open for writing; `live` is the live layer at work beside them, if there is one.

        Clears away what processes that died have left. Nothing runs in the background before the first one is open.
        """
        self.store = store
        self.live = live
        self.mountpoint = mountpoint
        self.caches = Caches()
        self.on_change: Callable[[str], None] = lambda name: None
        """Called, on any thread, when a name came, went, or leads to something else."""
        self._lock = threading.RLock()
        """Of what is open; held while one is opened, so that it is not opened twice."""
        self._open: dict[str, Overlay] = {}
        self._stopping = threading.Event()
        self._relieving: set[Overlay] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._periodic: Periodic | None = None
        self._churned = 0
        """`Overlay.churn` of those that are not open any more."""
        if live is not None:
            live.reclaimer.others, live.reclaimer.ask_others = self._churn, self._let_go
        self.sweep()

    def __enter__(self) -> Overlays:
        return self

    def __exit__(self, *_: object) -> None:
        for problem in self.close():
            log.error("not everything is stored: %s", problem)

    def sweep(self) -> list[str]:
        """Clear away what was half made or discarded, and ephemeral overlays whose process is gone; returns the names
        of these. While one is damaged, it is not known what may go; what cannot go now, goes later.
        """
        try:
            return sweep(self.store.backend) if self.store.write else []
        except MoonclipError as error:
            log.warning("nothing of overlays is cleared away: %s", error)
            return []

    def close(self) -> list[str]:
        """Let go of all, as they are, and end; ephemeral ones made here are discarded. Returns what went wrong."""
        self._stopping.set()
        if self._periodic is not None:
            self._periodic.stop()
        with self._lock:
            relieving = list(self._relieving)
        for overlay in relieving:
            overlay.encoder.end()  # what is staged stays so
        if self._pool is not None:
            self._pool.shutdown()
        with self._lock:
            overlays, self._open = list(self._open.values()), {}
        with ThreadPoolExecutor(limits.SYNC_THREADS, "moonclipfs overlay") as pool:  # the disk syncs many at once
            return [problem for problem in pool.map(_end, overlays) if problem is not None]

    # Looking

    def names(self) -> list[str]:
        """The names of all overlays of the store, sorted."""
        return overlay_names(self.store.path)

    def infos(self) -> list[OverlayInfo]:
        """All overlays of the store, by name. Raises CorruptError."""
        return overlay_infos(self.store.path)

    def opened(self) -> list[Overlay]:
        """Those that are open here."""
        with self._lock:
            return list(self._open.values())

    def get(self, name: str) -> Overlay:
        """An overlay, opened if need be. Raises NotFoundError, BusyError, which names who holds it, CorruptError."""
        with self._lock:
            overlay = self._open.get(name)
            if overlay is None:
                self._require_room()
                overlay = Overlay.open(self.store, name, mountpoint=self.mountpoint, caches=self.caches)
                self._add(overlay)
            return overlay

    # Changing

    def create(
        self,
        name: str,
        base: str = "",
        *,
        quota: int | None = None,
        ephemeral: bool = False,
        dry_run: bool = False,
        owner: Mapping[str, object] | None = None,
    ) -> Overlay:
        """Make an overlay on what `base` means (see `base_of`), and open it. Raises as `Overlay.create`, and
        NotFoundError for a base that is not there.
        """
        with self._lock:
            self._require_room()
        with self.base_of(base) as found, self._lock:
            overlay = Overlay.create(
                self.store, name, found, quota=quota, ephemeral=ephemeral, dry_run=dry_run,
                mountpoint=self.mountpoint, owner=owner, caches=self.caches,
            )  # fmt: skip
            self._add(overlay)
        self.on_change(name)
        return overlay

    def discard(self, name: str) -> None:
        """Throw an overlay away, a damaged one too. Raises NotFoundError, BusyError."""
        try:
            overlay = self.get(name)
        except CorruptError as error:
            log.warning("overlay %s is discarded as it is: %s", name, error)
            remove_damaged(self.store.backend, name)
        else:
            overlay.end()  # others are not to wait for that
            with self._lock:
                if self._open.get(overlay.name) is not overlay:
                    raise NotFoundError(f"overlay {name} was discarded by somebody else just then")
                churn = overlay.churn + 1
                try:
                    overlay.discard()
                finally:
                    if overlay.closed:  # also where its name went, and not all of it
                        self._churned += churn
                        del self._open[overlay.name]
        self.on_change(name)

    def rename(self, old: str, new: str) -> None:
        """Call an overlay otherwise. Raises NotFoundError, ExistsError, BusyError, UsageError."""
        with self._lock:
            overlay = self.get(old)
            overlay.rename(new)
            self._open[new] = self._open.pop(old)
        self.on_change(old)
        self.on_change(new)

    def rebase(self, name: str, base: str | None = None) -> list[tuple[str, str, str]]:
        """Put an overlay onto another base, by default the newest version of the snapshot that it stands on.

        Returns what both sides have changed: (path, why, where the base's is kept, if it is). The overlay's stays.
        Raises NotFoundError, BusyError while files of it are open for writing.
        """
        overlay = self.get(name)
        text = base if base is not None else self._snapshot_of(overlay)
        conflicts: Mapping[bytes, Conflict] = {}

        def merge(before: ObjectId, ours: ObjectId) -> ObjectId:
            nonlocal conflicts
            with self.store.ingest() as ingest:
                found = rebase(Directories(self.store, ingest), before, ours, theirs.root)
                ingest.complete([(Kind.DIRECTORY, found.root)])
            conflicts = found.conflicts
            return found.root

        with self.base_of(text) as theirs:
            overlay.rebase(theirs, merge)
            version = theirs.version
        self.on_change(name)
        place = "" if version is None else f"@versions/{version.path}/{version.number}/"
        return [(os.fsdecode(path), str(why), _kept(place, path, why)) for path, why in conflicts.items()]

    def release(self, overlay: Overlay) -> bool:
        """Let go of an overlay that is open here, as it is, unless it is being stored: others may have it. Returns
        whether it is closed. Raises NoSpaceError, BackendError; then it is closed all the same.
        """
        with self._lock:
            if self._open.get(overlay.name) is overlay and not overlay.is_storing:
                del self._open[overlay.name]
                self._churned += overlay.churn
                overlay.close()
            return overlay.closed

    @contextmanager
    def base_of(self, text: str) -> Iterator[BaseOf]:
        """What a base is called: `SNAPSHOT[@VERSION]`, else the name of an overlay, or `/PATH` of the live layer, both
        as they are at this moment; nothing for an empty base. It is kept from gc inside the block.

        Raises NotFoundError, UsageError, BusyError when another process holds the overlay.
        """
        with held(self.store):
            yield self._base_of(text)

    def _base_of(self, text: str) -> BaseOf:
        if not text:
            return BaseOf()
        name = text.removeprefix("@overlays/")
        if name == text and not text.startswith("/"):
            try:
                return of_version(self.store, text)
            except (NotFoundError, UsageError) as error:
                missing = error
        elif name != text:
            if "/" in name:
                raise UsageError(f"{text} is a part of an overlay: only a whole one, @overlays/NAME, can be a base")
            return self.get(name).as_base()
        else:
            missing = NotFoundError(f"no {text} in {self.store.path}")
        if name in self.names():
            return self.get(name).as_base()
        if self.live is None:
            raise missing
        try:
            return of_directory(self.live.layer, self.live.encoder, text, "/" + text.strip("/"))
        except NotFoundError:
            raise missing from None

    def _snapshot_of(self, overlay: Overlay) -> str:
        """The snapshot that an overlay stands on a version of, wherever it was moved."""
        info = overlay.info
        if info.base_path is None:
            raise UsageError(
                f"overlay {overlay.name} stands on no snapshot: say onto which base it is to be put (--onto)"
            )
        versions = self.store.names().all_versions()
        return next((one.path for one in versions if one.sequence == info.base_sequence), info.base_path)

    def _require_room(self) -> None:
        if len(self._open) >= limits.OVERLAYS_OPEN:
            raise TooManyOpenError(f"{limits.OVERLAYS_OPEN} overlays are open here already: discard some")

    def _add(self, overlay: Overlay) -> None:
        """Under the lock."""
        overlay.encoder.on_wake = self._wake
        if self.live is not None:
            overlay.make_room = self.live.make_room
        self._open[overlay.name] = overlay
        if self._periodic is None:
            self._periodic = Periodic("moonclipfs overlays", self._tick, _TICK_SECONDS)
            self._pool = ThreadPoolExecutor(limits.OVERLAY_ENCODERS, "moonclipfs overlay")
            self._periodic.start()

    # In the background

    def _wake(self) -> None:
        if self._periodic is not None:
            self._periodic.wake()

    def _tick(self) -> None:
        if not self.store.layers:
            self.store.names()  # tells others that nothing older is relied on: a live layer does that itself
        if self.store.base is None:  # a private store has none
            reserve.take_again(self.store.path)  # else the next full disk would let nobody remove anything
        now, failure = time.monotonic(), None
        for overlay in self.opened():
            try:
                if overlay.tick(now):
                    self._relieve(overlay)
            except MoonclipError as error:
                if overlay in self.opened():
                    failure = failure or error
        if failure is not None:
            raise failure

    def _churn(self) -> int:
        return self._churned + sum(overlay.churn for overlay in self.opened())

    def _let_go(self) -> None:
        for overlay in self.opened():
            try:
                overlay.let_go()
            except MoonclipError as error:
                log.info("overlay %s keeps what it does not need: %s", overlay.name, error)

    def _relieve(self, overlay: Overlay) -> None:
        with self._lock:
            if overlay in self._relieving or self._pool is None or self._stopping.is_set():
                return
            self._relieving.add(overlay)
            self._pool.submit(self._relieve_one, overlay)

    def _relieve_one(self, overlay: Overlay) -> None:
        try:
            overlay.relieve(self._stopping)
        except MoonclipError as error:
            if isinstance(error, NoSpaceError):
                overlay.encoder.wanted = overlay.make_room(overlay.layer.staging.used) > 0
            if not (self._stopping.is_set() or overlay.is_ending):
                log.warning("overlay %s: not encoded yet, but safe in staging: %s", overlay.name, error)
        finally:
            with self._lock:
                self._relieving.discard(overlay)


def _kept(place: str, path: bytes, why: Conflict) -> str:
    """Where a mount shows what the base has at a path; `place` is where it shows the base, if it does."""
    return place + os.fsdecode(path) if place and why is not Conflict.REMOVED_THERE else ""


def _end(overlay: Overlay) -> str | None:
    """Let go of an overlay, or discard it if it is ephemeral; returns what went wrong."""
    try:
        try:
            if overlay.info.ephemeral:
                overlay.discard()
        finally:
            overlay.close()
    except MoonclipError as error:
        return f"overlay {overlay.name}: {error}"
    return None
