"""Journals for tests: records, and a directory that is opened under one start of the kernel or another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moonclipfs.layers.journal import Journal
from moonclipfs.layers.records import Contents, Make, Record
from moonclipfs.store.backend import FileOps
from moonclipfs.store.segments import segment_name, segment_numbers
from moonclipfs.types import NO_ID
from tests.faults import UnsyncedOps

RESERVE = 256
"""Preallocated by the journals of these tests."""
BOOT = b"a" * 16
OTHER = b"b" * 16


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
