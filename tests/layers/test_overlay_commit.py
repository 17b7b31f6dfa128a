"""Overlays become snapshots, and stand on what is captured of others: exactly, at one moment, and with a trace nowhere
else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonclipfs.errors import BackendError, BusyError, LeaseLostError, NotFoundError, UsageError
from moonclipfs.layers.basing import BaseOf, held, of_directory
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.merge import Directories
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.rebasing import rebase
from moonclipfs.layers.seal import Sealer, note_writer
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType, Kind, ObjectId
from tests.layers.filekit import overwrite, read_all, staging_names
from tests.layers.overlaykit import LocalOverlayEncoder, create, everything, stored_bytes
from tests.layers.publish import Fifo, File, Files, publish
from tests.layers.sealkit import LocalEncoder, identities, model, picture, put, stored, tree

BASE: Files = {"m": model(1, 300_000), "d": {"x": b"1", "y": b"2"}, "hard": File(b"h", link_group=3), "pipe": Fifo()}


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


def changed(overlay: Overlay) -> Layer:
    """An overlay with changes of all kinds."""
    layer = overlay.layer
    file = layer.open_file(layer.resolve(b"m"), write=True)
    file.write(1000, b"\xff" * 10, 5)
    file.close()
    layer.unlink(layer.resolve(b"d"), b"x", 6)
    put(layer, "new/z", os.urandom(100_000))
    layer.make(layer.root, b"link", EntryType.SYMLINK, 0o777, 0, 0, 7, b"d/y")
    layer.link(layer.resolve(b"new/z"), layer.root, b"z2", 8)
    layer.set_xattr(layer.resolve(b"d"), b"user.k", b"v", 9)
    return layer


def test_a_commit_is_what_the_overlay_shows(overlay: Overlay, store: Store) -> None:
    """A commit makes a snapshot that is exactly what the overlay shows, while this stays as it is, and usable."""
    layer = changed(overlay)
    before = everything(layer)
    version = overlay.commit("result", metadata={"note": "x"})
    assert (version.path, version.number) == ("result", 1)
    assert version.metadata["overlay"] == "one" and version.metadata["base"] == "base@1"
    assert version.metadata["note"] == "x" and version.metadata["files"] == 5
    assert everything(layer) == before and layer.staging.used == 0 and staging_names(layer) == []
    copy = create(store, "copy", "result")
    assert picture(copy.layer, "") == picture(layer, "")
    assert layer.stat(layer.root)[2:7] == copy.layer.stat(copy.layer.root)[2:7]
    copy.close()
    put(layer, "after", b"1")
    assert overlay.commit("result").number == 2


def test_a_commit_says_who_wrote(overlay: Overlay) -> None:
    """A commit says which command wrote into the overlay last, where it is known."""
    layer = changed(overlay)
    note_writer(layer, layer.resolve(b"new/z"), os.getpid())
    overlay.tick(0.0)
    provenance = overlay.commit().metadata["provenance"]
    assert isinstance(provenance, dict) and provenance["cwd"] == os.getcwd() and provenance["command"]
    assert overlay.commit("other", metadata={"provenance": {"command": "mine"}}).metadata["provenance"] == {
        "command": "mine"
    }


def test_deltas_of_a_commit_are_against_the_base(overlay: Overlay, store: Store) -> None:
    """One byte changed in a file of the base costs a small delta when it is committed, also in a file made anew."""
    packs, layer = stored_bytes(store), overlay.layer
    data = model(1, 300_000)
    new = data[:5000] + b"\xff" + data[5001:]
    layer.unlink(layer.root, b"m", 5)
    put(layer, "m", new)
    version = overlay.commit()
    assert stored(store, version)["m"] == new and stored_bytes(store) - packs < 60_000


def test_the_same_content_is_the_same_version(overlay: Overlay, store: Store) -> None:
    """Committing the same content again makes nothing new; nor does one without changes, under its base's name."""
    assert overlay.commit("base").number == 1
    changed(overlay)
    first = overlay.commit()
    sequence, packs = store.names().sequence, stored_bytes(store)
    assert overlay.commit() == first
    overlay.layer.unlink(overlay.layer.root, b"z2", 9)
    second = overlay.commit()
    assert second.number == 2 and store.names().sequence == sequence + 1
    assert stored_bytes(store) - packs < 20_000
    overlay.layer.set_attributes(overlay.layer.root, now_ns=5, mode=0o700)
    assert overlay.commit().number == 3


def test_a_commit_takes_nothing_of_others(overlay: Overlay, store: Store) -> None:
    """What others published under the name meanwhile stays a version, and is not in the snapshot."""
    publish(store, "base", {"theirs": b"1"})
    version = overlay.commit("base")
    assert version.number == 3 and "theirs" not in stored(store, version)


