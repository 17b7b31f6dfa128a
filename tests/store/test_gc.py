"""gc: what is needed stays whatever happens, and what is not goes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MissingObjectError, MoonclipError, NoSpaceError, UsageError
from moonclipfs.store.backend import FileOps
from moonclipfs.store.check import verify
from moonclipfs.store.forget import forget
from moonclipfs.store.gc import collect, open_to_reclaim, preview
from moonclipfs.store.packs import Location, pack_key
from moonclipfs.store.store import Store
from moonclipfs.types import BytesSource, Entry, EntryType
from tests.faults import CountingOps, FaultyOps, KillingOps
from tests.store.kit import ATTRIBUTES, contents, in_order, noise, packs, publish, series


def test_nothing_to_do(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    before = packs(store)
    report = collect(store)
    assert packs(store) == before
    assert (report.deleted_packs, report.copied_bytes, report.dead_bytes) == (0, 0, 0)
    assert report.live_objects == 3


def test_a_forgotten_snapshot_goes_and_what_it_shared_stays(store: Store) -> None:
    publish(store, "a", {"f": noise(1), "shared": noise(2)})
    publish(store, "b", {"g": noise(3), "shared": noise(2)})
    publish(store, "c", {"h": noise(4)})
    store.log.forget([("a", 1), ("c", 1)])
    expected = preview(store)
    report = collect(store)
    assert contents(store, "b") == {"g": noise(3), "shared": noise(2)}
    assert report.deleted_packs == expected.deleted_packs == 2
    assert report.copied_bytes > 20_000
    assert report.waiting_packs == 0
    assert (report.deleted_bytes, report.live_objects) == (expected.deleted_bytes, expected.live_objects)
    assert collect(store).freed_bytes == 0
    assert not store.names().condemned().keys() & packs(store)


def test_removed_versions_are_kept_until_forgotten(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    publish(store, "a", {"f": noise(2)})
    store.log.unbind(["a"])
    assert collect(store).deleted_packs == 0
    assert contents(store, "a@1") == {"f": noise(1)}
    assert contents(store, "a@2") == {"f": noise(2)}
    store.log.forget([("a", 1)])
    assert collect(store).deleted_packs == 1
    assert contents(store, "a@2") == {"f": noise(2)}


def fill(store: Store) -> dict[str, dict[str, bytes]]:
    """Kept: deltas on a forgotten base, and half of a pack. To go: a whole pack, and the other half."""
    kept = {}
    for name, data in zip("abc", series(3, 2000), strict=True):
        kept[name] = {"m": data, "own": noise(ord(name), 6000)}
        publish(store, name, kept[name])
    publish(store, "dead", {"f": noise(1, 6000)})
    publish(store, "half", {"f": noise(3, 6000), "g": noise(4, 6000)})
    kept["rest"] = {"g": noise(4, 6000)}
    publish(store, "rest", kept["rest"])
    store.log.forget([("a", 1), ("dead", 1), ("half", 1)])
    del kept["a"]
    return kept


def assert_whole(store: Store, kept: dict[str, dict[str, bytes]]) -> None:
    index = store.path.parent / "fresh.sqlite"
    with Store.open(store.path, index_path=index) as fresh:
        assert verify(fresh).problems == []
        for name, files in kept.items():
            assert contents(fresh, name) == files


def new_store(path: Path) -> Store:
    path.mkdir()
    Store.create(path / "store").close()
    return Store.open(path / "store", write=True, index_path=path / "index.sqlite")


def test_a_dry_run_changes_nothing(store: Store) -> None:
    fill(store)
    in_order(store)
    before = {path: path.stat().st_mtime_ns for path in store.path.rglob("*") if "leases" not in path.parts}
    report = collect(store, dry_run=True)
    assert report.dry_run
    assert report.deleted_packs == 3
    assert {path: path.stat().st_mtime_ns for path in store.path.rglob("*") if "leases" not in path.parts} == before
    done = collect(store)
    assert (done.deleted_bytes, done.copied_bytes > 0) == (report.deleted_bytes, True)
    assert done.rebased_objects == report.rebased_objects == 2


def test_without_repacking_only_dead_packs_go(store: Store) -> None:
    kept = fill(store)
    report = collect(store, repack=False)
    assert (report.deleted_packs, report.copied_bytes) == (1, 0)
    assert_whole(store, kept)


def test_little_waste_is_left_alone(store: Store) -> None:
    for name, count in (("a", 8), ("b", 7)):
        publish(store, name, {str(number): noise(number) for number in range(count)})
    store.log.forget([("a", 1)])
    before = packs(store)
    report = collect(store)
    assert packs(store) == before
    assert 0 < report.dead_bytes < 0.3 * report.live_bytes


def test_a_read_only_store_is_refused(store: Store) -> None:
    with Store.open(store.path) as reader, pytest.raises(UsageError, match="reading only"):
        collect(reader)


def test_repacking_in_small_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = fill(store)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr("moonclipfs.limits.REPACK_BYTES", 1)
    report = collect(store, progress=lambda done, total: told.append((done, total)))
    assert report.deleted_packs == 3
    assert told[-1][0] == told[-1][1] == report.copied_bytes
    assert_whole(store, kept)


def test_a_flipped_byte_is_found_and_not_laundered(store: Store) -> None:
    """Merging in the other project gave a flipped byte a new, valid hash."""
    kept = fill(store)
    entry = store.lookup(store.resolve("rest"), b"g")
    location = store.index.find(store.recipe(entry).object_ids()[0])
    assert location is not None
    with (store.path / pack_key(location.pack)).open("r+b") as file:
        file.seek(location.offset + 3000)
        byte = file.read(1)[0]
        file.seek(location.offset + 3000)
        file.write(bytes([byte ^ 0x10]))
    report = collect(store)
    assert location.pack in packs(store)
    assert [problem for problem in report.problems if location.object_id.hex() in problem]
    assert report.deleted_packs == 2, "the other packs are done"
    (problem,) = verify(store).problems
    assert problem.affected == ["rest@1/g"]
    del kept["rest"]
    for name, files in kept.items():
        assert contents(store, name) == files


def test_what_is_not_known_is_not_deleted(store: Store) -> None:
    """A directory that cannot be read may refer to anything."""
    fill(store)
    location = store.index.find(store.resolve("b").root)
    assert location is not None
    with (store.path / pack_key(location.pack)).open("r+b") as file:
        file.seek(location.offset + 40)
        file.write(b"\xff\xff")
    before = packs(store)
    store.close()
    with Store.open(store.path, write=True) as other:
        with pytest.raises(CorruptError, match=r"b@1: .*nothing is deleted"):
            collect(other)
        assert packs(store) == before
        with pytest.raises(CorruptError, match=r"b@1: .*nothing is deleted"):
            forget(other, [other.resolve("c")])
        assert "c" in other.names().bound()
        report = forget(other, [other.resolve("b")])
        assert report.exclusive is None
        assert report.gc.deleted_packs > 0
        assert contents(other, "c")["own"] == noise(ord("c"), 6000)


def test_a_damaged_log_deletes_nothing(store: Store, expect_log: Callable[[str], None]) -> None:
    expect_log("SHA-256 does not match")
    fill(store)
    record = store.path / "log" / f"{2:016d}.json"
    record.write_bytes(record.read_bytes().replace(b'"number":1', b'"number":2'))
    before = packs(store)
    with Store.open(store.path, write=True) as other, pytest.raises(CorruptError, match="nothing is deleted"):
        collect(other)
    assert packs(store) == before


def test_a_lost_directory_stops_gc_until_its_version_is_forgotten(store: Store) -> None:
    fill(store)
    location = store.index.find(store.resolve("c").root)
    assert location is not None
    (store.path / pack_key(location.pack)).unlink()
    store.close()
    with Store.open(store.path, write=True) as other:
        before = packs(other)
        with pytest.raises(CorruptError, match="c@1"):
            collect(other)
        assert packs(other) == before
        report = forget(other, [other.resolve("c")])
        assert report.gc.deleted_packs > 0
        assert contents(other, "b")["own"] == noise(ord("b"), 6000)


def publish_delta_in_a_pack_of_its_own(store: Store, name: str, before: str, data: bytes) -> Location:
    """Bind `name` to a file that is stored against file m of `before`, its recipe and directory in another pack."""
    with store.ingest() as ingest:
        earlier = store.open_file(store.lookup(store.resolve(before), b"m"))
        recipe, stats = ingest.put_contents(BytesSource(data), earlier)
        ingest._packs_sink.flush()  # as when the pack is full
        entry = Entry(b"m", EntryType.FILE, ATTRIBUTES, len(data), ingest.put_recipe(recipe, stats))
        ingest.publish(name, ingest.put_directory([entry]), {})
    location = store.index.find(recipe.object_ids()[0])
    assert location is not None
    assert location.depth == 1
    return location


def test_while_a_pack_of_deltas_is_away_their_base_stays(store: Store, tmp_path: Path) -> None:
    """What an object that is in no pack is stored against is not known, and the pack may come back."""
    first, second = series(2, 20_000)
    publish(store, "a", {"m": first})
    publish(store, "whole", {"own": noise(1)})
    location = publish_delta_in_a_pack_of_its_own(store, "b", "a", second)
    store.log.forget([("a", 1)])
    store.close()
    away = tmp_path / "away"
    (store.path / pack_key(location.pack)).rename(away)
    with Store.open(store.path, write=True) as other:
        before = packs(other)
        told = f"b@1/m: object {location.object_id.hex()} .*bring back .*moonclipfs forget"
        for reclaim in (collect, preview, lambda other: forget(other, [other.resolve("whole")])):
            with pytest.raises(MissingObjectError, match=told):
                reclaim(other)
        assert packs(other) == before
        assert "whole" in other.names().bound()
    away.rename(store.path / pack_key(location.pack))
    with Store.open(store.path, write=True) as other:
        collect(other)
        assert contents(other, "b") == {"m": second}


def test_a_version_that_lacks_an_object_can_be_forgotten(store: Store) -> None:
    first, second = series(2, 20_000)
    publish(store, "a", {"m": first})
    publish(store, "whole", {"own": noise(1)})
    location = publish_delta_in_a_pack_of_its_own(store, "b", "a", second)
    store.log.forget([("a", 1)])
    (store.path / pack_key(location.pack)).unlink()
    store.close()
    with Store.open(store.path, write=True) as other:
        report = forget(other, [other.resolve("b")])
        assert report.exclusive is None
        assert report.gc.deleted_packs == 2
        assert collect(other).problems == []
        assert contents(other, "whole") == {"own": noise(1)}


def test_leftovers_of_dead_owners_go_and_those_of_live_ones_stay(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    dead = store.path / "tmp" / f"{'0' * 32}-0123456789abcdef"
    dead.write_bytes(b"half a pack")
    with Store.open(store.path, write=True) as other:
        upload = other.backend.upload()
        upload.write(b"being written")
        (mine,) = [path for path in (store.path / "tmp").iterdir() if path != dead]
        assert collect(store).leftovers == 1
        assert not dead.exists()
        assert mine.exists()
        upload.abort()


def test_old_log_records_are_trimmed(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    for number in range(150):
        store.log.move(f"a{number or ''}", f"a{number + 1}")
    assert collect(store).log_records > 0
    with Store.open(store.path) as other:
        assert contents(other, "a150") == {"f": noise(1)}


# Faults


def calls_of_gc(tmp_path: Path) -> int:
    with new_store(tmp_path / "counted") as store:
        fill(store)
        store.backend.ops = ops = CountingOps()
        collect(store)
        return ops.total


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_any_call_may_fail(tmp_path: Path, code: int) -> None:
    """The error is one of ours or gc does without; what is kept is whole, and the next run finishes."""
    failed = 0
    for at in range(calls_of_gc(tmp_path)):
        with new_store(tmp_path / f"at{at}") as store:
            kept = fill(store)
            store.backend.ops = FaultyOps(at, code)
            try:
                collect(store)
            except MoonclipError:
                failed += 1
            store.backend.ops = FileOps()
            assert_whole(store, kept)
            collect(store)
            report = collect(store, dry_run=True)
            assert (report.deleted_packs, report.waiting_packs) == (0, 0)
            assert_whole(store, kept)
    assert failed if code == errno.EIO else not failed, "one full disk is what the reserve is for"


def test_a_disk_that_stays_full(store: Store) -> None:
    """Nothing can be written at all: the error says so, and nothing is lost."""
    kept = fill(store)
    before = packs(store)
    store.backend.ops = FaultyOps(0, lasting=True)
    with pytest.raises(NoSpaceError):
        collect(store)
    store.backend.ops = FileOps()
    assert packs(store) == before
    assert_whole(store, kept)


def test_R071_killed_at_any_step(tmp_path: Path) -> None:
    """kill -9 in gc; then the same content is stored again, and read back exactly."""
    total = calls_of_gc(tmp_path)
    for at in range(total):
        with new_store(tmp_path / f"at{at}") as store:
            kept = fill(store)
            path = store.path
        index = path.parent / "index.sqlite"
        child = os.fork()
        if child == 0:
            with Store.open(path, write=True, index_path=index) as store:
                store.backend.ops = KillingOps(at)
                collect(store)
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (86, 0)
        with Store.open(path, write=True, index_path=index) as store:
            kept["again"] = {"f": noise(1, 6000), "g": noise(3, 6000), "m": series(3, 2000)[0]}
            publish(store, "again", kept["again"])
            assert_whole(store, kept)
            collect(store)
            assert list((path / "tmp").iterdir()) == []
            assert_whole(store, kept)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "moonclipfs-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root and CAP_SYS_ADMIN")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill_up(disk: Path) -> None:
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        while True:
            os.write(filler, bytes(4096))
    os.close(filler)
    assert os.statvfs(disk).f_bavail == 0


def fill_disk(disk: Path) -> Path:
    """A store with little to keep, and not one byte left beside it."""
    root = disk / "store"
    Store.create(root).close()
    kept = {"f": noise(1, 2 << 20)}
    with Store.open(root, write=True) as store:
        for number in range(6):
            publish(store, f"old/{number}", {"big": noise(100 + number, 5 << 20)})
        publish(store, "old/half", {**kept, "g": noise(2, 5 << 20)})
        publish(store, "kept", kept)
    fill_up(disk)
    with pytest.raises(NoSpaceError):
        Store.open(root, write=True)
    return root


def assert_room_again(root: Path) -> None:
    assert os.statvfs(root).f_bavail * os.statvfs(root).f_frsize > 30 << 20
    assert (root / "reserve").stat().st_blocks * 512 >= limits.RESERVE_BYTES
    with Store.open(root) as store:
        assert verify(store).ok
        assert contents(store, "kept") == {"f": noise(1, 2 << 20)}


def test_forget_and_gc_at_no_byte_free(small_disk: Path) -> None:
    root = fill_disk(small_disk)
    with open_to_reclaim(root, "forget") as store:
        report = forget(store, [version for version in store.names().all_versions() if version.path != "kept"])
        assert report.exclusive is not None
        assert report.gc.deleted_bytes > report.exclusive > 35 << 20
    assert_room_again(root)


def test_the_command_at_no_byte_free(small_disk: Path) -> None:
    root = fill_disk(small_disk)
    program = "import sys; from moonclipfs.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "forget", f"{root}:old"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert_room_again(root)


def test_on_a_full_disk_small_copies_make_room_for_large_ones(small_disk: Path) -> None:
    """The most dead pack needs more space than there is, until others have gone."""
    root, mib = small_disk / "store", 1 << 20
    Store.create(root).close()
    kept = {"big": {"f": noise(2, 17 * mib)}} | {f"small{n}": {"f": noise(20 + n, 2 * mib)} for n in range(3)}
    with Store.open(root, write=True) as store:
        for number, (name, files) in enumerate(kept.items()):
            publish(store, f"old/{name}", {"dead": noise(10 + number, (1 if number else 9) * mib), **files})
            publish(store, name, files)
    fill_up(small_disk)
    with open_to_reclaim(root, "forget") as store:
        report = forget(store, [one for one in store.names().all_versions() if one.path.startswith("old/")])
        assert report.gc.problems == []
        assert report.gc.freed_bytes > 11.9 * mib
        assert report.gc.copied_bytes > 23 * mib
    assert (root / "reserve").stat().st_blocks * 512 >= limits.RESERVE_BYTES
    with Store.open(root) as store:
        assert verify(store).ok
        assert {name: contents(store, name) for name in kept} == kept
