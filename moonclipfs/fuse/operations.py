"""The requests of the kernel, translated: inode numbers to nodes, errors to errno, answers to pyfuse3's types.

Nothing but FUSEError leaves a handler, since anything else would end the mount.
"""

from __future__ import annotations

import errno
import logging
import os
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, StatvfsData
from pyfuse3 import FileHandleT as Handle
from pyfuse3 import FileNameT as Name
from pyfuse3 import InodeT as Inode
from pyfuse3 import ModeT as Mode
from pyfuse3 import XAttrNameT as XattrName

from moonclipfs import limits
from moonclipfs.errors import (
    BusyError,
    CorruptError,
    CrossTreeError,
    DirectoryError,
    ExistsError,
    MoonclipError,
    NameTooLongError,
    NoDirectoryError,
    NoSpaceError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    ReadOnlyError,
    TooManyLinksError,
    UsageError,
)
from moonclipfs.fuse.handles import Handles
from moonclipfs.fuse.nodes import NodeTable
from moonclipfs.fuse.reading import Reads
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.lookup import Status
from moonclipfs.layers.tree import XATTR_PREFIX, Node, NotCachedError, Stat, Tree

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Operations")
Handler = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]

DOTS = [b".", b".."]
_BLOCK_SIZE = 1 << 20
"""What programs are told is a good length to read at a time."""
_ORDINARY = (
    BusyError, CrossTreeError, DirectoryError, ExistsError, NameTooLongError, NoDirectoryError, NoSpaceError,
    NotEmptyError, NotFoundError, NotPermittedError, ReadOnlyError, TooManyLinksError, UsageError,
)  # fmt: skip
"""What a program is told by an errno, and nobody else needs to know."""


