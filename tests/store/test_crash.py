"""After a crash at any point, every snapshot that was promised is whole, and no half of one is there.

`tests/faults.py` builds each state of the disk that the recorded system calls allow. Each is opened, all of it is
read and compared, and the store goes on from there.
"""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import BackendError, MoonclipError, NoSpaceError
from moonclipfs.store.backend import FileOps, LocalBackend
from moonclipfs.store.check import verify
from moonclipfs.store.config import create_store
from moonclipfs.store.gc import collect
from moonclipfs.store.log import Log
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.faults import (
    CrashState,
    FaultyOps,
    KillingOps,
    NoLinkOps,
    PausingOps,
    RecordingOps,
    UnsyncedOps,
    crash_states,
)
from tests.store.kit import noise, publish, series

Contents = dict[str, dict[str, bytes]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESERVE_BYTES", 8192)


@contextmanager
def opened(root: Path, ops: FileOps | None = None, *, write: bool = True) -> Iterator[Store]:
    """A store whose truth goes through `ops`, with its index in memory of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moonclipfs.store.store.LocalBackend", functools.partial(LocalBackend, ops=ops or UnsyncedOps()))
        patch.setattr("moonclipfs.store.store.default_index_path", lambda *arguments, **options: None)
        with Store.open(root, write=write) as store:
            yield store


def new_store(root: Path) -> Path:
    create_store(root, ops=UnsyncedOps())
    return root


def all_contents(store: Store) -> Contents:
    """Every file of every kept version, read whole."""
    return {
        f"{version.path}@{version.number}": {
            path.decode(): store.open_file(entry).read(0, entry.size)
            for path, entry in store.walk(version)
            if entry.type is EntryType.FILE
        }
        for version in store.names().all_versions()
    }


def promised(marks: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """What must be there (added, and not about to be forgotten), and what must be gone (forgotten)."""
    there = {mark[1:] for mark in marks if mark[0] == "+"} - {mark[1:] for mark in marks if mark[0] == "-"}
    return there, {mark[1:] for mark in marks if mark[0] == "!"}


def check_state(state: CrashState, root: Path, truth: Mapping[str, dict[str, bytes]]) -> None:
    with opened(state.write(root)) as store:
        found = all_contents(store)
        there, gone = promised(state.marks)
        assert there <= found.keys(), f"{state.at}: lost {there - found.keys()}"
        assert not gone & found.keys(), f"{state.at}: {gone & found.keys()} came back"
        for spec, files in found.items():
            assert files == truth[spec], f"{state.at}: {spec} has other bytes"
        # Life goes on: the same again is stored, gc clears up, and nothing is wrong.
        version = publish(store, "after", {"model": noise(1), "new": noise(99)})
        collect(store, wait_seconds=0)
        found["after@" + str(version.number)] = {"model": noise(1), "new": noise(99)}
        assert all_contents(store) == found
        report = verify(store)
        assert report.problems == [], f"{state.at}: {report.problems}"
        assert os.listdir(root / "tmp") == []


def check_all(recorder: RecordingOps, tmp_path: Path, truth: Mapping[str, dict[str, bytes]]) -> int:
    count = 0
    for count, state in enumerate(crash_states(recorder), 1):
        check_state(state, tmp_path / f"state{count}", truth)
    return count


class Life:
    """A store that is changed while everything is recorded."""

    def __init__(self, root: Path, ops: Callable[[Path], RecordingOps] = RecordingOps) -> None:
        self.root = root
        self.recorder = ops(root)
        self.truth: Contents = {"after@1": {}}

    def add(self, store: Store, path: str, files: Mapping[str, bytes]) -> None:
        number = store.names().highest(path) + 1
        self.truth[f"{path}@{number}"] = dict(files)
        publish(store, path, files)
        self.recorder.mark(f"+{path}@{number}")

    def forget(self, store: Store, path: str, number: int) -> None:
        self.recorder.mark(f"-{path}@{number}")
        store.log.forget([(path, number)])
        self.recorder.mark(f"!{path}@{number}")


def test_crash_while_publishing(tmp_path: Path) -> None:
    life = Life(new_store(tmp_path / "store"))
    with opened(life.root, life.recorder) as store:
        life.add(store, "run/1", {"model": noise(1, 3000)})
        life.add(store, "run/1", {"model": noise(1, 3000), "more": noise(2, 3000)})
    assert check_all(life.recorder, tmp_path, life.truth) >= 7


def test_crash_while_publishing_without_hard_links(tmp_path: Path) -> None:
    class Recorder(RecordingOps, NoLinkOps):
        pass

    life = Life(new_store(tmp_path / "store"), Recorder)
    with opened(life.root, life.recorder) as store:
        life.add(store, "run/1", {"model": noise(1, 3000)})
        life.add(store, "run/1", {"model": noise(2, 3000)})
    assert check_all(life.recorder, tmp_path, life.truth) >= 7


def test_crash_while_deltas_are_forgotten_and_collected(tmp_path: Path) -> None:
    """Bases outlive their snapshots, live objects are copied out of packs, packs and log records are deleted."""
    root = new_store(tmp_path / "store")
    files = series(4)
    with pytest.MonkeyPatch.context() as patch, opened(root) as store:
        patch.setattr(limits, "LOG_CHECKPOINT_EVERY", 3)
        for number, data in enumerate(files):
            publish(store, f"run/{number}", {"model": data, "noise": noise(number)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LOG_CHECKPOINT_EVERY", 3)
        patch.setattr(limits, "REPACK_DEAD_SHARE", 0.1)
        life = Life(root)
        with opened(root, life.recorder) as store:
            for number, data in enumerate(files):
                life.truth[f"run/{number}@1"] = {"model": data, "noise": noise(number)}
                life.recorder.mark(f"+run/{number}@1")
            life.forget(store, "run/0", 1)
            life.forget(store, "run/2", 1)
            report = collect(store, wait_seconds=0)
            assert report.deleted_packs >= 2 and report.copied_bytes and report.log_records
            life.add(store, "run/9", {"model": files[0], "noise": noise(0)})
        names = {event.name for event in life.recorder.events}
        assert {"unlink", "link", "sync_directory"} <= names
        assert check_all(life.recorder, tmp_path, life.truth) > 60


class _Both(PausingOps):
    """Pauses after a call, with every call recorded by another."""

    def __init__(self, recorder: RecordingOps, name: str, part: str, then: Callable[[], None]) -> None:
        super().__init__(name, part, then, late=True)
        self.recorder = recorder

    def before(self, name: str, arguments: tuple[object, ...]) -> None:
        self.recorder.before(name, arguments)

    def after(self, name: str, arguments: tuple[object, ...], result: object) -> None:
        self.recorder.after(name, arguments, result)
        super().after(name, arguments, result)


@pytest.mark.parametrize("part", ["/packs/", "/log/"])
def test_crash_between_two_processes_that_publish(tmp_path: Path, part: str) -> None:
    """One has named a pack or a record, and not made it durable, when the other builds on it."""
    life = Life(new_store(tmp_path / "store"))

    def meanwhile() -> None:
        with opened(life.root, life.recorder) as rival:
            life.add(rival, "rival", {"model": noise(1, 3000)})

    life.truth["slow@1"] = {"model": noise(1, 3000)}
    with opened(life.root, _Both(life.recorder, "link", part, meanwhile)) as store:
        publish(store, "slow", {"model": noise(1, 3000)})
        life.recorder.mark("+slow@1")
    assert [event.mark for event in life.recorder.events if event.mark] == ["+rival@1", "+slow@1"]
    assert check_all(life.recorder, tmp_path, life.truth) >= 6


def test_crash_while_another_process_collects_what_is_being_forgotten(tmp_path: Path) -> None:
    life = Life(new_store(tmp_path / "store"))
    with opened(life.root, life.recorder) as store:
        life.add(store, "run/1", {"model": noise(1, 3000)})
        life.add(store, "run/2", {"model": noise(2, 3000)})

    def meanwhile() -> None:
        with opened(life.root, life.recorder) as rival:
            assert collect(rival, wait_seconds=0).waiting_packs, "the slow one has not seen the record"

    with opened(life.root, _Both(life.recorder, "link", "/log/", meanwhile)) as store:
        life.forget(store, "run/1", 1)
    with opened(life.root, life.recorder) as store:
        assert collect(store, wait_seconds=0).deleted_packs == 1
    assert check_all(life.recorder, tmp_path, life.truth) >= 10


def test_crash_while_another_process_trims_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old records may go when a checkpoint holds what they say, and that is durable."""
    monkeypatch.setattr(limits, "LOG_CHECKPOINT_EVERY", 2)
    life = Life(new_store(tmp_path / "store"))
    with opened(life.root, life.recorder) as store:
        for number in range(3):
            life.add(store, f"run/{number}", {"model": noise(number, 3000)})

    def meanwhile() -> None:
        with opened(life.root, life.recorder) as rival:
            assert rival.log.trim() == 2

    with opened(life.root, _Both(life.recorder, "link", "0000006.json", meanwhile)) as store:
        life.add(store, "run/3", {"model": noise(3, 3000)})
    assert check_all(life.recorder, tmp_path, life.truth) >= 10


class _Reckless(RecordingOps):
    """A recorder that leaves out one kind of event: what a program that forgot it would leave to a crash."""

    omitted = ""

    def after(self, name: str, arguments: tuple[object, ...], result: object) -> None:
        super().after(name, arguments, result)
        if self.events and self.events[-1].name == self.omitted:
            self.events.pop()


@pytest.mark.parametrize("omitted", ["sync", "sync_directory"])
def test_the_crash_test_finds_a_missing_sync(tmp_path: Path, omitted: str, expect_log: Callable[[str], None]) -> None:
    class Recorder(_Reckless):
        pass

    Recorder.omitted = omitted
    life = Life(new_store(tmp_path / "store"), Recorder)
    with opened(life.root, life.recorder) as store:
        life.add(store, "run/1", {"model": noise(1, 3000)})

    def survives(state: CrashState, root: Path) -> bool:
        try:
            with opened(state.write(root), write=False) as store:
                return promised(state.marks)[0] <= all_contents(store).keys()
        except MoonclipError:
            return False

    numbered = enumerate(crash_states(life.recorder))
    assert not all(survives(state, tmp_path / f"state{number}") for number, state in numbered)
    if omitted == "sync":
        expect_log("")


# Failing calls and kills


def ending(root: Path, ops: FileOps) -> None:
    """Forget, add and collect: the work that is interrupted at every call."""
    with opened(root, ops) as store:
        store.log.forget([("run/0", 1)])
        publish(store, "run/3", {"model": series(4)[3], "noise": noise(3)})
        collect(store, wait_seconds=0)


def start(root: Path) -> Contents:
    new_store(root)
    with opened(root) as store:
        for number, data in enumerate(series(3)):
            publish(store, f"run/{number}", {"model": data, "noise": noise(number)})
        return all_contents(store)


def check_after(root: Path, before: Contents) -> None:
    with opened(root) as store:
        found = all_contents(store)
        assert found.keys() >= {"run/1@1", "run/2@1"}
        whole = {**before, "run/3@1": {"model": series(4)[3], "noise": noise(3)}}
        assert all(files == whole[spec] for spec, files in found.items())
        collect(store, wait_seconds=0)
        assert all_contents(store) == found and verify(store).problems == []
        assert os.listdir(root / "tmp") == []


@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False)],
    ids=["full", "stays full", "io"],
)
def test_a_failing_call_is_a_clean_error(
    tmp_path: Path, code: int, lasting: bool, expect_log: Callable[[str], None]
) -> None:
    """At every single call: an error of the project's, and a store as before or as after."""
    failed = 0
    for at in range(400):
        root = tmp_path / str(at)
        before = start(root)
        ops = FaultyOps(at, code, lasting=lasting)
        try:
            ending(root, ops)
        except MoonclipError as error:
            failed += 1
            assert isinstance(error, NoSpaceError if code == errno.ENOSPC else BackendError), repr(error)
        check_after(root, before)
        if not ops.reached:
            assert failed > 10
            return
    pytest.fail("the calls never end")


