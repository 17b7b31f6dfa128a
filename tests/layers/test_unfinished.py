"""What doctor says of layers: what is not encoded or sealed yet, and by whom a layer is mounted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs.layers.journal import Journal
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.records import Captured, Contents, Dropped, Link, Make, Record, Remove, Rename, Sealed, Stored
from moonclipfs.layers.unfinished import Unfinished, check_layers, unfinished
from moonclipfs.store.backend import FileOps
from moonclipfs.store.health import State
from moonclipfs.store.layerdirs import make_layer
from moonclipfs.store.segments import segment_name
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, EntryType

RECIPE = b"r" * 32
Write = Callable[[Record], Unfinished]


@pytest.fixture
def write(store: Store) -> Iterator[Write]:
    path, layer_id = make_layer(store, "host")
    journal = Journal(path / "journal", FileOps(), layer_id=layer_id)
    list(journal.replay())

    def append(record: Record) -> Unfinished:
        journal.append(record)
        return unfinished(store.path, "host")

    yield append
    journal.close()


def make(number: int, parent: int, name: bytes, type_: EntryType = EntryType.FILE) -> Make:
    return Make(number, parent, name, type_, 0o644, 0, 0, b"", 7)


def staged(number: int, size: int, generation: int, *, whole: bool = True) -> Contents:
    return Contents(number, size, 7, 7, whole, NO_ID, ((0, size, 2, generation),), (), False)


def test_a_file_counts_from_its_contents_until_it_is_stored(write: Write) -> None:
    assert write(make(5, 1, b"f")) == (0, 0, 0)
    assert write(staged(5, 1000, 3)) == (1, 1000, 0)
    assert write(staged(5, 3000, 4, whole=False)) == (1, 3000, 0)
    assert write(Stored(5, 3, RECIPE, 1000)) == (1, 3000, 0)
    assert write(Stored(5, 4, RECIPE, 3000)) == (0, 0, 0)
    assert write(staged(5, 10, 5)) == (1, 10, 0)
    assert write(Contents(5, 0, 7, 7, True, NO_ID, (), (), True)) == (0, 0, 0)


def test_a_file_counts_as_long_as_it_has_a_name(write: Write) -> None:
    write(make(5, 1, b"f"))
    write(staged(5, 1000, 3))
    write(Link(5, 1, b"g", 7))
    assert write(Remove(1, b"f", 0, 7)) == (1, 1000, 0)
    write(make(6, 1, b"h"))
    write(staged(6, 10, 4))
    assert write(Rename(1, b"h", 1, b"g", True, 7)) == (2, 1010, 0)
    assert write(Rename(1, b"h", 1, b"g", False, 7)) == (1, 1000, 0)
    assert write(Remove(1, b"g", 0, 7)) == (0, 0, 0)


def test_what_is_below_a_directory_goes_with_it(write: Write) -> None:
    write(make(5, 1, b"d", EntryType.DIRECTORY))
    write(make(6, 5, b"e", EntryType.DIRECTORY))
    write(make(7, 6, b"f"))
    write(staged(7, 1000, 3))
    assert write(Rename(5, b"e", 1, b"e", False, 7)) == (1, 1000, 0)
    assert write(Dropped(1, b"e")) == (0, 0, 0)


def test_a_capture_counts_until_it_is_sealed(write: Write) -> None:
    assert write(Captured(1, 5, b"run", 3, b"", b"", ())) == (0, 0, 1)
    assert write(Captured(2, 5, b"run", 3, b"", b"", ())) == (0, 0, 2)
    assert write(Sealed(1, b"run", 1, 1, RECIPE)) == (0, 0, 1)


def test_doctor_on_real_layers(store: Store) -> None:
    assert check_layers(store.path) == []
    layer = Layer.open(store, "busy", mountpoint="/mnt/busy")
    file = layer.make(layer.root, b"f", EntryType.FILE, 0o644, 0, 0, 7)
    handle = layer.open_file(file, write=True)
    handle.write(0, b"x" * 3_000_000, 7)
    handle.close()
    (finding,) = check_layers(store.path)
    assert (finding.what, finding.state) == ("layer busy", State.OK)
    assert finding.text == f"mounted at /mnt/busy by process {os.getpid()}"
    layer.close()
    (finding,) = check_layers(store.path)
    assert finding.state is State.NOTE and "1 files of 2.9 MiB are not encoded yet" in finding.text
    assert "--layer busy" in finding.advice
    Layer.open(store, "idle").close()
    assert [finding.state for finding in check_layers(store.path)] == [State.NOTE, State.OK]


def test_a_damaged_journal_is_a_problem(store: Store) -> None:
    Layer.open(store, "host").close()
    path: Path = store.path / "layers" / "host" / "journal" / segment_name(1)
    path.write_bytes(b"\0" * 100)
    (finding,) = check_layers(store.path)
    assert finding.state is State.PROBLEM and segment_name(1) in finding.text
