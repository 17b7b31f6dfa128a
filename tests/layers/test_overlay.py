"""What an overlay shows and keeps: the cases that users of overlay file systems reported, and more of their kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonclipfs import limits, rescue
from moonclipfs.errors import BusyError, CorruptError, NotEmptyError, NotFoundError, QuotaError, UsageError
from moonclipfs.layers import records
from moonclipfs.layers.inodes import ROOT_NUMBER, Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.overlay import Overlay
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from moonclipfs.types import Entry, EntryType
from tests.faults import CountingOps
from tests.layers.filekit import overwrite, read_all, write_file
from tests.layers.overlaykit import LocalOverlayEncoder, create, everything, size_of_overlay, stored_bytes
from tests.layers.publish import Fifo, File, Files, publish
from tests.layers.sealkit import identities, model, put, tree

BASE: Files = {
    "a": {"b": {"deep": b"1"}, "x": b"in a"},
    "file": b"hello",
    "hard": File(b"shared", link_group=7),
    "link": "a/x",
    "pipe": Fifo(),
    "tool": File(b"#!", 0o4755, xattrs={b"user.k": b"v"}),
    "d": {"hard": File(b"shared", link_group=7), ".wh.x": b"an ordinary name"},
}


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.layers.overlay.OverlayEncoder", LocalOverlayEncoder)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    Store.create(tmp_path / "store").close()
    with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "index.sqlite") as opened:
        publish(opened, "base", BASE)
        yield opened


@pytest.fixture
def overlay(store: Store) -> Iterator[Overlay]:
    made = create(store, "one", "base")
    yield made
    made.close()


def again(overlay: Overlay) -> Overlay:
    """The same overlay, closed and opened."""
    overlay.close()
    return Overlay.open(overlay.store, overlay.name)


def names(layer: Layer, path: str = "") -> list[str]:
    """What a directory lists; every name stats."""
    directory = layer.resolve(path.encode())
    found = layer.names_in(directory)
    assert all(layer.children(directory, found)), "a listed name does not stat"
    return [os.fsdecode(name) for name in found]


def remove_all(layer: Layer, parent: Inode, name: bytes) -> None:
    """rm -rf"""
    inode = layer.lookup(parent, name)
    if not inode.is_directory:
        layer.unlink(parent, name, 10)
        return
    for child in layer.names_in(inode):
        remove_all(layer, inode, child)
    layer.rmdir(parent, name, 10)


def mkdir(layer: Layer, path: str) -> Inode:
    above, _, name = path.rpartition("/")
    return layer.make(layer.resolve(above.encode()), name.encode(), EntryType.DIRECTORY, 0o755, 0, 0, 11)


def mv(layer: Layer, old: str, new: str) -> None:
    (a, _, b), (c, _, d) = old.rpartition("/"), new.rpartition("/")
    layer.rename(layer.resolve(a.encode()), b.encode(), layer.resolve(c.encode()), d.encode(), 12)


def test_an_overlay_shows_its_base(overlay: Overlay) -> None:
    """An overlay shows its base, with inodes of its own."""
    layer = overlay.layer
    found = everything(layer)
    assert sorted(found) == sorted(
        [
            "",
            "/a",
            "/a/b",
            "/a/b/deep",
            "/a/x",
            "/file",
            "/hard",
            "/link",
            "/pipe",
            "/tool",
            "/d",
            "/d/hard",
            "/d/.wh.x",
        ]
    )
    assert layer.resolve(b"hard") is layer.resolve(b"d/hard") and layer.stat(layer.resolve(b"hard")).nlink == 2
    assert layer.stat(layer.resolve(b"tool")).mode & 0o7777 == 0o4755
    assert layer.root.number != ROOT_NUMBER
    other = create(overlay.store, "two", "base")
    assert not {one[0] for one in found.values()} & {one[0] for one in everything(other.layer).values()}
    other.close()


def test_ghost_names_after_removing_making_and_renaming(overlay: Overlay) -> None:
    """Whiteouts, and directories made anew, survive rename and remount: no listed name is a ghost.

    R105
    """
    before = everything_of_base(overlay)
    remove_all(overlay.layer, overlay.layer.root, b"a")
    mkdir(overlay.layer, "a")
    mkdir(overlay.layer, "a/b")
    mv(overlay.layer, "a/b", "b")
    for _ in range(2):
        assert names(overlay.layer, "a") == [] and names(overlay.layer, "b") == []
        assert "a" in names(overlay.layer) and "b" in names(overlay.layer)
        overlay = again(overlay)
    assert everything_of_base(overlay) == before
    overlay.close()


def everything_of_base(overlay: Overlay) -> list[tuple[bytes, Entry]]:
    """All that the base version holds, by its objects."""
    store = overlay.store
    return list(store.walk(store.resolve("base")))


def test_rename_over_a_whiteout_keeps_the_lower_entry_hidden(overlay: Overlay) -> None:
    """A removed name of the base never comes back, whatever is renamed over it and away again."""
    layer = overlay.layer
    layer.unlink(layer.root, b"file", 5)
    write_file(layer, b"own", b"mine")
    mv(layer, "own", "file")
    assert read_all(layer, layer.resolve(b"file")) == b"mine"
    mv(layer, "file", "elsewhere")
    for _ in range(2):
        assert "file" not in names(overlay.layer)
        with pytest.raises(NotFoundError):
            overlay.layer.resolve(b"file")
        overlay = again(overlay)
    overlay.layer.files.checkpoint()
    overlay = again(overlay)
    assert "file" not in names(overlay.layer)
    overlay.close()


def test_a_directory_that_is_removed_and_made_again_is_empty(overlay: Overlay) -> None:
    """A directory removed and made again is empty."""
    remove_all(overlay.layer, overlay.layer.root, b"a")
    mkdir(overlay.layer, "a")
    write_file(overlay.layer, b"new", b"1", overlay.layer.resolve(b"a"))
    for _ in range(2):
        assert names(overlay.layer, "a") == ["new"]
        overlay = again(overlay)
    overlay.close()


def test_a_rename_of_a_file_that_only_the_overlay_has_leaves_no_marker(overlay: Overlay) -> None:
    """A rename or removal of what only the overlay has leaves nothing behind."""
    layer = overlay.layer
    write_file(layer, b"own", b"mine")
    mv(layer, "own", "other")
    assert not layer.root.removed and b"own" not in layer.root.names_changed
    layer.unlink(layer.root, b"other", 6)
    assert not layer.root.removed and not layer.root.names_changed


def test_deletes_persist(overlay: Overlay) -> None:
    """What was removed stays so over a remount, a kill, and a journal that is written anew."""
    layer = overlay.layer
    for name in (b"file", b"link", b"pipe", b"hard"):
        layer.unlink(layer.root, name, 5)
    remove_all(layer, layer.root, b"a")
    left = ["d", "tool"]
    assert names(layer) == left
    overlay = again(overlay)
    assert names(overlay.layer) == left and overlay.layer.stat(overlay.layer.resolve(b"d/hard")).nlink == 1
    overlay.layer.files.checkpoint()
    overlay.layer.journal.close()  # as a kill does
    overlay.layer._lock_file.release()
    overlay = Overlay.open(overlay.store, overlay.name)
    assert names(overlay.layer) == left
    assert dict(everything_of_base(overlay)).keys() > {b"file", b"a/b/deep"}
    overlay.close()


def test_a_whiteout_name_is_an_ordinary_name(overlay: Overlay) -> None:
    """A name such as .wh.x is an ordinary name, and so is one that begins with @."""
    layer = overlay.layer
    assert read_all(layer, layer.resolve(b"d/.wh.x")) == b"an ordinary name"
    write_file(layer, b".wh.file", b"1")
    write_file(layer, b".wh..wh..opq", b"2")
    write_file(layer, b"@x", b"3")
    overlay = again(overlay)
    assert {".wh.file", ".wh..wh..opq", "@x", "file", "a"} <= set(names(overlay.layer))
    overlay.close()


def test_two_overlays_of_one_base_never_see_each_other(store: Store) -> None:
    """Two overlays of one base never see each other."""
    one, two = create(store, "one", "base"), create(store, "two", "base")
    overwrite(one.layer, one.layer.resolve(b"file"), b"of one")
    two.layer.unlink(two.layer.resolve(b"a"), b"x", 5)
    put(two.layer, "a/own", b"of two")
    assert tree(one.layer)["file"] == b"of one" and tree(two.layer)["file"] == b"hello"
    assert "a/x" in tree(one.layer) and "a/own" not in tree(one.layer) and "a/x" not in tree(two.layer)
    one.discard()
    assert tree(two.layer)["a/own"] == b"of two"
    two.close()


def test_an_overlay_shows_no_names_of_the_log(store: Store, overlay: Overlay) -> None:
    """What is bound, moved or removed in the store does not show in an overlay, nor what it does in the store."""
    before = everything(overlay.layer)
    publish(store, "base/a/inner", {"x": b"1"})
    publish(store, "a", {"x": b"1"})
    publish(store, "base", {"x": b"1"})
    assert overlay.layer.refresh(5) == [] and everything(overlay.layer) == before
    remove_all(overlay.layer, overlay.layer.root, b"a")
    assert overlay.layer.push_names() == 0
    assert set(store.names().bound()) == {"base", "base/a/inner", "a"}


def test_changes_of_attributes_cost_nothing_but_metadata(store: Store) -> None:
    """A chmod, utime or rename of a base file costs metadata; one byte costs a page, and a small delta when encoded.

    R107
    """
    data = model(1, 8 << 20)
    publish(store, "large", {"m.safetensors": data})
    packs, overlay = stored_bytes(store), create(store, "x", "large")
    layer, empty = overlay.layer, size_of_overlay(store, overlay)
    inode = layer.resolve(b"m.safetensors")
    layer.set_attributes(inode, now_ns=5, mode=0o600, mtime_ns=7)
    mv(layer, "m.safetensors", "n.safetensors")
    overlay.flush()
    assert stored_bytes(store) == packs and size_of_overlay(store, overlay) - empty < 16384
    assert overlay.used == 0 and layer.staging.used == 0
    file = layer.open_file(inode, write=True)
    file.write(4 << 20, b"\xff", 8)
    file.close()
    assert size_of_overlay(store, overlay) - empty < 32768 and overlay.used <= 4096
    overlay.flush()
    assert layer.staging.used == 0 and stored_bytes(store) - packs < 300_000
    assert read_all(layer, layer.resolve(b"n.safetensors")) == data[: 4 << 20] + b"\xff" + data[(4 << 20) + 1 :]
    overlay.discard()
    collect(store)
    assert stored_bytes(store) <= packs + 4096
    assert list(tree_of(store, "large").values()) == [data]


def test_making_and_discarding_look_at_nothing_of_the_base(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Creating and discarding an overlay reads nothing of its base, and costs as many calls for a large as for none."""
    publish(store, "many", {f"d{n}": {f"f{m}": b"x" for m in range(50)} for n in range(50)})
    counts = []
    with monkeypatch.context() as patch:
        patch.setattr(store, "directory", lambda object_id: pytest.fail("the base is read"))
        patch.setattr(store.objects, "load", lambda *_: pytest.fail("the base is read"))
        for base in ("base", "base", "many"):
            ops = store.backend.ops = CountingOps()
            create(store, "x", base, ops=ops).discard()
            counts.append(ops.total)
    assert counts[1] == counts[2]  # the first one makes directories of the store


