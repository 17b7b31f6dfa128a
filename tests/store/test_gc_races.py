"""gc beside ingests, readers and other gcs: one runs as a whole in the middle of another, at every step of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from moonclipfs.codec.choose import encode
from moonclipfs.errors import BusyError, LeaseLostError
from moonclipfs.store.check import verify
from moonclipfs.store.gc import GcReport, collect, preview
from moonclipfs.store.packs import PackWriter, pack_key
from moonclipfs.store.repack import copy_objects
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, BytesSource, Entry, EntryType, Kind, ObjectId
from tests.faults import HookedOps, UnsyncedOps
from tests.store import kit
from tests.store.kit import contents, packs, publish, series


def noise(seed: int) -> bytes:
    """A small object that does not compress."""
    return kit.noise(seed, 6000)


class StepOps(HookedOps):
    """Runs `action` once, ahead of call number `at` (from 0); counts all calls in `calls`."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self.calls = 0
        self._at = at
        self._action = action
        self._lock = threading.Lock()

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        with self._lock:
            mine, self.calls = self.calls == self._at, self.calls + 1
        if mine:
            self._action()

    def fsync(self, fd: int) -> None:
        self.before("fsync", (fd,))  # a step like any other; what it does takes long and changes nothing here


def open_other(store: Store, name: str = "other.sqlite") -> Store:
    """The store as a process on another host has it: with an index of its own."""
    return Store.open(store.path, write=True, index_path=store.path.parent / name)


def quick_gc(store: Store) -> GcReport:
    return collect(store, wait_seconds=0.0)


def make_waste(store: Store) -> dict[str, dict[str, bytes]]:
    """Packs that are dead as a whole, in part, and by duplicates; deltas whose base only they need."""
    kept = {}
    for name, data in zip("abc", series(3, 2000), strict=True):
        kept[name] = {"m": data, "own": noise(ord(name))}
        publish(store, name, kept[name])
    publish(store, "dead", {"f": noise(1), "g": noise(2)})
    publish(store, "half", {"f": noise(3), "g": noise(4)})
    kept["rest"] = {"g": noise(4)}
    publish(store, "rest", kept["rest"])
    copy_objects(store, [location for location in store.index.iterate() if location.depth == 0][:4])
    store.log.forget([("a", 1), ("dead", 1), ("half", 1)])
    del kept["a"]
    return kept


def assert_whole(store: Store, kept: dict[str, dict[str, bytes]]) -> None:
    with open_other(store, "fresh.sqlite") as fresh:
        assert verify(fresh).problems == []
        for name, files in kept.items():
            assert contents(fresh, name) == files


@pytest.fixture
def other(store: Store) -> Iterator[Store]:
    with open_other(store) as opened:
        yield opened


def steps_of(tmp_path: Path, run: Callable[[Store, Callable[[], None], int], int]) -> int:
    """How many calls an undisturbed run makes."""
    Store.create(tmp_path / "counted").close()
    with Store.open(tmp_path / "counted", write=True, index_path=tmp_path / "counted.sqlite") as store:
        store.backend.ops = UnsyncedOps()
        return run(store, lambda: None, -1)


def gc_with(store: Store, action: Callable[[], None], at: int) -> int:
    """Run gc with `action` at its step `at`, or after it if it takes fewer; returns the number of steps."""
    store.backend.ops = ops = StepOps(at, action)
    try:
        quick_gc(store)
    finally:
        store.backend.ops = UnsyncedOps()
    if at >= ops.calls:
        action()
    return ops.calls


def each_step(tmp_path: Path, body: Callable[[Store, Store, int], None], steps: Iterable[int]) -> None:
    for at in steps:
        root = tmp_path / f"step{at}"
        root.mkdir()
        Store.create(root / "store").close()
        with (
            Store.open(root / "store", write=True, index_path=root / "index.sqlite") as store,
            open_other(store) as other,
        ):
            store.backend.ops = other.backend.ops = UnsyncedOps()
            body(store, other, at)


@pytest.fixture
def steps(tmp_path: Path) -> int:
    def run(store: Store, action: Callable[[], None], at: int) -> int:
        make_waste(store)
        return gc_with(store, action, at)

    count = steps_of(tmp_path, run)
    assert count > 20
    return count


def test_two_gcs_one_inside_the_other(tmp_path: Path, steps: int) -> None:
    def body(store: Store, other: Store, at: int) -> None:
        kept = make_waste(store)
        gc_with(store, lambda: quick_gc(other), at)
        assert_whole(store, kept)
        for one in (other, store, other):
            one.names()
            quick_gc(one)
        other.names()
        final = quick_gc(store)
        assert (final.deleted_packs, final.waiting_packs) == (0, 0)
        assert_whole(store, kept)

    each_step(tmp_path, body, range(steps))


