"""A file of a layer as a binary file object, for programs that have no mount."""

from __future__ import annotations

import io
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import UsageError, as_os_errors
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.room import Holder, with_room
from moonclipfs.store.cores import usable_cores

_COPIED_BYTES_PER_SECOND = 4 << 30
"""Bytes that come faster are copied from the cache: threads would only take time."""


class LayerFile(io.RawIOBase):
    """An unbuffered binary file object with a position of its own. Raises OSError only."""

    def __init__(
        self, holder: Holder, inode: Inode, path: str, *, read: bool, write: bool, append: bool = False
    ) -> None:
        """Open a file of a layer that `holder` has; `path` is for messages."""
        self._holder = holder
        self._path = path
        self._reads, self._writes, self._appends = read, write, append
        self._position = 0
        with as_os_errors(path):
            self._file: OpenFile = with_room(holder, partial(holder.layer.open_file, inode, write=write))

    @property
    def name(self) -> str:
        """The path, as those of other file objects."""
        return self._path

    def readable(self) -> bool:
        """Whether it was opened for reading."""
        return self._reads

    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._writes

    def seekable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the position on; fewer bytes at the end of the file."""
        self._check(self._reads, "reading")
        out = memoryview(buffer).cast("B")[: max(0, self._file.size - self._position)]
        with as_os_errors(self._path):
            count = _read_whole(self._file, self._position, out)
        self._position += count
        return count

    def readall(self) -> bytes:
        """All bytes from the position on."""
        length = max(0, self._file.size - self._position)
        whole = io.BytesIO(bytes(length))  # unlike a bytearray it gives its bytes away without a copy
        with whole.getbuffer() as out:
            count = self.readinto(out)
        data = whole.getvalue()
        return data if count == length else data[:count]

    def write(self, data: Any) -> int:
        """Write all of `data` at the position, or at the end of a file that is appended to."""
        self._check(self._writes, "writing")
        view = memoryview(data).cast("B")
        with as_os_errors(self._path):
            if self._appends:
                self._position = self._file.size
            for at in range(0, len(view), limits.PATH_WRITE_BYTES):
                part = view[at : at + limits.PATH_WRITE_BYTES]
                write = partial(self._file.write, self._position, part, time.time_ns())
                self._position += with_room(self._holder, write, len(part))
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Cut the file off at `size` bytes, or extend it with a hole."""
        self._check(self._writes, "writing")
        wanted = self._position if size is None else size
        cut = partial(self._holder.layer.truncate, self._file.inode, wanted, time.time_ns())
        with as_os_errors(self._path):
            with_room(self._holder, cut)
        return wanted

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position; past the end is allowed. Raises OSError before the beginning."""
        self._check(True, "")
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}.get(whence)
        with as_os_errors(self._path):
            if start is None or start + offset < 0:
                raise UsageError(f"cannot seek to {offset}, from {whence}")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """The position in bytes."""
        self._check(True, "")
        return self._position

    def sync(self) -> None:
        """Return when contents, attributes and names are durable, as fsync does."""
        self._check(True, "")
        with as_os_errors(self._path):
            with_room(self._holder, self._file.sync)

    def close(self) -> None:
        """Close the file: what was written is in the journal then. Raises OSError when that was not possible."""
        if self.closed:
            return
        try:
            with as_os_errors(self._path):
                with_room(self._holder, self._file.flush)
        finally:
            super().close()
            with as_os_errors(self._path):
                self._file.close()

    def _check(self, allowed: bool, what: str) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if not allowed:
            raise io.UnsupportedOperation(f"not open for {what}")


def _read_whole(file: OpenFile, offset: int, out: memoryview) -> int:
    """Fill `out` from `offset` on; by all cores what is long and has to be decoded. Returns the count of bytes.

    Raises CorruptError.
    """
    step, done = limits.PREFETCH_STEP_BYTES, 0
    while done < len(out):
        part, since = out[done : done + step], time.perf_counter()
        count = file.read_into(offset + done, part)
        done += count
        if count < len(part):
            return done  # the file has become shorter
        if time.perf_counter() - since > len(part) / _COPIED_BYTES_PER_SECOND:
            break  # it was decoded
    if done == len(out):
        return done
    with ThreadPoolExecutor(usable_cores(), "read") as pool:
        rest = range(done, len(out), step)
        return done + sum(pool.map(lambda at: file.read_into(offset + at, out[at : at + step]), rest))
