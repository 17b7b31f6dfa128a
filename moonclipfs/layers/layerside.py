"""A layer as a side of a comparison: of its files, what is known without reading."""

from __future__ import annotations

import os
from collections.abc import Iterator

from moonclipfs import limits
from moonclipfs.errors import BusyError, LimitError
from moonclipfs.layers.content import Part
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.records import PART_HOLE, PART_RECIPE
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.sides import SideFile
from moonclipfs.store.store import Store
from moonclipfs.types import ID_BYTES, NO_ID, EntryType, Extent, ObjectId, Source


class LayerFiles:
    """Files of a layer as sides have them, open for reading until `close`. A context manager."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._open: list[OpenFile] = []

    def __enter__(self) -> LayerFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.pop().close()

    def below(self, directory: Inode, prefix: bytes = b"", depth: int = 0) -> Iterator[tuple[bytes, SideFile]]:
        """All in a directory that are no directories, by path. Raises CorruptError, LimitError."""
        if depth > limits.PATH_DEPTH:
            raise LimitError(f"{os.fsdecode(prefix)}: more than {limits.PATH_DEPTH} directories deep")
        names = self._layer.names_in(directory)
        for name, found in zip(names, self._layer.children(directory, names), strict=True):
            if found is None:
                continue  # removed meanwhile
            inode, _ = found
            if inode.is_directory:
                yield from self.below(inode, prefix + name + b"/", depth + 1)
            else:
                yield prefix + name, self.side(inode, prefix + name)

    def side(self, inode: Inode, path: bytes) -> SideFile:
        """What is no directory; `path` is for messages. Raises CorruptError."""
        if inode.type is not EntryType.FILE:
            return SideFile(inode.type, _no_source, target=inode.target)
        with self._layer.lock:
            content = inode.content
            if content is None:
                kind = PART_HOLE if inode.child == NO_ID else PART_RECIPE
                parts, recipe = [Part(0, inode.size, kind)] if inode.size else [], inode.child
            else:
                parts, recipe = content.parts(0, content.size), content.recipe
        known = Recipe(list(_extents(self._layer.store, parts, recipe)))
        return SideFile(EntryType.FILE, lambda: self._source(inode, path, known.size), recipe=known)

    def _source(self, inode: Inode, path: bytes, size: int) -> Source:
        file = self._layer.open_file(inode, write=False)
        self._open.append(file)
        return _LayerSource(file, path, size)


class _LayerSource:
    """The bytes of a file as long as it was when the comparison began."""

    def __init__(self, file: OpenFile, path: bytes, size: int) -> None:
        self._file = file
        self._path = path
        self.size = size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`. Raises BusyError when they are not there any more, CorruptError."""
        data = self._file.read(offset, length)
        if len(data) != length:
            raise BusyError(f"{os.fsdecode(self._path)} was cut off while it was compared: try again")
        return data


def _extents(store: Store, parts: list[Part], recipe: ObjectId) -> Iterator[Extent]:
    """What the bytes are; those that are staged as an object that nothing else has, so that they count as unknown."""
    stored = store.recipe_object(recipe) if recipe != NO_ID else Recipe(())
    for part in parts:
        if part.kind == PART_HOLE:
            yield Extent(part.length)
        elif part.kind == PART_RECIPE:
            for extent, inside, length in stored.locate(part.offset, part.length):
                literal = None if extent.literal is None else extent.literal[inside : inside + length]
                yield Extent(length, extent.object_id, extent.object_offset + inside, literal)
        else:
            yield Extent(part.length, os.urandom(ID_BYTES))


def _no_source() -> Source:
    raise AssertionError("only a file has bytes")
