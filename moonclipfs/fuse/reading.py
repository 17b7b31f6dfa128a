"""Reads of open files: answered from decoded blocks at once, else on worker threads, with sequential read-ahead."""

from __future__ import annotations

import logging

import trio

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.fuse.handles import FileHandle, Stream
from moonclipfs.store.filereader import FileReader
from moonclipfs.types import Buffer

log = logging.getLogger(__name__)


class Reads:
    """Serves reads on the event loop, which never decodes itself. Read-ahead happens while `work` runs."""

    def __init__(self, cache_bytes: int, cores: int) -> None:
        """Read-ahead takes a sixteenth of the cache for one file at most, and a quarter for all, on `cores` threads."""
        self.waiting = 0
        self.waits = 0
        self.prefetches = 0
        self._budget = cache_bytes // 4
        self._window = min(limits.PREFETCH_BYTES, cache_bytes // 16)
        self._readers = trio.CapacityLimiter(limits.READ_THREADS)
        self._decoders = trio.CapacityLimiter(cores)
        self._cores = cores
        self._ahead: set[FileHandle] = set()
        self._jobs, self._queue = trio.open_memory_channel[tuple[FileHandle, int, int]](limits.PREFETCH_QUEUE)

    async def read(self, handle: FileHandle, offset: int, size: int) -> Buffer:
        """Return up to `size` bytes at `offset`, fewer only at the end of the file. Raises CorruptError."""
        size = max(0, min(size, handle.reader.size - offset))
        # Before anything is awaited, requests are in the order in which the kernel sent them: a run is a run.
        if (stream := handle.follow(offset, size)) is not None:
            self._read_ahead(handle, stream)
        data = handle.reader.cached(offset, size)
        if data is None:
            self.waiting += 1
            self.waits += 1
            try:
                data = await trio.to_thread.run_sync(_decode, handle.reader, offset, size, limiter=self._readers)
            finally:
                self.waiting -= 1
        return data

    def closed(self, handle: FileHandle) -> None:
        """The last user of a file is gone."""
        self._ahead.discard(handle)

    async def work(self) -> None:
        """Decode ahead, for as long as the mount lives."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._cores):
                nursery.start_soon(self._decode_ahead)

    def _read_ahead(self, handle: FileHandle, stream: Stream) -> None:
        """Queue what a sequential reader will want soon, whole steps only, except at the end of the file."""
        self._ahead.add(handle)
        room = min(self._window, self._budget // len(self._ahead))
        if stream.run < stream.next:  # not from the head of the file, where whole loads begin: the run has to grow
            room = min(room, 4 * stream.run)
        end = handle.reader.size
        goal = min(stream.next + room, end)
        stream.ahead = max(stream.ahead, stream.next)
        while stream.ahead < goal:
            step = min(limits.PREFETCH_STEP_BYTES, end - stream.ahead)
            if stream.ahead + step > goal:
                return
            try:
                self._jobs.send_nowait((handle, stream.ahead, step))
            except trio.WouldBlock:
                return
            stream.ahead += step

    async def _decode_ahead(self) -> None:
        async for handle, offset, length in self._queue:
            if not handle.users:
                continue
            self.prefetches += 1
            try:
                await trio.to_thread.run_sync(handle.reader.prefetch, offset, length, limiter=self._decoders)
            except MoonclipError as error:
                log.debug("read-ahead of %s at %d: %s; whoever reads there is told", handle.node.place, offset, error)


def _decode(reader: FileReader, offset: int, size: int) -> bytearray:
    buffer = bytearray(size)
    reader.read_into(offset, memoryview(buffer))
    return buffer
