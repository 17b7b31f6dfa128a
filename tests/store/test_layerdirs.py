"""Directories of layers: who has one, what their journals name, and the feature that a store has for them."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from moonclipfs.errors import BusyError, CorruptError, FormatVersionError, NotFoundError, UsageError
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.records import Make
from moonclipfs.store.backend import FileOps, LocalBackend
from moonclipfs.store.config import Config, decode_config, encode_config, load_config
from moonclipfs.store.layerdirs import (
    LayerLock,
    LayerRoots,
    layer_holder,
    layer_id,
    layer_names,
    layer_roots,
    make_layer,
)
from moonclipfs.store.segments import Extent, measure_segment, segment_numbers
from moonclipfs.store.store import Store
from moonclipfs.types import Kind
from tests.faults import PausingOps

LISTING = "moonclipfs.store.layerdirs.segment_numbers"
HOLDER = {"pid": 4711, "host": "node7", "mountpoint": "/mnt/run"}


def test_a_layer_is_made_once(store: Store) -> None:
    assert layer_names(store.path) == [] and list(layer_roots(store.path)) == []
    path, first = make_layer(store, "node-7.example")
    assert make_layer(store, "node-7.example") == (path, first)
    assert make_layer(store, "other")[1] != first
    assert layer_names(store.path) == ["node-7.example", "other"] and len(first) == 16
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((path / "journal").stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "id").stat().st_mode) == 0o600
    assert list(layer_roots(store.path)) == []


def test_a_layer_of_a_shared_store_lets_the_group_in(tmp_path: Path) -> None:
    with Store.create(tmp_path / "shared", shared=True) as store:
        path, _ = make_layer(store, "one")
        assert stat.S_IMODE((path / "journal").stat().st_mode) == 0o2770
        journal = Journal(path / "journal", FileOps())
        list(journal.replay())
        journal.close()
        assert all(one.stat().st_mode & 0o060 == 0o060 for one in [path / "id", *(path / "journal").iterdir()])


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "x" * 201, "a\0b"])
def test_a_name_that_cannot_be(store: Store, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a layer"):
        make_layer(store, name)
    assert not (store.path / "layers").exists()


def test_a_damaged_or_missing_id(store: Store) -> None:
    path, _ = make_layer(store, "one")
    (path / "id").write_text("nonsense")
    with pytest.raises(CorruptError, match=r"id is damaged"):
        layer_id(store.path, "one")
    with pytest.raises(NotFoundError):
        layer_id(store.path, "two")


# The feature


def test_the_first_layer_gives_the_store_a_feature(store: Store) -> None:
    assert load_config(LocalBackend(store.path)).read_only_compatible == ()
    make_layer(store, "one")
    found = load_config(LocalBackend(store.path))
    assert found == store.config and found.read_only_compatible == ("layers",)
    before = (store.path / "config.json").stat()
    make_layer(store, "two")
    assert (store.path / "config.json").stat() == before
    with Store.open(store.path, write=True) as again:
        assert again.config == found


def test_a_feature_of_a_newer_version_beside_it_is_refused_by_name() -> None:
    config = Config("0" * 32, read_only_compatible=("layers", "quantum"))
    with pytest.raises(FormatVersionError, match=r"uses quantum: writing"):
        decode_config(encode_config(config)).check_writable()


def test_a_feature_that_came_meanwhile_is_not_lost(store: Store) -> None:
    newer = encode_config(Config(store.config.store_id, read_only_compatible=("quantum",)))
    (store.path / "config.json").write_bytes(newer)
    with pytest.raises(FormatVersionError, match="quantum"):
        make_layer(store, "one")
    assert (store.path / "config.json").read_bytes() == newer and layer_names(store.path) == []


def test_the_config_is_old_or_new_at_every_moment(store: Store) -> None:
    seen: list[tuple[str, ...]] = []

    def look() -> None:
        seen.append(load_config(LocalBackend(store.path)).read_only_compatible)

    store.backend.ops = PausingOps("rename", "config.json", look)
    make_layer(store, "one")
    look()
    assert seen == [(), ("layers",)]
    assert os.listdir(store.path / "tmp") == []


# The lock


@pytest.fixture
def directory(store: Store) -> Iterator[Path]:
    path, _ = make_layer(store, "node7")
    yield path


def test_who_comes_second_is_told_who_has_it(directory: Path) -> None:
    assert layer_holder(directory) is None
    lock = LayerLock.acquire(directory, HOLDER)
    assert layer_holder(directory) == HOLDER
    with pytest.raises(BusyError) as caught:
        LayerLock.acquire(directory, {"pid": 1})
    message = str(caught.value)
    assert all(part in message for part in ("layer node7", "4711", "node7", "/mnt/run", "--layer NAME"))
    assert layer_holder(directory) == HOLDER
    lock.release()
    lock.release()
    assert layer_holder(directory) is None
    LayerLock.acquire(directory, {"pid": 1}).release()


@pytest.mark.parametrize("text", [b"", b"{", b"[1, 2]", b"\xff\xfe", json.dumps({"pid": [1]}).encode(), b"[" * 4000])
def test_a_holder_that_cannot_be_read_is_still_one(directory: Path, text: bytes) -> None:
    lock = LayerLock.acquire(directory, HOLDER)
    (directory / "lock").write_bytes(text)
    with pytest.raises(BusyError, match="--layer NAME"):
        LayerLock.acquire(directory, HOLDER)
    lock.release()


def test_the_longest_mountpoint(directory: Path) -> None:
    mountpoint = "/" + os.fsdecode(b"\xff" * 4094)
    lock = LayerLock.acquire(directory, HOLDER | {"mountpoint": mountpoint})
    with pytest.raises(BusyError) as caught:
        LayerLock.acquire(directory, HOLDER)
    assert mountpoint in str(caught.value)
    lock.release()


_CHILD = """
import sys
from pathlib import Path
from typing import BinaryIO
from moonclipfs.store.layerdirs import LayerLock
lock = LayerLock.acquire(Path(sys.argv[1]), {"pid": 1, "host": "h"})
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_killed_holder_frees_it_at_once(directory: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(BusyError):
        LayerLock.acquire(directory, HOLDER)
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    LayerLock.acquire(directory, HOLDER).release()


def test_a_child_that_shares_the_file_does_not_keep_it(directory: Path) -> None:
    lock = LayerLock.acquire(directory, HOLDER)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        theirs.recv(1)
        os._exit(0)
    lock.release()
    try:
        LayerLock.acquire(directory, HOLDER).release()
    finally:
        ours.send(b"x")
        os.waitpid(pid, 0)
        ours.close()
        theirs.close()


# What journals name


def open_journal(directory: Path) -> Journal:
    journal = Journal(directory / "journal", FileOps())
    list(journal.replay())
    return journal


def make(number: int) -> Make:
    return Make(number, 1, b"n", 1, 0o644, 0, 0, b"", 7)


def one_id(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_what_came_since_the_last_look(store: Store, directory: Path) -> None:
    journal, roots = open_journal(directory), LayerRoots(store.path)
    assert list(roots.more()) == []
    for number in range(1, 4):
        journal.append(make(number), [(Kind.RECIPE, one_id(number)), (Kind.DIRECTORY, one_id(number + 50))])
        found = [("node7", Kind.RECIPE, one_id(number)), ("node7", Kind.DIRECTORY, one_id(number + 50))]
        assert list(roots.more()) == found and list(roots.more()) == []
    journal.rewrite([(make(9), [(Kind.DATA, one_id(9))])])
    journal.append(make(10), [(Kind.DATA, one_id(10))])
    assert [one for _, _, one in roots.more()] == [one_id(9), one_id(10)]
    assert [one for _, one in layer_roots(store.path)] == [one_id(9), one_id(10)]
    journal.close()


def test_a_journal_that_is_written_anew_while_it_is_read(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each listing: what every state of the journal needed from the first look on is found."""
    listings = 0
    for at in range(1, 5):
        journal = open_journal(directory)
        journal.rewrite([(make(5), [(Kind.RECIPE, one_id(at))])])
        listings = 0

        def listing(path: Path, at: int = at, journal: Journal = journal) -> list[int]:
            nonlocal listings
            listings += 1
            found = segment_numbers(path)
            if listings == at:
                journal.append(make(6), [(Kind.RECIPE, one_id(100 + at))])
                journal.rewrite([(make(6), [(Kind.RECIPE, one_id(at)), (Kind.RECIPE, one_id(100 + at))])])
            return found

        monkeypatch.setattr(LISTING, listing)
        found = {one for _, one in layer_roots(store.path)}
        monkeypatch.setattr(LISTING, segment_numbers)
        assert one_id(at) in found
        journal.close()


def test_a_frame_that_is_read_while_it_is_written(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks damaged, with whole frames behind it that the reader saw later: so it looks again."""
    journal = open_journal(directory)
    journal.append(make(5), [(Kind.RECIPE, one_id(1))])
    failures = iter([CorruptError("torn"), CorruptError("torn"), None])

    def torn(file: BinaryIO, path: Path, before: Extent | None) -> Extent:
        if (error := next(failures)) is not None:
            raise error
        return measure_segment(file, path, before)

    monkeypatch.setattr("moonclipfs.store.layerdirs.measure_segment", torn)
    assert list(layer_roots(store.path)) == [(Kind.RECIPE, one_id(1))]
    journal.close()
