"""The journal of a layer: what was appended is replayed, after a kill, a power failure, and on a full disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.records import Contents, Make, Record, Remove
from moonclipfs.store.backend import FileOps
from moonclipfs.store.layerdirs import layer_roots
from moonclipfs.store.segments import segment_name, segment_numbers
from moonclipfs.types import NO_ID, Kind
from tests import faults
from tests.faults import RecordingOps, UnsyncedOps, crash_states, kill_states

BOOT = b"a" * 16
OTHER = b"b" * 16
RESERVE = 256


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", RESERVE)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", RESERVE // 2)


def make(number: int, name: bytes = b"n") -> Make:
    return Make(number, 1, name, 1, 0o644, 0, 0, b"", 7)


def contents(number: int, data: bytes = b"", *, synced: bool = False) -> Contents:
    return Contents(number, len(data), 7, 7, True, NO_ID, (), ((1, 0, data),) if data else (), synced)


class Case:
    """A journal's directory, opened under one start of the kernel or another."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "layers" / "host" / "journal"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.open_ones: list[Journal] = []

    def open(
        self, ops: FileOps | None = None, boot: bytes = BOOT, hook: Callable[[], object] = lambda: None
    ) -> tuple[Journal, list[Record]]:
        journal = Journal(self.directory, ops or FileOps(), hook, boot=boot)
        self.open_ones.append(journal)
        return journal, list(journal.replay())

    def read(self, boot: bytes = BOOT) -> list[Record]:
        """What a replay finds, without changing anything."""
        journal, found = self.open(UnsyncedOps(), boot)
        journal.close()
        return found

    def clear(self) -> None:
        for journal in self.open_ones:
            journal.close()
        for path in self.directory.iterdir():
            path.unlink()

    def segment(self, place: int = -1) -> Path:
        return self.directory / segment_name(segment_numbers(self.directory)[place])


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


# Crashes

THIRD = b"c" * 16


@dataclass
class Promise:
    """What was promised at some point: records that are on the disk, that are written, or are being written."""

    boot: bytes
    committed: list[Record]
    written: list[Record]
    coming: list[Record]


def counts(record: Record) -> bool:
    """Whether a record counts after a power failure."""
    return not isinstance(record, Contents) or record.synced


class Life:
    """A journal that is used, with a promise for each mark of the recorder."""

    def __init__(self, root: Path, recorder: RecordingOps) -> None:
        self.directory = root / "layers" / "host" / "journal"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.recorder = recorder
        self.promises: list[Promise] = []
        self.committed: list[Record] = []
        self.written: list[Record] = []
        self.number = 5

    def note(self, *coming: Record) -> None:
        promise = Promise(self.boot, self.committed.copy(), self.written.copy(), [*self.written, *coming])
        self.recorder.mark(str(len(self.promises)))
        self.promises.append(promise)

    def open(self, boot: bytes) -> None:
        if self.promises and boot != self.boot:
            self.written = self.committed.copy()
            self.boot = boot
            self.note()
        self.boot = boot
        self.journal = Journal(self.directory, self.recorder, boot=boot)
        self.written = list(self.journal.replay())
        if boot == OTHER:
            self.committed = self.written.copy()
        self.note()

    def append(self, record: Record) -> None:
        self.note(record)
        self.journal.append(record)
        self.written.append(record)
        self.note()

    def commit(self) -> None:
        self.journal.commit()
        self.committed = self.written.copy()
        self.note()

    def some(self) -> None:
        """Work of all kinds."""
        self.append(make(self.number))
        self.append(contents(self.number, b"not synced"))
        self.commit()
        self.append(contents(self.number, b"synced", synced=True))
        self.number += 1

    def rewrite(self) -> None:
        self.written = [record for record in self.written if counts(record)]
        self.journal.rewrite([(record, ()) for record in self.written])
        self.committed = self.written.copy()
        self.note()