def test_an_add_inside_gc_that_finds_what_gc_thinks_dead(tmp_path: Path, steps: int) -> None:
    def body(store: Store, other: Store, at: int) -> None:
        kept = make_waste(store)
        kept["again"] = {"f": noise(1), "m": series(3, 2000)[0], "new": noise(99)}
        gc_with(store, lambda: void(publish(other, "again", kept["again"])), at)
        assert_whole(store, kept)
        other.names()
        quick_gc(store)
        assert_whole(store, kept)

    each_step(tmp_path, body, range(0, steps, 2))


def test_a_forget_and_a_move_inside_gc(tmp_path: Path, steps: int) -> None:
    def body(store: Store, other: Store, at: int) -> None:
        kept = make_waste(store)

        def action() -> None:
            other.log.forget([("c", 1)])
            other.log.move("b", "moved/b")

        gc_with(store, action, at)
        kept["moved/b"] = kept.pop("b")
        del kept["c"]
        assert_whole(store, kept)

    each_step(tmp_path, body, range(1, steps, 2))


def void(value: object) -> None:
    """Drop a value."""


class Adding:
    """An ingest in two halves: everything put, nothing published."""

    def __init__(self, store: Store, files: dict[str, bytes]) -> None:
        self.ingest = store.ingest()
        entries = []
        for name, data in files.items():
            child, size, _ = self.ingest.put_file(BytesSource(data))
            entries.append(Entry(name.encode(), EntryType.FILE, Attributes(0o644), size, child))
        self.root: ObjectId = self.ingest.put_directory(entries)

    def publish(self, path: str) -> None:
        with self.ingest:
            self.ingest.publish(path, self.root, {})


def test_R073_gc_while_stored_chunks_are_not_committed(store: Store, other: Store) -> None:
    files = {"f": noise(1), "g": noise(2)}
    adding = Adding(other, files)
    adding.ingest._packs_sink.flush()
    before = packs(store)
    assert before
    report = quick_gc(store)
    assert packs(store) == before, "packs of an ingest that lives are not even condemned"
    assert report.deleted_packs == 0
    adding.publish("a")
    assert packs(store) == before | packs(store)
    assert_whole(store, {"a": files})


def test_R073_the_add_refers_to_what_gc_condemns(store: Store, other: Store) -> None:
    files = {"f": noise(1), "g": noise(2), "m": series(1)[0]}
    publish(store, "old", files)
    store.log.forget([("old", 1)])
    other.names()
    adding = Adding(other, files)
    report = quick_gc(store)
    assert report.deleted_packs == 0
    assert report.waiting_packs == 1, "condemned, and kept by the hold of the add"
    assert [line for line in report.waiting_for if "process" in line]
    adding.publish("new")
    assert_whole(store, {"new": files})
    other.names()
    assert quick_gc(store).deleted_packs == 1
    assert_whole(store, {"new": files})


def test_R073_an_aborted_add_leaves_what_gc_takes(store: Store, other: Store) -> None:
    publish(store, "a", {"f": noise(5)})
    adding = Adding(other, {"f": noise(1)})
    adding.ingest._packs_sink.flush()
    adding.ingest.close()
    assert quick_gc(store).waiting_packs == 1
    other.names()
    assert quick_gc(store).deleted_packs == 1
    assert_whole(store, {"a": {"f": noise(5)}})


