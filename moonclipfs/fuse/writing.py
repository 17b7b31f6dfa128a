"""Names of a mount's layers: looking them up, listing and changing them, and what is told beside them.

What lies below the names that begin with @ at the root are read-only trees: `Operations` answers for them, and nothing
moves between them and a layer, or from one layer to another.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, StatvfsData
from pyfuse3 import FileHandleT as Handle
from pyfuse3 import FileNameT as Name
from pyfuse3 import InodeT as Number
from pyfuse3 import ModeT as Mode
from pyfuse3 import XAttrNameT as XattrName

from moonclipfs import limits
from moonclipfs.errors import ExistsError, LimitError, NotFoundError, TooManyOpenError
from moonclipfs.fuse.filewriting import FileOperations, is_live, is_live_handle
from moonclipfs.fuse.operations import DOTS, answers
from moonclipfs.fuse.overlaydir import OVERLAYS_NAME, ServedNames
from moonclipfs.fuse.reading import Reads
from moonclipfs.fuse.served import LIVE_BIT, LayerDirectory, LayerFile, Served
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.inodes import ROOT_NUMBER, Inode
from moonclipfs.layers.live import Live
from moonclipfs.layers.lookup import Status
from moonclipfs.layers.names import Area
from moonclipfs.layers.tree import XATTR_PREFIX, Tree
from moonclipfs.types import EntryType

log = logging.getLogger(__name__)

_TYPES = {stat.S_IFREG: EntryType.FILE, stat.S_IFIFO: EntryType.FIFO, stat.S_IFSOCK: EntryType.SOCKET}
_NOREPLACE, _EXCHANGE = 1, 2
_FAMILIES = (b"user.", b"trusted.")


class LiveOperations(FileOperations):
    """A mount that can be written to."""

    def __init__(self, live: Live, tree: Tree, holds: Holds, reads: Reads, disk: str | os.PathLike[str]) -> None:
        """As for FileOperations."""
        super().__init__(live, tree, holds, reads, disk)
        self._last_directory = LIVE_BIT
        self.overlays: ServedNames | None = None
        """The directory `@overlays`, if the mount has it."""
        self.experts: ServedNames | None = None
        """The directory `@experts/@overlays`, if the mount has it."""

    # Looking

    @answers
    async def lookup(self, parent_inode: Number, name: Name, ctx: RequestContext) -> EntryAttributes:
        """Find a name; the kernel may remember what is not there: names come through it, or it is told."""
        if not is_live(parent_inode) or _is_virtual(parent_inode, name):
            if parent_inode == ROOT_NUMBER and name == OVERLAYS_NAME and self.overlays is not None:
                return (await self._overlays_entry(self.overlays))()
            if name == OVERLAYS_NAME and self.experts is not None and self._is_experts(parent_inode):
                return (await self._overlays_entry(self.experts))()
            return await super().lookup(parent_inode, name, ctx)
        if len(name) > limits.NAME_BYTES:
            raise FUSEError(errno.ENAMETOOLONG)
        directory, served = self.find(parent_inode)
        epoch = served.epoch
        (child,) = await self._ask(served.layer.children, directory, (name,), limiter=served.threads)
        # While this waited, names may have changed, and the kernel been told: it must not keep this answer then.
        fresh = served.epoch is epoch
        if child is not None:
            return self.mention(*child, served, None if fresh else 0.0)
        absent = EntryAttributes()
        absent.st_ino = Number(0)
        absent.entry_timeout = served.name_seconds if fresh else 0.0
        return absent

    def mention(self, inode: Inode, status: Status, directory: Served, timeout: float | None = None) -> EntryAttributes:
        """The attributes of an inode that the kernel is about to be told of, found in the layer `directory`.

        Raises ESTALE when that was discarded meanwhile, TooManyOpenError.
        """
        served = directory.of(inode)
        if served.gone:
            raise FUSEError(errno.ESTALE)
        if inode.number not in self.layers.known and len(self.layers.known) >= limits.NODES:
            raise TooManyOpenError(f"the kernel knows {limits.NODES} names already")
        self.layers.remember(inode, served)
        return self.attributes_of(inode, status, served.seconds(inode) if timeout is None else timeout)

    async def forget(self, inode_list: Sequence[tuple[Number, int]]) -> None:
        """Drop what the kernel has forgotten. There is no answer to give, so nothing may be raised at all."""
        await super().forget([(number, count) for number, count in inode_list if not is_live(number)])
        for number, count in inode_list:
            if is_live(number) and number != ROOT_NUMBER:
                try:
                    self.layers.forget(number, count)
                except Exception:
                    log.exception("forget of %d: unexpected error", number)

    def move_on(self, sequence: int) -> None:
        """Hold the names as of `sequence`, which are held already, for all that is open and still has a name.

        What has a name is kept by the layer or by the names of the log; what has none needs those of before.
        """
        handles: list[LayerFile | LayerDirectory] = [*self.open_files.values(), *self.open_directories.values()]
        for handle in handles:
            if handle.sequence < sequence and handle.served.has_name(handle.inode):
                self.holds.pin(sequence)
                self.holds.unpin(handle.sequence)
                handle.sequence = sequence

    @answers
    async def getattr(self, inode: Number, ctx: RequestContext) -> EntryAttributes:
        """stat."""
        if not is_live(inode):
            return await super().getattr(inode, ctx)
        found, served = self.find(inode)
        return self.attributes_of(
            found, await self._ask(served.layer.stat, found, limiter=served.threads), served.attribute_seconds
        )

    @answers
    async def readlink(self, inode: Number, ctx: RequestContext) -> Name:
        """The text of a symlink."""
        if not is_live(inode):
            return await super().readlink(inode, ctx)
        found, served = self.find(inode)
        return Name(served.layer.readlink(found))

    # Listing

    @answers
    async def opendir(self, inode: Number, ctx: RequestContext) -> Handle:
        """Open a directory; one that cannot be read is told here."""
        if not is_live(inode):
            return await super().opendir(inode, ctx)
        self.check_handles()
        sequence = self.tree.view.sequence  # held, which newer names that the layer shows may not be yet
        with self.holds.pinned(sequence):
            directory = LayerDirectory(*self.find(inode), sequence)
            await self._names_in(directory)
            self._last_directory += 1
            self.open_directories[self._last_directory] = directory
            self.holds.pin(sequence)
        return Handle(self._last_directory)

    @answers
    async def readdir(self, fh: Handle, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Names and attributes from number `start_id` on, as many as fit."""
        if not is_live_handle(fh):
            return await super().readdir(fh, start_id, token)
        handle, at, added = self.open_directories[fh], start_id, 0
        if handle.served.gone:
            raise FUSEError(errno.ESTALE)
        if start_id == 0:
            handle.names = await self._listing(handle)
        while batch := handle.names[at : at + limits.LISTING_BATCH]:
            try:
                for name, attributes in zip(batch, await self._children(handle, batch), strict=True):
                    at += 1
                    if attributes is None:
                        continue
                    if not self._reply(token, name, attributes(), at):
                        return
                    added += 1
            except Exception:
                if not added:
                    raise
                return  # the kernel gets what there is, counts it, and asks again from there: then it is told

    async def _names_in(self, directory: LayerDirectory) -> list[bytes]:
        served = directory.served
        return await self._ask(served.layer.names_in, directory.inode, limiter=served.threads)

    async def _listing(self, directory: LayerDirectory) -> list[bytes]:
        names = DOTS + await self._names_in(directory)
        if directory.inode.number == ROOT_NUMBER:
            virtual = [name for name in await self._ask(self.tree.names_in, self.tree.root) if name.startswith(b"@")]
            names += [*virtual, OVERLAYS_NAME] if virtual and self.overlays is not None else virtual
        return names

    async def _children(
        self, directory: LayerDirectory, names: Iterable[bytes]
    ) -> list[Callable[[], EntryAttributes] | None]:
        """For each name, what makes its attributes when it is told to the kernel; None for one that has gone."""
        found: list[Callable[[], EntryAttributes] | None] = []
        inode, served = directory.inode, directory.served
        virtual = [name for name in names if _is_virtual(inode.number, name)]
        live = [name for name in names if not _is_virtual(inode.number, name)]
        children = await self._ask(served.listed, inode, live, limiter=served.threads)
        for child, name in zip(children, live, strict=True):
            if child is None:
                found.append(None)
            elif name in DOTS:
                found.append(partial(self.attributes_of, *child))
            else:
                found.append(partial(self.mention, *child, served))
        for name in virtual:  # last at the root, as in its listing
            if name == OVERLAYS_NAME and self.overlays is not None:
                found.append(await self._overlays_entry(self.overlays))
                continue
            node = self.tree.lookup(self.tree.root, name)
            status = await self._ask(self.tree.stat, node)
            found.append(partial(self._mention, node, status))
        return found

    async def _overlays_entry(self, overlays: ServedNames) -> Callable[[], EntryAttributes]:
        """What makes the attributes of `@overlays`, whose name stays what it is."""
        root = overlays.names.root
        status = await self._ask(overlays.names.stat, root, limiter=overlays.threads)

        def mentioned() -> EntryAttributes:
            attributes = self.mention(root, status, overlays)
            attributes.entry_timeout = limits.CONTENT_TIMEOUT_SECONDS
            attributes.attr_timeout = overlays.attribute_seconds
            return attributes

        return mentioned

    def _is_experts(self, number: int) -> bool:
        """Whether an inode of a read-only tree is `@experts`."""
        node = self.nodes[number]
        return node.area is Area.EXPERTS and not node.path

    def _reply(self, token: pyfuse3.ReaddirToken, name: bytes, attributes: EntryAttributes, following: int) -> bool:
        """Add a line if it fits. Each is one more mention of its inode to the kernel, but for the dots."""
        fits = pyfuse3.readdir_reply(token, Name(name), attributes, following)
        if not fits and name not in DOTS:
            if is_live(attributes.st_ino):
                self.layers.forget(attributes.st_ino, 1)
            else:
                self.nodes.forget(attributes.st_ino, 1)
        return fits

    @answers
    async def releasedir(self, fh: Handle) -> None:
        """Close a directory."""
        if not is_live_handle(fh):
            return await super().releasedir(fh)
        self.holds.unpin(self.open_directories.pop(fh).sequence)

    @answers
    async def fsyncdir(self, fh: Handle, datasync: bool) -> None:
        """Return when the names of a directory are on the disk as they are."""
        if is_live_handle(fh):
            directory = self.open_directories[fh]
            served, inode = directory.served, directory.inode
            await self.with_room(served, lambda: served.layer.sync_directory(inode), 0, self._syncers)

    # Making

    @answers
    async def create(
        self, parent_inode: Number, name: Name, mode: Mode, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """open(2) with O_CREAT."""
        try:
            inode, served = await self._make(parent_inode, name, EntryType.FILE, mode, ctx)
        except ExistsError as error:
            if flags & os.O_EXCL:
                raise
            # Somebody else made it, and the kernel, which checks modes, does not know that yet: it is to look again.
            raise FUSEError(errno.ESTALE) from error
        info = await self.open_inode(inode, served, flags, ctx, new=True)
        try:
            return info, await self._mention_new(inode, served)
        except BaseException:
            await self.release(info.fh)  # the kernel will not, since it learns of no handle
            raise

    @answers
    async def mknod(
        self, parent_inode: Number, name: Name, mode: Mode, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """A file, fifo or socket; devices are not made, since none would work."""
        type_ = _TYPES.get(stat.S_IFMT(mode))
        if type_ is None:
            raise FUSEError(errno.EPERM)
        return await self._mention_new(*await self._make(parent_inode, name, type_, mode, ctx))

    @answers
    async def mkdir(self, parent_inode: Number, name: Name, mode: Mode, ctx: RequestContext) -> EntryAttributes:
        """A directory."""
        return await self._mention_new(*await self._make(parent_inode, name, EntryType.DIRECTORY, mode, ctx))

    @answers
    async def symlink(self, parent_inode: Number, name: Name, target: Name, ctx: RequestContext) -> EntryAttributes:
        """A symbolic link with any text."""
        return await self._mention_new(*await self._make(parent_inode, name, EntryType.SYMLINK, 0o777, ctx, target))

    @answers
    async def link(
        self, inode: Number, new_parent_inode: Number, new_name: Name, ctx: RequestContext
    ) -> EntryAttributes:
        """One more name of a file."""
        directory, served = self._writable(new_parent_inode, new_name)
        if not is_live(inode):
            raise FUSEError(errno.EXDEV)
        found, origin = self.find(inode)
        if origin is not served:
            raise FUSEError(errno.EXDEV)
        await self.change(served, served.layer.link, found, directory, new_name, self.clock.now_ns())
        return await self._mention_new(found, served)

    async def _make(
        self, parent: Number, name: Name, type_: EntryType, mode: int, ctx: RequestContext, target: bytes = b""
    ) -> tuple[Inode, Served]:
        owner = (stat.S_IMODE(mode), ctx.uid, ctx.gid)
        directory, served = self._writable(parent, name)
        now = self.clock.now_ns()
        inode = await self.change(served, served.layer.make, directory, name, type_, *owner, now, target=target)
        return inode, served

    async def _mention_new(self, inode: Inode, served: Served) -> EntryAttributes:
        return self.mention(inode, await self._ask(served.layer.stat, inode), served)

    # Removing and renaming

    @answers
    async def unlink(self, parent_inode: Number, name: Name, ctx: RequestContext) -> None:
        """Remove a name of a file; what is open stays readable."""
        directory, served = self._writable(parent_inode, name)
        await self.change(served, served.layer.unlink, directory, name, self.clock.now_ns())
        await self.refresh_others(served, directory)

    @answers
    async def rmdir(self, parent_inode: Number, name: Name, ctx: RequestContext) -> None:
        """Remove an empty directory."""
        directory, served = self._writable(parent_inode, name)
        await self.change(served, served.layer.rmdir, directory, name, self.clock.now_ns())

    @answers
    async def rename(
        self,
        parent_inode_old: Number,
        name_old: Name,
        parent_inode_new: Number,
        name_new: Name,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        """Move a name, over another one too, in one step for whoever looks."""
        if flags not in (0, _NOREPLACE, _EXCHANGE):
            raise FUSEError(errno.EINVAL)
        before, served = self._writable(parent_inode_old, name_old)
        after, other = self._writable(parent_inode_new, name_new)
        if served is not other:
            raise FUSEError(errno.EXDEV)
        options = {"replace": flags != _NOREPLACE, "exchange": flags == _EXCHANGE}
        now = self.clock.now_ns()
        await self.change(served, served.layer.rename, before, name_old, after, name_new, now, **options)
        for directory in {before, after}:
            await self.refresh_others(served, directory)

    def _writable(self, parent: Number, name: Name) -> tuple[Inode, Served]:
        """The directory in which a name is to be changed, and its layer."""
        if not is_live(parent):
            raise FUSEError(errno.EROFS)
        if _is_virtual(parent, name):
            raise FUSEError(errno.EPERM)
        if len(name) > limits.NAME_BYTES:
            raise FUSEError(errno.ENAMETOOLONG)
        return self.find(parent)

    # Extended attributes

    @answers
    async def getxattr(self, inode: Number, name: XattrName, ctx: RequestContext) -> bytes:
        """A stored or computed attribute, of the families that a snapshot can hold."""
        if not is_live(inode):
            return await super().getxattr(inode, name, ctx)
        if not name.startswith(_FAMILIES):
            raise FUSEError(errno.EOPNOTSUPP)
        found, served = self.find(inode)
        try:
            return await self._ask(served.layer.xattr, found, name)
        except NotFoundError as error:
            raise FUSEError(pyfuse3.ENOATTR) from error

    @answers
    async def listxattr(self, inode: Number, ctx: RequestContext) -> Sequence[XattrName]:
        """The attributes that a copy should carry."""
        if not is_live(inode):
            return await super().listxattr(inode, ctx)
        found, served = self.find(inode)
        names = served.layer.xattr_names(found)
        return [XattrName(name) for name in names if ctx.uid == 0 or not name.startswith(b"trusted.")]

    @answers
    async def setxattr(self, inode: Number, name: XattrName, value: bytes, ctx: RequestContext) -> None:
        """Store an attribute."""
        found, served = self._attributed(inode, name)
        try:
            await self.change(served, served.layer.set_xattr, found, name, value, self.clock.now_ns())
        except LimitError as error:
            raise FUSEError(errno.ENOSPC) from error  # what ext4 says of more than fits

    @answers
    async def removexattr(self, inode: Number, name: XattrName, ctx: RequestContext) -> None:
        """Remove an attribute."""
        found, served = self._attributed(inode, name)
        try:
            await self.change(served, served.layer.remove_xattr, found, name, self.clock.now_ns())
        except NotFoundError as error:
            raise FUSEError(pyfuse3.ENOATTR) from error

    def _attributed(self, number: Number, name: XattrName) -> tuple[Inode, Served]:
        if not is_live(number):
            raise FUSEError(errno.EROFS)
        if not name.startswith(_FAMILIES):
            raise FUSEError(errno.EOPNOTSUPP)
        if name.startswith(XATTR_PREFIX):
            raise FUSEError(errno.EPERM)
        return self.find(number)

    # The disk

    @answers
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Size and free space of the disk that the store is on; what can be reclaimed counts as free."""
        disk = await trio.to_thread.run_sync(os.statvfs, self._disk, limiter=self._threads)
        reclaimable = self.live.reclaimer.reclaimable // disk.f_frsize
        answer = StatvfsData()
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_files", "f_ffree", "f_favail"):
            setattr(answer, name, getattr(disk, name))
        answer.f_bfree = min(disk.f_bfree + reclaimable, disk.f_blocks)
        answer.f_bavail = min(disk.f_bavail + reclaimable, disk.f_blocks)
        answer.f_namemax = limits.NAME_BYTES
        return answer


def _is_virtual(parent: int, name: bytes) -> bool:
    """True for the names at the root that are kept for trees beside the live one."""
    return parent == ROOT_NUMBER and name.startswith(b"@")
