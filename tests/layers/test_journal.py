"""The journal of a layer: what was appended is replayed, after a kill, a power failure, and on a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
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
from tests.layers.journalkit import BOOT, OTHER, RESERVE, Case, contents, make


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
        elif name == "truncate":
            assert isinstance(arguments[0], int) and isinstance(arguments[1], int)
            self.free += os.fstat(arguments[0]).st_size - arguments[1]
        elif name == "unlink" and os.path.exists(str(arguments[0])):
            self.free += os.path.getsize(str(arguments[0]))
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


def test_without_a_reserve_what_removes_borrows_room_and_nothing_else_does(case: Case) -> None:
    ops, loans = FullOps(1 << 16), [0]

    def borrow() -> bool:
        loans[0] += 1
        ops.free = int(loans[0] < 3)
        return loans[0] < 3

    journal = Journal(case.directory, ops, reserve=False, borrow=borrow, boot=BOOT)
    case.open_ones.append(journal)
    assert list(journal.replay()) == []
    journal.append(make(6, b"name"))
    gone = Remove(1, b"name", 0, 7)
    for more in (make(7, b"new"), contents(6, b"data")):
        ops.free = 0
        with pytest.raises(NoSpaceError):
            journal.append(more)
    assert loans == [0]
    for _ in range(2):
        ops.free = 0
        journal.append(gone)
    assert loans == [2]
    ops.free = 0
    with pytest.raises(NoSpaceError):
        journal.append(gone)
    assert case.read() == [make(6, b"name"), gone, gone]


def test_on_a_full_disk_a_journal_is_written_anew_in_the_place_of_its_reserve(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", 1 << 14)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", 1 << 12)
    ops = FullOps(1 << 15)
    journal, _ = case.open(ops)
    journal.append(make(5))
    journal.append(make(6))
    ops.free = 0
    with pytest.raises(NoSpaceError):
        journal.rewrite([(make(6), ())])
    before = case.segment().stat().st_size
    journal.lend_reserve()
    assert case.segment().stat().st_size < before - (1 << 13)
    ops.free = before - case.segment().stat().st_size
    journal.rewrite([(make(6), ())])
    ops.free = 0
    journal.append(Remove(1, b"n", 0, 7))
    assert case.read() == [make(6), Remove(1, b"n", 0, 7)]


@pytest.mark.parametrize("anew", [False, True])
def test_the_reserve_is_there_from_the_start(case: Case, monkeypatch: pytest.MonkeyPatch, anew: bool) -> None:
    """After a power failure, and when the journal was written anew, a full disk gives back what the old one had."""
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", 1 << 14)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", 1 << 12)
    ops = FullOps(1 << 15)
    journal, _ = case.open(ops)
    journal.append(make(5))
    journal.commit()
    # Enough for a new segment, and not for its reserve.
    ops.free = 1000
    if anew:
        journal.rewrite([(make(5), ())])
    else:
        journal.close()
        journal, _ = case.open(ops, OTHER)
    ops.free = 0
    for _ in range(100):
        journal.append(Remove(1, b"n", 0, 7))
    assert len(case.read(OTHER if not anew else BOOT)) == 101


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


def test_a_disk_that_refuses_what_it_had_promised_does_not_end_the_journal(case: Case) -> None:
    """As file systems that copy on write do: preallocated space is none for them."""

    class Ops(HookedOps):
        full = False

        def before(self, name: str, arguments: tuple[object, ...]) -> None:
            if name == "pwrite" and self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ops = Ops()
    journal, _ = case.open(ops)
    ops.full = True
    with pytest.raises(NoSpaceError):
        journal.append(make(5))
    ops.full = False
    journal.append(make(6))
    assert case.read() == [make(6)]


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
