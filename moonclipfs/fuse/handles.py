"""Open files and directories. Files are by inode, since a RELEASE comes late and in any order; all share a reader."""

from __future__ import annotations

from collections.abc import Callable

from moonclipfs import limits
from moonclipfs.errors import LimitError
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.tree import Node
from moonclipfs.store.filereader import FileReader
from moonclipfs.types import Version


class Stream:
    """A run of reads that follow each other in a file: `run` bytes so far, up to `next`, decoded up to `ahead`."""

    __slots__ = ("ahead", "next", "run")

    def __init__(self, offset: int, size: int) -> None:
        self.next = self.ahead = offset + size
        self.run = size


class FileHandle:
    """An open file. `sequence` is the log record whose names are held for it."""

    __slots__ = ("node", "reader", "sequence", "streams", "users")

    def __init__(self, node: Node, reader: FileReader, sequence: int) -> None:
        self.node = node
        self.reader = reader
        self.sequence = sequence
        self.users = 0
        self.streams: list[Stream] = []

    def follow(self, offset: int, size: int) -> Stream | None:
        """Take note of a read; return its stream if it continues one, or begins one at the head of the file."""
        for number, stream in enumerate(self.streams):
            if stream.next == offset:
                stream.next += size
                stream.run += size
                self.streams.append(self.streams.pop(number))
                return stream
        stream = Stream(offset, size)
        self.streams.append(stream)
        del self.streams[: -limits.STREAMS]
        return stream if offset == 0 else None


class DirectoryHandle:
    """An open directory: its names as they were when it was opened."""

    __slots__ = ("names", "node", "sequence")

    def __init__(self, node: Node, names: list[bytes], sequence: int) -> None:
        self.node = node
        self.names = names
        self.sequence = sequence


class Handles:
    """Everything that is open. Lives on the thread of the event loop."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self.files: dict[int, FileHandle] = {}
        self.directories: dict[int, DirectoryHandle] = {}
        self._last_directory = 0

    def __len__(self) -> int:
        return len(self.files) + len(self.directories)

    def open_file(self, inode: int, node: Node, reader: FileReader, sequence: int) -> int:
        """Count one more user of a file; return its handle. Raises LimitError."""
        handle = self.files.get(inode)
        if handle is None:
            self._make_room(node)
            handle = self.files[inode] = FileHandle(node, reader, sequence)
            self._holds.pin(sequence)
        handle.users += 1
        return inode

    def release_file(self, number: int) -> None:
        """Count one user less; the last one closes the file."""
        handle = self.files[number]
        handle.users -= 1
        if not handle.users:
            del self.files[number]
            self._holds.unpin(handle.sequence)

    def open_directory(self, node: Node, names: list[bytes], sequence: int) -> int:
        """Keep a listing; return its handle. Raises LimitError."""
        self._make_room(node)
        self._last_directory += 1
        self.directories[self._last_directory] = DirectoryHandle(node, names, sequence)
        self._holds.pin(sequence)
        return self._last_directory

    def release_directory(self, number: int) -> None:
        """Drop a listing."""
        self._holds.unpin(self.directories.pop(number).sequence)

    def move_on(self, sequence: int, keeps: Callable[[Version], bool]) -> None:
        """Hold the names as of `sequence`, which are held already, for all that is open and that these still keep.

        So what is open for long is in the way of gc only once it was forgotten.
        """
        handles: list[FileHandle | DirectoryHandle] = [*self.files.values(), *self.directories.values()]
        for handle in handles:
            version = handle.node.version
            if handle.sequence < sequence and (version is None or keeps(version)):
                self._holds.pin(sequence)
                self._holds.unpin(handle.sequence)
                handle.sequence = sequence

    def _make_room(self, node: Node) -> None:
        if len(self) >= limits.OPEN_HANDLES:
            raise LimitError(f"{node.place}: {limits.OPEN_HANDLES} files are open already")
