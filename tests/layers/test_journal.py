"""The journal of a layer: what was appended is replayed, after a kill, a power failure, and on a full disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.records import Contents, Make, Record, Remove
from moonclipfs.store.backend import FileOps
from moonclipfs.store.layerdirs import layer_roots
from moonclipfs.store.segments import segment_name, segment_numbers
from moonclipfs.types import NO_ID, Kind

BOOT = b"a" * 16
OTHER = b"b" * 16
MAX_RESERVE = 1 << 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", MAX_RESERVE)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", MAX_RESERVE // 2)


def make(number: int, name: bytes = b"n") -> Make:
    return Make(number, 1, name, 1, 0o644, 0, 0, b"", 7)


def contents(number: int, data: bytes = b"", *, synced: bool = False) -> Contents:
    return Contents(number, len(data), 7, 7, True, NO_ID, (), ((1, 0, data),) if data else (), synced)


class Case:
    """A journal's directory, opened under one start of the kernel or another."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "layers" / "host" / "journal"
        self.directory.mkdir(parents=True)
        self.open_ones: list[Journal] = []

    def open(
        self, ops: FileOps | None = None, boot: bytes = BOOT, hook: Callable[[], object] = lambda: None
    ) -> tuple[Journal, list[Record]]:
        journal = Journal(self.directory, ops or FileOps(), hook, boot=boot)
        self.open_ones.append(journal)
        return journal, list(journal.replay())

    def read(self, boot: bytes = BOOT) -> list[Record]:
        """What a replay finds, without changing anything."""
        journal, found = self.open(boot=boot)
        journal.close()
        return found

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
    assert os.path.getsize(case.segment()) > journal_end + MAX_RESERVE // 2
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
