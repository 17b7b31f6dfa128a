"""The journal of a layer: what was appended is replayed, after a kill, a power failure, and on a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import BackendError, CorruptError, LimitError, MoonclipError, NoSpaceError
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.records import Record, Remove, SetXattr
from moonclipfs.store.backend import FileOps
from moonclipfs.store.layerdirs import layer_roots
from moonclipfs.store.segments import measure_segment, segment_name, segment_numbers
from moonclipfs.types import Buffer, Kind
from tests.faults import FaultyOps, HookedOps, UnsyncedOps
from tests.layers.journalkit import BOOT, OTHER, Case, contents, make

RESERVE = 256


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", RESERVE)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", RESERVE // 2)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path)
    yield made
    for journal in made.open_ones:
        journal.close()


def test_what_was_appended_is_replayed(case: Case) -> None:
    journal, found = case.open()
    assert found == []
    records: list[Record] = [make(5), contents(5, b"abc"), Remove(1, b"n", 0, 9)]
    for record in records:
        journal.append(record, [(Kind.RECIPE, b"r" * 32)])
    # Without a close: as after kill -9.
    again, found = case.open()
    assert found == records
    again.append(make(6))
    journal_end = again.size
    again.close()
    assert case.read() == [*records, make(6)]
    assert os.path.getsize(case.segment()) > journal_end + RESERVE // 2
    assert list(layer_roots(case.root)) == [(Kind.RECIPE, b"r" * 32)] * 3


def test_after_a_power_failure_only_what_was_committed_counts(case: Case) -> None:
    journal, _ = case.open()
    committed: list[Record] = [make(5), contents(5, b"synced", synced=True), contents(5, b"not synced")]
    for record in committed:
        journal.append(record)
    journal.commit()
    journal.append(make(6))
    again, found = case.open(boot=OTHER)
    assert found == committed[:2]
    assert (again.recovered.records, again.recovered.contents, again.recovered.power_failure) == (1, 1, True)
    again.append(make(7))
    again.close()
    # Nor do they count when the disk comes back to the machine where they were appended.
    assert case.read(BOOT) == [*committed[:2]]
    assert case.read(OTHER) == [*committed[:2]]


def test_rewrite_replaces_all_segments(case: Case) -> None:
    journal, _ = case.open()
    for number in range(5, 50):
        journal.append(make(number))
    journal.commit()
    journal.close()
    journal, _ = case.open(boot=OTHER)
    assert len(segment_numbers(case.directory)) == 2
    journal.append(make(60))
    journal.rewrite([(make(60), [(Kind.DIRECTORY, b"d" * 32)])])
    assert len(segment_numbers(case.directory)) == 1
    journal.append(make(61))
    assert list(layer_roots(case.root)) == [(Kind.DIRECTORY, b"d" * 32)]
    journal.close()
    assert case.read(OTHER) == [make(60), make(61)]
    assert case.read(BOOT) == [make(60)]


_CHILD = """
import sys
from pathlib import Path
from moonclipfs.layers.journal import Journal
from moonclipfs.store.backend import FileOps
from tests.layers.journalkit import make
journal = Journal(Path(sys.argv[1]), FileOps())
print(len(list(journal.replay())))
for number in range(1000):
    journal.append(make(number))