def tree_of(store: Store, spec: str) -> dict[str, bytes]:
    version = store.resolve(spec)
    found = {}
    for path, entry in store.walk(version):
        if entry.type is EntryType.FILE:
            reader = store.open_file(entry)
            found[path.decode()] = reader.read(0, reader.size)
    return found


def test_hard_links_of_the_base_are_one_file(overlay: Overlay) -> None:
    """Hard links of the base are one file in the overlay, also where one of them was moved before."""
    layer = overlay.layer
    mkdir(layer, "moved")
    mv(layer, "d", "moved/d")
    overwrite(layer, layer.resolve(b"hard"), b"changed")
    assert read_all(layer, layer.resolve(b"moved/d/hard")) == b"changed"
    overlay = again(overlay)
    layer = overlay.layer
    assert layer.resolve(b"hard") is layer.resolve(b"moved/d/hard")
    assert layer.stat(layer.resolve(b"hard")).nlink == 2
    version = overlay.commit()
    entries = dict(overlay.store.walk(version))
    assert entries[b"hard"].link_group == entries[b"moved/d/hard"].link_group != 0
    overlay.close()


def test_attributes_of_the_root_are_the_overlays_own(overlay: Overlay) -> None:
    layer = overlay.layer
    assert layer.stat(layer.root).mode & 0o7777 == 0o750  # as the snapshot has it
    layer.set_attributes(layer.root, now_ns=5, mode=0o711)
    layer.set_xattr(layer.root, b"user.k", b"v", 6)
    number = layer.root.number
    overlay = again(overlay)
    layer = overlay.layer
    assert layer.stat(layer.root).mode & 0o7777 == 0o711 and layer.xattr(layer.root, b"user.k") == b"v"
    assert layer.root.number == number
    layer.files.checkpoint()
    overlay = again(overlay)
    assert overlay.layer.stat(overlay.layer.root).mode & 0o7777 == 0o711
    overlay.close()