def test_files_that_are_open_are_committed_as_they_are(overlay: Overlay, store: Store) -> None:
    """A file that is open for writing is in the snapshot as it was then; its handle goes on."""
    layer = overlay.layer
    file = layer.open_file(layer.resolve(b"d/x"), write=True)
    file.write(0, b"first" * 50_000, 5)
    number = file.inode.number
    version = overlay.commit()
    file.write(0, b"later", 6)
    file.close()
    assert stored(store, version)["d/x"] == b"first" * 50_000
    assert read_all(layer, layer.resolve(b"d/x")).startswith(b"laterfirst")
    assert layer.resolve(b"d/x").number == number


@pytest.mark.parametrize("error", [BackendError("no"), BusyError("no"), LeaseLostError("no")])
def test_a_commit_that_fails_leaves_the_overlay_as_it_was(overlay: Overlay, store: Store, error: Exception) -> None:
    """A commit that fails half-way leaves the overlay as it was, and can be repeated."""
    layer = changed(overlay)
    before = everything(layer)
    encoder: Any = overlay.encoder
    encoder.fails = error
    with pytest.raises(type(error)):
        overlay.commit()
    encoder.fails = None
    assert everything(layer) == before
    overlay.close()
    reopened = Overlay.open(store, "one")
    assert everything(reopened.layer) == before
    version = reopened.commit()
    assert stored(store, version) == tree(reopened.layer)
    reopened.close()


def test_a_dry_run_is_not_committed_by_accident(store: Store) -> None:
    """A dry run is committed only when that was asked for."""
    overlay = create(store, "dry", "base", dry_run=True)
    assert overlay.layer.xattr(overlay.layer.resolve(b"m"), b"user.moonclip.dry_run") == b"1"
    with pytest.raises(UsageError, match="is a dry run"):
        overlay.commit()
    assert overlay.commit(allow=True).path == "dry"
    overlay.close()


# Standing on others


def test_an_overlay_of_an_overlay_sees_its_parent_as_of_creation(overlay: Overlay, store: Store) -> None:
    """An overlay of an overlay sees its parent as of creation; later changes of either are not seen by the other."""
    parent = changed(overlay)
    with held(store):
        child = create(store, "child", overlay.as_base())
    assert child.info.base == "overlay one" and child.info.base_path is None
    shown = picture(child.layer, "")
    assert shown == picture(parent, "")
    put(parent, "later", b"1")
    parent.unlink(parent.root, b"m", 6)
    overwrite(child.layer, child.layer.resolve(b"d/y"), b"of the child")
    assert "later" not in tree(child.layer) and read_all(parent, parent.resolve(b"d/y")) == b"2"
    overlay.discard()
    collect(store)
    child.close()
    reopened = Overlay.open(store, "child")
    assert tree(reopened.layer)["d/y"] == b"of the child" and tree(reopened.layer)["m"][1000] == 255
    reopened.close()


def test_gc_takes_nothing_of_an_overlay_and_all_of_a_discarded_one(overlay: Overlay, store: Store) -> None:
    """gc leaves what an overlay needs when its base is forgotten, and takes it all when it is discarded."""
    changed(overlay)
    with held(store):
        child = create(store, "child", overlay.as_base())
    store.log.forget([("base", 1)])
    collect(store)
    before = everything(child.layer)
    overlay.discard()
    collect(store)
    child.layer.files.checkpoint()
    collect(store)
    child.close()
    child = Overlay.open(store, "child")
    assert everything(child.layer) == before
    child.discard()
    collect(store)
    assert stored_bytes(store) == 0


@pytest.fixture
def live(store: Store) -> Iterator[Layer]:
    layer = Layer.open(store, "live")
    yield layer
    layer.close()


class CapturingEncoder(LocalEncoder):
    """Of a live layer whose directories are captured for overlays."""

    def call(self, op: str, **arguments: object) -> object:
        return LocalOverlayEncoder(self.layer).call(op, **arguments)


def test_a_live_directory_is_captured_as_of_that_moment(store: Store, live: Layer) -> None:
    """A base that is a live directory is captured as it is at that moment, and nothing about it changes."""
    put(live, "run/a/model", os.urandom(200_000))
    put(live, "run/a/d/small", b"tiny")
    live.link(live.resolve(b"run/a/model"), live.resolve(b"run/a"), b"hard", 5)
    live.make(live.resolve(b"run/a"), b"link", EntryType.SYMLINK, 0o777, 0, 0, 6, b"d/small")
    live.make(live.resolve(b"run/a"), b"pipe", EntryType.FIFO, 0o600, 0, 0, 6)
    live.set_xattr(live.resolve(b"run/a/d"), b"user.k", b"v", 7)
    file = live.open_file(live.resolve(b"run/a/d/small"), write=True)
    file.write(4, b" and open", 8)
    before, numbers = everything(live), identities(live)
    with held(store):
        base = of_directory(live, CapturingEncoder(live), "run/a", "/run/a")
        overlay = create(store, "x", base)
    assert picture(overlay.layer, "") == picture(live, "run/a")
    assert everything(live) == before and identities(live) == numbers
    assert "run" not in " ".join(store.names().bound()) and not len(live.captures)
    file.write(0, b"LATER", 9)
    file.close()
    live.unlink(live.resolve(b"run/a"), b"model", 9)
    assert tree(overlay.layer)["d/small"] == b"tiny and open" and "model" in tree(overlay.layer)
    assert overlay.layer.stat(overlay.layer.resolve(b"hard")).nlink == 2
    overlay.close()
    # What is sealed afterwards is what it would have been.
    version = Sealer(live, LocalEncoder(live), seal_after=None).seal(b"run/a")
    assert version is not None and version.number == 1 and stored(store, version) == tree(live, "run/a")


