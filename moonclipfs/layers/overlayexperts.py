"""The experts of a writable layer as a tree of names: what a mount serves of an overlay below `@experts/@overlays`.

It mirrors the directories of the layer. In each stands one directory for each layer of the model, with a file for each
expert. Besides, files can be made there that nobody lists and that end with this process: to be renamed over an expert.
What it is asked is what a layer is asked; with `wait=False` it raises NotCachedError where it would wait.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterable
from stat import S_ISDIR
from typing import NoReturn, TypeAlias
from weakref import WeakValueDictionary

from moonclipfs import limits
from moonclipfs.errors import (
    DirectoryError,
    ExistsError,
    NotFoundError,
    NotPermittedError,
    StaleError,
    TooManyOpenError,
    UsageError,
)
from moonclipfs.layers.expertfiles import ExpertFile, open_expert, replace_expert
from moonclipfs.layers.expertinodes import ExpertInode, Kind, directory_of, mirror_number, status_of
from moonclipfs.layers.experts import is_own_file
from moonclipfs.layers.expertsknown import KnownExperts
from moonclipfs.layers.experttables import Expert, LiveTable, read_table
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.inodes import Inode, inode_number
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.lookup import Status
from moonclipfs.layers.tree import XATTR_PREFIX, NotCachedError
from moonclipfs.store.cache import BoundedCache
from moonclipfs.types import EntryType

Tables: TypeAlias = BoundedCache[tuple[bytes, int], LiveTable]
"""By the layer and the number of the directory."""

_LAYER = re.compile(rb"(.+\.)?L[0-9]{3,9}")
_EXPERT = re.compile(rb"e[0-9]{5,9}\.safetensors")


class OverlayExperts:
    """The experts of one layer. Thread-safe."""

    def __init__(self, layer: Layer, tables: Tables) -> None:
        """`tables` keeps what is known of directories, of several layers perhaps."""
        self.layer = layer
        self.lock = layer.lock
        self.captures = layer.captures
        self.staging = layer.staging
        self._tables = tables
        self._reading = threading.Lock()
        self._read: set[int] = set()
        """The numbers of the directories that `tables` knows."""
        self._inodes: WeakValueDictionary[int, ExpertInode] = WeakValueDictionary()
        self._temporary: dict[tuple[int, bytes], Inode] = {}
        """Files that were made here, by the number of their directory and their name. They have no name in the layer,
        and are kept by a handle that is counted for each."""
        self._known = KnownExperts()
        self.root: Inode = self._mirror(layer.root)

    # Looking

    def children(
        self, directory: Inode, names: Iterable[bytes], *, wait: bool = True
    ) -> list[tuple[Inode, Status] | None]:
        """Lookup and stat of several names at once; None for one that is not there. Understands `.` and `..`."""
        found: list[tuple[Inode, Status] | None] = []
        table: LiveTable | None = None
        known: dict[int, Status] = {}
        for name in names:
            if table is None and (_EXPERT.fullmatch(name) or _LAYER.fullmatch(name)):
                table = self._table(directory_of(directory).real, wait)  # once for all of them
            inode = self._child(directory, name, wait, table)
            found.append(None if inode is None else (inode, self._status(inode, wait, known)))
        return found

    def lookup(self, directory: Inode, name: bytes, *, wait: bool = True) -> Inode:
        """The inode called `name` in a directory. Raises NotFoundError, CorruptError."""
        inode = self._child(directory, name, wait)
        if inode is None:
            raise NotFoundError(f"no {name!r} among the experts")
        return inode

    def resolve(self, path: bytes, *, wait: bool = True) -> Inode:
        """The inode at a path from the root. Raises NotFoundError."""
        inode = self.root
        for name in path.split(b"/") if path else ():
            inode = self.lookup(inode, name, wait=wait)
        return inode

    def _child(self, directory: Inode, name: bytes, wait: bool, table: LiveTable | None = None) -> Inode | None:
        """What a name is; `table` is that of the directory, if it is at hand."""
        inode = directory_of(directory)
        if name == b".":
            return inode
        if name == b"..":
            real = inode.real
            return self._mirror(real if inode.kind is Kind.LAYER else self.layer.lookup(real, b"..", wait=wait))
        if inode.kind is Kind.LAYER:
            with self.lock:
                temporary = self._temporary.get((inode.number, name))
            if temporary is not None or not _EXPERT.fullmatch(name):
                return temporary
            expert = (table or self._table(inode.real, wait)).layers.get(inode.layer, {}).get(name)
            return None if expert is None else self._of_expert(inode, name, expert)
        if _LAYER.fullmatch(name) and name in (table or self._table(inode.real, wait)).layers:
            return self._made(Kind.LAYER, inode.real, name)
        try:
            found = self.layer.lookup(inode.real, name, wait=wait)
        except NotFoundError:
            return None
        if found.is_directory:
            return self._mirror(found)
        return found if found.is_file and is_own_file(name) else None

    def names_in(self, directory: Inode, *, wait: bool = True) -> list[bytes]:
        """The names in a directory, sorted; none of files that were made here."""
        inode = directory_of(directory)
        table = self._table(inode.real, wait)
        if inode.kind is Kind.LAYER:
            return sorted(table.layers.get(inode.layer, {}))
        real = self.layer.names_in(inode.real, wait=wait)
        found = zip(real, self.layer.children(inode.real, real, wait=wait), strict=True)
        shown = [name for name, child in found if child is not None and _is_shown(name, child[1])]
        return sorted({*table.layers, *shown})

    def stat(self, inode: Inode, *, wait: bool = True) -> Status:
        """What stat says of an inode: a file has the latest times of those that hold its bytes."""
        return self._status(inode, wait, {})

    def _status(self, inode: Inode, wait: bool, known: dict[int, Status]) -> Status:
        """See `stat`. What is asked of the layer goes to `known`, by number."""
        if not isinstance(inode, ExpertInode):
            status = self.layer.stat(inode, wait=wait)
            return status._replace(nlink=max(1, status.nlink))  # what was made here has no name in the layer
        if inode.expert is None:
            status = self.layer.stat(inode.real, wait=wait)._replace(nlink=1)
        else:
            sources = [source.inode for source in inode.expert.sources.values()]
            for source in sources:
                if source.number not in known:
                    known[source.number] = self.layer.stat(source, wait=wait)
            status = status_of(inode.expert, [known[source.number] for source in sources])
        inode.mode, inode.uid, inode.gid = status.mode & 0o7777, status.uid, status.gid
        return status

    def path(self, inode: Inode) -> bytes:
        """The path from the root. Raises NotFoundError for what has none in the layer."""
        if not isinstance(inode, ExpertInode):
            return self.layer.path(inode)
        return b"/".join(part for part in (self.layer.path(inode.real), inode.layer, inode.name) if part)

    def readlink(self, inode: Inode) -> NoReturn:
        """Raises UsageError: there are no symbolic links."""
        raise UsageError(f"{inode} is no symbolic link")

    def xattr_names(self, inode: Inode) -> list[bytes]:
        """The names that listxattr gives."""
        return [] if isinstance(inode, ExpertInode) else self.layer.xattr_names(inode)

    def xattr(self, inode: Inode, name: bytes, *, wait: bool = True) -> bytes:
        """The value of an extended attribute; of an expert, those that tell of the layer. Raises NotFoundError."""
        if not isinstance(inode, ExpertInode):
            return self.layer.xattr(inode, name, wait=wait)
        computed = name.removeprefix(XATTR_PREFIX)
        if computed != name and (computed == b"store" or computed in self.layer.facts):
            return self.layer.xattr(inode.real, name, wait=wait)
        raise NotFoundError(f"{inode}: no attribute {name!r}")

    # Files

    def open_file(
        self, inode: Inode, *, write: bool, privileged: bool = False, wait: bool = True
    ) -> OpenFile | ExpertFile:
        """Open a file. Raises StaleError for an expert that is not there any more, NotPermittedError to write to one
        whose format has checksums, and as `Layer.open_file`.
        """
        if not isinstance(inode, ExpertInode):
            return self.layer.open_file(inode, write=write, privileged=privileged, wait=wait)
        expert = self._current(inode, wait)
        return open_expert(self.layer, inode, expert, write=write, privileged=privileged, wait=wait)

    def truncate(self, inode: Inode, size: int, now_ns: int, *, privileged: bool = False, wait: bool = True) -> None:
        """Cut a file off that was made here. Raises NotPermittedError for any other length of an expert's file."""
        if not isinstance(inode, ExpertInode):
            self.layer.truncate(inode, size, now_ns, privileged=privileged, wait=wait)
        elif inode.expert is None:
            raise DirectoryError(f"{inode} is a directory")
        elif size != inode.expert.size:
            self._refuse()

    def set_attributes(
        self,
        inode: Inode,
        *,
        now_ns: int,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        wait: bool = True,
    ) -> None:
        """Attributes of a file that was made here; an expert's are those of the files that hold its bytes."""
        if not isinstance(inode, ExpertInode):
            self.layer.set_attributes(
                inode, now_ns=now_ns, mode=mode, uid=uid, gid=gid, atime_ns=atime_ns, mtime_ns=mtime_ns, wait=wait
            )
        elif not (mode in (None, inode.mode) and uid is gid is atime_ns is mtime_ns is None):
            self._refuse()

    def sync_directory(self, directory: Inode) -> None:
        """The bytes of the experts in it are durable when this returns, and all that is in the journal."""
        inode = directory_of(directory)
        log = self.layer.files.log
        if inode.kind is Kind.LAYER:
            for source in self._table(inode.real, wait=True).sources.values():
                log.sync(source.inode)
        log.commit()

    # Changing names

    def make(
        self,
        directory: Inode,
        name: bytes,
        type_: EntryType,
        mode: int,
        uid: int,
        gid: int,
        now_ns: int,
        target: bytes = b"",
        *,
        wait: bool = True,
    ) -> Inode:
        """A file that nobody lists. Raises NotPermittedError for anything else and elsewhere, ExistsError."""
        inode = directory_of(directory)
        if self._child(inode, name, wait) is not None:
            raise ExistsError(f"{name!r} is there")
        if inode.kind is not Kind.LAYER or type_ is not EntryType.FILE or _EXPERT.fullmatch(name):
            self._refuse()
        state = self.layer.state
        with self.lock:
            if (inode.number, name) in self._temporary:
                raise ExistsError(f"{name!r} is there")
            self._clear_left_ones(now_ns)
            if len(self._temporary) >= limits.EXPERT_TEMPORARIES:
                raise TooManyOpenError(f"{limits.EXPERT_TEMPORARIES} files wait to become experts: remove some")
            made = Inode(state.new_number(), EntryType.FILE, mode, uid, gid, now_ns)
            state.inodes += 1
            state.take_over(made)
            made.handles += 1
            self._temporary[inode.number, name] = made
        return made

    def unlink(self, directory: Inode, name: bytes, now_ns: int, *, wait: bool = True) -> None:
        """Remove a file that was made here. Raises NotPermittedError for an expert: files always hold all of them."""
        with self.lock:
            made = self._temporary.pop((directory.number, name), None)
            if made is not None:
                self._let_go(made)
                return
        self.lookup(directory, name, wait=wait)
        self._refuse()

    def rename(
        self,
        directory: Inode,
        name: bytes,
        target: Inode,
        new_name: bytes,
        now_ns: int,
        *,
        replace: bool = True,
        exchange: bool = False,
        wait: bool = True,
    ) -> None:
        """Call a file that was made here otherwise. Over an expert, its tensors become that expert's, if they are the
        same but for their bytes; else UsageError is raised, and both are as they were.
        """
        inode, new = directory_of(directory), directory_of(target)
        with self.lock:
            made = self._temporary.get((inode.number, name))
        if made is None:
            self.lookup(inode, name, wait=wait)
        if made is None or new.kind is not Kind.LAYER:
            self._refuse()
        if exchange:
            raise UsageError("an expert is not exchanged: rename over it")
        there = self._child(new, new_name, wait)
        if there is not None and not replace:
            raise ExistsError(f"{new_name!r} is there")
        if isinstance(there, ExpertInode):
            if not wait:
                raise NotCachedError
            expert = self._current(there, wait)
            replace_expert(self.layer, expert, made, now_ns)
            with self.lock:
                new.replaced |= {source.inode.number for source in expert.sources.values()} | {there.number}
                if self._temporary.pop((inode.number, name), None) is made:
                    self._let_go(made)
            return
        if _EXPERT.fullmatch(new_name):
            self._refuse()
        with self.lock:
            if self._temporary.pop((inode.number, name), None) is not made:
                raise NotFoundError(f"no {name!r} among the experts")
            before = self._temporary.pop((new.number, new_name), None)
            if before is not None:
                self._let_go(before)
            self._temporary[new.number, new_name] = made

    def _refuse(self, *_arguments: object, **_options: object) -> NoReturn:
        raise NotPermittedError("the files of a checkpoint say which experts there are: write to these")

    link = rmdir = set_xattr = remove_xattr = _refuse

    # What the kernel knows

    def remember(self, inode: Inode) -> None:
        """Note that the kernel was told of an inode."""
        if not isinstance(inode, ExpertInode):
            self.layer.remember(inode)
            return
        with self.lock:
            inode.lookups += 1
            if inode.expert is not None:
                self._known.add(inode)

    def forget(self, inode: Inode, count: int) -> None:
        """Note that the kernel forgot `count` mentions of an inode."""
        if not isinstance(inode, ExpertInode):
            self.layer.forget(inode, count)
            return
        with self.lock:
            inode.lookups -= count
            if inode.lookups <= 0 and inode.expert is not None:
                self._known.drop(inode)

    def depending(self, inode: Inode, span: tuple[int, int] | None) -> tuple[list[ExpertInode], bool]:
        """The experts that the kernel knows and that depend on a file of the layer, on a range of it, or on names in a
        directory; and whether they may be others when that has changed.
        """
        if not self._known:
            return [], False
        with self.lock:
            if inode.is_directory:
                return self._known.of_directory(inode.number), True
            return self._known.of_file(inode.number, span)

    def links(self, inode: Inode) -> list[tuple[Inode, bytes]]:
        """(directory, name) of the name of an inode of this tree, as far as the directory is in memory."""
        if not isinstance(inode, ExpertInode):
            return []
        with self.lock:
            if inode.kind is not Kind.MIRROR:
                above = inode.layer if inode.kind is Kind.EXPERT else b""
                names = [(mirror_number(self.layer.id, inode.real.number, above), inode.name or inode.layer)]
            else:
                names = [(mirror_number(self.layer.id, parent.number), name) for parent, name in inode.real.links]
            return [(self._inodes[number], name) for number, name in names if number in self._inodes]

    @property
    def is_waited_for(self) -> bool:
        """Whether files that were made here wait to become experts: they end with this."""
        return bool(self._temporary)

    def let_go(self) -> None:
        """The layer is gone: nothing is known of it any more."""
        with self.lock:
            for number in self._read:
                self._tables.drop((self.layer.id, number))
            self._read.clear()

    def holding(self, inode: Inode) -> Collection[int]:
        """The numbers of the files that hold the bytes of an expert; of a directory, those in which bytes were replaced
        by renames since this was asked last, and the experts.
        """
        if not isinstance(inode, ExpertInode):
            return ()
        if inode.expert is not None:
            return [source.inode.number for source in inode.expert.sources.values()]
        with self.lock:
            replaced, inode.replaced = inode.replaced, set()
        return replaced

    # Inodes

    def _table(self, directory: Inode, wait: bool) -> LiveTable:
        key = (self.layer.id, directory.number)
        table = self._tables.get(key)
        if table is not None and table.directory is directory and table.is_fresh(self.layer):
            return table
        if not wait:
            raise NotCachedError
        with self._reading:  # whoever asks for the same meanwhile need not read it again
            before = self._tables.get(key)
            if before is not None and before.directory is not directory:
                before = None
            table = read_table(self.layer, directory, before)
            with self.lock:
                self._read.add(directory.number)
            self._tables.put(key, table, min(table.weight, limits.EXPERT_CACHE_PARTS // 2))
        return table

    def _current(self, inode: ExpertInode, wait: bool) -> Expert:
        """What an expert is now. Raises StaleError when there is none any more, or another one."""
        expert = self._table(inode.real, wait).layers.get(inode.layer, {}).get(inode.name)
        if inode.expert is None:
            raise DirectoryError(f"{inode} is a directory")
        if expert is None or self._expert_number(inode, inode.name, expert) != inode.number:
            raise StaleError(f"{os.fsdecode(inode.name)}: the files that hold it have changed")
        return expert

    def _mirror(self, real: Inode) -> ExpertInode:
        return self._made(Kind.MIRROR, real)

    def _of_expert(self, directory: ExpertInode, name: bytes, expert: Expert) -> ExpertInode:
        number = self._expert_number(directory, name, expert)
        with self.lock:
            inode = self._inodes.get(number)
            if inode is None:
                inode = self._inodes[number] = ExpertInode(number, Kind.EXPERT, directory.real, directory.layer, name)
            inode.expert = expert
        return inode

    def _expert_number(self, inode: ExpertInode, name: bytes, expert: Expert) -> int:
        real = b"%d" % inode.real.number
        return inode_number(self.layer.id, b"experts", real, inode.layer, name, expert.places)

    def _made(self, kind: Kind, real: Inode, layer: bytes = b"") -> ExpertInode:
        number = mirror_number(self.layer.id, real.number, layer)
        with self.lock:
            inode = self._inodes.get(number)
            if inode is None or inode.real is not real:
                inode = self._inodes[number] = ExpertInode(number, kind, real, layer)
        return inode

    def _clear_left_ones(self, now_ns: int) -> None:
        """Under the lock: let go of files that were made here and that nobody has had open or changed for long. Nobody
        lists them, so whoever left them behind cannot find them.
        """
        oldest = now_ns - int(limits.EXPERT_TEMPORARY_SECONDS * 1e9)
        for key, made in list(self._temporary.items()):
            if made.handles == 1 and max(made.mtime_ns, made.ctime_ns) < oldest:
                self._let_go(self._temporary.pop(key))

    def _let_go(self, made: Inode) -> None:
        """Under the lock: a file that was made here has no name any more."""
        made.handles -= 1
        self.layer.state.release(made)


def _is_shown(name: bytes, status: Status) -> bool:
    return S_ISDIR(status.mode) or is_own_file(name)