def test_numbers_stay_over_a_remount_and_a_rename_of_the_overlay(overlay: Overlay) -> None:
    """An inode of an overlay survives remount, commit and a rename of the overlay."""
    layer = overlay.layer
    put(layer, "a/own", b"1")
    overwrite(layer, layer.resolve(b"file"), b"2")
    layer.unlink(layer.resolve(b"a"), b"x", 5)
    before = identities(layer)
    overlay.commit("somewhere")
    assert identities(overlay.layer) == before
    overlay.rename("other")
    overlay = again(overlay)
    assert overlay.name == "other" and identities(overlay.layer) == before
    assert overlay.layer.xattr(overlay.layer.root, b"user.moonclip.overlay") == b"other"
    overlay.close()


def test_an_empty_overlay(store: Store) -> None:
    """An overlay without a base is an empty directory, and works as any other."""
    overlay = create(store, "empty")
    assert names(overlay.layer) == []
    put(overlay.layer, "x/y", b"1")
    overlay = again(overlay)
    version = overlay.commit()
    assert tree_of(store, f"empty@{version.number}") == {"x/y": b"1"}
    overlay.close()


def test_a_lower_that_vanished_is_reported(store: Store, tmp_path: Path) -> None:
    """A base whose bytes are gone is reported by whoever reads it, never read as empty."""
    publish(store, "gone", {"d": {"f": os.urandom(100_000)}, "own": b"1"})
    overlay = create(store, "x", "gone")
    overlay.close()
    store.close()
    for pack in (tmp_path / "store" / "packs").rglob("*"):
        if pack.is_file():
            pack.unlink()
    with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "new.sqlite") as damaged:
        overlay = Overlay.open(damaged, "x")
        layer = overlay.layer
        for look in (
            lambda: layer.names_in(layer.root),
            lambda: layer.resolve(b"d"),
            lambda: layer.rename(layer.root, b"own", layer.root, b"other", 5),
            lambda: layer.unlink(layer.root, b"own", 5),
            overlay.commit,
        ):
            with pytest.raises(CorruptError):
                look()
        overlay.close()
        damaged.log.forget([("base", 1), ("gone", 1)])
        with pytest.raises(CorruptError, match=r"overlay x: .*nothing is deleted"):
            collect(damaged)
        assert "overlay x" in str(verify(damaged).problems)


