"""Open files of a layer: what is read is what was written, whatever happens to it meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest

from moonclipfs import limits
from moonclipfs.errors import (
    CorruptError,
    DirectoryError,
    LimitError,
    NoSpaceError,
    StagingFullError,
    UsageError,
)
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.staging import Generation
from moonclipfs.layers.tree import NotCachedError
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.store import Store
from moonclipfs.types import Entry, EntryType, ObjectId
from tests.faults import HookedOps
from tests.layers.filekit import encode, make_file, overwrite, read_all, staging_names, write_file
from tests.layers.publish import File, publish

BIG = 2 * limits.INLINE_BYTES


@pytest.fixture
def layer(store: Store) -> Iterator[Layer]:
    opened = Layer.open(store, "test")
    yield opened
    opened.close()


def test_bytes_come_back(layer: Layer) -> None:
    inode = make_file(layer, b"a")
    with_file = layer.open_file(inode, write=True)
    assert with_file.write(0, b"hello", 5) == 5
    assert with_file.write(10, b"world", 6) == 5
    assert with_file.size == 15
    assert with_file.read(0, 100) == b"hello" + bytes(5) + b"world"
    assert with_file.cached(0, 5) == b"hello"
    out = bytearray(20)
    assert with_file.read_into(3, memoryview(out)) == 12
    assert (inode.mtime_ns, inode.ctime_ns) == (6, 6)
    with_file.close()


def test_large_writes_go_to_a_file(layer: Layer) -> None:
    data = os.urandom(3 * limits.INLINE_BYTES)
    inode = write_file(layer, b"large", data)
    assert read_all(layer, inode) == data
    assert len(staging_names(layer)) == 1


def test_small_files_make_no_files(layer: Layer) -> None:
    for number in range(50):
        write_file(layer, b"%d" % number, os.urandom(4096))
    assert staging_names(layer) == []


def test_encoded_content_is_read_from_the_store(layer: Layer) -> None:
    data = os.urandom(3 * limits.INLINE_BYTES)
    inode = write_file(layer, b"large", data)
    reader = layer.open_file(inode, write=False)
    before = reader.read(0, 10)
    (job,) = layer.take_jobs(0.0, urgent=True)
    assert reader.read(0, len(data)) == data
    encode(layer, job)
    assert reader.read(0, len(data)) == data and before == data[:10]
    layer.sync_all()
    assert staging_names(layer) == [] and layer.staging.used == 0
    reader.close()
    assert read_all(layer, inode) == data


def test_a_write_over_stored_content(layer: Layer) -> None:
    data = os.urandom(3 * limits.INLINE_BYTES)
    inode = write_file(layer, b"large", data)
    encode(layer, *layer.take_jobs(0.0, urgent=True))
    file = layer.open_file(inode, write=True)
    file.write(100, b"x" * 50, 9)
    expected = data[:100] + b"x" * 50 + data[150:]
    assert file.read(0, len(data)) == expected
    file.close()
    encode(layer, *layer.take_jobs(0.0, urgent=True))
    assert read_all(layer, inode) == expected


def test_writes_while_it_is_encoded(layer: Layer) -> None:
    data = os.urandom(3 * limits.INLINE_BYTES)
    inode = write_file(layer, b"large", data)
    (job,) = layer.take_jobs(0.0, urgent=True)
    file = layer.open_file(inode, write=True)
    file.write(0, b"new", 9)
    encode(layer, job)
    assert file.read(0, len(data)) == b"new" + data[3:]
    file.close()
    encode(layer, *layer.take_jobs(0.0, urgent=True))
    layer.sync_all()
    assert read_all(layer, inode) == b"new" + data[3:] and layer.staging.used == 0


def test_who_reads_keeps_what_it_found(layer: Layer) -> None:
    data = os.urandom(3 * limits.INLINE_BYTES)
    inode = write_file(layer, b"large", data)
    assert inode.content is not None
    (part,) = inode.content.parts(0, len(data))
    encode(layer, *layer.take_jobs(0.0, urgent=True))
    layer.sync_all()
    assert staging_names(layer) == []
    out = bytearray(len(data))
    assert part.generation is not None
    part.generation.read_into(0, memoryview(out))
    assert out == data


def test_truncate_and_extend(layer: Layer) -> None:
    inode = write_file(layer, b"a", b"0123456789")
    layer.truncate(inode, 4, 7)
    layer.truncate(inode, 8, 8)
    assert read_all(layer, inode) == b"0123" + bytes(4)
    assert layer.stat(inode).size == 8 and inode.mtime_ns == 8
    layer.truncate(inode, 1 << 40, 9)
    file = layer.open_file(inode, write=False)
    assert file.read((1 << 40) - 3, 10) == bytes(3)
    file.close()
    with pytest.raises(LimitError):
        layer.truncate(inode, limits.FILE_BYTES + 1, 9)


@pytest.mark.parametrize("size", [0, 5, BIG // 2, 2 * BIG])
@pytest.mark.parametrize("state", ["staged", "small", "stored", "unsynced"])
def test_a_truncate_that_is_not_journalled_changes_nothing(
    store: Store, layer: Layer, state: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever cuts a closed file off and gets an error finds it as it was, now and after a restart."""
    data = os.urandom(100 if state == "small" else BIG)
    inode = write_file(layer, b"a", data)
    if state != "unsynced":
        layer.sync_all()
    if state == "stored":
        encode(layer, *layer.take_jobs(0.0, urgent=True))
        layer.sync_all()
    before = layer.stat(inode)
    append = layer.journal.append

    def full(*_: object) -> None:
        raise NoSpaceError("the disk is full")

    for _ in range(2):
        monkeypatch.setattr(layer.journal, "append", full)
        with pytest.raises(NoSpaceError):
            layer.truncate(inode, size, 99)
        assert read_all(layer, inode) == data and layer.stat(inode) == before
    monkeypatch.setattr(layer.journal, "append", append)
    layer.sync_all()
    layer.files.checkpoint()
    layer.close()
    again = Layer.open(store, "test")
    inode = again.lookup(again.root, b"a")
    assert read_all(again, inode) == data and again.stat(inode).mtime_ns == before.mtime_ns
    again.truncate(inode, size, 99)
    again.sync_all()
    assert read_all(again, inode) == data[:size] + bytes(max(0, size - len(data)))
    encode(again, *again.take_jobs(0.0, urgent=True))
    again.sync_all()
    assert read_all(again, inode) == data[:size] + bytes(max(0, size - len(data)))
    assert staging_names(again) == []
    again.close()


