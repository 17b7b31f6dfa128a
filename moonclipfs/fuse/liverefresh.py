"""What others publish while a layer is mounted: the layer adopts it, and the kernel is told."""

from __future__ import annotations

import time
from collections.abc import Iterator

import trio

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.fuse.refresh import Refresher, invalidate
from moonclipfs.fuse.writing import LiveOperations
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.names import Area, View
from moonclipfs.store.store import Store


class LiveRefresher(Refresher):
    """Follows the log for a mount that can be written to."""

    def __init__(self, store: Store, operations: LiveOperations, holds: Holds) -> None:
        super().__init__(store, holds)
        self._operations = operations
        self._layer = operations.layer
        self._tree = operations.tree
        self._affected: list[tuple[Inode, bytes]] = []
        """Names that meant something else for a while, too: the kernel may have looked just then."""
        self._told = self._tree.view
        """What the kernel knows of names is as of this view, or newer."""

    async def _refresh(self) -> None:
        await self._tell()  # what is left when that failed
        before = self._tree.view
        view = await trio.to_thread.run_sync(self._look)
        if view is not None:
            self._tree.adopt(view)
            self._operations.handles.move_on(view.sequence, view.keeps)
            self._operations.move_on(view.sequence)
            self._holds.unpin(before.sequence)
        await self._tell()
        layers = self._operations.layers
        if len(layers.known) > limits.NODES // 4:
            oldest = layers.oldest(limits.NODES // 16)
            names = [(parent.number, name) for inode, served in oldest for parent, name in served.links(inode)]
            await trio.to_thread.run_sync(invalidate, names)

    async def _tell(self) -> None:
        """Make the kernel forget the names that mean something else by now. What fails is left for the next time: the
        kernel would believe what it knows for long.
        """
        before, view, affected = self._told, self._tree.view, [*self._affected]
        if before is view and not affected:
            return
        live = await trio.to_thread.run_sync(lambda: list(self._changed(affected, before, view)))
        areas = [area for area in Area if area is not Area.LIVE]
        beside = await trio.to_thread.run_sync(lambda: list(self._tree.changed(before, areas)))
        find = self._operations.nodes.find
        known = [(inode, name) for node, name in beside if (inode := find(node)) is not None]
        await trio.to_thread.run_sync(invalidate, live + known)
        self._told = view
        del self._affected[: len(affected)]

    def _look(self) -> View | None:
        """What names mean by now, held, if that is something else than what the tree shows.

        The layer's own moves and removals adopt names too, with whatever else is new.
        """
        self._holds.sweep()
        self._keep_lease()
        self._affected += self._layer.refresh(time.time_ns())
        view = self._layer.view
        if view.sequence == self._tree.view.sequence:
            return None
        self._holds.add(view.sequence)
        return view

    def _changed(self, affected: list[tuple[Inode, bytes]], before: View, view: View) -> Iterator[tuple[int, bytes]]:
        """The `affected` names, and those that stand for something else than in the view `before`, as far as the
        kernel may know them.
        """
        for directory, name in {*affected, *self._between(before, view)}:
            try:
                own = self._layer.lookup(directory, name).own
            except MoonclipError:
                own = False
            # What the layer has of its own goes before names, as it did: whoever works in it is not to be disturbed.
            if directory.number in self._operations.layers.known and not own:
                yield directory.number, name

    def _between(self, before: View, view: View) -> Iterator[tuple[Inode, bytes]]:
        for path, name in view.area(Area.LIVE).changes(before.area(Area.LIVE)):
            try:
                yield self._layer.resolve(path), name
            except MoonclipError:
                continue  # the directory went away with it: then its own name is among the changes
