"""The store that a manager saves into: made by the first save, opened when something is there to be read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import FormatVersionError, NotFoundError, PermissionDeniedError, UsageError
from moonclipfs.layers.claims import Claims
from moonclipfs.store.log import Names
from moonclipfs.store.replay import State
from moonclipfs.store.store import Store
from moonclipfs.store.target import is_store, mounted
from moonclipfs.torch.profile import Profile, TimedOps, wanted
from moonclipfs.types import NO_ID


class Place:
    """A store, or the directory where one is to be. A typo in a path makes no store: only saving does."""

    def __init__(self, path: str | os.PathLike[str], *, made_elsewhere: bool = False) -> None:
        """Opens what is there; with `made_elsewhere`, another process may be making it just then.

        Raises UsageError for a path inside a mount that saves cannot go to, FormatVersionError for something else than
        a store, NotFoundError and PermissionDeniedError where none could be made.
        """
        self.path = _store_behind(Path(path))
        self._store: Store | None = None
        self._timed: TimedOps | None = None
        self._claims: Claims | None = None
        if is_store(self.path):
            self._open()
        elif not made_elsewhere:
            _check_can_be_made(self.path)

    def for_saving(self) -> Store:
        """The store, open for writing; made if there is none. Raises PermissionDeniedError, NoSpaceError."""
        if self._store is None:
            if not is_store(self.path):
                Store.create(self.path).close()
            self._open()
        store = self.store()
        if not store.write:
            raise PermissionDeniedError(f"nothing can be saved in {self.path}: it can only be read")
        return store

    def await_store(self, seconds: float) -> None:
        """Return when there is a store. Raises NotFoundError when there is none after so many seconds."""
        deadline = time.monotonic() + seconds
        while not is_store(self.path):
            if time.monotonic() > deadline:
                raise NotFoundError(f"no store at {self.path} after {seconds:g} s: the first save of rank 0 makes it")
            time.sleep(limits.RANKS_POLL_SECONDS / 4)

    def store(self) -> Store:
        """The store. Raises NotFoundError when there is none."""
        if self._store is None and is_store(self.path):
            self._open()  # another process made it
        if self._store is None:
            raise NotFoundError(f"no store at {self.path}: the first save makes one")
        return self._store

    def names(self) -> Names:
        """The names of the store; none when there is no store."""
        try:
            return self.store().names()
        except NotFoundError:
            if is_store(self.path):
                raise
            return Names(State())

    @contextmanager
    def reading(self) -> Iterator[Names]:
        """The names, and whatever they lead to is not reclaimed inside the block."""
        if self._claims is None:
            yield self.names()
            return
        with self._claims.held():
            yield self.names()

    def pack_bytes(self) -> int:
        """Bytes of all packs of the store; 0 when there is none."""
        if self._store is None:
            return 0
        return sum(info.size for info in self._store.backend.list("packs/"))

    def measure(self, profile: Profile | None) -> None:
        """Count system calls of the store into a profile from here on, where profiles are wanted."""
        if self._timed is not None:
            self._timed.profile = profile

    def close(self) -> None:
        """Close the store. Harmless when done before."""
        if self._claims is not None:
            self._claims.close()

    def _open(self) -> None:
        try:
            store = Store.open(self.path, write=True, purpose="checkpoint manager")
        except PermissionDeniedError:
            store = Store.open(self.path, purpose="checkpoint manager")
        if wanted():
            store.backend.ops = self._timed = TimedOps(store.backend.ops)
        # It follows the log for as long as it is open, so that a run which saves once a day keeps gc from nothing.
        self._claims = Claims(store, owned=True)
        self._claim = self._claims.claim(NO_ID, 0)
        self._store = store


def _store_behind(path: Path) -> Path:
    """The store that a path means: itself, or that of a mount. Raises UsageError for any other path in a mount."""
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    found = mounted(there)
    if found is None:
        return path
    if found.dry_run:
        raise UsageError(f"{path} is in a dry run, which keeps nothing: save into the store {found.store} itself")
    if found.spec or there != path:
        raise UsageError(f"{path} is inside a mount: give its store, {found.store}, and the name of the run")
    return found.store


def _check_can_be_made(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FormatVersionError(f"not a store: {path}; give a store, or a directory that is empty or does not exist")
    parent = path if path.exists() else path.parent
    if not parent.is_dir():
        raise NotFoundError(f"no store can be made at {path}: there is no directory {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionDeniedError(f"no store can be made at {path}: {parent} cannot be written to")
