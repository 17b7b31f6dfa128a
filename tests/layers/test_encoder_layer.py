"""The encoder at work on a layer: what is read stays right meanwhile, what is staged goes, what is reopened goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moonclipfs import limits
from moonclipfs.errors import NoSpaceError
from moonclipfs.layers.encoder import Encoder
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.workerprocess import WorkerProcess
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, EntryType
from tests.store.kit import noise, packs, publish, series
from tests.store.test_ingest import floats, safetensors


@contextmanager
def working(store: Store) -> Iterator[tuple[Layer, Encoder]]:
    layer = Layer.open(store, "test")
    encoder = Encoder(layer, store.path)
    encoder.start()
    try:
        yield layer, encoder
    finally:
        encoder.stop()
        layer.close()


def write(layer: Layer, name: bytes, data: bytes, at: int = 0) -> Inode:
    """Make a file, or write into one that is there."""
    if name in layer.names_in(layer.root):
        inode = layer.lookup(layer.root, name)
    else:
        inode = layer.make(layer.root, name, EntryType.FILE, 0o644, 0, 0, time.time_ns())
    file = layer.open_file(inode, write=True)
    try:
        file.write(at, data, time.time_ns())
        file.flush()
    finally:
        file.close()
    return inode


def read(layer: Layer, name: bytes) -> bytes:
    file = layer.open_file(layer.lookup(layer.root, name), write=False)
    try:
        return bytes(file.read(0, file.size))
    finally:
        file.close()


def test_files_of_a_layer_are_stored_and_nothing_stays_staged(store: Store) -> None:
    files = {b"empty": b"", b"small": noise(1, 100), b"inline": noise(2, 50_000), b"long": noise(3, 3_000_000)}
    with working(store) as (layer, encoder):
        for name, data in files.items():
            write(layer, name, data)
        encoder.drain()
        assert layer.staging.used == 0
        assert layer.staged()["staged_files"] == layer.staged()["encoding_files"] == 0
        assert {name: read(layer, name) for name in files} == files
    with working(store) as (layer, encoder):
        assert {name: read(layer, name) for name in files} == files
        layer.sync_all()
        assert layer.lookup(layer.root, b"long").child != NO_ID
    assert len(packs(store)) == 1


def test_a_store_may_be_opened_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Store.create("store").close()
    with Store.open("store", write=True) as store, working(store) as (layer, encoder):
        write(layer, b"f", noise(1, 200_000))
        encoder.drain()
        assert read(layer, b"f") == noise(1, 200_000)


def test_a_page_of_a_stored_file_is_changed_and_stored(store: Store) -> None:
    data = bytearray(safetensors({f"t{n}": ("F32", floats(n, 200_000)) for n in range(5)}))
    with working(store) as (layer, encoder):
        write(layer, b"f", bytes(data))
        encoder.drain()
        for number in range(3):
            at = random.Random(number).randrange(len(data) - 4096)
            data[at : at + 4096] = noise(number, 4096)
            write(layer, b"f", bytes(data[at : at + 4096]), at)
            assert layer.staging.used <= 2 * limits.INLINE_BYTES
            encoder.drain()
            assert read(layer, b"f") == data
        assert layer.staging.used == 0


def test_a_checkpoint_of_a_line_is_stored_against_the_one_before(store: Store) -> None:
    first, second = series(2, 500_000)
    with working(store) as (layer, encoder):
        size = []
        for name, data in ((b"checkpoint-1", first), (b"checkpoint-2", second)):
            directory = layer.make(layer.root, name, EntryType.DIRECTORY, 0o755, 0, 0, time.time_ns())
            inode = layer.make(directory, b"model.safetensors", EntryType.FILE, 0o644, 0, 0, time.time_ns())
            file = layer.open_file(inode, write=True)
            file.write(0, data, time.time_ns())
            file.close()
            encoder.drain()
            size.append(sum(info.bytes for info in store.index.packs().values()))
            store.index.sync()
        total = sum(info.bytes for info in store.index.packs().values())
    assert total - size[0] < len(second) * 1.6


def test_readers_and_writers_see_the_right_bytes_while_files_are_encoded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ENCODE_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(limits, "ENCODE_IDLE_SECONDS", 0.05)
    rng = random.Random(1)
    with working(store) as (layer, encoder):
        model = {b"f%d" % number: bytearray(noise(number, 400_000)) for number in range(4)}
        for name, data in model.items():
            write(layer, name, bytes(data))
        errors: list[BaseException] = []
        stop = threading.Event()

        def drain() -> None:
            try:
                while not stop.is_set():
                    encoder.drain()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=drain)
        thread.start()
        try:
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                name = rng.choice(list(model))
                at, length = rng.randrange(400_000), rng.randrange(1, 50_000)
                data = rng.randbytes(min(length, 400_000 - at))
                model[name][at : at + len(data)] = data
                write(layer, name, data, at)
                other = rng.choice(list(model))
                assert read(layer, other) == model[other]
        finally:
            stop.set()
            thread.join()
        assert not errors
        encoder.drain()
        assert {name: read(layer, name) for name in model} == model
        assert layer.staging.used == 0


def test_gc_at_any_time_takes_nothing_that_a_layer_has_stored(store: Store) -> None:
    files = {b"f%d" % number: noise(number, 100_000) for number in range(6)}
    with working(store) as (layer, encoder), Store.open(store.path, write=True) as other:
        for name, data in files.items():
            write(layer, name, data)
            encoder.drain()
            store.names()
            collect(other, wait_seconds=0)
        store.names()
        collect(other)
        for name, data in files.items():
            assert read(layer, name) == data


def test_what_was_staged_at_a_crash_is_encoded_by_the_next_one(store: Store, expect_log: Callable[[str], None]) -> None:
    with working(store) as (layer, encoder):
        write(layer, b"f", noise(1, 1_000_000))
        inode = write(layer, b"g", noise(2, 2000))
        assert inode.content is not None and inode.content.is_staged
    with working(store) as (layer, encoder):
        encoder.drain()
        assert layer.staging.used == 0
        assert read(layer, b"f") == noise(1, 1_000_000)
        assert read(layer, b"g") == noise(2, 2000)


@pytest.mark.parametrize("op", ["encode", "complete", "release"])
@pytest.mark.parametrize("late", [False, True])
def test_a_process_killed_at_any_step_loses_nothing(
    store: Store, expect_log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, op: str, late: bool
) -> None:
    expect_log("encoder process was killed by SIGKILL; . files are encoded again")
    plain, left = WorkerProcess.ask, [1 if op == "encode" else 2]

    def ask(self: WorkerProcess, asked: str, **fields: Any) -> dict[str, Any]:
        kill = asked == op and left[0] > 0
        left[0] -= kill
        if kill and not late:
            os.kill(self.pid, signal.SIGKILL)
        answer = plain(self, asked, **fields)
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        return answer

    monkeypatch.setattr(WorkerProcess, "ask", ask)
    files = {b"f%d" % number: noise(number, 200_000) for number in range(5)}
    with working(store) as (layer, encoder):
        for name, data in files.items():
            write(layer, name, data)
            encoder.drain()
        assert left == [0]
        assert {name: read(layer, name) for name in files} == files
        assert layer.staging.used == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "moonclipfs-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root and CAP_SYS_ADMIN")
    yield disk
    # Lazily: a test that fails keeps files open, in the frames of its error.
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(path: Path) -> None:
    """Leave no byte."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("started", [False, True])
