"""Reads of open files: answered from decoded blocks at once, else on worker threads, with sequential read-ahead."""

from __future__ import annotations

import logging
import threading
from itertools import takewhile
from queue import Empty, Full, Queue
from typing import TypeAlias

import trio

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.fuse.handles import Reader, ReadHandle, Stream
from moonclipfs.types import Buffer

log = logging.getLogger(__name__)

_ACTIVE_SECONDS = 1.0
"""How long after its last read a file still gets its share of the read-ahead."""
_Step: TypeAlias = tuple[ReadHandle, int, int]
"""A file, an offset in it and a count of bytes."""


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
        self._cores = cores
        self._active = _Recent()
        self._running = _Recent()
        self._steps: Queue[_Step | None] = Queue(limits.PREFETCH_QUEUE)

    async def read(self, handle: ReadHandle, offset: int, size: int) -> Buffer:
        """Return up to `size` bytes at `offset`, fewer only at the end of the file. Raises CorruptError."""
        size = max(0, min(size, handle.reader.size - offset))
        # Before anything is awaited, requests are in the order in which the kernel sent them: a run is a run.
        if (stream := handle.follow(offset, size)) is not None:
            self._read_ahead(handle, stream, first=stream.run <= size)
        data = handle.reader.cached(offset, size)
        if data is None:
            self.waiting += 1
            self.waits += 1
            try:
                data = await trio.to_thread.run_sync(_decode, handle.reader, offset, size, limiter=self._readers)
            finally:
                self.waiting -= 1
        return data

    def closed(self, handle: ReadHandle) -> None:
        """The last user of a file is gone."""
        self._active.drop(handle)
        self._running.drop(handle)

    async def work(self) -> None:
        """Decode ahead, for as long as the mount lives.

        The threads take the next step themselves: the event loop, which is busy with answers then, would be asked twice
        for each.
        """
        threads = [threading.Thread(target=self._decode_ahead, name=f"ahead {n}") for n in range(self._cores)]
        for thread in threads:
            thread.start()
        try:
            await trio.sleep_forever()
        finally:
            self._drop_steps()
            for _ in threads:
                self._steps.put(None)
            with trio.CancelScope(shield=True):
                for thread in threads:
                    await trio.to_thread.run_sync(thread.join)

    def _read_ahead(self, handle: ReadHandle, stream: Stream, *, first: bool) -> None:
        """Queue what a sequential reader will want soon, whole steps only, except at the end of the file.

        A reader that goes on shares with others that do: many files may be opened, and only their heads looked at.
        """
        sharers = self._active.touch(handle)
        if not first:
            sharers = self._running.touch(handle)
        room = min(self._window, self._budget // sharers)
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
                self._steps.put_nowait((handle, stream.ahead, step))
            except Full:
                return
            self.prefetches += 1
            stream.ahead += step

    def _drop_steps(self) -> None:
        """Leave what nobody has begun with."""
        while True:
            try:
                self._steps.get_nowait()
            except Empty:
                return

    def _decode_ahead(self) -> None:
        while (step := self._steps.get()) is not None:
            handle, offset, length = step
            if not handle.users:
                continue
            try:
                handle.reader.prefetch(offset, length)
            except MoonclipError as error:
                log.debug("read-ahead of %s at %d: %s; whoever reads there is told", handle.place, offset, error)
            except Exception:  # memory that ran out, for one: what nobody asked for must not end the mount
                log.exception("read-ahead of %s at %d: unexpected error", handle.place, offset)


class _Recent:
    """Files in the order of their last use; those not used for `_ACTIVE_SECONDS` leave."""

    def __init__(self) -> None:
        self._times: dict[ReadHandle, float] = {}

    def touch(self, handle: ReadHandle) -> int:
        """Note a use; return how many files are in use."""
        now = trio.current_time()
        self._times.pop(handle, None)
        self._times[handle] = now
        for idle in [*takewhile(lambda other: self._times[other] < now - _ACTIVE_SECONDS, self._times)]:
            del self._times[idle]
        return len(self._times)

    def drop(self, handle: ReadHandle) -> None:
        """A file is closed."""
        self._times.pop(handle, None)


def _decode(reader: Reader, offset: int, size: int) -> Buffer:
    buffer = memoryview(bytearray(size))
    return buffer[: reader.read_into(offset, buffer)]  # shorter when the file was cut off meanwhile
