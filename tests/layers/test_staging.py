"""Staging generations: bytes in memory and in files, faults of the disk, open files, what is deleted under a reader."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.errors import BackendError, CorruptError, NoSpaceError, StagingFullError
from moonclipfs.layers.staging import Generation, Staging
from moonclipfs.store.backend import FileOps
from moonclipfs.types import Buffer
from tests.faults import CountingOps, FaultyOps, HookedOps

BIG = limits.INLINE_BYTES + 1
LIMIT = 1 << 40


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path / "staging", LIMIT, FileOps())


def read(generation: Generation, offset: int, length: int) -> bytes:
    out = bytearray(b"?" * length)
    generation.read_into(offset, memoryview(out))
    return bytes(out)


def files(staging: Staging) -> list[str]:
    return sorted(os.listdir(staging.directory))


def open_files(staging: Staging) -> int:
    """Descriptors of this process that lead into the staging directory."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(str(staging.directory))
        except FileNotFoundError:
            pass  # the one that listed them
    return count


def test_small_contents_make_no_file(staging: Staging) -> None:
    generation = staging.create(1)
    generation.write(3, b"abc")
    generation.write(4, memoryview(b"B"))
    assert read(generation, 0, 8) == b"\0\0\0aBc\0\0"
    assert generation.cached(2, 4) == b"\0aBc"
    assert generation.path is None and not files(staging)
    assert staging.used == generation.bytes == 6
    generation.sync()
    assert not files(staging)


def test_what_outgrows_memory_goes_on_in_a_private_file(staging: Staging) -> None:
    generation = staging.create(255)
    generation.write(0, b"begin")
    generation.write(BIG, b"end")
    assert files(staging) == ["00000000000000ff"]
    assert generation.path == str(staging.directory / "00000000000000ff")
    assert os.stat(generation.path).st_mode & 0o777 == 0o600
    assert os.stat(staging.directory).st_mode & 0o777 == 0o700
    assert read(generation, 0, BIG + 10) == b"begin" + bytes(BIG - 5) + b"end" + bytes(7)
    assert generation.cached(BIG, 3) == b"end"
    assert staging.used == generation.bytes == 8
    generation.write(BIG + 1, b"ND!")
    assert staging.used == 9


def test_a_small_write_far_out_takes_a_sparse_file_not_memory(staging: Staging) -> None:
    generation = staging.create(1)
    generation.write(1 << 40, b"far")
    assert staging.used == 3
    assert generation.path is not None and os.stat(generation.path).st_blocks * 512 < limits.MIB
    assert read(generation, (1 << 40) - 1, 4) == b"\0far"


def test_memory_for_small_contents_is_bounded(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INLINE_TOTAL_BYTES", 250)
    generations = [staging.create(number) for number in range(1, 5)]
    for generation in generations:
        generation.write(0, b"x" * 100)
    assert [generation.path is None for generation in generations] == [True, True, False, False]
    generations[1].write(100, b"x" * 100)
    assert generations[1].path is not None
    assert read(generations[1], 0, 200) == b"x" * 200
    assert staging.create(5).path is None
    generations[0].write(0, b"y" * 250)
    assert staging.create(6).path is not None
    staging.delete(generations[0])
    assert staging.create(7).path is None
    assert staging.used == 200 + 100 + 100


@given(st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=80)), max_size=20), st.integers(0, 400))
def test_a_generation_is_an_array_of_bytes(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, bytes]], inline: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "INLINE_BYTES", inline)
        staging = Staging(tmp_path_factory.mktemp("s") / "staging", LIMIT, FileOps())
        generation = staging.create(1)
        model, written = bytearray(400), set()
        for offset, data in writes:
            generation.write(offset, data)
            model[offset : offset + len(data)] = data
            written |= set(range(offset, offset + len(data)))
            assert read(generation, 0, 400) == model
            found = generation.cached(offset, len(data))
            assert found is None or found == data
        if generation.path is not None:
            # Gaps between what was in memory are written too, when it goes on in a file.
            assert len(written) <= generation.bytes <= min(len(written) + inline, max(written) + 1)
        assert staging.used == generation.bytes
        staging.delete(generation)
        assert staging.used == 0


