"""The live layer of a store, with everything that works behind it: encoding, seals, reclaiming, and what is told of it.

A mount drives one of these, and so does a program that wants a writable tree without a mount.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moonclipfs import limits
from moonclipfs.errors import ExistsError, MoonclipError, NoSpaceError, NotFoundError, UsageError
from moonclipfs.layers.arguments import argument
from moonclipfs.layers.encoder import Encoder
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.periodic import Periodic
from moonclipfs.layers.reclaim import Reclaimer
from moonclipfs.layers.seal import Sealer
from moonclipfs.store.leases import Hold
from moonclipfs.store.log import Log
from moonclipfs.store.overlaydirs import discard_layer, naming, new_layer_name
from moonclipfs.store.privatelog import PrivateLog
from moonclipfs.store.rebind import clone, restore
from moonclipfs.store.store import Store
from moonclipfs.types import Version

T = TypeVar("T")
log = logging.getLogger(__name__)

_NAMES_TICK_SECONDS = 0.5
_SEAL_TICK_SECONDS = 0.5
_RECLAIM_TICK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How a live layer works; see the options of `moonclipfs mount`. Times in seconds, `seal_after` None for never."""

    layer: str | None = None
    staging: str | None = None
    staging_limit: int = limits.STAGING_BYTES
    seal_after: float | None = limits.SEAL_AFTER_SECONDS
    keep_versions: int = limits.KEEP_VERSIONS
    keep_deleted: float = limits.KEEP_DELETED_SECONDS
    dry_run: bool = False
    """Nothing is kept, sealed or told to others: the layer has no name, and is gone at the end, also of a kill."""


