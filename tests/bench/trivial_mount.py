"""A pyfuse3 server of one file that costs nothing to make: the ceiling of what any server on pyfuse3 can reach.

    python -m tests.bench.trivial_mount MOUNTPOINT BYTES

Prints "ready" once it is mounted. The file is called `file` and holds zeros.
"""

from __future__ import annotations

import signal
import stat
import sys
from typing import Any

import pyfuse3
import trio

from moonclipfs.fuse.serving import raise_read_ahead

FILE = pyfuse3.InodeT(2)
_REQUEST_BYTES = 1 << 20


class TrivialOperations(pyfuse3.Operations):
    """Answers every read with part of the same megabyte."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._zeros = memoryview(bytes(_REQUEST_BYTES))

    async def getattr(self, inode: pyfuse3.InodeT, ctx: Any) -> pyfuse3.EntryAttributes:
        """The root and the file."""
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o644 if inode == FILE else stat.S_IFDIR | 0o755)
        entry.st_nlink = 1
        entry.st_size = self._size if inode == FILE else 0
        entry.entry_timeout = entry.attr_timeout = 3600
        return entry

    async def lookup(self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        """Whatever the name, it is the file."""
        return await self.getattr(FILE, ctx)

    async def open(self, inode: pyfuse3.InodeT, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        """Open the file."""
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), keep_cache=True)

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> Any:
        """Zeros."""
        return self._zeros[: max(0, min(size, self._size - off))]


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
