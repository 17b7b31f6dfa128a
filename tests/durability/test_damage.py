"""A flipped bit below a layer is told, and never gives wrong bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.unfinished import check_layers
from moonclipfs.store.gc import collect
from moonclipfs.store.health import State
from moonclipfs.store.store import Store
from tests.layers.filekit import encode, read_all, write_file

BIG = 3 * limits.INLINE_BYTES


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_damaged_pack_is_an_error_of_the_file_in_it(tmp_path: Path, expect_log: Callable[[str], None]) -> None:
    """The layer comes up, the file is an error, all others are readable, and it can be written anew."""
    data, other = os.urandom(BIG), os.urandom(BIG)
    Store.create(tmp_path / "store").close()
    with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "index") as store:
        layer = Layer.open(store, "test")
        write_file(layer, b"lost", data)
        encode(layer, *layer.take_jobs(0.0, urgent=True))
        before = set((store.path / "packs").iterdir())
        write_file(layer, b"kept", other)
        encode(layer, *layer.take_jobs(0.0, urgent=True))
        layer.sync_all()
        layer.close()
    (pack,) = before
    flip(pack, pack.stat().st_size // 2)
    with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "index") as store:
        layer = Layer.open(store, "test")
        with pytest.raises(CorruptError):
            read_all(layer, layer.resolve(b"lost"))
        assert read_all(layer, layer.resolve(b"kept")) == other
        layer.unlink(layer.root, b"lost", 5)
        write_file(layer, b"lost", data)
        assert read_all(layer, layer.resolve(b"lost")) == data
        layer.close()


def test_a_damaged_journal_is_told_and_gc_deletes_nothing(tmp_path: Path) -> None:
    """Damage before the tail of a journal is no torn tail: nothing is dropped in silence, and gc takes nothing."""
    Store.create(tmp_path / "store").close()
    with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "index") as store:
        layer = Layer.open(store, "test")
        for name in (b"a", b"b", b"c"):
            write_file(layer, name, os.urandom(BIG))
        encode(layer, *layer.take_jobs(0.0, urgent=True))
        layer.sync_all()
        layer.close()
    (journal,) = (tmp_path / "store/layers/test/journal").iterdir()
    at = journal.read_bytes().index(b"b", 60)
    flip(journal, at)
    packs = sorted((tmp_path / "store/packs").iterdir())
    with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "index") as store:
        with pytest.raises(CorruptError, match="journal"):
            Layer.open(store, "test")
        with pytest.raises(CorruptError, match="journal"):
            collect(store, wait_seconds=0)
        assert sorted((tmp_path / "store/packs").iterdir()) == packs
    (finding,) = check_layers(tmp_path / "store")
    assert finding.state is State.PROBLEM and finding.advice
