"""Names that come and go while mounted: the log is looked at off the event loop, and the kernel told what changed."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable

import pyfuse3
import trio
from pyfuse3 import FileNameT, InodeT

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.fuse.handles import Handles
from moonclipfs.fuse.nodes import NodeTable
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.names import View
from moonclipfs.layers.tree import Node, Tree
from moonclipfs.store.store import Store

log = logging.getLogger(__name__)


class Refresher(ABC):
    """Looks at the log for as long as `run` runs; what there is to do then is said by a subclass."""

    def __init__(self, store: Store, holds: Holds) -> None:
        self._store = store
        self._holds = holds
        self._trouble = ""
        self._scope = trio.CancelScope()
        self._asked, self._looked = trio.Event(), trio.Event()
        """Somebody waits for the next look; it is over. Of each look its own."""
        self._stopped = trio.Event()

    async def run(self) -> None:
        """Look at the log twice a second, and when asked to, until `stop`. What goes wrong is logged once, and tried
        again.
        """
        with self._scope:
            while True:
                with trio.move_on_after(limits.LEASE_REFRESH_SECONDS):
                    await self._asked.wait()
                looked = self._looked
                self._asked, self._looked = trio.Event(), trio.Event()
                try:
                    await self._refresh()
                    self._trouble = ""
                except Exception as error:
                    if str(error) != self._trouble:
                        log.warning(
                            "names may be out of date: %s", error, exc_info=not isinstance(error, MoonclipError)
                        )
                    self._trouble = str(error)
                finally:
                    looked.set()
        self._stopped.set()

    async def look(self) -> None:
        """Return when everything shows what the log holds by now, or cannot for the moment."""
        self._asked.set()
        with trio.move_on_after(limits.LEASE_REFRESH_SECONDS):
            await self._looked.wait()

    async def stop(self) -> None:
        """Return when nothing is under way. The kernel must be served until then: what it is told can wait for that."""
        self._scope.cancel()
        await self._stopped.wait()

    @abstractmethod
    async def _refresh(self) -> None:
        """Look once, and tell the kernel what changed."""

    def _keep_lease(self) -> None:
        """A mount lives long: whoever is stopped for a minute may be taken for dead, and a full disk has room again."""
        before = self._store.lease
        self._store.renew_lease()
        lease = self._store.lease
        self._holds.move(lease)
        if before is not None and lease is not before:
            log.warning("others took this mount for dead; %s", "it has a new lease" if lease else "it has no lease")
        elif lease is not before:
            log.info("this mount has a lease from here on")


class NameRefresher(Refresher):
    """Follows the log for a mount that nothing is written to."""

    def __init__(self, store: Store, tree: Tree, nodes: NodeTable, handles: Handles, holds: Holds) -> None:
        super().__init__(store, holds)
        self._tree = tree
        self._handles = handles
        self._nodes = nodes

    async def _refresh(self) -> None:
        view = await trio.to_thread.run_sync(self._look)
        if view is not None:
            before = self._tree.view
            self._tree.adopt(view)
            self._handles.move_on(view.sequence, view.keeps)
            self._holds.unpin(before.sequence)
            changed = await trio.to_thread.run_sync(lambda: list(self._tree.changed(before)))
            await self._tell(changed)
        if len(self._nodes) > limits.NODES // 4:
            oldest = self._nodes.oldest(limits.NODES // 16)
            await self._tell(await trio.to_thread.run_sync(lambda: list(self._names_of(oldest))))

    def _look(self) -> View | None:
        self._holds.sweep()
        self._keep_lease()
        view = self._tree.look(time.time_ns())
        if view is not None:
            self._holds.add(view.sequence)
        return view

    def _names_of(self, nodes: Iterable[Node]) -> Iterable[tuple[Node, bytes]]:
        for node in nodes:
            try:
                yield self._tree.parent(node), node.path.rpartition(b"/")[2]
            except MoonclipError:
                continue  # its directory is gone or damaged; the kernel forgets it in its own time

    async def _tell(self, changed: Iterable[tuple[Node, bytes]]) -> None:
        """Make the kernel forget what it knows of names; only those in directories that it knows matter."""
        known = [(inode, name) for node, name in changed if (inode := self._nodes.find(node)) is not None]
        if known:
            await trio.to_thread.run_sync(invalidate, known)


def invalidate(names: Iterable[tuple[int, bytes]], files: Iterable[int] = ()) -> None:
    """Make the kernel forget names, each with the inode number of its directory, and what it knows of these; and the
    bytes of `files`, by their numbers.

    On a worker thread: the kernel may first wait for requests that the event loop has to answer.
    """
    for inode, attr_only in {**{inode: True for inode, _ in names}, **dict.fromkeys(files, False)}.items():
        try:
            pyfuse3.invalidate_inode(InodeT(inode), attr_only=attr_only)
        except OSError:
            continue  # forgotten meanwhile
    for inode, name in names:
        try:
            pyfuse3.invalidate_entry(InodeT(inode), FileNameT(name))
        except OSError:
            continue  # not known to the kernel: nothing to forget