def test_a_removed_directory_of_the_base_is_not_empty_before_it_is(overlay: Overlay) -> None:
    with pytest.raises(NotEmptyError):
        overlay.layer.rmdir(overlay.layer.root, b"a", 5)


def test_what_was_written_over_is_let_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an overlay has stored and then written over is reclaimed while it goes on."""
    monkeypatch.setattr(limits, "RECLAIM_BYTES", 50_000)
    overlay, packs = create(store, "x"), stored_bytes(store)
    for round_ in range(4):
        put(overlay.layer, "f", os.urandom(60_000))
        overlay.flush()
        assert overlay.churn >= round_ * 60_000
        overlay.tick(0.0)
        collect(store)
    assert 60_000 < stored_bytes(store) - packs < 130_000
    overlay.close()


def test_a_version_that_knows_no_overlays_deletes_nothing_of_them(
    overlay: Overlay, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that does not know the records of overlays refuses to open one, and its gc keeps what they need."""
    put(overlay.layer, "a/own", os.urandom(50_000))
    overlay.flush()
    before = everything(overlay.layer)
    overlay.close()
    with monkeypatch.context() as patch:
        patch.setattr(records, "_TYPES", records._TYPES[: records._TYPES.index(records.Based)])
        with pytest.raises(CorruptError, match="not a record"):
            Overlay.open(store, "one")
        store.log.forget([("base", 1)])
        collect(store)
    overlay = Overlay.open(store, "one")
    assert everything(overlay.layer) == before
    overlay.close()


