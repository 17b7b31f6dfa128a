"""A journal at every state that a power failure or a kill may leave of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.records import Contents, Record
from moonclipfs.store.layerdirs import layer_roots
from tests import faults
from tests.faults import RecordingOps, UnsyncedOps, crash_states, kill_states
from tests.layers.journalkit import BOOT, OTHER, RESERVE, Case, contents, make

THIRD = b"c" * 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", RESERVE)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", RESERVE // 2)


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
        self.boot = BOOT

    def note(self, *coming: Record) -> None:
        promise = Promise(self.boot, self.committed.copy(), self.written.copy(), [*self.written, *coming])
        self.recorder.mark(str(len(self.promises)))
        self.promises.append(promise)

    def open(self, boot: bytes) -> None:
        if boot != self.boot:
            self.boot, self.written = boot, self.committed.copy()
            self.note()
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
    states = [state for state in kill_states(life.recorder) if state.marks]
    for state in states:
        promise = life.promises[int(state.marks[-1])]
        case = Case(tmp_path / "state")
        for path, data in state.files.items():
            (case.root / path).write_bytes(data)
        _, found = case.open(UnsyncedOps(), promise.boot)
        assert found in (promise.written, promise.coming, survivors(promise)), state.at
        case.clear()
    assert len(states) > 200


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