def test_a_frozen_generation_refuses_writes(staging: Staging) -> None:
    generation = staging.create(1)
    generation.write(0, b"kept")
    generation.frozen = True
    with pytest.raises(AssertionError, match="needs a new generation"):
        generation.write(0, b"lost")
    assert not generation.try_write(0, b"lost")
    assert read(generation, 0, 4) == b"kept"


class ShortOps(FileOps):
    """Every write takes one byte, or half of what there is."""

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return super().pwrite(fd, memoryview(data)[: max(1, len(data) // 2)], offset)


def test_writes_that_the_kernel_cuts_short_go_on(tmp_path: Path) -> None:
    generation = Staging(tmp_path / "staging", LIMIT, ShortOps()).create(1)
    data = random.Random(1).randbytes(BIG)
    generation.write(5, data)
    assert read(generation, 5, BIG) == data


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_loses_nothing_that_was_accepted(tmp_path: Path, code: int) -> None:
    """Call after call fails, once; then the same write succeeds, and counts are what they were before."""
    expected = NoSpaceError if code != errno.EIO else BackendError
    for at in range(1, 100):
        ops = FaultyOps(at, code)
        staging = Staging(tmp_path / f"staging{at}", LIMIT, ops)
        generation = staging.create(1)
        generation.write(0, b"accepted")
        failures = 0
        for offset, data in [(8, b"b" * BIG), (0, b"a")]:
            before = staging.used
            try:
                generation.write(offset, data)
            except expected as error:
                failures += 1
                assert str(staging.directory) in str(error)
                assert staging.used == before
                assert read(generation, 0, 8) == b"accepted"
                generation.write(offset, data)
        try:
            generation.sync()
        except expected:
            failures += 1
        assert read(generation, 0, 10) == b"acceptedbb"
        assert staging.used == generation.bytes == 8 + BIG
        assert failures == 1 or ops.failed in ("", "close")
        if not ops.reached:
            break
    else:
        pytest.fail("calls without end")


def test_a_full_disk_leaves_no_half_made_file(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "staging", LIMIT, FaultyOps(2, lasting=True))
    generation = staging.create(1)
    generation.write(0, b"small")
    with pytest.raises(NoSpaceError, match="No space left"):
        generation.write(0, bytes(BIG))
    assert not files(staging) and generation.path is None
    assert read(generation, 0, 5) == b"small" and staging.used == 5


class FailingSync(HookedOps):
    """fdatasync fails so many times, and the kernel then takes the pages for clean ones."""

    def __init__(self, code: int, times: int) -> None:
        self.code, self.times = code, times
        self.written: list[tuple[int, bytes]] = []

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        if name == "fdatasync" and self.times:
            self.times -= 1
            self.written = []
            raise OSError(self.code, os.strerror(self.code))

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        self.written.append((offset, bytes(data)))
        return super().pwrite(fd, data, offset)


def test_a_sync_after_one_without_space_writes_the_bytes_again(tmp_path: Path) -> None:
    ops = FailingSync(errno.ENOSPC, 2)
    generation = Staging(tmp_path / "staging", LIMIT, ops).create(1)
    generation.write(BIG, b"one")
    generation.write(2 * BIG, b"two")
    for _ in range(2):
        with pytest.raises(NoSpaceError, match="sync"):
            generation.sync()
    generation.sync()
    assert ops.written == [(BIG, b"one"), (2 * BIG, b"two")]


def test_a_sync_after_a_broken_disk_fails_again(tmp_path: Path) -> None:
    generation = Staging(tmp_path / "staging", LIMIT, FailingSync(errno.EIO, 1)).create(1)
    generation.write(BIG, b"one")
    for _ in range(3):
        with pytest.raises(BackendError, match="Input/output error"):
            generation.sync()


def test_sync_makes_bytes_and_name_durable_and_happens_once(tmp_path: Path) -> None:
    ops = CountingOps()
    staging = Staging(tmp_path / "staging", LIMIT, ops)
    generations = [staging.create(number) for number in (1, 2, 3)]
    for generation in generations:
        generation.write(0, bytes(BIG))
    generations[0].sync()
    assert (ops.calls["fdatasync"], ops.calls["fsync"]) == (1, 1)
    generations[0].sync()
    generations[1].sync()
    assert (ops.calls["fdatasync"], ops.calls["fsync"]) == (2, 1)
    generations[0].write(0, b"x")
    generations[0].sync()
    assert (ops.calls["fdatasync"], ops.calls["fsync"]) == (3, 1)


class SlowSync(FileOps):
    """fdatasync takes as long as the test wants."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def fdatasync(self, fd: int) -> None:
        self.begun.set()
        assert self.go.wait(30)
        super().fdatasync(fd)


def test_who_syncs_meanwhile_waits_for_the_disk_too(tmp_path: Path) -> None:
    ops = SlowSync()
    generation = Staging(tmp_path / "staging", LIMIT, ops).create(1)
    generation.write(0, bytes(BIG))
    threads = [threading.Thread(target=generation.sync) for _ in range(2)]
    threads[0].start()
    assert ops.begun.wait(30)
    threads[1].start()
    generation.write(0, b"writes wait for no sync")
    threads[1].join(0.1)
    assert threads[0].is_alive() and threads[1].is_alive()
    ops.go.set()
    for thread in threads:
        thread.join()


def test_few_files_are_open_however_many_generations_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STAGING_FILES", 3)
    staging = Staging(tmp_path / "staging", LIMIT, FileOps())
    generations = [staging.create(number) for number in range(1, 21)]
    for generation in generations:
        generation.write(BIG, bytes([generation.number]))
        assert open_files(staging) <= 3
    for generation in generations:
        generation.write(BIG + 1, b"!")
        assert read(generation, BIG, 2) == bytes([generation.number]) + b"!"
        assert open_files(staging) <= 3
    assert generations[0].cached(BIG, 1) is None
    for generation in generations[1:]:
        generation.sync()


@pytest.mark.parametrize("evicted", [False, True])
def test_who_reads_a_deleted_generation_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evicted: bool
) -> None:
    monkeypatch.setattr(limits, "STAGING_FILES", 1)
    staging = Staging(tmp_path / "staging", LIMIT, FileOps())
    small, big = staging.create(1), staging.create(2)
    small.write(0, b"small")
    big.write(BIG, b"big")
    if evicted:
        staging.create(3).write(BIG, b"other")
    for generation in (small, big, big):
        staging.delete(generation)
    assert staging.used == (5 if evicted else 0) and len(files(staging)) == evicted
    assert read(small, 0, 5) == b"small" and read(big, BIG, 3) == b"big"
    big.sync()
    with pytest.raises(AssertionError, match="deleted"):
        big.write(0, b"x")
    before = open_files(staging)
    del big, generation
    gc.collect()
    assert open_files(staging) == before - 1


def test_reads_beside_a_writer_that_outgrows_memory_see_old_or_new(staging: Staging) -> None:
    """No read sees zeros or a mixture of a write with nothing, and none fails."""
    generation = staging.create(1)
    generation.write(0, b"a" * 1000)
    stop = threading.Event()
    wrong: list[bytes] = []

    def reader() -> None:
        while not stop.is_set():
            found = read(generation, 0, 1000)
            if set(found) - set(b"ab"):
                wrong.append(found)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        generation.write(0, b"b" * 1000)
        generation.write(0, b"a" * 1000)
    generation.write(BIG, b"x")
    for _ in range(50):
        generation.write(0, b"b" * 1000)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and read(generation, 0, 1000) == b"b" * 1000


def test_opened_again_after_a_crash(tmp_path: Path) -> None:
    first = Staging(tmp_path / "staging", LIMIT, FileOps())
    first.create(1).write(BIG, b"first")
    first.create(2).write(BIG, b"orphan")
    (tmp_path / "staging" / "notes.txt").write_text("not ours")
    (tmp_path / "staging" / "sixteen letters!").write_text("not ours")
    ops = CountingOps()
    staging = Staging(tmp_path / "staging", LIMIT, ops)
    generation = staging.open(1)
    assert staging.open(1) is generation and staging.used == 0
    generation.mark(BIG, 5)
    generation.mark(BIG, 5)
    assert staging.used == 5 and read(generation, BIG, 5) == b"first"
    generation.sync()
    assert ops.calls["fdatasync"] == 1, "the process before may not have synced it"
    assert ops.calls["fsync"] == 1, "nor its name"
    generation.write(BIG + 5, b" again")
    assert read(generation, BIG, 11) == b"first again"
    assert staging.orphans({1}) == [2]
    staging.remove(2)
    staging.remove(2)
    assert staging.orphans({1}) == [] and len(files(staging)) == 3


def test_missing_bytes_are_never_zeros(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "staging", LIMIT, FileOps())
    gone, short = staging.open(1), staging.open(2)
    gone.mark(0, 10)
    (tmp_path / "staging" / f"{2:016x}").write_bytes(b"only")
    short.mark(0, 10)
    with pytest.raises(CorruptError, match="0000000000000001 is gone"):
        read(gone, 0, 10)
    with pytest.raises(CorruptError, match=r"from 4 on in .*0000000000000002"):
        read(short, 0, 10)
    assert read(short, 0, 4) == b"only" and read(short, 10, 2) == bytes(2)
    assert gone.cached(0, 10) is None and short.cached(0, 10) is None
    with pytest.raises(CorruptError):
        gone.write(0, b"x")
    staging.delete(gone)
    unknown = staging.restore(3, [(0, b"abc")])
    unknown.mark(0, 5)
    assert unknown.cached(0, 5) is None
    with pytest.raises(CorruptError, match="from 3 on in the journal"):
        read(unknown, 0, 5)


def test_small_contents_come_back_from_the_journal(tmp_path: Path) -> None:
    ops = CountingOps()
    staging = Staging(tmp_path / "staging", LIMIT, ops)
    generation = staging.restore(1, [(0, b"abc"), (5, b"f")])
    assert staging.restore(1, [(3, b"de")]) is generation
    assert read(generation, 0, 6) == b"abcdef" and staging.used == 6
    assert "open" not in ops.calls


def test_what_went_on_in_a_file_before_the_crash_is_read_from_it(tmp_path: Path) -> None:
    """The journal holds the first bytes and names the generation for later ones; its file has them all."""
    before = Staging(tmp_path / "staging", LIMIT, FileOps())
    generation = before.create(1)
    generation.write(0, b"first")
    generation.write(BIG, b"later")
    staging = Staging(tmp_path / "staging", LIMIT, FileOps())
    restored = staging.restore(1, [(0, b"first")])
    restored.mark(0, 5)
    assert staging.open(1) is restored
    restored.mark(BIG, 5)
    assert restored.path is not None and staging.used == 10
    assert read(restored, 0, 5) == b"first" and read(restored, BIG, 5) == b"later"
    assert staging.create(2).path is None


def test_a_file_that_no_record_mentions_does_not_hide_what_the_journal_holds(tmp_path: Path) -> None:
    """It grew past memory just before a power failure: the bytes in its file may be anything."""
    Staging(tmp_path / "staging", LIMIT, FileOps()).create(1).write(BIG, b"unsynced")
    staging = Staging(tmp_path / "staging", LIMIT, FileOps())
    restored = staging.restore(1, [(0, b"kept")])
    assert read(restored, 0, 4) == b"kept"
    restored.write(BIG + 100, b"new")
    assert read(restored, 0, BIG + 103) == b"kept" + bytes(BIG + 96) + b"new"


def test_past_the_limit_writers_are_told_to_wait(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "staging", 100, FileOps())
    staging.admit(1000)
    generation = staging.create(1)
    generation.write(0, bytes(60))
    staging.admit(40)
    assert not staging.full
    with pytest.raises(StagingFullError, match="60 bytes of at most 100 wait to be encoded"):
        staging.admit(41)
    assert staging.refuses, "so that even a little less than nearly full is encoded"
    staging.admit(40)
    assert not staging.refuses
    generation.write(60, bytes(40))
    assert staging.full
    staging.delete(generation)
    assert not staging.full
    staging.admit(41)


def test_what_is_kept_for_a_crash_alone_lets_nobody_wait(tmp_path: Path) -> None:
    """No encoding frees it: only the end of the write that it would keep waiting does."""
    staging = Staging(tmp_path / "staging", 100, FileOps())
    old, new = staging.create(1), staging.create(2)
    old.write(0, bytes(90))
    staging.set_aside([old])
    staging.set_aside([old])
    assert (staging.used, staging.waiting) == (90, 0)
    staging.admit(100)
    new.write(0, bytes(60))
    assert (staging.used, staging.waiting) == (150, 60)
    with pytest.raises(StagingFullError, match="60 bytes of at most 100"):
        staging.admit(41)
    staging.delete(old)
    staging.set_aside([old])
    assert (staging.used, staging.waiting) == (60, 60)