class UnlinksFail(HookedOps):
    """No staging file can be deleted."""

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        if name == "unlink" and "/staging/" in str(arguments[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_staging_file_that_cannot_be_deleted_is_no_error_of_a_change(
    store: Store, expect_log: Callable[[str], None]
) -> None:
    """What was removed, cut off or replaced is so; the file stays until the layer is opened next."""
    layer = Layer.open(store, "test", ops=UnlinksFail())
    for name in (b"removed", b"cut", b"replaced"):
        write_file(layer, name, os.urandom(BIG))
    write_file(layer, b"new", b"new")
    layer.unlink(layer.root, b"removed", 5)
    layer.truncate(layer.lookup(layer.root, b"cut"), 0, 5)
    layer.rename(layer.root, b"new", layer.root, b"replaced", 5)
    layer.sync_all()
    layer.sync_all()
    assert sorted(layer.names_in(layer.root)) == [b"cut", b"replaced"] and layer.staging.used == len(b"new")
    assert len(staging_names(layer)) == 3
    layer.close()
    expect_log("WARNING .*cannot delete .*Input/output error; nobody needs it")
    again = Layer.open(store, "test")
    assert again.recovery.orphans == 3
    again.sync_all()
    assert staging_names(again) == []
    assert read_all(again, again.lookup(again.root, b"replaced")) == b"new"
    again.close()


def test_set_ids_are_cleared_by_writes_of_others(layer: Layer) -> None:
    inode = make_file(layer, b"a", 0o6775)
    file = layer.open_file(inode, write=True)
    file.write(0, b"x", 5)
    assert inode.mode == 0o775
    file.close()
    inode = make_file(layer, b"b", 0o6765)
    layer.truncate(inode, 5, 5)
    assert inode.mode == 0o2765
    inode = make_file(layer, b"c", 0o6775)
    file = layer.open_file(inode, write=True, privileged=True)
    file.write(0, b"x", 5)
    assert inode.mode == 0o6775
    file.close()


def test_what_is_no_file_is_not_opened(layer: Layer) -> None:
    with pytest.raises(DirectoryError):
        layer.open_file(layer.root, write=False)
    link = layer.make(layer.root, b"link", EntryType.SYMLINK, 0o777, 0, 0, 1, target=b"x")
    with pytest.raises(UsageError):
        layer.open_file(link, write=False)
    file = layer.open_file(make_file(layer, b"a"), write=False)
    with pytest.raises(UsageError):
        file.write(0, b"x", 1)
    file.close()


def test_an_unlinked_file_lives_until_it_is_closed(layer: Layer) -> None:
    data = os.urandom(3 * limits.INLINE_BYTES)
    inode = write_file(layer, b"a", data)
    file = layer.open_file(inode, write=True)
    layer.unlink(layer.root, b"a", 9)
    assert file.read(0, len(data)) == data
    file.write(0, b"abc", 10)
    file.sync()
    assert file.read(0, 5) == b"abc" + data[3:5]
    file.close()
    layer.sync_all()
    assert staging_names(layer) == [] and layer.staging.used == 0
    assert layer.take_jobs(0.0, urgent=True) == []


def test_a_removed_temporary_file_is_never_encoded(layer: Layer) -> None:
    """A temporary file that is removed soon is never encoded."""
    write_file(layer, b"a", os.urandom(3 * limits.INLINE_BYTES))
    layer.unlink(layer.root, b"a", 9)
    assert staging_names(layer) == [] and layer.staging.used == 0
    assert layer.take_jobs(0.0, urgent=True) == []


def test_a_staged_file_can_be_written_anew_though_both_pass_the_limit(store: Store) -> None:
    """Its old content is kept for a crash until the new one is complete: the writer must not wait for that."""
    layer = Layer.open(store, "test", staging_limit=1 << 20)
    try:
        inode = write_file(layer, b"a", os.urandom(800_000))
        layer.sync_all()
        layer.truncate(inode, 0, 7)
        with_file, data = layer.open_file(inode, write=True), os.urandom(800_000)
        for offset in range(0, len(data), 100_000):
            with_file.write(offset, data[offset : offset + 100_000], 8)
        with pytest.raises(StagingFullError):
            with_file.write(len(data), bytes(400_000), 8)
        assert layer.staging.used == 1_600_000
        with_file.close()
        layer.sync_all()
        layer.sync_all()
        assert (layer.staging.used, layer.staging.waiting) == (800_000, 800_000)
        assert read_all(layer, inode) == data
    finally:
        layer.close()


def test_staging_limit(store: Store) -> None:
    layer = Layer.open(store, "test", staging_limit=1 << 20)
    try:
        inode = make_file(layer, b"a")
        file = layer.open_file(inode, write=True)
        file.write(0, bytes(1 << 20), 1)
        with pytest.raises(StagingFullError):
            file.write(1 << 20, b"x", 2)
        assert file.size == 1 << 20
        encode(layer, *layer.take_jobs(0.0, urgent=True, pressure=True))
        layer.sync_all()
        assert file.write(1 << 20, b"x", 3) == 1
        file.close()
    finally:
        layer.close()


def test_writers_and_the_encoder_at_once(layer: Layer) -> None:
    """Writes of all sizes, reads, freezes and stores, in threads: what is read in the end is what was written."""
    inode = make_file(layer, b"a")
    size = 2 << 20
    truth = bytearray(size)
    stop = threading.Event()
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
                raise

        return run

    def write(half: int) -> None:
        import random

        rng = random.Random(half)
        file = layer.open_file(inode, write=True)
        for step in range(120):
            length = rng.choice([1, 500, 4096, 100_000, 300_000])
            offset = half * size // 2 + rng.randrange(size // 2 - length)
            data = bytes([step % 255 + 1]) * length
            file.write(offset, data, step)
            truth[offset : offset + length] = data
            assert file.read(offset, length) == data
        file.close()

    def encoder() -> None:
        while not stop.is_set():
            for job in layer.take_jobs(0.0, urgent=True, pressure=True):
                encode(layer, job)
            layer.sync_all()

    writers = [threading.Thread(target=guarded(lambda half=half: write(half))) for half in (0, 1)]  # type: ignore[misc]
    background = threading.Thread(target=guarded(encoder))
    for thread in (*writers, background):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    background.join()
    assert not failures
    found = read_all(layer, inode)
    assert found == truth[: len(found)] and not any(truth[len(found) :])


def test_what_is_not_in_memory_is_not_waited_for(layer: Layer) -> None:
    data = os.urandom(BIG)
    inode = write_file(layer, b"a", data)
    encode(layer, *layer.take_jobs(0.0, urgent=True))
    file = layer.open_file(inode, write=True)
    file.write(BIG - 10, b"x" * 20, 5)
    assert file.cached(0, 10) is None and file.cached(BIG - 10, 20) == b"x" * 20
    file.prefetch(0, file.size)
    assert file.cached(0, BIG + 100) == data[:-10] + b"x" * 20
    assert file.cached(BIG + 10, 5) == b""
    file.close()


def test_a_damaged_recipe_is_an_error(layer: Layer) -> None:
    inode = write_file(layer, b"a", os.urandom(BIG))
    (job,) = layer.take_jobs(0.0, urgent=True)
    layer.stored(job, b"?" * 32, BIG)
    with pytest.raises(CorruptError):
        read_all(layer, inode)


def test_a_recipe_that_is_too_short_is_an_error(layer: Layer) -> None:
    short = write_file(layer, b"short", b"x" * BIG)
    inode = write_file(layer, b"a", os.urandom(BIG + 1))
    encode(layer, *layer.take_jobs(0.0, urgent=True, inodes=[short]))
    (job,) = layer.take_jobs(0.0, urgent=True)
    layer.stored(job, short.child, BIG + 1)
    with pytest.raises(CorruptError):
        read_all(layer, inode)


def test_what_is_reclaimed_under_a_reader_is_read_from_where_it_is_now(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader looks where the bytes were; meanwhile they were encoded anew, and what they were from is gone."""
    inode = write_file(layer, b"a", os.urandom(BIG))
    encode(layer, *layer.take_jobs(0.0, urgent=True))
    old = inode.child
    overwrite(layer, inode, os.urandom(BIG))
    data = read_all(layer, inode)
    encode(layer, *layer.take_jobs(0.0, urgent=True))
    load, new = layer.store.recipe_object, inode.child
    inode.child = old
    file = layer.open_file(inode, write=False)

    def recipe_object(recipe: ObjectId) -> Recipe:
        if recipe == old:
            inode.child = new
            raise CorruptError("reclaimed")
        return load(recipe)

    monkeypatch.setattr(layer.store, "recipe_object", recipe_object)
    assert file.read(0, BIG) == data
    file.close()


# Syncs, and what happens while the disk is at work


def _write(layer: Layer, file: OpenFile) -> None:
    file.write(5, b"meanwhile", 9)


def _flush(layer: Layer, file: OpenFile) -> None:
    _write(layer, file)
    file.flush()


def _cut(layer: Layer, file: OpenFile) -> None:
    layer.truncate(file.inode, BIG // 2, 9)
    file.flush()


def _replace(layer: Layer, file: OpenFile) -> None:
    layer.truncate(file.inode, 0, 9)
    file.write(0, b"replaced" * BIG, 9)
    file.flush()


def _half_replace(layer: Layer, file: OpenFile) -> None:
    layer.truncate(file.inode, 0, 9)
    file.write(0, b"replaced", 9)


def _rename(layer: Layer, file: OpenFile) -> None:
    _write(layer, file)
    layer.rename(layer.root, b"a", layer.root, b"b", 9)


def _sync(layer: Layer, file: OpenFile) -> None:
    _write(layer, file)
    file.sync()


def _encode(layer: Layer, file: OpenFile) -> None:
    jobs = layer.take_jobs(0.0, urgent=True, pressure=True)
    _write(layer, file)
    encode(layer, *jobs)


def _checkpoint(layer: Layer, file: OpenFile) -> None:
    _write(layer, file)
    layer.files.checkpoint()


def _unlink(layer: Layer, file: OpenFile) -> None:
    layer.unlink(layer.root, b"a", 9)


@pytest.mark.parametrize("file_before", [False, True])
@pytest.mark.parametrize(
    "meanwhile",
    [_write, _flush, _cut, _replace, _half_replace, _rename, _sync, _encode, _checkpoint, _unlink],
    ids=lambda function: function.__name__.strip("_"),
)
def test_a_change_during_a_sync(
    store: Store, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Layer, OpenFile], None], file_before: bool
) -> None:
    """What was there when the sync began is durable, or what came later; what was accepted outlives a kill."""
    layer = Layer.open(store, "test")
    data = os.urandom(BIG)
    if file_before:
        write_file(layer, b"a", os.urandom(BIG))
        layer.sync_all()
    file = layer.open_file(layer.lookup(layer.root, b"a") if file_before else make_file(layer, b"a"), write=True)
    file.write(0, data, 1)
    then: list[Callable[[Layer, OpenFile], None]] = [meanwhile]
    original = Generation.sync

    def sync(generation: Generation) -> None:
        original(generation)
        while then:
            then.pop()(layer, file)

    monkeypatch.setattr(Generation, "sync", sync)
    file.sync()
    assert not then
    now = file.read(0, file.size)
    layer.close()

    def reopened(boot: bytes | None) -> bytes | None:
        with pytest.MonkeyPatch.context() as patch:
            if boot is not None:
                patch.setattr("moonclipfs.layers.journal.this_boot", lambda: boot)
            again = Layer.open(store, "test")
            names = again.names_in(again.root)
            found = read_all(again, again.lookup(again.root, names[0])) if names else None
            again.close()
            return found

    left = {None} if meanwhile is _unlink else {now} if meanwhile is not _half_replace else {data}
    in_place = data[:5] + b"meanwhile" + data[14:]
    killed = reopened(None)
    assert killed in left | ({data, in_place} if meanwhile in (_write, _encode) else set())
    assert reopened(b"other".ljust(16)) in left | {killed, data, in_place}


@pytest.mark.parametrize("how", ["sync", "flush", "sync_all"])
def test_a_write_that_is_under_way_during_a_sync_is_journalled(
    layer: Layer, store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What was journalled while the bytes went to staging does not have them: a close or sync after it must."""
    inode = make_file(layer, b"a")
    file = layer.open_file(inode, write=True)
    first, second = os.urandom(BIG), os.urandom(BIG)
    file.write(0, first, 1)
    real, between = Generation.try_write, {"sync": file.sync, "flush": file.flush, "sync_all": layer.sync_all}[how]

    def try_write(generation: Generation, offset: int, data: bytes) -> bool:
        written = real(generation, offset, data)
        between()
        return written

    with monkeypatch.context() as patch:
        patch.setattr(Generation, "try_write", try_write)
        file.write(BIG, second, 2)
    file.flush()
    file.close()
    layer.close()
    again = Layer.open(store, "test")
    try:
        assert read_all(again, again.resolve(b"a")) == first + second
    finally:
        again.close()


def test_bytes_leave_memory_under_the_lock_only(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether bytes travel in a record of the journal must not change while one is made."""
    file = layer.open_file(make_file(layer, b"a"), write=True)
    file.write(0, b"small", 1)
    real, paths = Generation.try_write, []

    def try_write(generation: Generation, offset: int, data: bytes) -> bool:
        paths.append(generation.path)
        return real(generation, offset, data)

    monkeypatch.setattr(Generation, "try_write", try_write)
    file.write(5, bytes(BIG), 2)
    file.close()
    assert paths == [layer.staging.path(1)]


def test_attributes_that_are_set_during_a_sync_stay(
    layer: Layer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of contents that a sync began with is written after theirs."""
    inode = make_file(layer, b"a")
    file = layer.open_file(inode, write=True)
    file.write(0, os.urandom(BIG), 2)
    real = Generation.sync

    def sync(generation: Generation) -> None:
        real(generation)
        layer.set_attributes(inode, mtime_ns=77, now_ns=99)

    with monkeypatch.context() as patch:
        patch.setattr(Generation, "sync", sync)
        file.sync()
    file.close()
    change = inode.changed
    layer.close()
    again = Layer.open(store, "test")
    try:
        found = again.resolve(b"a")
        assert (found.mtime_ns, found.ctime_ns, found.changed) == (77, 99, change)
    finally:
        again.close()


def test_opening_for_writing_waits_for_nothing_that_is_not_in_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes over a file needs of the store is loaded without the lock: who may not wait is told."""
    publish(store, "a", {"x": File(b"1", link_group=1), "d": {"y": File(b"1", link_group=1)}})
    layer = Layer.open(store, "test")
    inode = layer.resolve(b"a/x")
    held: list[bool] = []
    real = store.directory

    def directory(object_id: ObjectId) -> Mapping[bytes, Entry]:
        free = threading.Event()

        def take() -> None:
            with layer.lock:
                free.set()

        other = threading.Thread(target=take)
        other.start()
        held.append(not free.wait(1))
        return real(object_id)

    monkeypatch.setattr(store, "directory", directory)
    with pytest.raises(NotCachedError):
        layer.open_file(inode, write=True, wait=False)
    with pytest.raises(NotCachedError):
        layer.truncate(inode, 0, 1, wait=False)
    assert held == []
    layer.open_file(inode, write=True).close()
    layer.close()
    assert held and not any(held)


@pytest.mark.parametrize("size", [100, BIG])
def test_what_the_kernel_knows_can_be_opened_after_its_last_name_went(layer: Layer, size: int) -> None:
    """A program that opens a file while another one replaces or removes it has the old bytes, not none."""
    data = os.urandom(size)
    inode = write_file(layer, b"a", data)
    layer.remember(inode)
    write_file(layer, b"b", b"new")
    layer.rename(layer.root, b"b", layer.root, b"a", 5)
    layer.sync_all()
    assert read_all(layer, inode) == data and layer.stat(inode).size == size
    assert read_all(layer, inode) == data, "closed, it is known still"
    layer.forget(inode, 1)
    layer.sync_all()
    assert staging_names(layer) == [] and layer.staging.used == len(b"new")


def test_large_deleted_files_are_closed_by_who_may_wait(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """To free gigabytes takes the kernel long: not in the middle of an unlink, under the lock."""
    monkeypatch.setattr(limits, "LONG_CLOSE_BYTES", BIG)

    def open_files() -> int:
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum(os.readlink(link).startswith(str(layer.staging.directory)) for link in links if os.path.islink(link))

    write_file(layer, b"large", bytes(BIG))
    write_file(layer, b"small", bytes(BIG - 1))
    assert open_files() == 2
    for name in (b"large", b"small"):
        layer.unlink(layer.root, name, 5)
    assert open_files() == 1 and layer.staging.used == 0 and staging_names(layer) == []
    layer.sync_all()
    assert open_files() == 0