_CHILD = """
import sys
from pathlib import Path
from tests.faults import KillingOps
from tests.store.test_crash import ending
from moonclipfs import limits
limits.RESERVE_BYTES = 8192
ops = KillingOps(int(sys.argv[2]))
ending(Path(sys.argv[1]), ops)
print(ops.count)
"""


def test_a_process_killed_at_any_call(tmp_path: Path) -> None:
    """Its lease is free at once, its uploads are cleared, and the store goes on."""
    before = start(tmp_path / "count")
    counter = KillingOps(1 << 30)
    ending(tmp_path / "count", counter)
    for at in range(0, counter.count, max(1, counter.count // 7)):
        root = tmp_path / str(at)
        assert start(root) == before
        process = subprocess.run([sys.executable, "-c", _CHILD, str(root), str(at)], check=False)
        assert process.returncode == 86, f"call {at} was never made"
        check_after(root, before)


def test_log_records_cut_at_any_byte_are_never_trusted(tmp_path: Path, expect_log: Callable[[str], None]) -> None:
    """Not even where a file system tears what was published."""
    root = new_store(tmp_path / "store")
    with opened(root) as store:
        publish(store, "run/1", {"model": noise(1)})
        publish(store, "run/2", {"model": noise(2)})
    last = root / "log" / "0000000000000002.json"
    data = last.read_bytes()
    expect_log(r"0000000000000002\.json")
    for length in range(1, len(data) - 1):
        for torn in (data[:length], data[:length].ljust(len(data), b"\0")):
            last.write_bytes(torn)
            names = Log(LocalBackend(root)).refresh()
            assert list(names.bound()) == ["run/1"] and names.damaged