def check_crashes(life: Life, tmp_path: Path) -> int:
    """Replay every state that a power failure may leave, under another start of the kernel; returns how many.

    What a segment holds that has no name yet makes no difference.
    """
    seen: set[tuple[object, ...]] = set()
    for state in crash_states(life.recorder):
        named = [(path, data) for path, data in sorted(state.files.items()) if path.endswith(".log")]
        if not state.marks or (state.marks[-1], *named) in seen:
            continue
        seen.add((state.marks[-1], *named))
        promise = life.promises[int(state.marks[-1])]
        coming = [record for record in promise.coming if counts(record)]
        promised = [record for record in promise.committed if counts(record)]
        case = Case(tmp_path / "state")
        for path, data in state.files.items():
            (case.root / path).write_bytes(data)
        journal, found = case.open(UnsyncedOps(), THIRD)
        assert found == coming[: len(found)] and len(found) >= len(promised), state.at
        journal.append(make(999))
        assert case.read(THIRD) == [*found, make(999)], state.at
        list(layer_roots(case.root))
        case.clear()
    return len(seen)


def live(root: Path, recorder: RecordingOps) -> Life:
    """Work under two starts of the kernel, with kills in between."""
    life = Life(root, recorder)
    life.open(BOOT)
    life.some()
    life.open(BOOT)
    life.some()
    life.rewrite()
    life.some()
    life.journal.close()
    life.open(OTHER)
    life.some()
    life.rewrite()
    life.some()
    life.journal.close()
    return life


def test_a_power_failure_at_any_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "EVERY_CUT", 0)
    monkeypatch.setattr(faults, "CUTS", 8)
    (tmp_path / "store").mkdir()
    life = live(tmp_path / "store", RecordingOps(tmp_path / "store"))
    assert check_crashes(life, tmp_path) > 1000


def test_a_power_failure_at_any_byte(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    life = Life(tmp_path / "store", RecordingOps(tmp_path / "store"))
    life.open(BOOT)
    life.append(make(5))
    life.commit()
    life.append(contents(5, b"synced", synced=True))
    life.append(make(6))
    life.commit()
    life.journal.close()
    assert check_crashes(life, tmp_path) > 300


def test_every_state_after_a_kill(tmp_path: Path) -> None:
    """All that was appended is there, and of what was being appended all or nothing."""
    (tmp_path / "store").mkdir()
    life = live(tmp_path / "store", RecordingOps(tmp_path / "store"))
    total = 0
    for total, state in enumerate(kill_states(life.recorder)):
        if not state.marks:
            continue
        promise = life.promises[int(state.marks[-1])]
        case = Case(tmp_path / "state")
        for path, data in state.files.items():
            (case.root / path).write_bytes(data)
        _, found = case.open(UnsyncedOps(), promise.boot)
        assert found in (promise.written, promise.coming, survivors(promise)), state.at
        case.clear()
    assert total > 200


def survivors(promise: Promise) -> list[Record]:
    """What counts when the journal was opened under another start of the kernel, or written anew."""
    return [record for record in promise.written if counts(record)]


class Reckless(RecordingOps):
    """Forgets the syncs of one kind."""

    omitted = ""

    def after(self, name: str, arguments: tuple[object, ...], result: object) -> None:
        super().after(name, arguments, result)
        if self.events and self.events[-1].name == self.omitted:
            self.events.pop()


@pytest.mark.parametrize("omitted", ["sync", "sync_directory"])
def test_the_crash_test_finds_a_missing_sync(tmp_path: Path, omitted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "EVERY_CUT", 0)
    monkeypatch.setattr(faults, "CUTS", 8)
    (tmp_path / "store").mkdir()
    recorder = Reckless(tmp_path / "store")
    recorder.omitted = omitted
    life = live(tmp_path / "store", recorder)
    with pytest.raises((AssertionError, MoonclipError)):
        check_crashes(life, tmp_path)
