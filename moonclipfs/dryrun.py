"""Dry runs: a program works on a checkpoint as if it were its own, and nothing of it is kept.

with moonclipfs.dry_run("/data/store", "run1/checkpoint-500") as path:
    train(path)
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from moonclipfs.errors import FuseUnavailableError, MoonclipError, UsageError
from moonclipfs.fuse.attached import SIGNALS, AttachedMount
from moonclipfs.fuse.namespace import Isolation
from moonclipfs.fuse.prepare import MountOptions, check_device
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.overlayapi import Overlay, Where
from moonclipfs.overlayplaces import InMount, InStore, Place, base_spec, for_base, place_of
from moonclipfs.store.alternates import temporary_private_store
from moonclipfs.store.target import OVERLAYS

log = logging.getLogger(__name__)

_NAME_CHARACTERS = 40
_OTHER = re.compile(r"[^A-Za-z0-9._-]+")


def dry_run_name(base: str) -> str:
    """A name for the overlay of a dry run, which no other has."""
    last = _OTHER.sub("-", base.rpartition("/")[2])[:_NAME_CHARACTERS].strip(".-")
    return f"{last or 'dry-run'}-{secrets.token_hex(4)}"


class DryRun:
    """A dry run: a context manager that gives the directory to work in. What was asked for with `dry_run`."""

    def __init__(
        self,
        where: Where,
        base: Where | None,
        *,
        commit: bool | str,
        quota: int | None,
        mount: bool | None,
    ) -> None:
        self._where = where
        self._base = base
        self._commit = commit
        self._quota = quota
        self._mount = mount
        self._overlay: Overlay | None = None
        self._private: _PrivateMount | None = None
        self._state = ExitStack()
        """Takes away what holds what is written, where the store can only be read."""
        self.version: str | None = None
        """The snapshot that it was committed as at its end, as NAME@N."""

    @property
    def path(self) -> Path | LayerPath:
        """The directory to work in."""
        return self._running().path

    @property
    def name(self) -> str:
        """The name of its overlay."""
        return self._running().name

    def diff(self) -> Mapping[str, Any]:
        """What was changed so far, by the keys of `moonclipfs overlay diff --json`."""
        return self._running().diff()

    def commit(self, name: str | None = None) -> str:
        """See `Overlay.commit`. Raises UsageError, unless the dry run was begun with `commit`."""
        return self._running().commit(name)

    def discard(self) -> None:
        """End it now: what was changed is gone. Harmless when repeated."""
        overlay, self._overlay = self._overlay, None
        private, self._private = self._private, None
        try:
            if overlay is not None and private is None:  # else it goes with its mount
                overlay.discard(force=True)
        finally:
            if overlay is not None:
                overlay.close()
            if private is not None:
                private.close()
            self._state.close()

    def __enter__(self) -> Path | LayerPath:
        if self._overlay is not None:
            raise UsageError("this dry run is under way already: make another one")
        try:
            self._overlay = self._begin()
            return self._overlay.path
        except BaseException:
            self.discard()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None and self._commit and self._overlay is not None:
                self.version = self.commit(self._commit if isinstance(self._commit, str) else None)
        finally:
            try:
                self.discard()
            except MoonclipError as problem:
                log.warning("the overlay of a dry run is left to be discarded by others: %s", problem)

    def _begin(self) -> Overlay:
        found, _ = place_of(self._where)
        found = for_base(found, self._base)
        base = base_spec(self._base, found.store)
        if isinstance(found, InStore) and not os.access(found.store, os.W_OK):
            found = self._beside(found)
        place: Place = found
        name = dry_run_name(base)
        wanted: dict[str, Any] = {"name": name, "base": base, "quota": self._quota, "ephemeral": True}
        wanted |= {"dry_run": not self._commit, "committable": bool(self._commit)}
        if isinstance(found, InMount):
            if self._mount is False:
                raise UsageError(f"{os.fspath(self._where)} is in a mount: name the store to do without")
            wanted["owner"] = {"pid": os.getpid()}
        elif self._mount is not False and (private := self._mounted(found)) is not None:
            self._private = private
            place = private
        place.ask("overlay_create", **wanted)
        return Overlay(place, name)

    def _beside(self, place: InStore) -> InStore:
        """For a store that can only be read: a private store over it, in a temporary directory."""
        if self._commit:
            raise UsageError(
                f"{place.store} can only be read, so nothing can be committed there: keep an overlay in a private "
                "store, by `moonclipfs overlay create --state DIR`, and commit that --into another store"
            )
        return InStore(self._state.enter_context(temporary_private_store(place.store, purpose="dry run")))

    def _mounted(self, place: InStore) -> _PrivateMount | None:
        """A mount of a store for this dry run; None where that cannot be, unless it was asked for."""
        try:
            check_device()
            return _PrivateMount(place.store)
        except FuseUnavailableError:
            if self._mount:
                raise
            return None

    def _running(self) -> Overlay:
        if self._overlay is None:
            raise UsageError("this dry run has ended, or was not begun: use it in a `with` block")
        return self._overlay


def dry_run(
    store_or_mount: Where,
    base: Where | None = None,
    commit: bool | str = False,
    quota: int | None = None,
    mount: bool | None = None,
) -> DryRun:
    """A directory that shows `base`, and where everything can be written; at the end of the block, or of this process
    however it ends, that is gone.

    It is in the mount that is named, else in one that is made for it, else (in a container without /dev/fuse, or with
    `mount=False`) it is a `LayerPath`, which has the methods of a `pathlib.Path`. With `mount=True` a mount must be
    possible. `base` is as of `create_overlay`; None is an empty directory. `quota` is in bytes. Over a store that can
    only be read, what is written lies in a private store in the directory for temporary files.

    With `commit`, it can be saved to and committed, and is when the block ends without an exception: as the snapshot of
    that name, or of the overlay's. Without, each attempt to keep something of it is an error.

    Raises NotFoundError, UsageError, BusyError, FuseUnavailableError; see also `DryRun`.
    """
    return DryRun(store_or_mount, base, commit=commit, quota=quota, mount=mount)


class _PrivateMount:
    """A mount that keeps nothing, of this process alone, in a temporary directory."""

    def __init__(self, store: Path) -> None:
        """Raises what `AttachedMount` raises."""
        self._directory = tempfile.mkdtemp(prefix="moonclipfs-")
        try:
            with _signals_blocked():
                self._attached = AttachedMount(
                    os.path.abspath(store),
                    self._directory,
                    MountOptions(dry_run=True),
                    # A process with threads cannot enter a namespace.
                    isolation=Isolation.NONE,
                    temporary=True,
                )
        except BaseException:
            os.rmdir(self._directory)
            raise
        self.store = store
        self._closed = False

    def ask(self, verb: str, /, **arguments: Any) -> Mapping[str, Any]:
        """Ask its server, which nobody else knows of."""
        return self._attached.ask(verb, **arguments)

    def path(self, name: str) -> str:
        """The directory of an overlay."""
        return os.path.join(self._attached.place, OVERLAYS, name)

    def close(self) -> None:
        """Unmount. Files that are open in it cannot be read after this. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        if problem := self._attached.finish():
            log.warning("the mount of a dry run ended badly: %s", problem)
        try:
            os.rmdir(self._directory)
        except OSError as error:
            log.warning("%s stays: %s", self._directory, error.strerror)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """What is started in the block is not ended by signals that all processes of a group get."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
