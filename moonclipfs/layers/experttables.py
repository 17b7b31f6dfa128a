"""The experts of a directory of a layer, whose files may be written to: known until something of these changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import NamedTuple

from moonclipfs.errors import NotFoundError, ParseError
from moonclipfs.formats import gguf, safetensors
from moonclipfs.formats.experts import Parts, header, header_length, recognise
from moonclipfs.formats.layout import Layout, RegionKind
from moonclipfs.formats.sniff import parse
from moonclipfs.layers.experts import expert_name, holds_tensors
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, ObjectId

_WRITABLE = (safetensors.FORMAT, gguf.FORMAT)
"""Formats whose tensors may be changed in place: no checksum stands elsewhere in the file."""
_CHUNK = 1 << 20

Stamp = tuple[ObjectId, int, int]


class Source(NamedTuple):
    """A file of a checkpoint, and what was seen of it. `head` is of the first `head_length` bytes, which say where all
    tensors are; empty where more than these says so.
    """

    inode: Inode
    stamp: Stamp
    head_length: int
    head: bytes
    writable: bool


class Expert(NamedTuple):
    """One expert of a directory of a layer."""

    layer: str
    number: int
    parts: Parts
    sources: Mapping[str, Source]
    size: int
    places: bytes
    """Tells experts apart whose bytes are in other files, or at other places."""

    @property
    def head(self) -> bytes:
        """What its file begins with."""
        return header(self.layer, self.number, self.parts)

    @property
    def writable(self) -> bool:
        """Whether its bytes may be changed where they are."""
        return all(source.writable for source in self.sources.values())


class LiveTable(NamedTuple):
    """The experts of a directory, by the names of their layer's directory and of their file."""

    directory: Inode
    seen: tuple[int, int]
    sources: Mapping[bytes, Source]
    layers: Mapping[bytes, Mapping[bytes, Expert]]

    @property
    def weight(self) -> int:
        """Tensors and names, about."""
        return 1 + sum(1 + len(one.parts) for experts in self.layers.values() for one in experts.values())

    def is_fresh(self, layer: Layer) -> bool:
        """Whether nothing has changed in the directory, or in the files that hold tensors. Waits for nothing."""
        with layer.lock:
            return self.seen == _seen(layer, self.directory) and all(
                source.stamp == _stamp(source.inode) for source in self.sources.values()
            )


def read_table(layer: Layer, directory: Inode, before: LiveTable | None) -> LiveTable:
    """The experts of a directory as they are; `before` is what was known of it. Raises CorruptError, BackendError."""
    with layer.lock:
        seen = _seen(layer, directory)
    inodes = dict(_checkpoint_files(layer, directory))
    if before is not None and inodes == {name: source.inode for name, source in before.sources.items()}:
        sources = {name: source._replace(stamp=_stamp(source.inode)) for name, source in before.sources.items()}
        if all(_is_same(layer, before.sources[name], source) for name, source in sources.items()):
            return before._replace(seen=seen, sources=sources)
    read = {name: _read(layer, name, inode) for name, inode in inodes.items()}
    sources = {name: source for name, (source, _) in read.items()}
    found = recognise((os.fsdecode(name), layout) for name, (_, layout) in read.items())
    layers: dict[bytes, Mapping[bytes, Expert]] = {}
    for name, experts in found.items():
        known: dict[bytes, Expert] = {}
        for number, parts in experts.items():
            of_it = {part.file: sources[os.fsencode(part.file)] for part in parts}
            size = header_length(name, number, parts) + sum(part.length for part in parts)
            known[expert_name(number)] = Expert(name, number, parts, of_it, size, _places(parts, of_it))
        layers[name.encode()] = known
    return LiveTable(directory, seen, sources, layers)


def _places(parts: Parts, sources: Mapping[str, Source]) -> bytes:
    where = [(sources[part.file].inode.number, part.offset, part.length, part.name) for part in parts]
    return blake2b(repr(where).encode("utf-8", "surrogateescape"), digest_size=16).digest()


def read_whole(file: OpenFile, offset: int, length: int) -> bytes:
    """Bytes of a file that may be cut off meanwhile: raises ParseError then."""
    data = file.read(offset, length)
    if len(data) != length:
        raise ParseError("the file was cut off while it was read")
    return data


class Contents:
    """A `types.Source` over an open file, as long as it was at first."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self.size = file.size

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes. Raises ParseError when they are gone, CorruptError."""
        return read_whole(self._file, offset, length)


def _checkpoint_files(layer: Layer, directory: Inode) -> Iterator[tuple[bytes, Inode]]:
    for name in layer.names_in(directory):
        if holds_tensors(name):
            try:
                inode = layer.lookup(directory, name)
            except NotFoundError:
                continue
            if inode.is_file:
                yield name, inode


def _seen(layer: Layer, directory: Inode) -> tuple[int, int]:
    """Another pair when a name in a directory means something else."""
    return layer.state.names_version, directory.below


def _stamp(inode: Inode) -> Stamp:
    """Another one when bytes of a file may have changed."""
    content = inode.content
    return (inode.child, inode.size, -1) if content is None else (NO_ID, 0, content.stamp)


def _is_same(layer: Layer, before: Source, now: Source) -> bool:
    """Whether the tensors of a file are where they were."""
    if before.stamp == now.stamp:
        return True
    if not before.head:
        return False
    file = layer.open_file(now.inode, write=False)
    try:
        return file.size >= before.head_length and _digest(file, before.head_length) == before.head
    except ParseError:
        return False
    finally:
        file.close()


def _read(layer: Layer, name: bytes, inode: Inode) -> tuple[Source, Layout]:
    with layer.lock:
        stamp, content = _stamp(inode), inode.content
        recipe = inode.child if content is None else content.recipe if content.exact else None
        size = inode.size if content is None else content.size
    file = layer.open_file(inode, write=False)
    try:
        if recipe is not None and recipe != NO_ID:
            layout = layer.store.layout(Entry(name, EntryType.FILE, Attributes(0), size, recipe))
        else:
            layout = parse(Contents(file))
        writable = layout.format in _WRITABLE and not layout.reason
        first = layout.regions[0] if layout.regions else None
        length = first.length if writable and first is not None and first.kind is RegionKind.HEADER else 0
        try:
            head = _digest(file, length) if length else b""
        except ParseError:
            head = b""
    finally:
        file.close()
    return Source(inode, stamp, length, head, writable), layout


def _digest(file: OpenFile, length: int) -> bytes:
    """Of the first bytes of a file, and of its length, which a head does not tell. Raises ParseError."""
    digest = blake2b(str(file.size).encode(), digest_size=16)
    for at in range(0, length, _CHUNK):
        digest.update(read_whole(file, at, min(_CHUNK, length - at)))
    return digest.digest()
