"""Open files and directories. Files are by inode, since a RELEASE comes late and in any order; all share a reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from moonclipfs import limits
from moonclipfs.errors import TooManyOpenError
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.tree import Node
from moonclipfs.types import Buffer, Version


class Stream:
    """A run of reads that follow each other in a file: `run` bytes so far, up to `next`, decoded up to `ahead`."""

    __slots__ = ("ahead", "next", "run")

    def __init__(self, offset: int, size: int) -> None:
        self.next = self.ahead = offset + size
        self.run = size


class Reader(Protocol):
    """The bytes of an open file, as `FileReader` gives them; those of a file that is written to change."""

    @property
    def size(self) -> int:
        """Bytes from the beginning to the end."""
        ...

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset` on, up to the end of the file; return the count of bytes. Raises CorruptError."""
        ...

    def cached(self, offset: int, length: int) -> Buffer | None:
        """The bytes of a range, clipped to the file, if they are there without waiting; else None."""
        ...

    def prefetch(self, offset: int, length: int) -> None:
        """Get a range, clipped to the file, ready. Raises CorruptError."""
        ...


class ReadHandle(ABC):
    """An open file, as far as reading it goes. `sequence` is the log record whose names are held for it."""

    __slots__ = ("reader", "sequence", "streams", "users")

    def __init__(self, reader: Reader, sequence: int) -> None:
        self.reader = reader
        self.sequence = sequence
        self.users = 0
        self.streams: list[Stream] = []

    @property
    @abstractmethod
    def place(self) -> str:
        """The path from the root of the mount, for messages."""

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


class FileHandle(ReadHandle):
    """An open file of a snapshot, shared by all who have it open."""

    __slots__ = ("node",)

    def __init__(self, node: Node, reader: Reader, sequence: int) -> None:
        super().__init__(reader, sequence)
        self.node = node

    @property
    def place(self) -> str:
        """The path from the root of the mount, for messages."""
        return self.node.place


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

    def open_file(self, inode: int, node: Node, reader: Reader, sequence: int) -> int:
        """Count one more user of a file; return its handle. Raises TooManyOpenError."""
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
        """Keep a listing; return its handle. Raises TooManyOpenError."""
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
            raise TooManyOpenError(f"{node.place}: {limits.OPEN_HANDLES} files are open already")
