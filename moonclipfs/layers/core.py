"""What all parts of a layer share: its state, lock and journal, and how a call that needs the store waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from moonclipfs.errors import CorruptError, NotFoundError
from moonclipfs.layers.base import Base, Caches, Missing
from moonclipfs.layers.inodes import ROOT_NUMBER, Inode, root_number
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.names import View, no_names
from moonclipfs.layers.records import Record
from moonclipfs.layers.staging import Staging
from moonclipfs.layers.state import State
from moonclipfs.store.log import Log, Names
from moonclipfs.store.store import Store
from moonclipfs.types import Kind, ObjectId

T = TypeVar("T")


class Core:
    """The parts of one layer. Thread-safe."""

    journal: Journal
    staging: Staging

    def __init__(
        self,
        store: Store,
        name: str,
        layer_id: bytes,
        directory: Path,
        *,
        fixed: bool = False,
        caches: Caches | None = None,
        names_log: Log | None = None,
    ) -> None:
        """Use `Layer.open`. A `fixed` layer is an overlay: it stands on one base, and shows no names of the log.
        `names_log` is a private one (`store/privatelog.py`) in the place of the store's.
        """
        self.fixed = fixed
        self.names_log = names_log or store.log
        self.store = store
        self.name = name
        self.id = layer_id
        self.directory = directory
        self.lock = threading.RLock()
        """Of all state in memory. Nobody waits for the store, the log, an fsync or a thread while holding it."""
        self.names_lock = threading.Lock()
        """Held by whoever changes the names of the log, or adopts them; taken before `lock`."""
        self.state = State(layer_id, root_number(layer_id) if fixed else ROOT_NUMBER)
        self.root = self.state.root
        self.base = Base(store, caches)
        if fixed:
            self.view = View(no_names())
        else:
            names = self.names()
            self.view = View(names)
            self.saw(names)
        self.facts: Mapping[bytes, bytes] = {}
        """Computed attributes of everything in it, by name: what kind of layer it is."""
        self.before_rename: Callable[[Inode, Inode | None], None] = lambda inode, replaced: None
        """Called under the lock: the first inode is about to take the place of the other, if there is one."""

    def names(self) -> Names:
        """The names of the log that the layer follows, as they are. Raises BackendError, CorruptError."""
        return self.store.names() if self.names_log is self.store.log else self.names_log.refresh()

    def saw(self, names: Names) -> None:
        """Tell others that the layer relies on nothing before these names; one with a private log holds the lease."""
        if self.names_log is self.store.log:
            self.store.saw(names)

    @property
    def counter(self) -> int:
        """The change counter: how many records were applied."""
        return self.state.change

    def run(self, body: Callable[[], T], wait: bool) -> T:
        """Call `body` under the lock. When it raises Missing, load that without the lock and call it again.

        `body` changes nothing before it has all it needs. Without `wait`, NotCachedError is raised instead.
        """
        loaded: dict[object, object] = {}
        while True:
            try:
                with self.lock:
                    before, self.base.pinned = self.base.pinned, loaded
                    try:
                        return body()
                    finally:
                        self.base.pinned = before
            except Missing as error:
                if not wait:
                    raise
                key, load = error.key, error.load  # not the error: it would keep what its calls refer to
            try:
                loaded[key] = load()
            except CorruptError as error:
                loaded[key] = error  # the call decides whether it can do without

    def record(self, record: Record, refs: Iterable[tuple[Kind, ObjectId]] = ()) -> None:
        """Journal a change and apply it, under the lock. Raises NoSpaceError, BackendError; then nothing changed."""
        self.journal.append(record, refs)
        self.state.apply(record)

    def by_number(self, number: int) -> Inode:
        """The inode that the kernel knows by a number. Raises KeyError."""
        with self.lock:
            inode = self.state.find(number)
        if inode is None:
            raise KeyError(number)
        return inode

    def remember(self, inode: Inode) -> None:
        """Note that the kernel was told of an inode."""
        with self.lock:
            inode.lookups += 1
            self.state.remembered[inode.number] = inode

    def forget(self, inode: Inode, count: int) -> None:
        """Note that the kernel forgot `count` mentions of an inode."""
        with self.lock:
            inode.lookups -= count
            if inode.lookups <= 0:
                inode.lookups = 0
                self.state.remembered.pop(inode.number, None)
                self.state.release(inode)

    def path(self, inode: Inode) -> bytes:
        """The path from the layer's root, of a file by any of its names. Raises NotFoundError for an unlinked one."""
        with self.lock:
            path = self.state.path(inode)
        if path is None:
            raise NotFoundError(f"{inode} has no name any more")
        return path
