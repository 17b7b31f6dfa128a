"""What a layer is after its process was killed, or the power failed."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.records import Contents
from moonclipfs.store.store import Store
from tests.layers.filekit import encode, make_file, overwrite, read_all, staging_names, write_file

BIG = 2 * limits.INLINE_BYTES
Crash = Callable[..., AbstractContextManager[Layer]]


@pytest.fixture
def layer(store: Store) -> Iterator[Layer]:
    opened = Layer.open(store, "test")
    yield opened
    opened.close()


@pytest.fixture
def crash(layer: Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crash:
    """A context manager: the layer as the next process finds it, with `power` as the next start of the machine does."""
    count = 0

    @contextmanager
    def crashed(*, power: bool = False) -> Iterator[Layer]:
        nonlocal count
        count += 1
        root = tmp_path / f"crash{count}"
        shutil.copytree(layer.store.path, root)
        with monkeypatch.context() as patch:
            if power:
                patch.setattr("moonclipfs.layers.journal.this_boot", lambda: b"otherboot".ljust(16))
            with Store.open(root, write=True, index_path=tmp_path / f"crash{count}.sqlite") as copy:
                found = Layer.open(copy, "test")
                try:
                    yield found
                finally:
                    found.close()

    return crashed


def content(layer: Layer, path: bytes) -> bytes:
    return read_all(layer, layer.resolve(path))


@pytest.mark.parametrize("size", [100, BIG])
def test_a_closed_file_survives_a_kill(layer: Layer, crash: Crash, size: int) -> None:
    """What close accepted is there after a kill of the server."""
    data = os.urandom(size)
    write_file(layer, b"a", data)
    with crash() as found:
        assert content(found, b"a") == data
        assert found.recovery.staged_files == 1 and found.recovery.orphans == 0
        assert "1 files" in str(found.recovery)
        (job,) = found.take_jobs(0.0, urgent=True)
        encode(found, job)
        found.sync_all()
        assert content(found, b"a") == data and staging_names(found) == []


@pytest.mark.parametrize("size", [100, BIG])
def test_a_new_file_that_was_not_synced(layer: Layer, crash: Crash, size: int) -> None:
    """A new file that was not synced is absent, or a prefix, after a power failure.

    Small ones are in the journal, as durable as their names.
    """
    data = os.urandom(size)
    write_file(layer, b"a", data)
    layer.sync_directory(layer.root)
    with crash(power=True) as found:
        assert content(found, b"a") == (data if size == 100 else b"")


@pytest.mark.parametrize("size", [100, BIG])
def test_what_was_synced_survives_a_power_failure(layer: Layer, crash: Crash, size: int) -> None:
    """What was synced is there after a power failure, byte for byte."""
    data = os.urandom(size)
    file = layer.open_file(make_file(layer, b"a"), write=True)
    file.write(0, data, 1)
    file.sync()
    file.write(0, b"later", 2)
    with crash(power=True) as found:
        expected = b"later" + data[5:] if size == BIG else data
        assert content(found, b"a") in (data, expected)
    with crash() as found:
        assert content(found, b"a") in (data, expected)
    file.close()
    with crash() as found:
        assert content(found, b"a") == b"later" + data[5:]


@pytest.mark.parametrize("size", [100, BIG])
@pytest.mark.parametrize("power", [False, True])
def test_a_replaced_content_is_old_or_new(layer: Layer, crash: Crash, size: int, power: bool) -> None:
    """A file replaced by O_TRUNC is old or new after any crash."""
    old, new = os.urandom(size), os.urandom(size)
    inode = write_file(layer, b"a", old)
    layer.sync_all()
    file = layer.open_file(inode, write=True)
    layer.truncate(inode, 0, 5)
    with crash(power=power) as found:
        assert content(found, b"a") == old
    file.write(0, new[: size // 2], 6)
    layer.sync_all()
    with crash(power=power) as found:
        assert content(found, b"a") == old
    file.write(size // 2, new[size // 2 :], 6)
    file.close()
    layer.sync_directory(layer.root)
    with crash(power=power) as found:
        assert content(found, b"a") == (old if power and size == BIG else new)
    layer.sync_all()
    with crash(power=power) as found:
        assert content(found, b"a") == new
        found.sync_all()
        assert len(staging_names(found)) == (size == BIG)
    assert len(staging_names(layer)) == (size == BIG)


@pytest.mark.parametrize("size", [100, BIG])
def test_a_rename_over_is_old_or_new(layer: Layer, crash: Crash, size: int) -> None:
    """A file replaced by rename is old or new after any crash."""
    old, new = os.urandom(size), os.urandom(size)
    write_file(layer, b"a", old)
    layer.sync_all()
    file = layer.open_file(make_file(layer, b"tmp"), write=True)
    file.write(0, new, 6)
    layer.rename(layer.root, b"tmp", layer.root, b"a", 7)
    with crash() as found:
        assert content(found, b"a") == new
    with crash(power=True) as found:
        assert content(found, b"a") == old
    layer.sync_directory(layer.root)
    with crash(power=True) as found:
        assert content(found, b"a") == new
    file.close()


def test_fsync_of_one_file_does_not_wait_for_another(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync of one file waits for no other, except for what replaced others by rename."""
    write_file(layer, b"large", os.urandom(BIG))
    synced: list[int] = []
    file = layer.open_file(make_file(layer, b"small"), write=True)
    file.write(0, os.urandom(BIG), 1)
    monkeypatch.setattr(layer.staging.ops, "fdatasync", synced.append)
    file.sync()
    assert len(synced) == 2  # its own bytes, and the journal
    file.close()


