"""Layers with checkpoints in them, and an encoder without a process, for tests of seals."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

import msgpack

from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.publishing import publish
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType, Version
from tests.formats.samples import entry, safetensors
from tests.layers.filekit import encode, read_all, write_file


class LocalEncoder:
    """Does at once, in this process, what the encoder has its own for."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.calls: list[dict[str, Any]] = []

    def drain(
        self, inodes: Collection[Inode] | None = None, timeout: float | None = None, *, urgent: bool = True
    ) -> None:
        encode(self.layer, *self.layer.take_jobs(time.monotonic(), urgent=True, inodes=inodes))

    def call(self, op: str, **arguments: Any) -> Any:
        assert op == "publish"
        self.calls.append(arguments)
        return carried(publish(self.layer.store, carried(arguments)))


def carried(value: Any) -> Any:
    """As it arrives at the other process."""
    return msgpack.unpackb(msgpack.packb(value, use_bin_type=True), raw=False, use_list=False, strict_map_key=False)


def model(seed: int = 0, length: int = 4000) -> bytes:
    """A whole file of safetensors."""
    data = bytes((seed * 7 + i) % 251 for i in range(length))
    return safetensors({"w": entry("U8", [length], 0, length)}, data)


def directory(layer: Layer, path: str, now_ns: int = 1) -> Inode:
    """The directory at a path, with all above, made where it is missing."""
    inode = layer.root
    for name in path.encode().split(b"/"):
        try:
            inode = layer.lookup(inode, name)
        except Exception:  # it is not there
            inode = layer.make(inode, name, EntryType.DIRECTORY, 0o755, 0, 0, now_ns)
    return inode


def put(layer: Layer, path: str, data: bytes) -> Inode:
    """A new file, or a new content of one, with all directories above."""
    above, _, name = path.rpartition("/")
    place = directory(layer, above) if above else layer.root
    try:
        layer.unlink(place, name.encode(), 1)
    except Exception:  # it is not there
        pass
    return write_file(layer, name.encode(), data, place)


def tree(layer: Layer, path: str = "") -> dict[str, bytes]:
    """The bytes of all files below a path."""
    found: dict[str, bytes] = {}
    todo = [(layer.resolve(path.encode()), "")]
    while todo:
        inode, prefix = todo.pop()
        for name in layer.names_in(inode):
            child = layer.lookup(inode, name)
            place = prefix + name.decode()
            if child.is_directory:
                todo.append((child, place + "/"))
            elif child.is_file:
                found[place] = read_all(layer, child)
    return found


def identities(layer: Layer, path: str = "") -> dict[str, tuple[object, ...]]:
    """What a seal never changes: inode numbers, times, modes, sizes and link counts, by path."""
    found: dict[str, tuple[object, ...]] = {}
    todo = [(layer.resolve(path.encode()), "")]
    while todo:
        inode, place = todo.pop()
        status = layer.stat(inode)
        found[place] = (inode.number, *status)
        if inode.is_directory:
            todo += [(layer.lookup(inode, name), f"{place}/{name.decode()}") for name in layer.names_in(inode)]
    return found


def stored(store: Store, version: Version) -> dict[str, bytes]:
    """The bytes of all files of a version."""
    found = {}
    for path, one in store.walk(version):
        if one.type is EntryType.FILE:
            reader = store.open_file(one)
            found[path.decode()] = reader.read(0, reader.size)
    return found


def picture(layer: Layer, path: str) -> dict[str, tuple[object, ...]]:
    """All that a version keeps of a directory's tree, by path, as the layer shows it."""
    found: dict[str, tuple[object, ...]] = {}
    linked: dict[int, list[str]] = {}
    todo = [(layer.resolve(path.encode()), "")]
    while todo:
        above, prefix = todo.pop()
        for name in layer.names_in(above):
            inode = layer.lookup(above, name)
            place = prefix + name.decode()
            status = layer.stat(inode)
            data = read_all(layer, inode) if inode.is_file else inode.target
            found[place] = (inode.type, inode.mode, status.uid, status.gid, status.mtime_ns, status.ctime_ns, data)
            if inode.is_directory:
                todo.append((inode, place + "/"))
            else:
                linked.setdefault(inode.number, []).append(place)
    return _with_links(found, linked.values())


def stored_picture(store: Store, version: Version) -> dict[str, tuple[object, ...]]:
    """The same of a version."""
    found: dict[str, tuple[object, ...]] = {}
    linked: dict[int, list[str]] = {}
    for path, one in store.walk(version):
        data, attributes = one.target, one.attributes
        if one.type is EntryType.FILE:
            reader = store.open_file(one)
            data = reader.read(0, reader.size)
        times = attributes.mtime_ns, attributes.ctime_ns
        found[path.decode()] = (one.type, attributes.mode, attributes.uid, attributes.gid, *times, data)
        if one.link_group:
            linked.setdefault(one.link_group, []).append(path.decode())
    return _with_links(found, linked.values())


def _with_links(
    found: dict[str, tuple[object, ...]], linked: Iterable[Collection[str]]
) -> dict[str, tuple[object, ...]]:
    groups = {path: frozenset(paths) for paths in linked for path in paths}
    return {path: (*what, groups.get(path, frozenset([path]))) for path, what in found.items()}
