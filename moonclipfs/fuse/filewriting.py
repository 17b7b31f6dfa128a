"""Files of a mount's layers: opening, reading and writing them. Names are in `writing.py`.

Inodes of layers have numbers of their own (`inodes.inode_number`), and so have handles of their files; all others are
of the read-only trees beside them, and `Operations` answers for them.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext
from pyfuse3 import FileHandleT as Handle
from pyfuse3 import InodeT as Number

from moonclipfs import limits
from moonclipfs.errors import LimitError, MoonclipError, NoSpaceError, QuotaError, StagingFullError, TooManyOpenError
from moonclipfs.fuse import initflags
from moonclipfs.fuse.operations import Operations, answers, entry_attributes, let_go
from moonclipfs.fuse.reading import Reads
from moonclipfs.fuse.refresh import invalidate
from moonclipfs.fuse.served import LIVE_BIT, LayerDirectory, LayerFile, Served, ServedLayers
from moonclipfs.layers.changes import without_set_ids
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.inodes import ROOT_NUMBER, Inode
from moonclipfs.layers.live import Live
from moonclipfs.layers.lookup import Status
from moonclipfs.layers.seal import note_writer
from moonclipfs.layers.tree import Node, NotCachedError, Tree

log = logging.getLogger(__name__)
T = TypeVar("T")

_OF_HANDLES = {"read", "write", "flush", "fsync", "release", "readdir", "releasedir", "fsyncdir"}
_COARSE_CLOCK = 5
"""CLOCK_REALTIME_COARSE of linux/time.h."""
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.01, 0.25


class Clock:
    """The time of changes, in nanoseconds, by the clock that the kernel takes where a program asks for the present
    time. That one may be ahead of what it tells here by some milliseconds, so what was seen of it is a lower bound: no
    later change seems to be earlier.
    """

    def __init__(self) -> None:
        self._seen = 0

    def now_ns(self) -> int:
        """The present time."""
        return max(self._seen, time.clock_gettime_ns(_COARSE_CLOCK))

    def saw(self, time_ns: int) -> None:
        """A time that came with a request."""
        if self._seen < time_ns <= time.time_ns():
            self._seen = time_ns


def is_live(inode: int) -> bool:
    """True for the number of an inode of a layer."""
    return inode == ROOT_NUMBER or bool(inode & LIVE_BIT)


def is_live_handle(number: int) -> bool:
    """True for a handle of a layer."""
    return bool(number & LIVE_BIT)


class FileOperations(Operations):
    """What a program does with an open file of a layer."""

    def __init__(self, live: Live, tree: Tree, holds: Holds, reads: Reads, disk: str | os.PathLike[str]) -> None:
        """`tree` shows the versions beside the live names; `disk` is as for Operations."""
        super().__init__(tree, holds, reads, disk)
        self.live = live
        self.layer = live.layer
        self.layers = ServedLayers(Served(live.layer, live.encoder, live.make_room))
        self.open_files: dict[int, LayerFile] = {}
        self.open_directories: dict[int, LayerDirectory] = {}
        self.ending = False
        """The mount is about to end: nobody waits for room any more."""
        self.direct = False
        """Writers go past the page cache, and the kernel keeps it right."""
        self.clock = Clock()
        self._slow_until = 0.0
        """Until then the staging disk is taken for slow, and longer writes go to threads."""
        self._last_handle = LIVE_BIT
        self._writers = trio.CapacityLimiter(limits.WRITE_THREADS)
        self._syncers = trio.CapacityLimiter(limits.SYNC_THREADS)
        self._tellers = trio.CapacityLimiter(limits.METADATA_THREADS)
        """Those of who tells the kernel something, which may wait for a directory whose holder waits for `_threads`."""

    def init(self) -> None:
        """Told by pyfuse3 when the kernel has greeted: requests come from here on."""
        self.direct = bool(initflags.granted() & initflags.DIRECT_IO_ALLOW_MMAP)
        super().init()

    # What is asked for

    def find(self, number: int) -> tuple[Inode, Served]:
        """The inode that the kernel means, and its layer. Raises ESTALE for one that it cannot know."""
        return self.layers.find(number)

    def opened(self, number: int) -> LayerFile:
        """An open file. Raises ESTALE when its layer was discarded."""
        handle = self.open_files[number]
        if handle.served.gone:
            raise FUSEError(errno.ESTALE)
        return handle

    def node_of(self, name: str, args: Sequence[Any]) -> Node | None:
        """The file or directory of a read-only tree that a request is about."""
        return None if _is_of_layer(name, args) else super().node_of(name, args)

    def is_gone(self, name: str, args: Sequence[Any]) -> bool:
        """Whether the layer of a request was discarded."""
        if not _is_of_layer(name, args):
            return False
        number = args[0]
        if name not in _OF_HANDLES:
            return number not in self.layers.known
        handle = self.open_files.get(number) or self.open_directories.get(number)
        return handle is not None and handle.served.gone

    def describe(self, name: str, args: Sequence[Any]) -> str:
        """What a request is about, for the log."""
        if not _is_of_layer(name, args):
            return super().describe(name, args)
        number = args[0]
        handle = self.open_files.get(number)
        if handle is not None:
            where = f" at offset {args[1]}" if name in ("read", "write") else ""
            return f"of {handle.place}{where}"
        if number not in self.layers.known:
            return f"of {number}"
        inode, served = self.find(number)
        names = "".join(f" {part!r}" for part in args[1:4] if isinstance(part, bytes))
        return f"of {served.place_of(inode)}{names}"

    def attributes_of(self, inode: Inode, status: Status, timeout: float | None = None) -> EntryAttributes:
        """pyfuse3's form of a stat. What the layer shows changes through this mount only, or the kernel is told."""
        seconds = limits.CONTENT_TIMEOUT_SECONDS if timeout is None else timeout
        return entry_attributes(inode.number, status, status.atime_ns, status.blocks, seconds)

    # Opening

    def check_handles(self) -> None:
        """Raise TooManyOpenError when one more open file or directory would be too many."""
        if len(self.open_files) + len(self.open_directories) + len(self.handles) >= limits.OPEN_HANDLES:
            raise TooManyOpenError(f"{limits.OPEN_HANDLES} files are open already")

    @answers
    async def open(self, inode: Number, flags: int, ctx: RequestContext) -> FileInfo:
        """Open a file; its pages stay valid in the kernel, since its bytes change only through this mount."""
        if not is_live(inode):
            return await super().open(inode, flags, ctx)
        return await self.open_inode(*self.find(inode), flags, ctx)

    async def open_inode(
        self, inode: Inode, served: Served, flags: int, ctx: RequestContext, *, new: bool = False
    ) -> FileInfo:
        """Open a file of a layer with the flags of open(2), for who asks."""
        self.check_handles()
        access = flags & os.O_ACCMODE
        sequence = self.tree.view.sequence  # held, which newer names that the layer shows may not be yet
        with self.holds.pinned(sequence):
            options = {"write": access != os.O_RDONLY, "privileged": _is_privileged(ctx)}
            file = await self.change(served, served.layer.open_file, inode, **options)
            try:
                if served.gone:
                    raise FUSEError(errno.ESTALE)
                if flags & os.O_TRUNC and not new:
                    await self._truncate(inode, served, 0, ctx)
            except BaseException:
                file.close()
                raise
            self._last_handle += 1
            self.open_files[self._last_handle] = LayerFile(served, file, sequence)
            self.holds.pin(sequence)
        if access != os.O_RDONLY:
            note_writer(served.layer, inode, ctx.pid)
        # A map of a handle that may be read is served from the page cache, which a direct handle has to keep right:
        # that is worth it for files that are written anew.
        anew = access == os.O_RDWR and (new or bool(flags & os.O_TRUNC))
        direct = self.direct and (access == os.O_WRONLY or anew)
        return FileInfo(fh=Handle(self._last_handle), direct_io=direct, keep_cache=served.keeps_pages)

    @answers
    async def read(self, fh: Handle, off: int, size: int) -> bytes:
        """Bytes of a file, fewer than asked only at its end; what is damaged or missing is EIO."""
        if not is_live_handle(fh):
            return await super().read(fh, off, size)
        return await self.reads.read(self.opened(fh), off, size)  # type: ignore[return-value]  # any buffer does

    @answers
    async def release(self, fh: Handle) -> None:
        """Close a file. Whoever had it open is not told of errors: FLUSH came before."""
        if not is_live_handle(fh):
            return await super().release(fh)
        handle = self.open_files.pop(fh)
        handle.users = 0
        self.reads.closed(handle)
        self.holds.unpin(handle.sequence)
        try:
            if not handle.served.gone:
                handle.file.close()
        except MoonclipError:
            if not handle.served.gone:  # else there is nothing left to close it in
                raise

    def close_all(self) -> None:
        """Close what is open when the kernel is gone."""
        for handle in self.open_files.values():
            handle.users = 0
            if not handle.served.gone:
                handle.file.close()
        self.open_files.clear()

    # Writing

    @answers
    async def write(self, fh: Handle, off: int, buf: bytes) -> int:
        """Write at an offset. Waits while too much is staged; ENOSPC comes only when nothing can be reclaimed."""
        if not is_live_handle(fh):
            raise FUSEError(errno.EROFS)
        handle = self.opened(fh)
        write = partial(handle.file.write, off, buf, self.clock.now_ns())
        try:
            written = await self._write(handle.served, write, len(buf))
        except LimitError as error:
            raise FUSEError(errno.EFBIG) from error  # past the longest file
        await self.refresh_others(handle.served, handle.inode, (off, off + written))
        return written

    async def refresh_others(self, served: Served, inode: Inode, span: tuple[int, int] | None = None) -> None:
        """Make the kernel forget what it knows of others that depend on what was just changed; see `Served.beside`."""
        names, files = served.beside(inode, span)
        names = [(number, name) for number, name in names if number in self.layers.known]
        files = [number for number in files if number in self.layers.known]
        if names or files:
            await trio.to_thread.run_sync(invalidate, names, files, limiter=self._tellers)

    async def _write(self, served: Served, write: Callable[[], int], length: int) -> int:
        """At once when that is likely to be quick, else on a thread."""
        began = time.monotonic()
        if length < limits.WRITE_INLINE_BYTES or began >= self._slow_until:
            try:
                return write()
            except (NoSpaceError, StagingFullError) as error:
                let_go(error)  # it takes longer
            finally:
                ended = time.monotonic()
                if ended - began > limits.SLOW_WRITE_SECONDS:
                    self._slow_until = ended + limits.SLOW_DISK_SECONDS
        return await self.with_room(served, write, length, self._writers)

    async def with_room(
        self, served: Served, work: Callable[[], T], length: int, limiter: trio.CapacityLimiter | None = None
    ) -> T:
        """Do something on a thread that needs about `length` bytes of room in a layer: wait while too much is staged,
        reclaim when the disk is full, as long as there is anything. Raises NoSpaceError, ESTALE when the layer goes.
        """
        seconds, reclaimed = _FIRST_WAIT_SECONDS, False
        staged, since = served.staged, time.monotonic()
        while True:
            try:
                return await trio.to_thread.run_sync(work, limiter=limiter or served.threads or self._threads)
            except StagingFullError as error:
                let_go(error)
                if served.gone:
                    raise FUSEError(errno.ESTALE) from error
                if self.ending:
                    raise NoSpaceError(f"the mount ends: {error}") from error
                used, now = served.staged, time.monotonic()
                if used < staged:
                    staged, since = used, now
                elif now - since > limits.STAGING_PATIENCE_SECONDS and served.encoding.failures:
                    raise NoSpaceError(f"nothing that is staged can be stored: {error}") from error
                served.encoding.wake()
                await trio.sleep(seconds)
                seconds = min(2 * seconds, _LONGEST_WAIT_SECONDS)
            except NoSpaceError as error:
                let_go(error)
                if self.ending or isinstance(error, QuotaError):
                    raise
                freed = await trio.to_thread.run_sync(served.make_room, length, limiter=self._writers)
                if reclaimed and not freed:
                    raise
                reclaimed = True

    async def change(self, served: Served, method: Callable[..., T], *args: object, **options: object) -> T:
        """Call a method of a layer: at once if it knows all it needs, else on a worker thread."""
        try:
            return method(*args, **options, wait=False)
        except (NotCachedError, NoSpaceError):
            return await self.with_room(served, partial(method, *args, **options, wait=True), 0)

    @answers
    async def flush(self, fh: Handle) -> None:
        """close(2) of one descriptor: its caller is told what went wrong with what was written."""
        if not is_live_handle(fh):
            return
        handle = self.opened(fh)
        try:
            handle.file.flush()
        except (NoSpaceError, StagingFullError):
            await self.with_room(handle.served, handle.file.flush, limits.INLINE_BYTES)

    @answers
    async def fsync(self, fh: Handle, datasync: bool) -> None:
        """Return when what was written to a file is on the disk."""
        if not is_live_handle(fh):
            return
        handle = self.opened(fh)
        await self.with_room(handle.served, partial(handle.file.sync, datasync), limits.INLINE_BYTES, self._syncers)

    # Attributes

    @answers
    async def setattr(
        self,
        inode: Number,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: Handle | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """chmod, chown, utimensat, truncate."""
        if not is_live(inode):
            raise FUSEError(errno.EROFS)
        (found, served), now = self.find(inode), self.clock.now_ns()
        if fields.update_size:
            await self._truncate(found, served, attr.st_size, ctx)
        if fields.update_mtime:
            self.clock.saw(attr.st_mtime_ns)
        mode = attr.st_mode & 0o7777 if fields.update_mode else None
        owned = fields.update_uid or fields.update_gid
        before = found.mode if mode is None else mode
        after = before if found.is_directory else without_set_ids(before)
        # A request that sets nothing comes from a chown that changes nothing but the time of changes, and before a
        # write of somebody who may not keep setuid and setgid. Who does not own the file takes them off by the write.
        if owned or (not _sets_anything(fields) and (after == before or int(ctx.uid) in (0, found.uid))):
            mode = after
        changes = {
            "mode": mode,
            "uid": attr.st_uid if fields.update_uid else None,
            "gid": attr.st_gid if fields.update_gid else None,
            "atime_ns": _within_times(attr.st_atime_ns) if fields.update_atime else None,
            "mtime_ns": _within_times(attr.st_mtime_ns) if fields.update_mtime else None,
        }
        if any(value is not None for value in changes.values()):
            await self.change(served, served.layer.set_attributes, found, now_ns=now, **changes)
        return self.attributes_of(found, await self._ask(served.layer.stat, found), served.attribute_seconds)

    async def _truncate(self, inode: Inode, served: Served, size: int, ctx: RequestContext) -> None:
        now, privileged = self.clock.now_ns(), _is_privileged(ctx)
        try:
            await self.change(served, served.layer.truncate, inode, size, now, privileged=privileged)
        except LimitError as error:
            raise FUSEError(errno.EFBIG) from error
        await self.refresh_others(served, inode)


def _is_of_layer(request: str, args: Sequence[Any]) -> bool:
    """True for a request about an inode or a handle of a layer."""
    first = args[0]
    if not isinstance(first, int):
        return False
    return is_live_handle(first) if request in _OF_HANDLES else is_live(first)


def _within_times(time_ns: int) -> int:
    """The nearest time that a file can have."""
    return min(max(time_ns, limits.FIRST_TIME_NS), limits.LAST_TIME_NS)


def _sets_anything(fields: pyfuse3.SetattrFields) -> bool:
    return bool(
        fields.update_mode
        or fields.update_uid
        or fields.update_gid
        or fields.update_size
        or fields.update_atime
        or fields.update_mtime
        or fields.update_ctime
    )


def _is_privileged(ctx: RequestContext) -> bool:
    """May who asks write to a file and leave its setuid and setgid bits as they are?"""
    return int(ctx.uid) == 0
