"""The index: a cache that answers from footers alone, and is never trusted with a wrong answer."""

from __future__ import annotations

import logging
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moonclipfs.errors import BusyError, CorruptError, MissingObjectError
from moonclipfs.store import hostfs
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.index import Index, PackInfo
from moonclipfs.store.objects import object_id
from moonclipfs.store.packs import Location, PackReader, PackWriter, pack_key
from moonclipfs.types import DType, Kind, ObjectId
from tests.faults import UnsyncedOps

Expect = Callable[[str], None]
ATTEMPTS = 60


class CountingPacks(PackReader):
    """Counts the footers read."""

    def __init__(self, backend: LocalBackend) -> None:
        super().__init__(backend)
        self.footers = 0

    def entries(self, pack: str) -> NDArray[np.void]:
        self.footers += 1
        return super().entries(pack)


class Ground:
    """A directory of packs, and what an index over it needs."""

    def __init__(self, root: Path) -> None:
        for name in ("packs", "tmp"):
            (root / name).mkdir(parents=True)
        self.root = root
        self.file = root / "index.sqlite"
        self.backend = LocalBackend(root, UnsyncedOps())
        self.opened: list[Index] = []

    def pack(self, *datas: bytes, **fields: object) -> list[Location]:
        writer = PackWriter(self.backend, lambda pack, entries: None)
        locations = [
            writer.add(data, object_id=name(data), kind=Kind.DATA, raw_length=len(data), **fields)  # type: ignore[arg-type]
            for data in datas
        ]
        writer.flush()
        return locations

    def index(self, *, store_id: str = "id", memory: bool = False) -> Index:
        self.packs = CountingPacks(self.backend)
        index = Index(None if memory else self.file, self.backend, self.packs, store_id)
        self.opened.append(index)
        return index

    def delete(self, pack: str) -> None:
        self.backend.delete(pack_key(pack))


def name(data: bytes) -> ObjectId:
    return object_id(Kind.DATA, data)


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(tmp_path / "store")
    yield ground
    for index in ground.opened:
        index.close()


@pytest.mark.parametrize("memory", [False, True])
def test_finds_what_the_packs_hold(ground: Ground, memory: bool) -> None:
    locations = ground.pack(b"a", b"b") + ground.pack(b"c")
    index = ground.index(memory=memory)
    assert [index.find(location.object_id) for location in locations] == locations
    assert index.find(name(b"x")) is None
    assert index.find_many([name(b"a"), name(b"x"), name(b"c")]) == {name(b"a"): locations[0], name(b"c"): locations[2]}
    assert sorted(map(str, index.iterate())) == sorted(map(str, locations))
    sizes = {pack: ground.backend.size(pack_key(pack)) for pack in (locations[0].pack, locations[2].pack)}
    assert index.packs() == {
        locations[0].pack: PackInfo(sizes[locations[0].pack], 2),
        locations[2].pack: PackInfo(sizes[locations[2].pack], 1),
    }


def test_nothing_is_read_before_the_first_use_and_footers_once(ground: Ground) -> None:
    for number in range(20):
        ground.pack(b"%d" % number)
    index = ground.index()
    assert ground.packs.footers == 0 and not ground.file.exists()
    index.find(name(b"1"))
    assert ground.packs.footers == 20
    index.close()
    again = ground.index()
    assert again.find(name(b"19")) is not None
    assert ground.packs.footers == 0
    ground.pack(b"new")
    again.sync()
    assert ground.packs.footers == 1 and again.find(name(b"new")) is not None


def test_many_ids_at_once(ground: Ground) -> None:
    datas = [b"%d" % number for number in range(1500)]
    ground.pack(*datas)
    found = ground.index().find_many(map(name, datas))
    assert set(found) == set(map(name, datas)) and len(list(ground.opened[0].iterate())) == 1500


