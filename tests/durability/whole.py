"""A layer with all that works behind it, in one process, while every call that changes the disk is recorded."""

from __future__ import annotations

import functools
import os
import shutil
import time
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.reclaim import reclaim
from moonclipfs.layers.seal import Sealer
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.check import verify
from moonclipfs.store.store import Store
from tests.faults import CrashState, RecordingOps
from tests.layers.filekit import encode, read_all
from tests.layers.sealkit import LocalEncoder, directory, put, stored, tree
from tests.layers.test_layer_crash import Content, mixtures, opened, prefixes

Allowed: TypeAlias = dict[str, set[Content]]
Files: TypeAlias = dict[str, bytes]


class Behind(LocalEncoder):
    """Reclaims too, in this process."""

    def call(self, op: str, **arguments: Any) -> Any:
        return reclaim(self.layer.store, arguments) if op == "reclaim" else super().call(op, **arguments)


class Whole:
    """A life in which files are written, stored, sealed, moved, removed and reclaimed; and what may be left of each
    file after each step, by a killed process and by a power failure.

    `moves` are names of which only one may be there at a time: (old, new).
    """

    def __init__(self, root: Path, ops: type[RecordingOps] = RecordingOps) -> None:
        Store.create(root).close()
        with Store.open(root, write=True, index_path=root.with_name("index.sqlite")) as store:
            Layer.open(store, "test").close()
        self.recorder = ops(root)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moonclipfs.store.store.LocalBackend", functools.partial(LocalBackend, ops=self.recorder))
            self.store = Store.open(root, write=True, index_path=root.with_name("index.sqlite"))
        self.layer = Layer.open(self.store, "test", ops=self.recorder)
        self.behind = Behind(self.layer)
        self.sealer = Sealer(self.layer, self.behind, seal_after=None)
        self.kill: list[Allowed] = []
        self.power: list[Allowed] = []
        self.captured: list[Files] = []
        self.published: list[int] = []
        """How many versions were promised, by mark."""
        self.moves: list[tuple[str, str]] = []
        self._kill: Allowed = {}
        self._power: Allowed = {}
        self._published = 0
        self._mark()

    def close(self) -> None:
        self.layer.journal.close()
        self.layer._lock_file.release()
        self.store.close()

    # What is promised

    def _mark(self) -> None:
        self.recorder.mark(str(len(self.kill)))
        self.kill.append({path: set(allowed) for path, allowed in self._kill.items()})
        self.power.append({path: set(allowed) for path, allowed in self._power.items()})
        self.published.append(self._published)

    def may(self, path: str, *contents: Content) -> None:
        """From here on, a file may also be one of these."""
        for allowed in (self._kill, self._power):
            allowed.setdefault(path, {None}).update(contents)
        self._mark()

    def accepted(self) -> None:
        """What is there now is what a killed process leaves."""
        live = tree(self.layer)
        self._kill = {path: {live.get(path)} for path in self._kill}
        self._mark()

    def durable(self, *paths: str) -> None:
        """What these files are now, or all of them, is what anything leaves."""
        self.accepted()
        for path in paths or self._kill:
            self._power[path] = set(self._kill[path])
        self._mark()

    # Steps

    def put(self, path: str, data: bytes) -> None:
        """A new file, or a new one in place of another."""
        self.may(path, *prefixes(data))
        put(self.layer, path, data)
        self.accepted()

    def overwrite(self, path: str, offset: int, data: bytes, *, sync: bool) -> None:
        """Write in place."""
        inode = self.layer.resolve(path.encode())
        old = read_all(self.layer, inode)
        self.may(path, *mixtures(old, old[:offset] + data + old[offset + len(data) :]))
        file = self.layer.open_file(inode, write=True)
        file.write(offset, data, 7)
        if sync:
            file.sync()
            self.durable(path)
        file.close()
        self.accepted()

    def fsync(self, path: str) -> None:
        file = self.layer.open_file(self.layer.resolve(path.encode()), write=False)
        file.sync()
        file.close()
        self.durable(path)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, or a directory with all below."""
        below = {path: data for path, data in tree(self.layer).items() if f"{path}/".startswith(f"{old}/")}
        for path, data in below.items():
            self._kill[path].add(None)
            self._power[path].add(None)
            self.may(new + path[len(old) :], data, *self._power[path])
        if len(below) != 1 or old not in below:
            self.moves.append((old, new))
        (above, name), (new_above, new_name) = self._place(old), self._place(new)
        self.layer.rename(above, name, new_above, new_name, 8)
        self.accepted()

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all below."""
        inode = self.layer.resolve(path.encode())
        if inode.is_directory:
            for name in self.layer.names_in(inode):
                self.remove(f"{path}/{name.decode()}")
            self.layer.rmdir(*self._place(path), 9)
        else:
            self.may(path, None)
            self.layer.unlink(*self._place(path), 9)
        self.accepted()

    def _place(self, path: str) -> tuple[Inode, bytes]:
        above, _, name = path.rpartition("/")
        return (directory(self.layer, above) if above else self.layer.root), name.encode()

    def encode(self) -> None:
        """Store all that is staged."""
        encode(self.layer, *self.layer.take_jobs(time.monotonic() + 100, urgent=True))
        self.accepted()

    def seal(self, path: str, *, wait: bool = True) -> None:
        self.captured.append(tree(self.layer, path))
        self.sealer.seal(path.encode(), wait=wait)
        if wait:
            self._published = len(self.captured)
        self._mark()

    def sync(self) -> None:
        """What the background does every few seconds."""
        self.layer.sync_all()
        self.durable()
        self.layer.push_names()
        self._mark()

    def reclaim(self) -> None:
        """What is done on a full disk, but for the versions that were removed."""
        self.behind.call("reclaim", forget=(), pressed=True)
        self._mark()