def test_unsynced_contents_count_for_this_boot_only(layer: Layer, crash: Crash) -> None:
    """The synced state is kept until the next one is on the disk, through a restart too."""
    old, new = os.urandom(BIG), os.urandom(BIG)
    inode = write_file(layer, b"a", old)
    layer.sync_all()
    overwrite(layer, inode, new)
    layer.sync_directory(layer.root)
    with crash() as found:
        assert content(found, b"a") == new
        found.sync_directory(found.root)
        assert len(staging_names(found)) == 2
        found.sync_all()
        assert len(staging_names(found)) == 1 and content(found, b"a") == new


@pytest.mark.parametrize("how", ["replaced", "another file is synced"])
def test_the_synced_state_is_kept_through_a_kill(store: Store, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Of a file whose newer content was accepted and not synced when the process was killed."""
    old, new = os.urandom(BIG), os.urandom(BIG)
    layer = Layer.open(store, "test")
    inode = write_file(layer, b"a", old)
    layer.sync_all()
    overwrite(layer, inode, new)
    layer.close()
    layer = Layer.open(store, "test")
    assert content(layer, b"a") == new
    if how == "replaced":
        layer.truncate(layer.resolve(b"a"), 0, 9)
    else:
        write_file(layer, b"b", b"text")
        layer.sync_directory(layer.root)
    layer.close()
    monkeypatch.setattr("moonclipfs.layers.journal.this_boot", lambda: b"otherboot".ljust(16))
    layer = Layer.open(store, "test")
    assert content(layer, b"a") == old
    layer.sync_all()
    assert len(staging_names(layer)) == 1
    layer.close()


def test_a_small_file_that_had_grown_when_the_process_was_killed(store: Store) -> None:
    """Its file is new, and no record tells of it: the bytes in the journal count."""
    layer = Layer.open(store, "test")
    file = layer.open_file(make_file(layer, b"a"), write=True)
    file.write(0, b"small", 1)
    file.sync()
    file.write(5, bytes(BIG), 2)
    assert len(staging_names(layer)) == 1
    layer.close()
    layer = Layer.open(store, "test")
    assert content(layer, b"a") == b"small" and layer.recovery.orphans == 1
    layer.sync_all()
    assert staging_names(layer) == []
    layer.close()


def test_stored_content_after_a_power_failure(layer: Layer, crash: Crash) -> None:
    """Stored is durable, synced or not, and counts for what was stored, not for what was there before."""
    old, new = os.urandom(BIG), os.urandom(BIG)
    inode = write_file(layer, b"a", old)
    layer.sync_all()
    overwrite(layer, inode, new)
    (job,) = layer.take_jobs(0.0, urgent=True)
    encode(layer, job)
    with crash(power=True) as found:
        assert content(found, b"a") == old
    layer.sync_all()
    with crash(power=True) as found:
        assert content(found, b"a") == new and found.staged()["staged_files"] == 0
        assert found.take_jobs(0.0, urgent=True) == []


def test_stored_while_a_newer_content_is_not_synced(layer: Layer, crash: Crash) -> None:
    first, second, third = (os.urandom(BIG) for _ in range(3))
    inode = write_file(layer, b"a", first)
    layer.sync_all()
    overwrite(layer, inode, second)
    (job,) = layer.take_jobs(0.0, urgent=True)
    overwrite(layer, inode, third)
    encode(layer, job)
    layer.sync_directory(layer.root)
    assert content(layer, b"a") == third
    with crash() as found:
        assert content(found, b"a") == third
    with crash(power=True) as found:
        assert content(found, b"a") in (first, second)


def test_missing_staging_is_an_error_and_never_zeros(
    layer: Layer, crash: Crash, expect_log: Callable[[str], None]
) -> None:
    """Staged bytes that are missing are EIO for whoever reads them, never zeros."""
    data = os.urandom(BIG)
    write_file(layer, b"a", data)
    write_file(layer, b"b", data)
    layer.sync_all()
    first, second = staging_names(layer)
    os.unlink(layer.staging.directory / first)
    os.truncate(layer.staging.directory / second, BIG - 10)
    with crash() as found:
        for name in (b"a", b"b"):
            with pytest.raises(CorruptError):
                content(found, name)


def test_orphans_are_cleared_away(layer: Layer, crash: Crash) -> None:
    write_file(layer, b"a", os.urandom(BIG))
    (layer.staging.directory / f"{999:016x}").write_bytes(b"left behind")
    with crash() as found:
        assert found.recovery.orphans == 1 and "1 staging files" in str(found.recovery)
        assert len(staging_names(found)) == 2
        write_file(found, b"b", os.urandom(BIG))
        found.sync_all()
        names = staging_names(found)
        assert len(names) == 2 and f"{999:016x}" not in names
        assert int(names[-1], 16) > 999


def test_what_is_removed_after_a_replay_gives_its_space_back(layer: Layer, crash: Crash) -> None:
    """A file that is deleted and open still takes room."""
    write_file(layer, b"removed", os.urandom(BIG))
    write_file(layer, b"stored", os.urandom(BIG))
    with crash() as found:
        encode(found, *found.take_jobs(0.0, urgent=True, inodes=[found.resolve(b"stored")]))
        found.unlink(found.root, b"removed", 5)
        found.sync_all()
        gc.collect()
        held = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        assert not [path for path in held if path.startswith(str(found.staging.directory)) and "deleted" in path]


def test_what_was_deleted_before_a_kill_does_not_count_as_staged(layer: Layer, crash: Crash) -> None:
    """The journal names it still; status, the limit of staging and the quota count what is there."""
    for _ in range(3):
        inode = write_file(layer, b"again", os.urandom(BIG))
        layer.sync_all()
        layer.unlink(layer.root, b"again", 5)
        layer.sync_all()
    write_file(layer, b"stays", os.urandom(BIG))
    layer.sync_all()
    assert not inode.links and layer.staging.used == BIG
    with crash() as found:
        assert found.staging.used == BIG == found.staging.waiting and len(staging_names(found)) == 1


def test_an_open_file_that_was_removed_is_gone(layer: Layer, crash: Crash) -> None:
    file = layer.open_file(write_file(layer, b"a", os.urandom(BIG)), write=True)
    layer.unlink(layer.root, b"a", 5)
    with crash() as found:
        found.sync_all()
        assert staging_names(found) == [] and found.names_in(found.root) == [] and found.staging.used == 0
    file.close()


def test_times_and_size_are_replayed(layer: Layer, crash: Crash) -> None:
    inode = write_file(layer, b"a", b"x" * 100)
    layer.set_attributes(inode, now_ns=50, mtime_ns=40)
    layer.truncate(inode, 60, 70)
    status = layer.stat(inode)
    with crash() as found:
        assert found.stat(found.resolve(b"a")) == status


# Writing the journal anew


@pytest.mark.parametrize("power", [False, True])
def test_checkpoint(layer: Layer, crash: Crash, power: bool) -> None:
    """Everything is there again: small, large, stored, sparse, replaced and half-written files."""
    expected = {}
    for size in (0, 10, BIG):
        for stored in (False, True):
            name, data = b"%d.%d" % (size, stored), os.urandom(size)
            expected[name] = data
            inode = write_file(layer, name, data)
            if stored:
                encode(layer, *layer.take_jobs(0.0, urgent=True, inodes=[inode]))
    edited = write_file(layer, b"edited", os.urandom(BIG))
    encode(layer, *layer.take_jobs(0.0, urgent=True, inodes=[edited]))
    before = content(layer, b"edited")
    file = layer.open_file(edited, write=True)
    file.write(5, b"edit", 9)
    layer.truncate(edited, BIG + 1000, 9)
    file.close()
    expected[b"edited"] = before[:5] + b"edit" + before[9:] + bytes(1000)
    replaced = write_file(layer, b"replaced", os.urandom(BIG))
    expected[b"replaced"] = content(layer, b"replaced")
    layer.sync_all()
    writer = layer.open_file(replaced, write=True)
    layer.truncate(replaced, 0, 11)
    writer.write(0, os.urandom(BIG // 2), 12)
    layer.files.checkpoint()
    with crash(power=power) as found:
        assert {name: content(found, name) for name in found.names_in(found.root)} == expected
        assert len(found.names_in(found.root)) == len(expected)
        encode(found, *found.take_jobs(0.0, urgent=True))
        found.sync_all()
        assert {name: content(found, name) for name in found.names_in(found.root)} == expected
        assert staging_names(found) == [] and found.staging.used == 0
    writer.write(BIG // 2, os.urandom(BIG // 2), 13)
    expected[b"replaced"] = writer.read(0, BIG)
    writer.close()
    layer.sync_all()
    with crash(power=power) as found:
        assert {name: content(found, name) for name in found.names_in(found.root)} == expected


def test_checkpoint_keeps_what_power_failures_bring_back(layer: Layer, crash: Crash) -> None:
    old, new = os.urandom(BIG), os.urandom(BIG)
    inode = write_file(layer, b"a", old)
    layer.sync_all()
    overwrite(layer, inode, new)
    layer.journal.rewrite(layer.files._records())
    layer.files.log.rewritten()
    with crash() as found:
        assert content(found, b"a") == new
    with crash(power=True) as found:
        assert content(found, b"a") == old
    layer.sync_all()
    assert len(staging_names(layer)) == 1
    with crash(power=True) as found:
        assert content(found, b"a") == new


def test_the_journal_is_written_anew_when_it_is_long(
    layer: Layer, crash: Crash, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOURNAL_SEGMENT_BYTES", 100_000)
    inode = make_file(layer, b"a")
    for _ in range(40):
        overwrite(layer, inode, os.urandom(4096))
    data = content(layer, b"a")
    layer.sync_all()
    assert layer.journal.size < 20_000
    with crash() as found:
        assert content(found, b"a") == data


def test_the_journal_learns_of_contents_at_closes_not_at_writes(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[object] = []
    monkeypatch.setattr(layer.journal, "append", lambda record, refs=(): records.append(record))
    file = layer.open_file(make_file(layer, b"a"), write=True)
    for offset in range(0, BIG, 4096):
        file.write(offset, bytes(4096), 1)
    assert not any(isinstance(record, Contents) for record in records)
    file.flush()
    file.flush()
    file.close()
    assert sum(isinstance(record, Contents) for record in records) == 1


def test_a_journal_full_of_staged_bytes_is_not_copied(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_SEGMENT_BYTES", 10_000)
    monkeypatch.setattr(limits, "REWRITE_STAGED_BYTES", 50_000)
    for number in range(20):
        write_file(layer, b"%d" % number, os.urandom(4096))
    layer.sync_all()
    assert layer.journal.size > 80_000
    encode(layer, *layer.take_jobs(0.0, urgent=True))
    layer.sync_all()
    assert layer.journal.size < 20_000


def test_a_journal_that_is_written_anew_waits_for_no_large_sync_under_the_lock(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written in place all the time is synced before, so that little is left then."""
    inode = write_file(layer, b"a", os.urandom(BIG))
    layer.sync_all()
    file = layer.open_file(inode, write=True)
    file.write(0, os.urandom(BIG), 2)
    held: list[bool] = []
    original = layer.staging.ops.fdatasync

    def try_lock() -> None:
        held.append(not layer.lock.acquire(timeout=1))
        if not held[-1]:
            layer.lock.release()

    def fdatasync(fd: int) -> None:
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
        original(fd)

    monkeypatch.setattr(layer.staging.ops, "fdatasync", fdatasync)
    layer.files.checkpoint()
    assert held and not any(held)
    file.close()


def test_a_replay_overwrites_no_staging_file(layer: Layer, crash: Crash, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal may have more bytes of small files than memory takes at a time; a file that outgrew it is safe."""
    for _ in range(10):
        write_file(layer, b"x", os.urandom(60000))
        layer.unlink(layer.root, b"x", 1)
    kept = os.urandom(60000)
    write_file(layer, b"kept", kept)
    small, data = os.urandom(50000), os.urandom(BIG)
    file = layer.open_file(make_file(layer, b"a"), write=True)
    file.write(0, small, 1)
    file.flush()
    file.write(len(small), data, 1)
    file.sync()
    file.close()
    monkeypatch.setattr(limits, "INLINE_TOTAL_BYTES", 100000)
    for power in (False, True):
        with crash(power=power) as found:
            assert content(found, b"a") == small + data and content(found, b"kept") == kept
            assert len(staging_names(found)) == 1
            assert found.staging.in_memory == len(kept)  # the dead ones are not in memory


def test_bytes_that_wait_at_another_place_are_not_forgotten(store: Store, tmp_path: Path) -> None:
    """A mount without the `--staging` of the one before would not find them, and stage others beside."""
    for places in ((tmp_path / "fast", None), (None, tmp_path / "fast"), (tmp_path / "fast", tmp_path / "other")):
        layer = Layer.open(store, "test", staging=places[0])
        data = os.urandom(2 * limits.INLINE_BYTES)
        write_file(layer, b"a", data)
        layer.close()
        option = "without --staging" if places[0] is None else f"with --staging {places[0]}"
        with pytest.raises(UsageError, match=f"files of layer test wait in .*: mount it {option}, and unmount it"):
            Layer.open(store, "test", staging=places[1])
        layer = Layer.open(store, "test", staging=places[0])
        inode = layer.resolve(b"a")
        assert read_all(layer, inode) == data
        encode(layer, *layer.take_jobs(0.0, urgent=True))
        layer.unlink(layer.root, b"a", 1)
        layer.sync_all()
        layer.close()
        Layer.open(store, "test", staging=places[1]).close()
    Layer.open(store, "test").close()
    assert not (store.path / "layers/test/staged-in").is_symlink()
