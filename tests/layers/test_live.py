"""A live layer at work without a mount: what a program writes is stored, sealed, seen by others, and reclaimed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.live import Live, LiveOptions
from moonclipfs.store.gc import collect
from moonclipfs.store.rebind import clone
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType

_PATIENCE_SECONDS = 60.0


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def save(live: Live, directory: bytes, name: bytes, data: bytes) -> Inode:
    """Write a file into a directory at the root, which is made when it is not there."""
    layer = live.layer
    if directory not in layer.names_in(layer.root):
        layer.make(layer.root, directory, EntryType.DIRECTORY, 0o755, 0, 0, time.time_ns())
    inode = layer.make(layer.resolve(directory), name, EntryType.FILE, 0o644, 0, 0, time.time_ns())
    file = layer.open_file(inode, write=True)
    file.write(0, data, time.time_ns())
    file.flush()
    file.close()
    return inode


def test_what_is_written_is_stored_and_sealed_and_seen_by_other_processes(store: Store) -> None:
    data = os.urandom(300_000)
    with Live(store, LiveOptions(seal_after=None)) as live:
        save(live, b"run", b"model.bin", data)
        live.flush()
        assert live.status()["staged_files"] == 0
        version = live.seal(b"run")
        assert version is not None and version.path == "run"
        with Store.open(store.path) as other:
            entry = other.lookup(other.resolve("run"), b"model.bin")
            assert other.open_file(entry).read(0, entry.size) == data


def test_what_others_publish_appears(store: Store) -> None:
    with Live(store, LiveOptions(seal_after=None)) as live, Store.open(store.path, write=True) as other:
        save(live, b"run", b"model.bin", b"weights")
        live.seal(b"run")
        clone(other, "run", "copy")
        assert eventually(lambda: b"copy" in live.layer.names_in(live.layer.root))


def test_gc_of_others_does_not_wait_for_it(store: Store) -> None:
    with Live(store, LiveOptions(seal_after=None)) as live, Store.open(store.path, write=True) as other:
        save(live, b"run", b"model.bin", os.urandom(1_000_000))
        version = live.seal(b"run")
        assert version is not None
        layer = live.layer
        layer.unlink(layer.resolve(b"run"), b"model.bin", time.time_ns())
        layer.rmdir(layer.root, b"run", time.time_ns())
        assert eventually(lambda: "run" not in other.names().bound())
        other.log.forget([("run", version.number)])
        live.reclaimer.leave()  # the journal lets go of what it named

        def reclaimed() -> bool:
            collect(other)
            return sum(path.stat().st_size for path in Path(store.path, "packs").iterdir()) < 500_000

        assert eventually(reclaimed)


def test_nothing_is_lost_between_one_life_and_the_next(store: Store) -> None:
    data = os.urandom(100_000)
    with Live(store, LiveOptions(seal_after=None)) as live:
        number = save(live, b"run", b"log.txt", data).number
    with Live(store, LiveOptions(seal_after=None)) as live:
        inode = live.layer.resolve(b"run/log.txt")
        assert inode.number == number
        file = live.layer.open_file(inode, write=False)
        assert file.read(0, len(data)) == data
        file.close()
