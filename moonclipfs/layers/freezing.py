"""What a directory of a layer holds at one moment, as a tree that never changes: the first half of every capture.

Staged bytes that it needs are frozen: later writes go to new generations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from moonclipfs import limits
from moonclipfs.errors import LimitError
from moonclipfs.layers.captured import CapturedEntry, files_needed
from moonclipfs.layers.changes import Changes
from moonclipfs.layers.contents_records import size_of
from moonclipfs.layers.files import Files
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.names import Area, join
from moonclipfs.layers.staging import Generation
from moonclipfs.types import NO_ID, EntryType


@dataclass(frozen=True, slots=True)
class Frozen:
    """A directory at the moment when the layer's change counter was `counter`, and the generations that it needs, which
    are kept until `thaw`.
    """

    tree: CapturedEntry
    counter: int
    pinned: tuple[Generation, ...]


def freeze(layer: Changes, files: Files, directory: Inode) -> Frozen:
    """Freeze all that a directory shows, snapshots bound below it too, without a trace in the journal: a kill undoes
    it. Raises LimitError, CorruptError, NoSpaceError, BackendError.
    """

    def body() -> Frozen:
        builder = Builder(layer, files, whole=True)
        builder.settle(directory)
        tree = builder.directory(b"", directory, layer.path(directory))
        generations = builder.generations(files_needed(tree))
        files.log.disposal.pin(generations)
        return Frozen(tree, layer.counter, tuple(generations))

    return layer.run(body, wait=True)


def thaw(layer: Changes, files: Files, frozen: Frozen) -> None:
    """Let go of the staged bytes that were kept for a frozen directory."""
    with layer.lock:
        files.log.disposal.unpin(frozen.pinned, after_commit=True)


def staged_paths(generations: tuple[Generation, ...]) -> dict[int, str]:
    """Where the bytes of generations are, by number."""
    return {generation.number: generation.path for generation in generations if generation.path is not None}


def resolved(layer: Changes, entry: CapturedEntry, counter: int) -> CapturedEntry:
    """A tree that was frozen at `counter`, where files that have not changed since and are stored come from their
    recipes. Under the lock.
    """
    if entry.is_directory:
        return entry._replace(entries=tuple(resolved(layer, one, counter) for one in entry.entries))
    inode = layer.state.own.get(entry.inode)
    if not entry.parts or inode is None or inode.changed > counter:
        return entry
    content = inode.content
    if content is None:
        return entry._replace(parts=(), data=(), child=inode.child, size=inode.size)
    if content.exact and not content.is_staged:
        return entry._replace(parts=(), data=(), child=content.recipe, size=content.size)
    return entry


class Builder:
    """Makes the captured tree of a directory. Under the layer's lock; costs what was changed, no more."""

    def __init__(self, layer: Changes, files: Files, *, whole: bool = False) -> None:
        """Snapshots bound below the directory have names of their own: they are part of a `whole` tree only."""
        self._layer = layer
        self._files = files
        self._whole = whole
        self._generations: dict[int, Generation] = {}

    def settle(self, directory: Inode) -> None:
        """Journal what memory is ahead of the journal: a write after the capture then counts as a later change."""
        for inode in own_files(directory):
            self._files.log.journal(inode)

    def generations(self, needed: set[int]) -> list[Generation]:
        """Those in files with these numbers."""
        return [self._generations[number] for number in sorted(needed)]

    def directory(self, name: bytes, inode: Inode, path: bytes, depth: int = 0) -> CapturedEntry:
        """A directory with what changed in it. Raises LimitError, and in a whole tree Missing."""
        if depth > limits.PATH_DEPTH:
            raise LimitError(f"/{os.fsdecode(path)}: more than {limits.PATH_DEPTH} directories deep")
        bound = self._layer.view.area(Area.LIVE).leaves
        lower, entries = inode.lower, []
        for child_name, child in inode.entries.items():
            place = join(path, child_name)
            if child.is_directory:
                # Clean ones too: what others changed in them has to show through after the seal.
                if self._whole or not (place in bound and child.sealed):
                    entries.append(self.directory(child_name, child, place, depth + 1))
            elif lower is None or child_name in inode.names_changed or child.below:
                entries.append(self._file(child_name, child) if child.is_file else _entry(child_name, child))
        for child_name in self._layer.bound_in(inode) if self._whole else ():
            if child_name not in inode.entries:
                child = self._layer.look_inside(inode, child_name)
                entries.append(self.directory(child_name, child, join(path, child_name), depth + 1))
        anchor, child_id = (b"", NO_ID) if lower is None else (lower.anchor, lower.directory)
        # Where names are bound in it, it is newer than what it shows through.
        mtime, ctime = self._layer.times(inode) if self._whole else (inode.mtime_ns, inode.ctime_ns)
        return _entry(name, inode)._replace(
            mtime_ns=mtime,
            ctime_ns=ctime,
            child=child_id,
            anchor=anchor,
            removed=tuple(sorted(inode.removed)),
            entries=tuple(entries),
        )

    def _file(self, name: bytes, inode: Inode) -> CapturedEntry:
        lower = inode.lower
        entry = _entry(name, inode)._replace(
            size=size_of(inode), child=inode.child, group=inode.group, anchor=b"" if lower is None else lower.anchor
        )
        content = inode.content
        if content is None:
            return entry
        entry = entry._replace(child=content.recipe)
        if content.exact and not content.is_staged:
            return entry if content.size else entry._replace(child=NO_ID)
        parts, data = [], []
        for part in content.freeze():
            generation = part.generation
            parts.append((part.offset, part.length, part.kind, 0 if generation is None else generation.number))
            if generation is not None and generation.path is None:
                bytes_ = bytearray(part.length)
                generation.read_into(part.offset, memoryview(bytes_))
                data.append((generation.number, part.offset, bytes(bytes_)))
            elif generation is not None:
                self._generations[generation.number] = generation
        return entry._replace(parts=tuple(parts), data=tuple(data), freeze=content.newest)


def own_files(directory: Inode) -> Iterator[Inode]:
    """The own files of a directory's tree. Under the layer's lock."""
    todo = [directory]
    while todo:
        for child in todo.pop().entries.values():
            if child.is_directory:
                todo.append(child)
            elif child.is_file:
                yield child


def _entry(name: bytes, inode: Inode) -> CapturedEntry:
    xattrs = tuple(sorted(inode.xattrs.items()))
    return CapturedEntry(
        name, inode.type, inode.number, inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.ctime_ns, xattrs,
        0, NO_ID, inode.target if inode.type is EntryType.SYMLINK else b"",
    )  # fmt: skip
