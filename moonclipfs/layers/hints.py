"""Which stored file a new one probably differs little from: what it replaced, or its like in the directory's line.

The line of `run1/checkpoint-1000/unet/x` is found at the nearest directory above that has siblings called as it is but
for numbers (`checkpoint-500`), then at any sibling. Of the siblings that have the same path below, the newest counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TypeAlias

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.lookup import Lookup
from moonclipfs.layers.units import masked
from moonclipfs.store.cache import BoundedCache
from moonclipfs.types import NO_ID, EntryType, ObjectId, natural_key

Lines: TypeAlias = BoundedCache[tuple[bytes, bytes, bool], list[bytes]]


class Hints:
    """Hints for the files of one layer."""

    def __init__(self, layer: Lookup) -> None:
        self._layer = layer
        self._replaced: BoundedCache[int, ObjectId] = BoundedCache(limits.HINTS)

    def replaced(self, inode: Inode, recipe: ObjectId) -> None:
        """A file takes the place of what `recipe` is."""
        self._replaced.put(inode.number, recipe)

    def of(self, inode: Inode) -> ObjectId:
        """The recipe of what a file replaced, or consisted of before; NO_ID for none."""
        content = inode.content
        return self._replaced.get(inode.number) or (NO_ID if content is None else content.recipe)

    def find(self, path: bytes, size: int, lines: Lines) -> ObjectId:
        """The recipe of the like of a new file at `path`; NO_ID for none. Waits for the store; not under the lock.

        `lines` remembers from file to file which names are alike.
        """
        if size <= limits.LITERAL_FILE_BYTES:
            return NO_ID  # it has no objects of its own
        recipe = self._in_base(path)
        if recipe != NO_ID:
            return recipe
        above = list(_places(path))
        tries = [(place, True) for place in [*above, _whole(path)]] + [(place, False) for place in above]
        for (directory, name, below), alike in tries:
            recipe = self._newest(directory, name, below, alike, lines)
            if recipe != NO_ID:
                return recipe
        return NO_ID

    def _in_base(self, path: bytes) -> ObjectId:
        """The recipe of the file that the base of an overlay has at a path."""
        based = self._layer.state.based
        if based is None:
            return NO_ID
        child, type_ = based.base, EntryType.DIRECTORY
        try:
            for name in path.split(b"/"):
                if type_ is not EntryType.DIRECTORY or child == NO_ID:
                    return NO_ID
                entry = self._layer.store.directory(child).get(name)
                if entry is None:
                    return NO_ID
                child, type_ = entry.child, entry.type
        except MoonclipError:
            return NO_ID  # whoever opens it is told
        return child if type_ is EntryType.FILE else NO_ID

    def _newest(self, directory: bytes, name: bytes, below: bytes, alike: bool, lines: Lines) -> ObjectId:
        best, newest = NO_ID, -1
        try:
            parent = self._layer.resolve(directory)
            for other in self._line(parent, directory, masked(name), alike, lines):
                found = None if other == name else self._recipe(parent, other, below)
                if found is not None and found[1] > newest:
                    best, newest = found
        except MoonclipError:
            return NO_ID  # names changed meanwhile, or a directory is damaged: whoever opens it is told
        return best

    def _line(self, parent: Inode, directory: bytes, mask: bytes, alike: bool, lines: Lines) -> list[bytes]:
        """The last names of a directory that are called as `mask` says, or are not."""
        key = (directory, mask, alike)
        names = lines.get(key)
        if names is None:
            found = [name for name in self._layer.names_in(parent) if (masked(name) == mask) == alike]
            names = sorted(found, key=lambda name: natural_key(os.fsdecode(name)))[-limits.HINT_SIBLINGS :]
            lines.put(key, names)
        return names

    def _recipe(self, parent: Inode, name: bytes, below: bytes) -> tuple[ObjectId, int] | None:
        """The recipe at `name`/`below` and when it was written, in nanoseconds; None when there is no stored file."""
        inode = parent
        try:
            for part in (name, *below.split(b"/")) if below else (name,):
                inode = self._layer.lookup(inode, part)
        except MoonclipError:
            return None
        if not inode.is_file:
            return None
        recipe = inode.child if inode.content is None else inode.content.recipe
        return None if recipe == NO_ID else (recipe, inode.ctime_ns)


def _places(path: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(directory, name in it, path below that) for each directory above a file, nearest first."""
    parts = path.split(b"/")
    for depth in range(len(parts) - 2, max(-1, len(parts) - 2 - limits.HINT_DEPTH), -1):
        yield b"/".join(parts[:depth]), parts[depth], b"/".join(parts[depth + 1 :])


def _whole(path: bytes) -> tuple[bytes, bytes, bytes]:
    """The same for the file itself."""
    directory, _, name = path.rpartition(b"/")
    return directory, name, b""
