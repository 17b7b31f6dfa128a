"""The nodes that the kernel knows, by inode number, each as often as the kernel was told of it."""

from __future__ import annotations

from itertools import islice

from moonclipfs import limits
from moonclipfs.errors import TooManyOpenError
from moonclipfs.layers.tree import ROOT_INODE, Node, inode_number

_ATTEMPTS = [b"", *(b"\0%d" % attempt for attempt in range(64))]
"""What is appended to an identity for another number, when its own is taken: the own one comes first."""


class NodeTable:
    """Lives on the thread of the event loop. A node leaves it when the kernel forgets it, and the root never does."""

    def __init__(self, root: Node) -> None:
        self._nodes = {ROOT_INODE: root}
        self._mentions = {ROOT_INODE: 1}
        self._moved: dict[bytes, int] = {}
        """Numbers of the nodes whose own number another one had: next to none, ever."""

    def __getitem__(self, inode: int) -> Node:
        """The node of an inode number that the kernel was told. Raises KeyError."""
        return self._nodes[inode]

    def __len__(self) -> int:
        return len(self._nodes)

    def remember(self, node: Node) -> int:
        """Count one more mention of a node to the kernel; return its inode number. Raises TooManyOpenError."""
        inode, attempt = self._place(node)
        if inode not in self._nodes:
            if len(self._nodes) >= limits.NODES:
                raise TooManyOpenError(f"{node.place}: the kernel knows {limits.NODES} names already")
            self._mentions[inode] = 0
            if attempt:
                self._moved[node.identity] = inode
        self._nodes[inode] = node
        self._mentions[inode] += 1
        return inode

    def find(self, node: Node) -> int | None:
        """The inode number of a node if the kernel knows it."""
        inode, _ = self._place(node)
        return inode if inode in self._nodes else None

    def forget(self, inode: int, count: int) -> None:
        """The kernel forgot `count` mentions of an inode number."""
        if inode == ROOT_INODE or inode not in self._nodes:
            return
        self._mentions[inode] -= count
        if self._mentions[inode] <= 0:
            node = self._nodes.pop(inode)
            del self._mentions[inode]
            if self._moved:
                self._moved.pop(node.identity, None)

    def oldest(self, count: int) -> list[Node]:
        """Of the `count` nodes that the kernel has known for the longest time, those to give up first.

        A directory is among them only if there is no file: the kernel would forget all that it knows below it. Those
        that are given out count as new: the kernel keeps what is in use, and is asked for all others before it again.
        """
        nodes = list(islice(self._nodes.items(), 1, count + 1))
        chosen = [(inode, node) for inode, node in nodes if not node.is_directory] or nodes
        for inode, node in chosen:
            del self._nodes[inode]
            self._nodes[inode] = node
        return [node for _, node in chosen]

    def _place(self, node: Node) -> tuple[int, bytes]:
        """The number of a node, its own or another that no other file has; and the attempt that gave it."""
        if node.is_root:
            return ROOT_INODE, b""
        identity = node.identity
        if self._moved and identity in self._moved:
            return self._moved[identity], b""
        for attempt in _ATTEMPTS:
            inode = inode_number(identity + attempt)
            known = self._nodes.get(inode)
            if known is None or known.identity == identity:
                return inode, attempt
        raise TooManyOpenError(f"{node.place}: no free inode number")