def test_iterate_while_packs_come_and_go(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.store.index._ROWS_AT_ONCE", 3)
    first = ground.pack(*[b"%d" % number for number in range(10)])
    index = ground.index()
    seen = []
    for number, location in enumerate(index.iterate()):
        seen.append(location)
        if number == 4:
            ground.pack(b"later")
            index.sync()
    assert seen[:10] == first and len(seen) == 11


def test_add_and_drop(ground: Ground) -> None:
    index = ground.index()
    assert index.packs() == {}
    writer = PackWriter(ground.backend, index.add_pack)
    location = writer.add(b"a", object_id=name(b"a"), kind=Kind.DATA, raw_length=1)
    writer.flush()
    assert index.find(name(b"a")) == location and ground.packs.footers == 0
    ground.delete(location.pack)
    index.drop_pack(location.pack)
    assert index.find(name(b"a")) is None and index.packs() == {}


def test_a_vanished_pack_is_dropped_by_sync_and_at_opening(ground: Ground) -> None:
    (gone,) = ground.pack(b"a")
    (kept,) = ground.pack(b"a", depth=1)
    index = ground.index()
    assert index.find(name(b"a")) == gone
    ground.delete(gone.pack)
    index.sync()
    assert index.find(name(b"a")) == kept
    index.close()
    ground.delete(kept.pack)
    assert ground.index().find(name(b"a")) is None


def test_condemned_packs_are_not_usable(ground: Ground) -> None:
    (old,) = ground.pack(b"a", label=7)
    index = ground.index()
    index.set_condemned([old.pack])
    assert index.find(name(b"a")) == old, "what is there can be read until it is deleted"
    assert index.find(name(b"a"), usable=True) is None
    assert index.by_label(7) == []
    (new,) = ground.pack(b"a", label=7, depth=3)
    index.sync()
    assert index.find(name(b"a")) == index.find(name(b"a"), usable=True) == new
    assert index.by_label(7) == [new]
    index.set_condemned([])
    assert index.find_many([name(b"a")], usable=True) == {name(b"a"): new}, "the log forgets before the pack is gone"
    ground.delete(old.pack)
    index.sync()


def test_a_delta_whose_base_is_gone_or_condemned_is_not_usable(ground: Ground) -> None:
    """gc deletes a base together with the last use of what hangs on it, and leaves that in a pack that lives on."""
    (base,) = ground.pack(b"base")
    (middle,) = ground.pack(b"middle", base=base.object_id, depth=1, label=5)
    (top,) = ground.pack(b"top", base=middle.object_id, depth=2, label=5)
    index = ground.index()
    assert index.find_many([top.object_id, middle.object_id], usable=True) == {
        top.object_id: top,
        middle.object_id: middle,
    }
    assert sorted(index.by_label(5), key=lambda one: one.depth) == [middle, top]
    index.set_condemned([base.pack])
    assert index.find_many([top.object_id, middle.object_id, base.object_id], usable=True) == {}
    assert index.by_label(5) == []
    ground.delete(base.pack)
    index.sync()
    assert index.find(top.object_id, usable=True) is None and index.find(top.object_id) == top
    (again,) = ground.pack(b"base")
    index.sync()
    assert index.find(top.object_id, usable=True) == top and index.find(base.object_id) == again


def test_R075_bases_that_lead_back_are_not_usable_and_end(ground: Ground) -> None:
    ground.pack(b"a", base=name(b"b"), depth=1)
    ground.pack(b"b", base=name(b"a"), depth=1)
    assert ground.index().find(name(b"a"), usable=True) is None


def test_labels_and_element_counts_give_the_newest_first(ground: Ground) -> None:
    sketch = bytes(range(32))
    locations = [
        ground.pack(b"%8d" % number, label=2**64 - 3, sketch=sketch, dtype=DType.F32)[0] for number in range(12)
    ]
    ground.pack(b"no sketch", label=0)
    index = ground.index()
    index.sync()
    found = index.by_label(2**64 - 3, limit=5)
    assert len(found) == 5 and {one.pack for one in found} <= {one.pack for one in locations}
    (newest,) = ground.pack(b"newest 1", label=2**64 - 3, sketch=sketch, dtype=DType.BF16)
    index.sync()
    assert index.by_label(2**64 - 3, limit=5)[0] == newest
    assert index.by_elements(4) == [newest] and len(index.by_elements(2)) == 12
    assert index.by_label(0) == [] and index.by_label(99) == [] and index.by_elements(0) == []


def test_threads_share_an_index(ground: Ground) -> None:
    datas = [b"%d" % number for number in range(300)]
    for start in range(0, 300, 30):
        ground.pack(*datas[start : start + 30])
    index = ground.index()
    wrong: list[bytes] = []

    def work(seed: int) -> None:
        for data in random.Random(seed).sample(datas, 200):
            location = index.find(name(data))
            if location is None or location.object_id != name(data):
                wrong.append(data)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_OTHER = """
import sys
from pathlib import Path
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.index import Index
from moonclipfs.store.packs import PackReader
root = Path(sys.argv[1])
backend = LocalBackend(root)
for _ in range(5):
    index = Index(root / "index.sqlite", backend, PackReader(backend), "id")
    print(len(list(index.iterate())))
    index.close()
"""


def test_processes_share_an_index(ground: Ground) -> None:
    for number in range(30):
        ground.pack(*[b"%d %d" % (number, part) for part in range(20)])
    command = [sys.executable, "-c", _OTHER, str(ground.root)]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    mine = len(list(ground.index().iterate()))
    assert [other.communicate()[0].split() for other in others] == [["600"] * 5] * 3
    assert mine == 600


# Damage


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


# Where it lies


MOUNTS = r"""
1 0 8:1 / / rw - ext4 /dev/sda rw
2 1 0:5 / /mnt/with\040space rw shared:1 master:2 - nfs4 host:/x rw
3 1 0:6 / /mnt/with\040space/deep rw - tmpfs tmpfs rw
4 1 0:7 / /fuse rw - fuse.sshfs host rw
5 1 0:8 / /fuse rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/mnt/with space", "nfs4"),
        ("/mnt/with space/a/b", "nfs4"),
        ("/mnt/with spaces", "ext4"),
        ("/mnt/with space/deep/x", "tmpfs"),
        ("/fuse/x", "xfs"),
    ],
)
def test_file_system_of_a_path(path: str, kind: str) -> None:
    assert hostfs.file_system_type(Path(path), MOUNTS.strip()) == kind


def test_place_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hostfs, "is_local", lambda path: True)
    assert hostfs.index_path(tmp_path, "id", shared=False) == tmp_path / "index.sqlite"
    shared = hostfs.index_path(tmp_path, "id", shared=True)
    assert shared is not None and shared.parent == tmp_path / "cache" / "moonclipfs" / "id"
    monkeypatch.setattr(hostfs, "is_local", lambda path: False)
    assert hostfs.index_path(tmp_path, "id", shared=False) == shared
    assert hostfs.index_path(tmp_path / "copy", "id", shared=False) != shared
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert hostfs.index_path(tmp_path, "id", shared=False) is None


def test_opening_a_large_index_reads_no_footer_and_few_rows(ground: Ground) -> None:
    """200,000 objects cost what their packs cost: a listing, and one row each."""
    for number in range(40):
        ground.pack(*[b"%d %d" % (number, part) for part in range(50)])
    ground.index().sync()
    ground.opened[0].close()
    index = ground.index()
    steps = [0]

    def step() -> int:
        steps[0] += 1
        return 0

    real = sqlite3.connect

    def connect(*arguments: object, **options: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = real(*arguments, **options)  # type: ignore[call-overload]
        connection.set_progress_handler(step, 1)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect)
        index.find(name(b"1 1"))
    assert ground.packs.footers == 0
    assert steps[0] < 40 * 10 + 500, "virtual machine steps grow with packs, not with their 2,000 objects"