def answers(handler: Handler[S, P, T]) -> Handler[S, P, T]:
    """Count a request; let nothing but FUSEError out."""
    name = handler.__name__

    @wraps(handler)
    async def answer(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.requests[name] += 1
        self.in_work += 1
        try:
            return await handler(self, *args, **kwargs)
        except FUSEError:
            raise
        except _ORDINARY as error:
            let_go(error)
            raise FUSEError(error.errno) from error
        except MoonclipError as error:
            node = self.node_of(name, args)
            lost = isinstance(error, CorruptError) and node is not None and not self.tree.is_kept(node)
            if lost or self.is_gone(name, args):
                raise FUSEError(errno.ESTALE) from error
            log.error("%s %s: %s", name, self.describe(name, args), error)
            raise FUSEError(error.errno) from error
        except Exception as error:
            if self.is_gone(name, args):
                raise FUSEError(errno.ESTALE) from error
            log.exception("%s %s: unexpected error", name, self.describe(name, args))
            raise FUSEError(errno.EIO) from error
        finally:
            self.in_work -= 1

    return answer


def let_go(error: BaseException) -> None:
    """Empty the frames that an error has come through. These and the error hold each other, and with them the staging
    file that it is about: whose room is not given back then before garbage is looked for.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


class Operations(pyfuse3.Operations):
    """One mounted store, as far as looking and reading go."""

    supports_dot_lookup = False

    def __init__(self, tree: Tree, holds: Holds, reads: Reads, disk: str | os.PathLike[str]) -> None:
        """`disk` is a path on the disk whose size and free space statfs tells."""
        super().__init__()
        self.tree = tree
        self.nodes = NodeTable(tree.root)
        self.holds = holds
        self.handles = Handles(holds)
        self.reads = reads
        self.requests: Counter[str] = Counter()
        self.in_work = 0
        self.answering = trio.Event()
        self._disk = disk
        self._threads = trio.CapacityLimiter(limits.METADATA_THREADS)

    def init(self) -> None:
        """Told by pyfuse3 when the kernel has greeted: requests come from here on."""
        self.answering.set()

    def node_of(self, name: str, args: Sequence[Any]) -> Node | None:
        """The file or directory that a request is about, if the kernel may ask about it at all."""
        try:
            directory = name in ("readdir", "releasedir")
            return self.handles.directories[args[0]].node if directory else self.nodes[args[0]]
        except (KeyError, IndexError):
            return None

    def is_gone(self, name: str, args: Sequence[Any]) -> bool:
        """Whether what a request is about was thrown away as a whole while it was served."""
        return False

    def describe(self, name: str, args: Sequence[Any]) -> str:
        """What a request is about, for the log: the path, and where in the file."""
        node = self.node_of(name, args)
        if node is None:
            return f"with {args!r}"
        if name == "read":
            return f"of {node.place} at offset {args[1]}, {args[2]} bytes"
        return f"of {args[1]!r} in {node.place}" if name == "lookup" else f"of {node.place}"

    @answers
    async def lookup(self, parent_inode: Inode, name: Name, ctx: RequestContext) -> EntryAttributes:
        """Find a name. The kernel may remember what a snapshot does not hold as absent."""
        parent = self.nodes[parent_inode]
        (child,) = await self._ask(self.tree.children, parent, (name,))
        if child is not None:
            node, status = child
            return self._mention(node, status)
        if parent.version is None:
            raise FUSEError(errno.ENOENT)
        absent = EntryAttributes()
        absent.st_ino = Inode(0)
        absent.entry_timeout = limits.CONTENT_TIMEOUT_SECONDS
        return absent

    async def forget(self, inode_list: Sequence[tuple[Inode, int]]) -> None:
        """Drop what the kernel has forgotten. There is no answer to give, so nothing may be raised at all."""
        self.requests["forget"] += 1
        for inode, count in inode_list:
            self.nodes.forget(inode, count)

    @answers
    async def getattr(self, inode: Inode, ctx: RequestContext) -> EntryAttributes:
        """stat."""
        node = self.nodes[inode]
        return _attributes(inode, node, await self._ask(self.tree.stat, node))

    @answers
    async def readlink(self, inode: Inode, ctx: RequestContext) -> Name:
        """The text of a symlink."""
        return Name(self.nodes[inode].entry.target)

    @answers
    async def access(self, inode: Inode, mode: int, ctx: RequestContext) -> bool:
        """The kernel itself checks modes (the mount option default_permissions)."""
        return True

    @answers
    async def opendir(self, inode: Inode, ctx: RequestContext) -> Handle:
        """Take down the names of a directory, as they are from here until it is closed."""
        node, sequence = self.nodes[inode], self.tree.view.sequence
        with self.holds.pinned(sequence):  # the names may change while the store is asked
            names = await self._ask(self.tree.names_in, node)
            return Handle(self.handles.open_directory(node, DOTS + names, sequence))

    @answers
    async def readdir(self, fh: Handle, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Names and attributes from number `start_id` on, as many as fit."""
        handle, at, added = self.handles.directories[fh], start_id, 0
        while batch := handle.names[at : at + limits.LISTING_BATCH]:
            try:
                children = await self._ask(self.tree.children, handle.node, batch)
                for name, child in zip(batch, children, strict=True):
                    at += 1
                    if child is not None:
                        if not self._list(token, name, *child, at):
                            return
                        added += 1
            except Exception:
                if not added:
                    raise
                return  # the kernel gets what there is, counts it, and asks again from there: then it is told

    def _list(self, token: pyfuse3.ReaddirToken, name: bytes, node: Node, status: Stat, following: int) -> bool:
        """Add a line if it fits. Each is one more mention of its node to the kernel, but for the dots."""
        if name in DOTS:
            return pyfuse3.readdir_reply(token, Name(name), _attributes(node.inode, node, status), following)
        attributes = self._mention(node, status)
        fits = pyfuse3.readdir_reply(token, Name(name), attributes, following)
        if not fits:
            self.nodes.forget(attributes.st_ino, 1)
        return fits

    def _mention(self, node: Node, status: Stat) -> EntryAttributes:
        """The attributes of a node that the kernel is about to be told of."""
        inode = self.nodes.remember(node)
        try:
            return _attributes(inode, node, status)
        except Exception:
            self.nodes.forget(inode, 1)
            raise

    @answers
    async def releasedir(self, fh: Handle) -> None:
        """Close a directory."""
        self.handles.release_directory(fh)

    @answers
    async def open(self, inode: Inode, flags: int, ctx: RequestContext) -> FileInfo:
        """Open a file for reading; its pages stay valid in the kernel for as long as its inode number is used."""
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FUSEError(errno.EROFS)
        node, sequence = self.nodes[inode], self.tree.view.sequence
        with self.holds.pinned(sequence):
            reader = await trio.to_thread.run_sync(self.tree.open, node, limiter=self._threads)
            return FileInfo(fh=Handle(self.handles.open_file(inode, node, reader, sequence)), keep_cache=True)

    @answers
    async def read(self, fh: Handle, off: int, size: int) -> bytes:
        """Bytes of a file, fewer than asked only at its end; what is damaged or missing is EIO."""
        return await self.reads.read(self.handles.files[fh], off, size)  # type: ignore[return-value]  # any buffer does

    @answers
    async def release(self, fh: Handle) -> None:
        """Close a file: the last of its users, perhaps."""
        handle = self.handles.files[fh]
        self.handles.release_file(fh)
        if not handle.users:
            self.reads.closed(handle)

    @answers
    async def flush(self, fh: Handle) -> None:
        """Nothing is ever dirty."""

    @answers
    async def fsync(self, fh: Handle, datasync: bool) -> None:
        """Nothing is ever dirty."""

    @answers
    async def fsyncdir(self, fh: Handle, datasync: bool) -> None:
        """Nothing is ever dirty."""

    @answers
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Size and free space of the disk that the store is on."""
        disk = await trio.to_thread.run_sync(os.statvfs, self._disk, limiter=self._threads)
        answer = StatvfsData()
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"):
            setattr(answer, name, getattr(disk, name))
        answer.f_namemax = limits.NAME_BYTES
        return answer

    @answers
    async def getxattr(self, inode: Inode, name: XattrName, ctx: RequestContext) -> bytes:
        """A stored or computed attribute. Families that a snapshot never holds are not supported: asked once, not ever
        again by many programs, and by the kernel itself.
        """
        node = self.nodes[inode]
        if not name.startswith((b"user.", b"trusted.")):
            raise FUSEError(errno.EOPNOTSUPP)
        try:
            if name.startswith(XATTR_PREFIX):
                return await trio.to_thread.run_sync(self.tree.xattr, node, name, limiter=self._threads)
            return self.tree.xattr(node, name)
        except NotFoundError as error:
            raise FUSEError(pyfuse3.ENOATTR) from error

    @answers
    async def listxattr(self, inode: Inode, ctx: RequestContext) -> Sequence[XattrName]:
        """The attributes that a copy should carry."""
        return [XattrName(name) for name in self.tree.xattr_names(self.nodes[inode])]

    async def _ask(self, question: Callable[..., T], *args: object, limiter: trio.CapacityLimiter | None = None) -> T:
        """Ask the tree: at once if it knows the answer, else on a worker thread, one of `limiter`."""
        try:
            return question(*args, wait=False)
        except NotCachedError:
            threads = limiter or self._threads
            return await trio.to_thread.run_sync(partial(question, *args, wait=True), limiter=threads)


class ReadOnlyOperations(Operations):
    """A mount that nothing is written to."""

    @answers
    async def _refuse(self, *_args: object) -> NoReturn:
        """A request that would change something."""
        raise FUSEError(errno.EROFS)

    setattr = mknod = mkdir = unlink = rmdir = symlink = rename = link = _refuse  # type: ignore[assignment]
    create = write = setxattr = removexattr = _refuse  # type: ignore[assignment]


def _attributes(inode: int, node: Node, stat: Stat) -> EntryAttributes:
    """pyfuse3's form of what stat says of a node, and how long the kernel may believe it."""
    timeout = limits.NAME_TIMEOUT_SECONDS if node.is_name else limits.CONTENT_TIMEOUT_SECONDS
    return entry_attributes(inode, stat, stat.mtime_ns, -(-stat.size // 512), timeout)


def entry_attributes(inode: int, stat: Stat | Status, atime_ns: int, blocks: int, timeout: float) -> EntryAttributes:
    """pyfuse3's form of a stat; the kernel may believe it, and the name, for `timeout` seconds."""
    entry = EntryAttributes()
    entry.st_ino = Inode(inode)
    entry.generation = 0
    entry.entry_timeout = entry.attr_timeout = timeout
    entry.st_mode = Mode(stat.mode)
    entry.st_nlink = stat.nlink
    entry.st_uid = stat.uid
    entry.st_gid = stat.gid
    entry.st_rdev = 0
    entry.st_size = stat.size
    entry.st_blksize = _BLOCK_SIZE
    entry.st_blocks = blocks
    entry.st_atime_ns = atime_ns
    entry.st_mtime_ns = stat.mtime_ns
    entry.st_ctime_ns = stat.ctime_ns
    return entry
