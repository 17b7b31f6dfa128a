"""A pyfuse3 server that does next to nothing: the ceiling of what any server on pyfuse3 can reach.

    python -m tests.bench.trivial_mount MOUNTPOINT BYTES

Prints "ready" once it is mounted. A file called `file` holds zeros. Any other can be made: what is written to it is
counted and forgotten.
"""

from __future__ import annotations

import errno
import signal
import stat
import sys
from collections.abc import Sequence
from typing import Any

import pyfuse3
import trio

from moonclipfs.fuse.serving import raise_read_ahead

FILE = pyfuse3.InodeT(2)
_REQUEST_BYTES = 1 << 20


class TrivialOperations(pyfuse3.Operations):
    """Answers every read with part of the same megabyte, and takes whatever is written."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._sizes = {FILE: size}
        self._names = {b"file": FILE}
        self._zeros = memoryview(bytes(_REQUEST_BYTES))

    async def getattr(self, inode: pyfuse3.InodeT, ctx: Any) -> pyfuse3.EntryAttributes:
        """The root and the files."""
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o644 if inode in self._sizes else stat.S_IFDIR | 0o755)
        entry.st_nlink = 1
        entry.st_size = self._sizes.get(inode, 0)
        entry.entry_timeout = entry.attr_timeout = 3600
        return entry

    async def lookup(self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        """A file that is there."""
        if name not in self._names:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(self._names[name], ctx)

    async def open(self, inode: pyfuse3.InodeT, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        """Open a file."""
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), keep_cache=True)

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> Any:
        """Zeros."""
        return self._zeros[: max(0, min(size, self._sizes[pyfuse3.InodeT(fh)] - off))]

    async def create(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, mode: pyfuse3.ModeT, flags: int, ctx: Any
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """A new file, open past the page cache: the quickest way in."""
        inode = self._names[name] = pyfuse3.InodeT(len(self._names) + int(FILE))
        self._sizes[inode] = 0
        file = pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), direct_io=True)
        return file, await self.getattr(inode, ctx)

    async def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        """Take it."""
        inode = pyfuse3.InodeT(fh)
        self._sizes[inode] = max(self._sizes[inode], off + len(buf))
        return len(buf)

    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        """Nothing is left to do."""

    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        """Nothing is kept."""

    async def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        """Nothing is counted."""


async def _serve() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


async def _stop() -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        print("ready", flush=True)
        async for _ in signals:
            pyfuse3.terminate()
            return


def main() -> None:
    """See the module."""
    mountpoint, size = sys.argv[1], int(sys.argv[2])
    pyfuse3.init(TrivialOperations(size), mountpoint, {"fsname=trivial", "default_permissions"})
    raise_read_ahead(mountpoint)
    try:
        trio.run(_serve)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
