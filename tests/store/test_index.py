"""The index: a cache that answers from the footers of packs alone."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading

import pytest

from moonclipfs.store.index import PackInfo
from moonclipfs.store.packs import PackWriter, pack_key
from moonclipfs.types import DType, Kind
from tests.store.ground import Ground, name


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
