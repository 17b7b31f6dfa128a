"""Overlays for tests, whose encoder works in this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moonclipfs.layers import committing
from moonclipfs.layers.basing import BaseOf, held, of_version
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.overlay import Overlay
from moonclipfs.store.store import Store
from tests.layers.filekit import encode, read_all
from tests.layers.sealkit import carried


class LocalOverlayEncoder:
    """Does at once what `OverlayEncoder` has a process for. `fails` is raised by the next operation."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.calls: list[str] = []
        self.fails: Exception | None = None
        self.wanted = False
        self.failures = 0
        self.encoded_bytes = 0
        self.on_wake = lambda: None

    @contextmanager
    def running(self) -> Iterator[LocalOverlayEncoder]:
        yield self

    def drain(
        self, inodes: Collection[Inode] | None = None, timeout: float | None = None, *, urgent: bool = True
    ) -> None:
        encode(self.layer, *self.layer.take_jobs(time.monotonic(), urgent=True, inodes=inodes))

    def call(self, op: str, **arguments: Any) -> Any:
        self.calls.append(op)
        work = {"capture": committing.capture, "commit": committing.commit}[op]
        answer = carried(work(self.layer.store, carried(arguments)))
        if self.fails is not None:
            raise self.fails
        return answer

    def wake(self) -> None:
        self.wanted = True

    def relieve(self, stopping: threading.Event) -> None:
        self.wanted = False
        self.drain()

    def is_due(self, now: float) -> bool:
        return False

    def end(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {}


def create(store: Store, name: str, spec: str | BaseOf = "", **options: Any) -> Overlay:
    """A new overlay on a snapshot."""
    with held(store):
        base = spec if isinstance(spec, BaseOf) else of_version(store, spec) if spec else BaseOf()
        return Overlay.create(store, name, base, **options)


def everything(layer: Layer, path: str = "") -> dict[str, tuple[object, ...]]:
    """All that a tree shows: numbers, attributes, sizes, times and bytes, by path."""
    found: dict[str, tuple[object, ...]] = {}
    todo = [(layer.resolve(path.encode()), "")]
    while todo:
        inode, place = todo.pop()
        status = layer.stat(inode)
        xattrs = {name: layer.xattr(inode, name) for name in layer.xattr_names(inode)}
        data = read_all(layer, inode) if inode.is_file else inode.target
        found[place] = (inode.number, inode.type, *status, xattrs, data)
        if inode.is_directory:
            todo += [(layer.lookup(inode, name), f"{place}/{os.fsdecode(name)}") for name in layer.names_in(inode)]
    return found


def stored_bytes(store: Store) -> int:
    """Bytes of all packs."""
    return sum(path.stat().st_size for path in (Path(store.path) / "packs").rglob("*") if path.is_file())


def size_of_overlay(store: Store, overlay: Overlay) -> int:
    """Bytes on the disk of an overlay's own state."""
    top = Path(store.path) / "layers" / overlay.info.layer
    paths = [top, *top.rglob("*"), Path(store.path) / "overlays" / overlay.name]
    return sum(path.lstat().st_blocks * 512 for path in paths)