def test_a_full_disk_keeps_all_readable_and_is_got_over(
    small_disk: Path, expect_log: Callable[[str], None], started: bool
) -> None:
    expect_log(r"safe in staging: f\d.*: .*No space")
    files = {b"f%d" % number: noise(number, 3_000_000) for number in range(4)}
    Store.create(small_disk / "store").close()
    with Store.open(small_disk / "store", write=True) as store, working(store) as (layer, encoder):
        for name, data in files.items():
            write(layer, name, data)
        deadline = time.monotonic() + 30
        while started and encoder.status()["pid"] is None and time.monotonic() < deadline:
            time.sleep(0.02)
        fill(small_disk / "filler")
        with pytest.raises(NoSpaceError):
            encoder.drain()
        assert {name: read(layer, name) for name in files} == files
        assert encoder.status()["failures"] == len(files) == len(layer.staged()["failed_files"])
        layer.refresh(time.time_ns())
        encoder.call("reclaim", forget=[])
        os.unlink(small_disk / "filler")
        encoder.drain()
        assert encoder.status()["failures"] == len(layer.staged()["failed_files"]) == 0
        assert layer.staging.used == 0
        assert {name: read(layer, name) for name in files} == files
        assert not list((small_disk / "store" / "tmp").iterdir())


def test_a_process_can_be_started_on_a_full_disk_to_reclaim(small_disk: Path) -> None:
    Store.create(small_disk / "store").close()
    with Store.open(small_disk / "store", write=True) as store, working(store) as (layer, encoder):
        publish(store, "a", {"f": noise(1, 8_000_000)})
        store.log.forget([("a", 1)])
        fill(small_disk / "filler")
        for _ in range(2):
            layer.refresh(time.time_ns())
            encoder.call("reclaim", forget=[])
        assert not packs(store)


def test_reclaiming_waits_for_no_batch(store: Store) -> None:
    with working(store) as (layer, encoder):
        publish(store, "a", {"f": noise(1, 100_000)})
        (old,) = packs(store)
        write(layer, b"f", noise(2, 100_000))
        deadline = time.monotonic() + 30
        while encoder.status()["finishing"] != 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert encoder.status()["finishing"] == 1
        store.log.forget([("a", 1)])
        for _ in range(2):
            layer.refresh(time.time_ns())
            encoder.call("reclaim", forget=[])
        assert old not in packs(store)
        assert encoder.status()["finishing"] == 0, "it was made durable first"
        assert read(layer, b"f") == noise(2, 100_000)
