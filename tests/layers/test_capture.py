"""Captures: what they hold, what they cost, what keeps their bytes, and seals while everything else goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moonclipfs.errors import LimitError, UsageError
from moonclipfs.layers.capture import Capture
from moonclipfs.layers.encoder import Encoder
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.records import PART_RECIPE, PART_STAGED
from moonclipfs.layers.seal import Sealer
from moonclipfs.layers.staging import Generation
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.layers import publish as plain
from tests.layers.filekit import encode, overwrite, read_all
from tests.layers.sealkit import LocalEncoder, directory, identities, put, stored, tree


@pytest.fixture
def layer(store: Store) -> Iterator[Layer]:
    opened = Layer.open(store, "host")
    yield opened
    opened.close()


def take(layer: Layer, path: bytes = b"run/a") -> Capture:
    return layer.captures.take(layer.resolve(path), {"automatic": False})


def test_a_capture_holds_what_changed(store: Store, layer: Layer) -> None:
    """A capture costs what was changed since the last seal, not what the directory holds."""
    plain.publish(store, "run/a", {f"f{n}": b"x" for n in range(100)} | {"d": {"e": b"y"}})
    layer.refresh(1)
    overwrite(layer, layer.resolve(b"run/a/f7"), b"new")
    layer.unlink(layer.resolve(b"run/a"), b"f8", 2)
    capture = take(layer)
    assert [entry.name for entry in capture.tree.entries] == [b"f7"]
    assert capture.tree.removed == (b"f8",)
    assert capture.tree.child == store.names().bound()["run/a"].root


def test_captured_bytes_are_never_written_again(layer: Layer) -> None:
    """A captured staging generation is never written again: later writes go to a new one."""
    inode = put(layer, "run/a/x", os.urandom(100_000))
    before = read_all(layer, inode)
    file = layer.open_file(inode, write=True)
    file.write(0, b"first", 3)
    capture = take(layer)
    (generation,) = capture.pinned
    assert generation.frozen
    file.write(0, b"later", 4)
    file.close()
    out = bytearray(100_000)
    generation.read_into(0, memoryview(out))
    assert bytes(out) == b"first" + before[5:]
    assert read_all(layer, inode) == b"later" + before[5:]
    (entry,) = capture.tree.entries
    assert {kind for _, _, kind, _ in entry.parts} == {PART_STAGED}


def test_small_bytes_travel_with_the_capture(layer: Layer) -> None:
    put(layer, "run/a/x", b"small")
    capture = take(layer)
    assert capture.pinned == () and capture.tree.entries[0].data[0][2] == b"small"


def test_a_capture_of_a_stored_file_is_its_recipe(layer: Layer) -> None:
    inode = put(layer, "run/a/x", os.urandom(100_000))
    encode(layer, *layer.take_jobs(time.monotonic(), urgent=True))
    file = layer.open_file(inode, write=True)
    file.write(10, b"over", 5)
    file.close()
    (entry,) = take(layer).tree.entries
    assert [kind for _, _, kind, _ in entry.parts] == [PART_RECIPE, PART_STAGED, PART_RECIPE]
    put(layer, "run/b/x", os.urandom(100_000))
    encode(layer, *layer.take_jobs(time.monotonic(), urgent=True))
    (entry,) = take(layer, b"run/b").tree.entries
    assert entry.parts == () and entry.size == 100_000


def test_a_directory_of_snapshots_alone_is_not_captured(store: Store, layer: Layer) -> None:
    plain.publish(store, "run/a", {"x": b"1"})
    layer.refresh(1)
    with pytest.raises(UsageError, match="nothing but snapshots"):
        take(layer, b"run")


def test_what_is_too_deep_for_a_snapshot_is_refused(layer: Layer) -> None:
    inode = directory(layer, "run/a")
    for _ in range(130):
        inode = layer.make(inode, b"d", EntryType.DIRECTORY, 0o755, 0, 0, 1)
    with pytest.raises(LimitError, match="128 directories deep"):
        take(layer)
    assert len(layer.captures) == 0


def test_staged_bytes_of_captures_are_synced_before_they_count(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure a capture counts only with all its bytes: they are synced before the journal is."""
    put(layer, "run/a/x", os.urandom(100_000))
    capture = take(layer)
    synced: list[int] = []
    kind = type(capture.pinned[0])
    monkeypatch.setattr(kind, "sync", lambda generation: synced.append(generation.number))
    layer.journal.commit()
    assert synced == [capture.pinned[0].number]
    layer.journal.commit()
    assert len(synced) == 1


