"""The nodes that the kernel knows, by inode number, each as often as the kernel was told of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from moonclipfs import limits
from moonclipfs.errors import LimitError
from moonclipfs.layers.tree import ROOT_INODE, Node, inode_number


class _Known:
    __slots__ = ("count", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.count = 0


class NodeTable:
    """Lives on the thread of the event loop. A node leaves it when the kernel forgets it, and the root never does."""

    def __init__(self, root: Node) -> None:
        self._known = {ROOT_INODE: _Known(root)}
        self._moved: dict[tuple[object, ...], int] = {}
        """Numbers of the nodes whose own number another one had: next to none, ever."""

    def __getitem__(self, inode: int) -> Node:
        """The node of an inode number that the kernel was told. Raises KeyError."""
        return self._known[inode].node

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, node: Node) -> int:
        """Count one more mention of a node to the kernel; return its inode number. Raises LimitError."""
        inode = self._place(node)
        known = self._known.get(inode)
        if known is None:
            if len(self._known) >= limits.NODES:
                raise LimitError(f"{node.place}: the kernel knows {limits.NODES} names already")
            known = self._known[inode] = _Known(node)
            if inode != node.inode:
                self._moved[node.identity] = inode
        known.node = node
        known.count += 1
        return inode

    def find(self, node: Node) -> int | None:
        """The inode number of a node if the kernel knows it."""
        inode = self._place(node)
        return inode if inode in self._known else None

    def forget(self, inode: int, count: int) -> None:
        """The kernel forgot `count` mentions of an inode number."""
        known = self._known.get(inode)
        if known is None or inode == ROOT_INODE:
            return
        known.count -= count
        if known.count <= 0:
            del self._known[inode]
            self._moved.pop(known.node.identity, None)

    def oldest(self, count: int) -> list[Node]:
        """Of the `count` nodes that the kernel has known for the longest time, those to give up first.

        A directory is among them only if there is no file: the kernel would forget all that it knows below it.
        """
        nodes = [known.node for known in islice(self._known.values(), 1, count + 1)]
        return [node for node in nodes if not node.is_directory] or nodes

    def _place(self, node: Node) -> int:
        """The number of a node: its own, or another that no other file has."""
        identity = node.identity
        moved = self._moved.get(identity)
        if moved is not None:
            return moved
        for inode in _candidates(node):
            known = self._known.get(inode)
            if known is None or known.node.identity == identity:
                return inode
        raise LimitError(f"{node.place}: no free inode number")


def _candidates(node: Node) -> Iterator[int]:
    yield node.inode
    for attempt in range(64):
        yield inode_number(repr((node.identity, attempt)).encode())
