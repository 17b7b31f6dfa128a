"""Logs in bare directories, for tests."""

from __future__ import annotations

from pathlib import Path

from moonclipfs.store.log import Log, Names
from moonclipfs.store.records import record_name
from moonclipfs.types import Version


def make_root(root: Path) -> Path:
    """Make the directories that a log needs."""
    for name in ("log", "packs", "tmp"):
        (root / name).mkdir(parents=True)
    return root


def root_id(number: int) -> bytes:
    """An id that stands for a directory object."""
    return number.to_bytes(32, "big")


def bind(log: Log, path: str, number: int = 1) -> Version:
    """Bind a directory that is nowhere."""
    return log.bind(path, root_id(number), {"files": number})


def content(names: Names) -> tuple[object, ...]:
    """All that names say, to be compared."""
    return (names.sequence, list(names.all_versions()), dict(names.bound()), dict(names.condemned()))


def record(root: Path, sequence: int) -> Path:
    """The file of a log record."""
    return root / record_name(sequence)


def flip(path: Path, at: int = -10) -> None:
    """Damage one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