def test_a_journal_written_anew_names_no_bytes_that_are_not_on_the_disk(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that comes right before the new journal, of a file that is cut off then, needs its bytes synced."""
    inode = put(layer, "run/a/x", os.urandom(100_000))
    file = layer.open_file(inode, write=True)
    settle = layer.files.log.settle
    captures: list[Capture] = []

    def late() -> None:
        settle()
        if not captures:
            file.write(0, bytes(100_000), 3)
            captures.append(take(layer))
            layer.truncate(inode, 0, 4)

    synced: list[int] = []
    real = Generation.sync
    monkeypatch.setattr(layer.files.log, "settle", late)

    def sync(generation: Generation) -> None:
        synced.append(generation.number)
        real(generation)

    monkeypatch.setattr(Generation, "sync", sync)
    layer.files.checkpoint()
    file.close()
    assert captures[0].generations() <= set(synced) and captures[0].generations()


def test_staging_of_a_capture_goes_when_it_is_published(store: Store, layer: Layer) -> None:
    """Staged bytes that only a capture needs are kept for it, over a remount too, and go when it is published."""
    inode = put(layer, "run/a/x", os.urandom(100_000))
    before = read_all(layer, inode)
    take(layer)
    layer.unlink(layer.resolve(b"run/a"), b"x", 3)
    put(layer, "run/a/y", b"1")
    layer.sync_all()
    assert layer.staging.used >= 100_000
    layer.close()
    layer = Layer.open(store, "host")
    layer.sync_all()
    assert layer.staging.used >= 100_000
    Sealer(layer, LocalEncoder(layer)).tick(0.0)
    assert stored(store, store.names().bound()["run/a"]) == {"x": before}
    layer.sync_all()
    assert os.listdir(layer.staging.directory) == []
    assert tree(layer, "run/a") == {"y": b"1"}
    layer.close()


def test_a_file_that_is_open_goes_on_across_a_seal(store: Store, layer: Layer) -> None:
    """Handles that are open across a seal read and write the live file, whose inode stays the same."""
    inode = put(layer, "run/a/x", b"0" * 100_000)
    reader, writer = layer.open_file(inode, write=False), layer.open_file(inode, write=True)
    writer.write(0, b"one", 3)
    capture = take(layer)
    writer.write(0, b"two", 4)
    Sealer(layer, LocalEncoder(layer)).tick(0.0)
    assert len(layer.captures) == 0 and capture.number == 1
    assert bytes(reader.read(0, 5)) == b"two00"
    writer.write(3, b"!", 5)
    assert bytes(reader.read(0, 5)) == b"two!0"
    reader.close()
    writer.close()
    assert stored(store, store.names().bound()["run/a"])["x"][:5] == b"one00"
    assert read_all(layer, inode)[:5] == b"two!0"
    assert layer.resolve(b"run/a/x") is inode


def test_seals_while_files_are_written_hold_one_moment_each(store: Store, layer: Layer) -> None:
    """Each version holds the directory as it was at one moment, however much is written meanwhile."""
    sealer = Sealer(layer, LocalEncoder(layer), seal_after=None)
    place, stop, steps = directory(layer, "run/a"), threading.Event(), [0]
    put(layer, "run/a/step", b"0")

    def write() -> None:
        while not stop.is_set():
            steps[0] += 1
            text = b"%d" % steps[0]
            with layer.lock:  # one moment for both
                put(layer, "run/a/step", text)
                put(layer, f"run/a/big{steps[0] % 3}", text * 20_000)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(15):
            sealer.seal(b"run/a", wait=False)
            sealer.tick(time.monotonic())
    finally:
        stop.set()
        thread.join()
    versions = store.names().versions("run/a")
    assert len(versions) > 3
    for version in versions:
        files = stored(store, version)
        step = int(files["step"])
        if step:
            assert files[f"big{step % 3}"] == b"%d" % step * 20_000
    assert layer.resolve(b"run/a") is place
    last = sealer.seal(b"run/a")
    assert last is not None and stored(store, last) == tree(layer, "run/a")


def test_seals_of_several_threads_each_return_their_version(store: Store, layer: Layer) -> None:
    """However many threads seal a directory at once, each gets the version that holds what it had written."""
    sealer = Sealer(layer, LocalEncoder(layer), seal_after=None)
    put(layer, "run/a/x", b"1")
    found: dict[int, dict[str, bytes]] = {}

    def work(number: int) -> None:
        put(layer, f"run/a/{number}", b"mine")
        version = sealer.seal(b"run/a")
        assert version is not None
        found[number] = stored(store, version)

    def publish() -> None:
        for _ in range(50):
            sealer.tick(float("inf"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    threads.append(threading.Thread(target=publish))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(6))
    assert all(files[str(number)] == b"mine" for number, files in found.items())


def test_a_kill_between_publishing_and_its_record(store: Store, layer: Layer) -> None:
    """A process that is killed after a version was bound, and before it journalled that, binds it no second time."""

    class Killed(Exception):
        pass

    class Dying(LocalEncoder):
        def call(self, op: str, **arguments: Any) -> Any:
            super().call(op, **arguments)
            raise Killed

    put(layer, "run/a/x", os.urandom(100_000))
    put(layer, "run/a/d/y", b"2")
    before, showed = tree(layer), identities(layer, "run/a")
    with pytest.raises(Killed):
        Sealer(layer, Dying(layer)).seal(b"run/a")
    assert store.names().bound()["run/a"].number == 1
    layer.close()
    layer = Layer.open(store, "host")
    layer.refresh(9)
    assert tree(layer) == before and len(layer.captures) == 1
    Sealer(layer, LocalEncoder(layer)).tick(0.0)
    assert store.names().bound()["run/a"].number == 1 and len(layer.captures) == 0
    assert identities(layer, "run/a") == showed
    layer.close()


def test_gc_keeps_what_a_capture_needs(store: Store, layer: Layer) -> None:
    """What a capture needs is not reclaimed, though nothing else refers to it any more."""
    plain.publish(store, "run/a", {"base": os.urandom(50_000), "d": {"deep": os.urandom(50_000)}})
    layer.refresh(1)
    put(layer, "run/a/x", os.urandom(100_000))
    encode(layer, *layer.take_jobs(time.monotonic(), urgent=True))
    before = tree(layer, "run/a")
    take(layer)
    for path in ("run/a/x", "run/a/base", "run/a/d/deep"):
        above, _, name = path.encode().rpartition(b"/")
        layer.unlink(layer.resolve(above), name, 5)
    layer.rmdir(layer.resolve(b"run/a"), b"d", 6)
    layer.rmdir(layer.resolve(b"run"), b"a", 6)
    layer.push_names()
    layer.files.checkpoint()
    store.log.forget([("run/a", 1)])
    for _ in range(3):
        store.names()
        collect(store)
    Sealer(layer, LocalEncoder(layer)).tick(0.0)
    (version,) = store.names().versions("run/a")
    assert version.removed and stored(store, version) == before
    assert verify(store).problems == []


def test_seals_through_the_encoder_process(store: Store, layer: Layer) -> None:
    """A seal works through the encoder's process, which stores what is staged and publishes."""
    encoder = Encoder(layer, store.path)
    encoder.start()
    try:
        sealer = Sealer(layer, encoder)
        put(layer, "run/a/x", os.urandom(300_000))
        put(layer, "run/a/y", b"small")
        before = tree(layer, "run/a")
        first = sealer.seal(b"run/a")
        assert first is not None and stored(store, first) == before
        overwrite(layer, layer.resolve(b"run/a/y"), b"two")
        sealer.seal(b"run/a", wait=False)
        overwrite(layer, layer.resolve(b"run/a/y"), b"three")
        sealer.tick(0.0)
        sealer.seal(b"run/a")
        assert [stored(store, one)["y"] for one in store.names().versions("run/a")] == [b"small", b"two", b"three"]
        encoder.drain()
        layer.sync_all()
        assert layer.staging.used == 0
    finally:
        encoder.stop()