def test_the_rescue_program_passes_overlays_by(
    overlay: Overlay, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(overlay.layer, "own", b"1")
    monkeypatch.setattr(sys, "argv", ["rescue.py", os.fspath(store.path), os.fspath(tmp_path / "out")])
    assert rescue.main() == 0
    assert (tmp_path / "out" / "base" / "file").read_bytes() == b"hello"
    assert not list((tmp_path / "out").rglob("own"))


# Quotas


def test_a_quota_holds_and_freeing_works(store: Store) -> None:
    """A quota counts what was written in the overlay, once, staged or encoded; removing and cutting off frees it."""
    publish(store, "large", {"m": os.urandom(300_000)})
    overlay = create(store, "x", "large", quota=200_000)
    layer = overlay.layer
    put(layer, "new", os.urandom(150_000))
    assert overlay.used == 150_000
    with pytest.raises(QuotaError, match="overlay x has"):
        put(layer, "more", os.urandom(60_000))
    layer.unlink(layer.root, b"more", 5)
    overlay.flush()
    assert overlay.used == 150_000
    file = layer.open_file(layer.resolve(b"new"), write=True)
    for _ in range(3):
        file.write(0, os.urandom(150_000), 6)  # in place: nothing more
    file.close()
    overlay.flush()
    file = layer.open_file(layer.resolve(b"m"), write=True)
    file.write(1000, b"z" * 40_000, 7)
    with pytest.raises(QuotaError):
        file.write(200_000, b"z" * 40_000, 8)
    file.close()
    assert overlay.used == 190_000
    for _ in range(2):
        overlay = again(overlay)
        assert overlay.used == 190_000
        overlay.flush()
        overlay.layer.files.checkpoint()
    layer = overlay.layer
    layer.truncate(layer.resolve(b"new"), 100_000, 9)
    assert overlay.used == 140_000
    layer.unlink(layer.root, b"m", 9)
    assert overlay.used == 100_000
    layer.truncate(layer.resolve(b"new"), 1 << 30, 9)  # a hole costs nothing
    assert overlay.used == 100_000
    put(layer, "more", os.urandom(100_000))
    assert again(overlay).used == 200_000


def test_a_quota_counts_a_range_once_however_often_it_is_encoded(store: Store) -> None:
    """A quota counts what was written in the overlay, once, staged or encoded; removing and cutting off frees it."""
    publish(store, "large", {"m": os.urandom(300_000)})
    overlay = create(store, "x", "large", quota=10_000)
    for round_ in range(6):
        file = overlay.layer.open_file(overlay.layer.resolve(b"m"), write=True)
        file.write(4096, os.urandom(4000), 5)
        file.write(100_000 + 500 * round_, os.urandom(1000), 5)
        file.close()
        used = 4000 + 1000 + 500 * round_
        assert overlay.used == used
        overlay.flush()
        if round_ % 2:
            overlay.layer.files.checkpoint()
        overlay = again(overlay)
        assert overlay.used == used
    overlay.layer.truncate(overlay.layer.resolve(b"m"), 101_000, 6)
    assert overlay.used == 5000
    overlay = again(overlay)
    assert overlay.used == 5000
    inode = overlay.layer.resolve(b"m")
    file = overlay.layer.open_file(inode, write=True)
    overlay.layer.truncate(inode, 0, 7)
    file.write(0, b"x" * 300, 7)
    file.close()
    overlay.flush()
    overlay.layer.truncate(inode, 300_000, 8)
    assert overlay.used == 300
    assert again(overlay).used == 300


def test_a_file_that_replaces_another_takes_its_room(store: Store) -> None:
    overlay = create(store, "x", "base", quota=1000)
    layer = overlay.layer
    for round_ in range(5):
        put(layer, "tmp", b"%d" % round_ * 450)
        mv(layer, "tmp", "file")
        overlay.flush()
    assert overlay.used == 450
    overwrite(layer, layer.resolve(b"file"), b"y" * 900)
    assert overlay.used == 900
    overlay.close()


# Who has it


def test_a_second_process_is_told_who_has_an_overlay(overlay: Overlay, store: Store) -> None:
    with pytest.raises(BusyError, match=f"overlay one is in use by process {os.getpid()}"):
        Overlay.open(store, "one")


def test_an_overlays_layer_is_no_live_layer(overlay: Overlay, store: Store) -> None:
    overlay.close()
    with pytest.raises(UsageError, match="layer of an overlay"):
        Layer.open(store, overlay.info.layer)


def test_a_journal_without_its_base_is_refused(overlay: Overlay, store: Store) -> None:
    overlay.close()
    for segment in (store.path / "layers" / overlay.info.layer / "journal").iterdir():
        segment.unlink()
    with pytest.raises(CorruptError, match="does not say what it stands on"):
        Overlay.open(store, "one")


def test_a_long_listing_looks_again_only_for_what_it_had_to_load(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link count of a directory takes its entries, which are not in memory."""
    count = 2 * limits.LISTING_BATCH + 3
    publish(store, "wide", {f"d{number:03}": {"f": b"%d" % number} for number in range(count)})
    looked: list[bytes] = []
    look = Layer._look

    def counted(layer: Layer, directory: Inode, name: bytes) -> Inode | None:
        looked.append(name)
        return look(layer, directory, name)

    monkeypatch.setattr(Layer, "_look", counted)
    with create(store, "wide", "wide") as made:
        layer = made.layer
        names = layer.names_in(layer.root)
        found = layer.children(layer.root, [*names, b"absent", b"."])
    assert [None if child is None else child[0] for child in found[-2:]] == [None, layer.root]
    assert [child and next(iter(child[0].links))[1] for child in found[:-2]] == names
    assert len(names) == count
    assert len(looked) <= 2 * len(found)