print("done", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_loses_nothing(case: Case) -> None:
    for before in (0, 1000):
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(case.directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == f"{before}\n" and process.stdout.readline() == "done\n"
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    journal = Journal(case.directory, FileOps())
    assert len(list(journal.replay())) == 2000
    journal.close()


# Commits


class SlowOps(HookedOps):
    """Counts fdatasyncs, each of which waits for `gate`; they fail while `code` is set."""

    def __init__(self) -> None:
        self.syncs = 0
        self.code = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        if name == "fdatasync":
            self.syncs += 1
            self.entered.set()
            assert self.gate.wait(20)
            if self.code:
                raise OSError(self.code, os.strerror(self.code))


def in_threads(count: int, body: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_one_sync_serves_all_who_wait(case: Case) -> None:
    ops = SlowOps()
    journal, _ = case.open(ops)
    ops.gate.clear()
    ops.syncs = 0
    appended = threading.Barrier(21)

    def body(number: int) -> None:
        journal.append(make(number))
        appended.wait(20)
        journal.commit()

    threads = in_threads(20, body)
    appended.wait(20)
    assert ops.entered.wait(20)
    ops.gate.set()
    for thread in threads:
        thread.join()
    assert 1 <= ops.syncs <= 2
    assert len(case.read(OTHER)) == 20


def test_commit_without_anything_new_does_nothing(case: Case) -> None:
    ops, calls = SlowOps(), []
    journal, _ = case.open(ops, hook=lambda: calls.append(1))
    journal.append(make(5))
    journal.commit()
    before = ops.syncs, len(calls), journal.size
    journal.commit()
    assert (ops.syncs, len(calls), journal.size) == before


def test_a_failed_sync_fails_all_who_wait_and_all_after_them(case: Case) -> None:
    ops = SlowOps()
    journal, _ = case.open(ops)
    ops.gate.clear()
    ops.entered.clear()
    failures: list[str] = []
    appended = threading.Barrier(6)

    def body(number: int) -> None:
        journal.append(make(number))
        appended.wait(20)
        try:
            journal.commit()
        except BackendError as error:
            failures.append(str(error))

    threads = in_threads(5, body)
    appended.wait(20)
    assert ops.entered.wait(20)
    ops.code = errno.EIO
    ops.gate.set()
    for thread in threads:
        thread.join()
    assert len(failures) == 5 and "mounted again" in failures[0] and ops.syncs == 1
    ops.code = 0
    with pytest.raises(BackendError, match="mounted again"):
        journal.append(make(9))
    with pytest.raises(BackendError, match="mounted again"):
        journal.commit()
    journal.close()

    class Watching(HookedOps):
        def before(self, name: str, arguments: tuple[object, ...]) -> None:
            if name == "pwrite":
                assert isinstance(arguments[1], memoryview)
                written.append(bytes(arguments[1]))

    written: list[bytes] = []
    end = os.path.getsize(case.segment())
    _, found = case.open(Watching())
    assert len(found) == 5
    # What the kernel takes for clean and is not on the disk was written once more.
    assert written and written[0] in case.segment().read_bytes()[:end] and len(written[0]) > 5 * 30


def test_what_must_be_synced_first_is_synced_right_before_the_mark(case: Case) -> None:
    calls: list[bool] = []
    lock = threading.RLock()

    def try_lock() -> bool:
        if taken := lock.acquire(blocking=False):
            lock.release()
        return taken

    def hook() -> bool:
        # Another thread has the lock free only while nobody appends.
        free: list[bool] = []
        thread = threading.Thread(target=lambda: free.append(try_lock()))
        thread.start()
        thread.join()
        calls.append(free[0])
        journal.append(contents(len(calls), b"x", synced=True))
        return len(calls) < 3

    journal = Journal(case.directory, FileOps(), hook, lock=lock, boot=BOOT)
    list(journal.replay())
    case.open_ones.append(journal)
    journal.append(make(5))
    journal.commit()
    assert calls == [True, True, True, False]
    assert len(case.read(OTHER)) == 5


def test_a_hook_that_fails_leaves_the_journal_usable(case: Case) -> None:
    full = [True]

    def hook() -> None:
        if full[0]:
            raise NoSpaceError("no space")

    journal, _ = case.open(hook=hook)
    journal.append(make(5))
    with pytest.raises(NoSpaceError):
        journal.commit()
    full[0] = False
    journal.commit()
    assert case.read(OTHER) == [make(5)]


def test_written_anew_while_a_commit_waits_for_the_disk(case: Case) -> None:
    ops = SlowOps()
    journal, _ = case.open(ops)
    journal.append(make(5))
    ops.gate.clear()
    ops.entered.clear()
    threads = in_threads(1, lambda number: journal.commit())
    assert ops.entered.wait(20)
    journal.rewrite([(make(6), ())])
    journal.append(make(7))
    ops.gate.set()
    threads[0].join()
    assert case.read(OTHER) == [make(6)]


# Full and failing disks


class FullOps(HookedOps):
    """A disk with `free` bytes that are not allocated; writing where something is allocated needs none."""

    def __init__(self, free: int) -> None:
        self.free = free

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        if name == "allocate":
            assert isinstance(arguments[2], int)
            if arguments[2] > self.free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.free -= arguments[2]
        elif name == "pwrite":
            fd, data, offset = arguments
            assert isinstance(fd, int) and isinstance(data, memoryview) and isinstance(offset, int)
            if self.free == 0 and offset + len(data) > os.fstat(fd).st_size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill(journal: Journal, record: Record) -> int:
    count = 0
    with pytest.raises(NoSpaceError):
        for _ in range(100_000):
            journal.append(record)
            count += 1
    return count


def test_a_full_disk_takes_no_data_but_lets_names_go(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", 1 << 14)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", 1 << 12)
    monkeypatch.setattr("moonclipfs.layers.journal._RETRY_SECONDS", 0.0)
    ops = FullOps(1 << 16)
    journal, _ = case.open(ops)
    data, name = contents(5, bytes(400)), make(6, b"name")
    gone, big = Remove(1, b"name", 0, 7), SetXattr(6, b"user.x", b"v", 7)
    taken: list[Record] = [data] * fill(journal, data)
    assert ops.free < 400
    ops.free = 0
    with pytest.raises(NoSpaceError):
        journal.append(data)
    taken += [name] * fill(journal, name)
    with pytest.raises(NoSpaceError):
        journal.append(big)
    assert len(taken) > 100
    counted = len(taken)
    taken += [gone] * fill(journal, gone)
    assert len(taken) - counted > 100
    ops.free = 1 << 16
    journal.append(data)
    assert case.read() == [*taken, data]


def test_a_file_system_that_cannot_preallocate(case: Case) -> None:
    class Ops(HookedOps):
        def before(self, name: str, arguments: tuple[object, ...]) -> None:
            if name == "allocate":
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    journal, _ = case.open(Ops())
    for number in range(100):
        journal.append(make(number))
    journal.commit()
    assert len(case.read(OTHER)) == 100


class TornOps(HookedOps):
    """Writes half of what it is given, and fails, once `torn` is set."""

    torn = False

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        if self.torn:
            self.torn = False
            super().pwrite(fd, memoryview(data)[: len(data) // 2], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwrite(fd, data, offset)


def test_half_a_record_leaves_nothing(case: Case) -> None:
    ops = TornOps()
    journal, _ = case.open(ops)
    journal.append(make(5))
    ops.torn = True
    with pytest.raises(BackendError):
        journal.append(contents(5, b"x" * 40))
    journal.append(Remove(1, b"n", 0, 7))
    assert case.read() == [make(5), Remove(1, b"n", 0, 7)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_call_leaves_old_or_new(tmp_path: Path, code: int) -> None:
    failed = 0
    for at in range(100):
        case = Case(tmp_path / str(at))
        ops = FaultyOps(at, code)
        done: list[Record] = []
        tried: list[Record] = []
        try:
            journal, _ = case.open(ops)
            for number in range(3):
                tried.append(make(number))
                journal.append(make(number))
                done.append(make(number))
                journal.commit()
            journal.rewrite([(record, ()) for record in done])
            journal.close()
        except MoonclipError as error:
            failed += 1
            # The space ahead is taken if there is some: a disk that refuses it once is asked for less.
            assert isinstance(error, NoSpaceError if code == errno.ENOSPC else BackendError)
        assert case.read() in (done, tried)
        case.clear()
        if not ops.reached:
            assert failed > 10
            return
    pytest.fail("the calls never end")


def test_a_journal_that_cannot_be_written_anew_goes_on(case: Case) -> None:
    class Ops(HookedOps):
        full = False

        def before(self, name: str, arguments: tuple[object, ...]) -> None:
            if self.full and name == "fsync":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ops = Ops()
    journal, _ = case.open(ops)
    journal.append(make(5))
    ops.full = True
    with pytest.raises(NoSpaceError):
        journal.rewrite([(make(6), ())])
    journal.append(make(7))
    journal.commit()
    assert os.listdir(case.directory) == [segment_name(1)]
    assert case.read(OTHER) == [make(5), make(7)]


# Damage and bounds


def test_every_flipped_byte_is_found_or_in_the_tail(case: Case) -> None:
    journal, _ = case.open(UnsyncedOps())
    records: list[Record] = []
    for number in range(3):
        records += [make(number), contents(number, b"data", synced=True)]
        journal.append(records[-2])
        journal.append(records[-1])
        journal.commit()
    journal.close()
    path = case.segment()
    data = path.read_bytes()
    with open(path, "rb") as file:
        durable = measure_segment(file, path).durable
    assert durable > len(data.rstrip(b"\0")) - 40
    for at in range(len(data.rstrip(b"\0"))):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        for boot in (BOOT, OTHER):
            try:
                found = list(Journal(case.directory, UnsyncedOps(), boot=boot).replay())
            except CorruptError as error:
                assert str(path) in str(error) and "offset" in str(error)
            else:
                assert found == records and at >= durable
    path.write_bytes(data)


def test_a_missing_segment_is_damage(case: Case) -> None:
    journal, _ = case.open()
    journal.append(make(5))
    journal.commit()
    journal.close()
    case.open(boot=OTHER)
    case.segment(0).unlink()
    with pytest.raises(CorruptError, match="the segment before it is missing"):
        case.open(boot=OTHER)


def test_a_journal_of_another_layer_is_refused(case: Case) -> None:
    case.open()
    journal = Journal(case.directory, FileOps(), layer_id=b"x" * 16)
    with pytest.raises(CorruptError, match="another layer"):
        list(journal.replay())


def test_records_have_a_longest(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECORD_BYTES", 1000)
    journal, _ = case.open()
    with pytest.raises(LimitError, match="1000"):
        journal.append(contents(5, bytes(1000)))
    journal.append(make(5))
    assert case.read() == [make(5)]


def test_it_wants_to_be_written_anew_when_a_fresh_one_would_be_shorter(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOURNAL_SEGMENT_BYTES", 2000)
    journal, _ = case.open()
    records: list[Record] = [make(number) for number in range(100)]
    for record in records:
        assert journal.wants_rewrite == (journal.size > 2000)
        journal.append(record)
    journal.rewrite([(record, ()) for record in records])
    assert journal.size > 2000 and not journal.wants_rewrite
    journal.close()
    again, _ = case.open()
    assert not again.wants_rewrite
    for record in records * 2:
        again.append(record)
    assert again.wants_rewrite


def test_nothing_is_appended_before_the_replay(case: Case) -> None:
    journal = Journal(case.directory, FileOps())
    with pytest.raises(BackendError, match="not open"):
        journal.append(make(5))