def broken(life: Whole, state: CrashState, root: Path, boot: bytes | None) -> str:
    """What is wrong with a state; empty when nothing is."""
    if not state.marks:
        return ""
    mark = int(state.marks[-1])
    allowed = (life.kill if boot is None else life.power)[mark]
    state.write(root)
    try:
        with opened(root, boot) as layer:
            live = tree(layer)
            wrong = _look(layer, live, allowed, life, life.published[mark])
        if not wrong:
            with opened(root, b"third".ljust(16)) as layer:
                wrong = "" if tree(layer) == live else "the next time it is different"
                wrong = wrong or _clear(layer)
        return wrong
    finally:
        shutil.rmtree(root)


def _look(layer: Layer, live: Files, allowed: Allowed, life: Whole, published: int) -> str:
    for path in allowed.keys() | live.keys():
        if live.get(path) not in allowed.get(path, {None}):
            return f"{path!r} is {live.get(path)!r}"
    names = set(layer.store.names().bound())
    for old, new in life.moves:
        both = [any(f"{path}/".startswith(f"{top}/") for path in live.keys() | names) for top in (old, new)]
        if all(both):
            return f"some is at {old}, some at {new}: {sorted(live)}, {sorted(names)}"
    behind = Behind(layer)
    Sealer(layer, behind, seal_after=None).tick(float("inf"))
    versions = sorted(layer.store.names().all_versions(), key=lambda version: version.sequence)
    found = [stored(layer.store, version) for version in versions]
    if found != life.captured[: len(found)] or len(found) < published:
        return f"{published} versions were promised, {len(found)} are there, of {len(life.captured)} captured"
    behind.drain()
    layer.sync_all()
    layer.push_names()
    return "" if tree(layer) == live else "work in the background changed something"


def _clear(layer: Layer) -> str:
    """All is stored by now: nothing may be staged, and the store is whole."""
    layer.sync_all()
    if staged := os.listdir(layer.staging.directory):
        return f"staging files that nobody needs: {staged}"
    problems = verify(layer.store).problems
    return str(problems) if problems else ""