def test_a_live_directory_with_snapshots_below_it_is_captured_whole(store: Store, live: Layer) -> None:
    """Snapshots that are bound below a live directory are part of it as a base, with what was changed in them since."""
    publish(store, "run/ck-1", {"m": b"1", "h1": File(b"h", link_group=1), "h2": File(b"h", link_group=1)})
    publish(store, "run/ck-2", {"m": b"2", "h1": File(b"H", link_group=1), "h2": File(b"H", link_group=1)})
    publish(store, "run/ck-2/best", {"m": b"b"})
    publish(store, "run/deep/er/ck", {"m": b"3"})
    live.refresh(5)
    put(live, "run/ck-1/own", b"own")
    live.unlink(live.resolve(b"run/ck-1"), b"m", 6)
    shown = picture(live, "run")
    sequence = store.names().sequence
    with held(store):
        overlay = create(store, "x", of_directory(live, CapturingEncoder(live), "/run", "/run"))
    assert picture(overlay.layer, "") == shown
    links = [overlay.layer.resolve(path) for path in (b"ck-1/h1", b"ck-1/h2", b"ck-2/h1", b"ck-2/h2")]
    assert links[0] is links[1] and links[2] is links[3] and links[0] is not links[2]
    assert store.names().sequence == sequence
    overlay.close()


def test_a_file_is_no_base(store: Store, live: Layer) -> None:
    put(live, "f", b"1")
    with held(store), pytest.raises(UsageError, match="no directory"):
        of_directory(live, CapturingEncoder(live), "f", "/f")
    with held(store), pytest.raises(NotFoundError):
        of_directory(live, CapturingEncoder(live), "g", "/g")


# Onto another base


def merging(store: Store, theirs: ObjectId) -> tuple[list[bytes], Callable[[ObjectId, ObjectId], ObjectId]]:
    conflicts: list[bytes] = []

    def merge(before: ObjectId, ours: ObjectId) -> ObjectId:
        with store.ingest() as ingest:
            found = rebase(Directories(store, ingest), before, ours, theirs)
            ingest.complete([(Kind.DIRECTORY, found.root)])
        conflicts[:] = list(found.conflicts)
        return found.root

    return conflicts, merge


def test_an_overlay_is_put_onto_another_base(overlay: Overlay, store: Store) -> None:
    """A rebase keeps what was changed here, takes what was changed there, and tells both; it survives a remount."""
    layer = changed(overlay)
    overwrite(layer, layer.resolve(b"d/y"), b"ours")
    newer = publish(store, "base", {**BASE, "d": {"x": b"1", "y": b"theirs"}, "added": b"there"})
    conflicts, merge = merging(store, newer.root)
    root = layer.root.number
    with held(store):
        overlay.rebase(BaseOf("base@2", newer.root, store.root_entry(newer).attributes, newer), merge)
    for _ in range(2):
        found = tree(overlay.layer)
        assert conflicts == [b"d/y"] and found["d/y"] == b"ours" and found["added"] == b"there"
        assert "d/x" not in found and found["m"][1000] == 255 and len(found["new/z"]) == 100_000
        assert overlay.info.base == "base@2" and overlay.base_root == newer.root
        assert overlay.layer.root.number == root and not overlay.layer.root.entries
        overlay.close()
        overlay = Overlay.open(store, "one")
    put(overlay.layer, "more", b"1")
    overlay.layer.files.checkpoint()
    collect(store)
    assert stored(store, overlay.commit()) == {**found, "more": b"1"}
    overlay.close()


def test_a_rebase_waits_for_nobody_who_writes(overlay: Overlay, store: Store) -> None:
    """An overlay with files that are open for writing, or that changes meanwhile, is not rebased."""
    layer = changed(overlay)
    _, merge = merging(store, store.resolve("base").root)
    base = BaseOf("base", store.resolve("base").root)
    file = layer.open_file(layer.resolve(b"m"), write=True)
    with held(store), pytest.raises(BusyError, match="open for writing"):
        overlay.rebase(base, merge)
    assert file.write(0, b"x", 5) == 1
    file.close()
    before = everything(layer)

    def merge_slowly(old: ObjectId, ours: ObjectId) -> ObjectId:
        layer.set_attributes(layer.resolve(b"d"), now_ns=layer.counter, mode=0o755)
        return merge(old, ours)

    with held(store), pytest.raises(BusyError, match="being changed"):
        overlay.rebase(base, merge_slowly)
    assert sorted(everything(layer)) == sorted(before) and overlay.info.base == "base@1"
