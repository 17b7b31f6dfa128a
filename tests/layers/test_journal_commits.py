"""Commits of a journal: one sync for all who wait, what comes before it, and what its failure means."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import pytest

from moonclipfs.errors import BackendError, NoSpaceError
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.records import Make
from moonclipfs.store.backend import FileOps
from tests.faults import HookedOps, UnsyncedOps
from tests.layers.journalkit import BOOT, OTHER, Case, contents, make


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


def test_threads_that_append_commit_and_write_anew(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure all is there that a commit came back for, each thread's records in their order."""
    lock = threading.RLock()
    journal = Journal(case.directory, UnsyncedOps(), lambda: False, lock=lock, boot=BOOT)
    assert list(journal.replay()) == []
    case.open_ones.append(journal)
    state: list[Make] = []
    promised = [0] * 6

    def body(thread: int) -> None:
        for number in range(200):
            with lock:
                journal.append(make(1000 * thread + number))
                state.append(make(1000 * thread + number))
            if number % (thread + 2) == 0:
                journal.commit()
                promised[thread] = number + 1
            if number % 50 == thread:
                with lock:
                    journal.rewrite([(record, ()) for record in state])

    for thread in in_threads(6, body):
        thread.join()
    found = [record.number for record in case.read(OTHER) if isinstance(record, Make)]
    for place in range(6):
        own = [number - 1000 * place for number in found if number // 1000 == place]
        assert own == list(range(len(own))) and len(own) >= promised[place] > 190
