"""The index damaged, unwritable, held or incomplete: never a wrong answer, and always one in the end."""

from __future__ import annotations

import logging
import random
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moonclipfs.errors import BusyError, CorruptError, MissingObjectError
from moonclipfs.store.cachedb import CacheDatabase
from moonclipfs.store.packs import pack_key
from tests.store.ground import Ground, name

Expect = Callable[[str], None]
ATTEMPTS = 60


def test_locate_makes_a_doubtful_index_anew_once(ground: Ground) -> None:
    (location,) = ground.pack(b"a")
    index = ground.index()
    index.find(name(b"a"))
    index.close()
    with sqlite3.connect(ground.file) as connection:
        connection.execute("UPDATE objects SET key = key + 1")
    connection.close()
    index = ground.index()
    assert index.find(name(b"a")) is None
    assert index.locate(name(b"a")) == location
    with pytest.raises(MissingObjectError, match=name(b"x").hex()):
        index.locate(name(b"x"))
    footers = ground.packs.footers
    with pytest.raises(MissingObjectError):
        index.locate(name(b"y"))
    assert ground.packs.footers == footers, "it is not made anew for every object that is missing"


def test_relocate_reads_the_footer_again(ground: Ground) -> None:
    (location,) = ground.pack(b"hello")
    index = ground.index()
    index.find(location.object_id)
    with sqlite3.connect(ground.file) as connection:
        (entry,) = connection.execute("SELECT entry FROM objects").fetchone()
        wrong = bytearray(entry)
        wrong[104] ^= 0x40
        connection.execute("UPDATE objects SET entry = ?", (bytes(wrong),))
    connection.close()
    false = index.find(location.object_id)
    assert false is not None and false.offset != location.offset
    with pytest.raises(CorruptError):
        ground.packs.read(false, 0, 5)
    assert index.relocate(false) == location
    assert index.relocate(location) is None, "the footer says the same: the pack itself is damaged"
    (copy,) = ground.pack(b"hello")
    assert index.relocate(location) == copy
    ground.delete(copy.pack)
    ground.delete(location.pack)
    with pytest.raises(MissingObjectError):
        index.relocate(location)


@pytest.mark.parametrize("content", [b"garbage" * 1000, b"", b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_file_that_is_no_index_is_replaced(ground: Ground, content: bytes) -> None:
    (location,) = ground.pack(b"a")
    ground.file.write_bytes(content)
    assert ground.index().find(name(b"a")) == location


def test_an_index_of_another_store_or_version_is_replaced(ground: Ground) -> None:
    (location,) = ground.pack(b"a")
    ground.index(store_id="other").find(name(b"a"))
    ground.opened[0].close()
    index = ground.index()
    assert index.find(name(b"a")) == location and ground.packs.footers == 1
    index.close()
    with sqlite3.connect(ground.file) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    index = ground.index()
    assert index.find(name(b"a")) == location and ground.packs.footers == 1


def test_a_truncated_or_flipped_index_never_gives_a_wrong_answer(ground: Ground) -> None:
    """Whatever its file holds, `locate` and `relocate` lead to the object, and reading checks each record."""
    datas = [b"%d" % number * 50 for number in range(60)]
    locations = {
        location.object_id: location
        for start in range(0, 60, 10)
        for location in ground.pack(*datas[start : start + 10])
    }
    index = ground.index()
    index.sync()
    index.close()
    good = ground.file.read_bytes()
    random_ = random.Random(7)
    for attempt in range(ATTEMPTS):
        bad = bytearray(good)
        for _ in range(1 + attempt % 20):
            bad[random_.randrange(len(bad))] ^= 1 << random_.randrange(8)
        for suffix in ("-wal", "-shm"):
            Path(f"{ground.file}{suffix}").unlink(missing_ok=True)
        ground.file.write_bytes(bad if attempt % 3 else bad[: random_.randrange(len(bad))])
        index = ground.index()
        for data in random_.sample(datas, 20):
            location = index.locate(name(data))
            try:
                read = ground.packs.read(location, 0, location.encoded_length)
            except CorruptError:
                better = index.relocate(location)
                assert better == locations[name(data)]
                read = ground.packs.read(better, 0, better.encoded_length)
            assert read == data
        index.close()
        ground.packs.close()


def test_a_pack_with_a_damaged_footer_is_scanned(ground: Ground, expect_log: Expect) -> None:
    locations = ground.pack(b"a" * 100, b"b" * 100)
    path = Path(ground.backend.path(pack_key(locations[0].pack)))
    path.write_bytes(path.read_bytes()[:-60])
    expect_log(f"WARNING .*pack {locations[0].pack}.*verify")
    index = ground.index()
    assert [index.find(location.object_id) for location in locations] == locations
    assert index.packs()[locations[0].pack].damaged


def test_a_pack_that_was_cut_off_is_read_again(ground: Ground, expect_log: Expect) -> None:
    first, second = ground.pack(b"a" * 100, b"b" * 100)
    ground.index().find(first.object_id)
    ground.opened[0].close()
    path = Path(ground.backend.path(pack_key(first.pack)))
    path.write_bytes(path.read_bytes()[: second.offset + 50])
    expect_log("cut off")
    index = ground.index()
    assert index.find(first.object_id) == first and index.find(second.object_id) is None


def test_an_unwritable_place_means_memory(ground: Ground, tmp_path: Path) -> None:
    (location,) = ground.pack(b"a")
    ground.file = tmp_path / "missing" / "index.sqlite"
    assert ground.index().find(name(b"a")) == location
    assert not ground.file.exists()


def test_a_full_disk_under_the_index_fails_nothing(ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
    ground.pack(b"a")
    index = ground.index()
    index.find(name(b"a"))
    caplog.set_level(logging.INFO, "moonclipfs")
    ground.pack(b"b" * 10, *[b"%d" % number for number in range(3000)])
    index._database.run(lambda connection: connection.execute("PRAGMA max_page_count = 1"))
    index.sync()
    assert index.find(name(b"b" * 10)) is not None and index.find(name(b"a")) is not None
    assert "goes on in memory" in caplog.text


def test_a_held_index_ends_in_busy(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.store.cachedb._WAIT_SECONDS", 0.1)
    ground.pack(b"a")
    index = ground.index()
    index.find(name(b"a"))
    ground.pack(b"b")
    other = sqlite3.connect(ground.file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(BusyError, match=r"index\.sqlite"):
        index.sync()
    other.close()
    index.sync()
    assert index.find(name(b"b")) is not None


def test_an_interrupted_rebuild_goes_on(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.store.index._INSERT_AT_ONCE", 1)
    for number in range(6):
        ground.pack(b"%d" % number)
    index = ground.index()
    real, reads = ground.packs.entries, []

    def failing(pack: str) -> NDArray[np.void]:
        reads.append(pack)
        if len(reads) == 4:
            raise KeyboardInterrupt
        return real(pack)

    monkeypatch.setattr(ground.packs, "entries", failing)
    with pytest.raises(KeyboardInterrupt):
        index.sync()
    monkeypatch.undo()
    again = ground.index()
    assert len(list(again.iterate())) == 6 and ground.packs.footers == 3


def test_several_may_open_a_new_index_at_the_same_moment(tmp_path: Path) -> None:
    """SQLite fails at once then, whatever it was told to wait."""

    def look(number: int) -> int:
        database = CacheDatabase(tmp_path / str(number // 4), "", 1, "x", lambda connection: None)
        found: int = database.run(lambda connection: connection.execute("SELECT count(*) FROM owner").fetchone()[0])
        database.close()
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(look, range(80))) == [1] * 80