def test_an_idle_process_that_has_not_seen_the_record_keeps_the_packs(store: Store, other: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    version = other.resolve("a")
    store.log.forget([("a", 1)])
    report = quick_gc(store)
    assert (report.deleted_packs, report.waiting_packs) == (0, 1)
    entry = other.lookup(version, b"f")
    assert other.open_file(entry).read(0, entry.size) == noise(1)
    other.names()
    assert quick_gc(store).deleted_packs == 1


def test_an_open_handle_keeps_the_packs(store: Store, other: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    publish(store, "b", {"f": noise(2)})
    assert other.lease is not None
    version = other.resolve("a")
    hold = other.lease.hold(other.log.names.sequence)
    reader = other.open_file(other.lookup(version, b"f"))
    store.log.forget([("a", 1)])
    for _ in range(2):
        quick_gc(store)
        other.names()
    assert reader.read(0, reader.size) == noise(1)
    hold.release()
    assert quick_gc(store).deleted_packs == 1


def test_gc_waits_for_a_process_that_is_about_to_see_the_record(store: Store, other: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    other.names()
    store.log.forget([("a", 1)])
    stop = threading.Event()

    def refresh() -> None:
        while not stop.wait(0.02):
            other.names()

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        assert collect(store, wait_seconds=60).deleted_packs == 1
    finally:
        stop.set()
        thread.join()


def test_R083_a_gc_that_was_taken_for_dead_condemns_nothing(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    store.log.forget([("a", 1)])
    assert store.lease is not None
    before = packs(store)
    store.lease.path.unlink()
    with pytest.raises(LeaseLostError):
        quick_gc(store)
    assert packs(store) == before
    assert not store.log.refresh().condemned()


def test_copies_that_two_gcs_rely_on_are_never_condemned_together(store: Store, other: Store) -> None:
    """Each of two packs holds a copy of the same objects; whichever gc is first, one copy stays."""
    publish(store, "a", {"f": noise(1)})
    (old,) = packs(store)
    copy_objects(store, list(store.index.iterate()))
    (new,) = packs(store) - {old}

    def condemn(pack: str) -> None:
        other.log.condemn([pack])

    # The other condemns the copy that this gc takes for the one to keep, at the last moment before its own record.
    append = store.log.append

    def raced(type_: str, body: Callable[..., object]) -> int:
        condemn(new)
        return append(type_, body)  # type: ignore[arg-type]

    store.log.append = raced  # type: ignore[method-assign]
    quick_gc(store)
    store.log.append = append  # type: ignore[method-assign]
    assert old in packs(store)
    assert_whole(store, {"a": {"f": noise(1)}})
    other.names()
    quick_gc(store)
    assert packs(store) == {old}
    assert_whole(store, {"a": {"f": noise(1)}})


def _life(root: Path, seed: int, steps: int) -> None:
    """Two processes that add, forget, remove, collect and pause in the middle of adds, in any order."""
    chooser = random.Random(seed)
    pool = [noise(number) for number in range(12)] + series(6, 2000, seed=seed)
    kept: dict[tuple[str, int], dict[str, bytes]] = {}
    Store.create(root / "store").close()
    with (
        Store.open(root / "store", write=True, index_path=root / "a.sqlite", cache_bytes=0) as one,
        Store.open(root / "store", write=True, index_path=root / "b.sqlite", cache_bytes=0) as two,
    ):
        stores = [one, two]
        waiting: dict[int, tuple[Adding, dict[str, bytes]]] = {}
        for store in stores:
            store.backend.ops = UnsyncedOps()
        for _ in range(steps):
            which = chooser.randrange(2)
            store = stores[which]
            action = chooser.choice(
                ["add", "add", "begin", "end", "end", "forget", "forget", "remove", "gc", "gc", "look"]
            )
            name = chooser.choice("pqrs")
            files = {str(number): data for number, data in enumerate(chooser.sample(pool, chooser.randint(1, 4)))}
            if action == "add":
                kept[name, publish(store, name, files).number] = files
            elif action == "begin" and which not in waiting:
                waiting[which] = Adding(store, files), files
            elif action == "end" and which in waiting:
                adding, files = waiting.pop(which)
                try:
                    adding.publish(name)
                    kept[name, store.names().versions(name)[-1].number] = files
                except BusyError:
                    pass  # gc took what it was encoded against, and nothing was published: it is to be added anew
            elif action == "forget" and kept:
                some = chooser.sample(sorted(kept), min(len(kept), 2))
                store.log.forget(some)
                for each in some:
                    del kept[each]
            elif action == "remove" and name in store.names().bound():
                store.log.unbind([name])
            elif action == "gc":
                quick_gc(store)
                with open_other(store, "fresh.sqlite") as fresh:
                    assert verify(fresh).problems == []
            elif action == "look":
                store.names()
            for (path, number), expected in kept.items():
                assert contents(chooser.choice(stores), f"{path}@{number}") == expected
        for adding, _ in waiting.values():
            adding.ingest.close()
        for store in (one, two, one, two):
            store.names()
            quick_gc(store)
        assert verify(one).problems == []
        assert preview(two).deleted_packs == 0


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_adds_forgets_and_collections(tmp_path: Path, seed: int) -> None:
    _life(tmp_path, seed, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_long_lives(tmp_path: Path, seed: int) -> None:
    _life(tmp_path, seed, 150)


def test_a_reader_falls_back_to_another_encoding_when_a_base_is_gone(store: Store, other: Store) -> None:
    """It remembers a delta whose base was reclaimed, after the same object had been stored again in full."""
    files = series(2, 2000)
    for name, data in zip("ab", files, strict=True):
        publish(store, name, {"m": data})
    entry = other.lookup(other.resolve("b"), b"m")
    reader = other.open_file(entry)
    assert reader.read(0, entry.size) == files[1]
    (delta,) = [location for location in store.index.iterate() if location.depth == 1]
    raw = store.objects.load(delta.object_id, Kind.DATA)
    writer = PackWriter(store.backend, store.index.add_pack)
    writer.add(
        encode(raw, delta.dtype).data, object_id=delta.object_id, kind=Kind.DATA,
        raw_length=delta.raw_length, dtype=delta.dtype,
    )  # fmt: skip
    writer.flush()
    base = store.index.find(delta.base)
    assert base is not None
    (store.path / pack_key(base.pack)).unlink()
    with Store.open(store.path, index_path=other.path.parent / "other.sqlite", cache_bytes=0) as again:
        again.objects._links = other.objects._links  # what it remembers
        assert again.open_file(entry).read(0, entry.size) == files[1]