class Live:
    """A live layer at work. A context manager; thread-safe."""

    def __init__(self, store: Store, options: LiveOptions | None = None, *, mountpoint: str = "") -> None:
        """Open the layer of a store that is open for writing; `close` leaves the store open. Raises BusyError.

        Whoever mounts it at `mountpoint` calls `layer.refresh` twice a second.
        """
        options = options or LiveOptions()
        self.store = store
        self._mounted = bool(mountpoint)
        self.dry_run = options.dry_run
        self._hold: Hold | None = None
        """In a dry run, on the names as they were when it began."""
        self.layer = self._open_dry(options, mountpoint) if options.dry_run else self._open(options, mountpoint)
        self.encoder = Encoder(self.layer, store.path)
        self.sealer = Sealer(
            self.layer, self.encoder, seal_after=options.seal_after, keep_versions=options.keep_versions
        )
        self.reclaimer = Reclaimer(self.layer, self.encoder, keep_deleted=options.keep_deleted)
        self._tasks = [
            Periodic("moonclipfs sync", self._sync, limits.SYNC_SECONDS),
            Periodic("moonclipfs names", self._tell_names, _NAMES_TICK_SECONDS),
        ]
        if not self.dry_run:
            self._tasks += [
                Periodic("moonclipfs seal", self._seal_what_is_due, _SEAL_TICK_SECONDS),
                Periodic("moonclipfs reclaim", lambda: self.reclaimer.tick(time.monotonic()), _RECLAIM_TICK_SECONDS),
            ]

    def _open(self, options: LiveOptions, mountpoint: str, name: str = "", names_log: Log | None = None) -> Layer:
        return Layer.open(
            self.store,
            name or options.layer or default_layer(),
            mountpoint=mountpoint,
            staging=None if options.staging is None else Path(options.staging),
            staging_limit=options.staging_limit,
            names_log=names_log,
        )

    def _open_dry(self, options: LiveOptions, mountpoint: str) -> Layer:
        """A layer without a name, which whoever opens the store next clears away when this process is gone."""
        if self.store.lease is None:
            raise UsageError(f"{self.store.path} is open for reading only")
        self._hold = self.store.lease.hold(self.store.log.names.sequence)
        try:
            with naming(self.store.backend):
                layer = self._open(options, mountpoint, new_layer_name(), PrivateLog(self.store))
        except BaseException:
            self._hold.release()
            raise
        layer.facts = {b"dry_run": b"1"}
        return layer

    def start(self) -> None:
        """Begin to encode, seal and reclaim in the background."""
        self.encoder.start()
        for task in self._tasks:
            task.start()

    def close(self) -> list[str]:
        """Store and seal what is there, as far as that is possible, and end. Returns what could not be done. A dry run
        leaves nothing.
        """
        for task in self._tasks:
            task.stop()
        if self.dry_run:
            return self._discard()
        problems = []
        # The last commit lets what was stored leave the staging.
        push, sync = self.layer.push_names, self.layer.sync_all
        for work in (self._drain, self.sealer.close, push, self.reclaimer.leave, sync):
            try:
                self._with_room(work)
            except MoonclipError as error:
                if str(error) not in problems:  # several may need the same file
                    problems.append(str(error))
        self.encoder.stop()
        self.layer.close()
        return problems

    def _discard(self) -> list[str]:
        self.encoder.stop()
        try:
            discard_layer(self.store.backend, self.layer.name)
        except MoonclipError as error:
            return [str(error)]
        finally:
            self.layer.close()
            if self._hold is not None:
                self._hold.release()
        return []

    def _require_kept(self, what: str) -> None:
        if self.dry_run:
            raise UsageError(f"this is a dry run: nothing of it is kept, so {what}")

    def __enter__(self) -> Live:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for problem in self.close():
            log.error("not everything is stored: %s", problem)

    def flush(self) -> None:
        """Return when everything written so far is encoded and durable, what was captured for seals too.

        Raises what kept some of it from that.
        """
        self.layer.sync_all()
        self._drain()
        self.sealer.publish_pending()
        self.layer.push_names()

    def seal(self, path: bytes, *, wait: bool = True) -> Version | None:
        """Seal the directory at a path of the layer; returns its version, the last one when nothing is new.

        Without `wait` it is captured, and published in the background. Raises NotFoundError, UsageError, also in a dry
        run, BusyError.
        """
        self._require_kept("nothing can be sealed")
        return self._with_room(lambda: self.sealer.seal(path, wait=wait))

    def make_room(self, length: int) -> int:
        """See `Reclaimer.make_room`. A dry run, which holds all names as they were, frees nothing."""
        return 0 if self.dry_run else self.reclaimer.make_room(length)

    def status(self) -> dict[str, Any]:
        """What is staged, being encoded, failed, waiting to be sealed, in conflict and reclaimable: JSON values."""
        return {
            "layer": self.layer.name,
            "dry_run": self.dry_run,
            "store": os.fspath(self.store.path),
            **self.layer.staged(),
            "encoder": self.encoder.status(),
            "captures": len(self.layer.captures),
            "missing": self.sealer.missing(),
            "conflicts": self.layer.conflicts(),
            "reclaimable": self.reclaimer.reclaimable,
            "troubles": [*(task.trouble for task in self._tasks if task.trouble), *self.sealer.given_up()],
        }

    @property
    def verbs(self) -> Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
        """What the control socket of a mount offers; each may take long, and is called on a thread of its own."""
        return {
            "status": lambda _: self.status(),
            "flush": self._flush_verb,
            "seal": self._seal_verb,
            "restore": self._restore_verb,
            "clone": self._clone_verb,
        }

    def _flush_verb(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        self.flush()
        return {}

    def _seal_verb(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        version = self.seal(os.fsencode(argument(arguments, "path", str)), wait=argument(arguments, "wait", bool, True))
        return {} if version is None else {"path": version.path, "number": version.number}

    def restore(self, name: str, number: int | None = None, *, to: str | None = None) -> Version:
        """See `rebind.restore`. What was written into `name` since its last seal becomes a version first.

        Raises ExistsError when something else is at `to`, BusyError while a file of `name` is written to, UsageError
        in a dry run.
        """
        self._require_kept("no version can be restored in it")
        self._tell_names()
        there = self._there(name if to is None else to)
        if there is not None and to is not None and to.strip("/") != name:
            raise ExistsError(f"{to} is there already: choose another name, or remove it first")
        if there is not None and there.below:
            self.seal(os.fsencode(name))
        return restore(self.store, name, number, to=to)

    def clone(self, source: str, target: str) -> Version:
        """See `rebind.clone`. Raises ExistsError when something is at `target`, UsageError in a dry run."""
        self._require_kept("nothing can be cloned in it")
        self._tell_names()
        if self._there(target) is not None:
            raise ExistsError(f"{target} is there already: choose another name, or remove it first")
        return clone(self.store, source, target)

    def _there(self, name: str) -> Inode | None:
        """What the layer has at a name."""
        try:
            return self.layer.resolve(os.fsencode(name.strip("/")))
        except NotFoundError:
            return None

    def _restore_verb(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        version = self.restore(
            argument(arguments, "name", str),
            argument(arguments, "number", int, None),
            to=argument(arguments, "to", str, None),
        )
        return {"path": version.path, "number": version.number}

    def _clone_verb(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        version = self.clone(argument(arguments, "source", str), argument(arguments, "target", str))
        return {"path": version.path, "number": version.number}

    def _drain(self) -> None:
        self._with_room(self.encoder.drain)

    def _with_room(self, work: Callable[[], T]) -> T:
        """Do something; on a full disk, do it again as long as something can be reclaimed. Raises NoSpaceError."""
        reclaimed = False
        while True:
            try:
                return work()
            except NoSpaceError:
                # What is staged has to be stored beside itself. Room may have come just before, too.
                if not self.make_room(self.layer.staging.used) and reclaimed:
                    raise
                reclaimed = True

    def _seal_what_is_due(self) -> None:
        self._with_room(lambda: self.sealer.tick(time.monotonic()))

    def _tell_names(self) -> None:
        """Let others know soon what was removed here. A mount follows the log by itself, with its kernel."""
        if not self._mounted:
            self.layer.refresh(time.time_ns())
        if self.layer.state.unbinding:
            self._sync()

    def _sync(self) -> None:
        self.layer.sync_all()
        self.layer.push_names()


def default_layer() -> str:
    """The name of the layer that mounts of this host use."""
    name = "".join(letter if (letter.isalnum() and letter.isascii()) or letter in "._-" else "-" for letter in _host())
    return name.lstrip(".") or "layer"


def _host() -> str:
    return os.uname().nodename
