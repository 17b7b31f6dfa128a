"""The writable tree over snapshots: own entries, the base below them, and numbers that stay."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    MoonclipError,
    NameTooLongError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    TooManyLinksError,
    UsageError,
)
from moonclipfs.layers import changes
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.seal import Sealer
from moonclipfs.layers.tree import NotCachedError
from moonclipfs.layers.wholes import whole_records
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.layers.publish import MTIME, Fifo, File, publish
from tests.layers.sealkit import LocalEncoder

NOW = 2_000_000_000_000_000_001


@pytest.fixture
def opened(store: Store) -> Iterator[Callable[[], Layer]]:
    """Opens the layer, and each time again: as after a clean end."""
    layers: list[Layer] = []

    def open_() -> Layer:
        while layers:
            layers.pop().close()
        layers.append(Layer.open(store, "host"))
        return layers[0]

    yield open_
    for layer in layers:
        layer.close()


@pytest.fixture
def layer(opened: Callable[[], Layer]) -> Layer:
    return opened()


def file(layer: Layer, directory: Inode, name: bytes, mode: int = 0o644) -> Inode:
    return layer.make(directory, name, EntryType.FILE, mode, 1, 2, NOW)


def mkdir(layer: Layer, directory: Inode, name: bytes, mode: int = 0o755) -> Inode:
    return layer.make(directory, name, EntryType.DIRECTORY, mode, 1, 2, NOW)


def killed(layer: Layer, store: Store, name: str = "after") -> Layer:
    """The layer as it is after its process was killed now."""
    layers = Path(store.path) / "layers"
    shutil.copytree(layers / layer.name, layers / name)
    return Layer.open(store, name)


def test_a_change_outlives_a_kill(store: Store, layer: Layer) -> None:
    """A change is seen at once, and again when the layer is opened again, after a kill too."""
    directory = mkdir(layer, layer.root, b"d")
    inode = file(layer, directory, b"\xff\xfe name", 0o640)
    layer.make(directory, b"l", EntryType.SYMLINK, 0o777, 0, 0, NOW, b"any/where")
    layer.make(directory, b"p", EntryType.FIFO, 0o600, 0, 0, NOW)
    layer.set_xattr(inode, b"user.k", b"v", NOW + 1)
    layer.link(inode, layer.root, b"again", NOW + 2)
    layer.rename(layer.root, b"d", layer.root, b"e", NOW + 3)
    assert layer.names_in(layer.root) == [b"again", b"e"]
    after = killed(layer, store)
    try:
        found = after.resolve(b"e/\xff\xfe name")
        assert found.number == inode.number and after.lookup(after.root, b"again") is found
        assert after.stat(found) == layer.stat(inode)
        assert after.stat(found)[:6] == (stat.S_IFREG | 0o640, 2, 1, 2, 0, NOW)
        assert after.xattr(found, b"user.k") == b"v"
        assert after.readlink(after.resolve(b"e/l")) == b"any/where"
        assert stat.S_ISFIFO(after.stat(after.resolve(b"e/p")).mode)
        assert after.stat(after.root) == layer.stat(layer.root)
    finally:
        after.close()


def test_own_entries_names_and_base(store: Store, opened: Callable[[], Layer]) -> None:
    """A directory shows its own entries, else names of the log at its path, else what its snapshot holds."""
    publish(store, "a", {"b": {"x": b"base", "y": b"base"}, "n": {"hidden": b"base"}})
    publish(store, "a/n", {"bound": b"name"})
    layer = opened()
    file(layer, layer.resolve(b"a/b"), b"z")
    layer.unlink(layer.resolve(b"a/b"), b"x", NOW)
    assert layer.names_in(layer.resolve(b"a")) == [b"b", b"n"]
    assert layer.names_in(layer.resolve(b"a/b")) == [b"y", b"z"]
    assert layer.names_in(layer.resolve(b"a/n")) == [b"bound"]
    file(layer, layer.resolve(b"a/n"), b"own")
    assert layer.names_in(opened().resolve(b"a/n")) == [b"bound", b"own"]


def test_metadata_of_the_base_costs_metadata(store: Store, opened: Callable[[], Layer]) -> None:
    """chmod, utime, chown, rename and link of a stored file of any size cost a record or two, and copy no bytes."""
    publish(store, "run/a", {"big": os.urandom(1 << 22), "d": {f"f{i}": b"" for i in range(500)}})
    layer = opened()
    before, directory = layer.journal.size, layer.resolve(b"run/a")
    inode = layer.lookup(directory, b"big")
    layer.set_attributes(inode, now_ns=NOW, mode=0o600, mtime_ns=5)
    layer.link(inode, layer.root, b"link", NOW)
    layer.rename(directory, b"d", layer.root, b"e", NOW)
    assert layer.journal.size - before < 3000
    layer = opened()
    status = layer.stat(layer.resolve(b"run/a/big"))
    assert (status.mode, status.size, status.nlink, status.mtime_ns) == (stat.S_IFREG | 0o600, 1 << 22, 2, 5)
    assert status.blocks == (1 << 22) // 512
    assert len(layer.names_in(layer.resolve(b"e"))) == 500
    assert layer.names_in(layer.resolve(b"run/a")) == [b"big"]


def test_numbers_stay(store: Store, opened: Callable[[], Layer]) -> None:
    """No rename, change or remount changes an inode number."""
    publish(store, "run/a", {"x": b"1", "sub": {"deep": {"y": b"2"}}})
    layer = opened()
    numbers = {path: layer.resolve(path).number for path in (b"run", b"run/a", b"run/a/x", b"run/a/sub/deep/y")}
    assert len(set(numbers.values())) == 4
    layer = opened()
    assert {path: layer.resolve(path).number for path in numbers} == numbers
    layer.set_attributes(layer.resolve(b"run/a/sub/deep/y"), now_ns=NOW, mode=0o600)
    layer.rename(layer.resolve(b"run/a"), b"sub", layer.root, b"elsewhere", NOW)
    layer.rename(layer.root, b"run", layer.root, b"away", NOW)
    for _ in range(2):
        assert layer.resolve(b"away").number == numbers[b"run"]
        assert layer.resolve(b"away/a").number == numbers[b"run/a"]
        assert layer.resolve(b"away/a/x").number == numbers[b"run/a/x"]
        assert layer.resolve(b"elsewhere/deep/y").number == numbers[b"run/a/sub/deep/y"]
        layer = opened()
    with layer.lock:
        layer.journal.rewrite(whole_records(layer.state))
    assert opened().resolve(b"away/a/x").number == numbers[b"run/a/x"]


def test_what_was_removed_stays_so(store: Store, opened: Callable[[], Layer]) -> None:
    """What was removed does not show through again, and a directory made in its place is empty."""
    publish(store, "a", {"d": {"x": b"1", "y": b"2"}, "f": b"3"})
    layer = opened()
    top = layer.resolve(b"a")
    with pytest.raises(NotEmptyError):
        layer.rmdir(top, b"d", NOW)
    for name in (b"x", b"y"):
        layer.unlink(layer.lookup(top, b"d"), name, NOW)
    layer.rmdir(top, b"d", NOW)
    layer.unlink(top, b"f", NOW)
    assert layer.names_in(top) == []
    old = mkdir(layer, top, b"d")
    file(layer, top, b"f")
    layer.rename(top, b"f", top, b"g", NOW)
    layer = opened()
    assert layer.names_in(layer.resolve(b"a")) == [b"d", b"g"]
    assert layer.names_in(layer.resolve(b"a/d")) == []
    assert layer.resolve(b"a/d").number == old.number
    assert layer.stat(layer.resolve(b"a")).nlink == 3


def test_hard_links_of_the_base_stay_together(store: Store, opened: Callable[[], Layer]) -> None:
    """Hard links of a snapshot are one file still when one of them changes, moves or goes."""
    link = File(b"shared", link_group=3)
    publish(store, "a", {"one": link, "d": {"two": link, "e": {"three": link}}, "other": File(b"s", link_group=4)})
    layer = opened()
    one, three = layer.resolve(b"a/one"), layer.resolve(b"a/d/e/three")
    assert one is three and layer.stat(one).nlink == 3
    layer.rename(layer.resolve(b"a/d"), b"e", layer.root, b"moved", NOW)
    layer.set_attributes(layer.resolve(b"a/d/two"), now_ns=NOW, mode=0o600)
    layer.unlink(layer.resolve(b"a"), b"one", NOW)
    for _ in range(2):
        two = layer.resolve(b"a/d/two")
        assert layer.resolve(b"moved/three") is two
        assert (layer.stat(two).nlink, layer.stat(two).mode) == (2, stat.S_IFREG | 0o600)
        assert layer.stat(layer.resolve(b"a/other")).nlink == 1
        layer = opened()


def test_hard_links_are_found_where_directories_were_moved(store: Store, opened: Callable[[], Layer]) -> None:
    link = File(b"shared", link_group=3)
    publish(store, "a", {"one": link, "d": {"e": {"two": link}}, "three": link})
    layer = opened()
    layer.rename(layer.resolve(b"a/d"), b"e", layer.root, b"moved", NOW)
    layer.rename(layer.root, b"a", layer.root, b"b", NOW)
    for path in (b"moved/two", b"b/one"):
        layer = opened()
        layer.set_attributes(layer.resolve(path), now_ns=NOW, mode=0o600)
        found = {layer.resolve(each) for each in (b"moved/two", b"b/one", b"b/three")}
        assert len(found) == 1 and layer.stat(found.pop()).nlink == 3


def test_hard_links_keep_their_number_when_all_around_is_sealed(store: Store, opened: Callable[[], Layer]) -> None:
    """A seal of a directory with hard links changes no number, also where it numbers the links anew."""
    for name in ("a", "b"):
        publish(store, f"run/{name}", {"one": File(b"s", link_group=3), "d": {"two": File(b"s", link_group=3)}})
    layer = opened()
    file(layer, layer.resolve(b"run/a"), b"new")
    store.log.unbind(["run/a", "run/b"])
    file(layer, layer.resolve(b"run/b"), b"new")
    layer.refresh(NOW)
    paths = [b"run/a/one", b"run/a/d/two", b"run/b/one", b"run/b/d/two", b"run/b/new"]
    numbers = [layer.resolve(path).number for path in paths]
    assert len(set(numbers)) == 3
    sealer = Sealer(layer, LocalEncoder(layer), seal_after=None)
    for _ in range(2):
        assert sealer.seal(b"run") is not None
        assert [layer.resolve(path).number for path in paths] == numbers
        assert [layer.stat(layer.resolve(path)).nlink for path in paths] == [2, 2, 2, 2, 1]
        layer.set_attributes(layer.resolve(b"run/a/new"), now_ns=NOW, mode=0o600)
    assert [opened().resolve(path).number for path in paths] == numbers


def test_an_unlinked_file_lives_while_it_is_open(store: Store, opened: Callable[[], Layer]) -> None:
    """An unlinked file lives until its last handle is closed, and is gone after a crash."""
    publish(store, "a", {"x": b"base"})
    layer = opened()
    for directory, name in ((layer.root, b"new"), (layer.resolve(b"a"), b"x")):
        if directory is layer.root:
            file(layer, directory, name)
        inode = layer.lookup(directory, name)
        layer.remember(inode)
        handle = layer.open_file(inode, write=False)
        layer.unlink(directory, name, NOW)
        assert layer.stat(inode).nlink == 0 and layer.stat(inode).ctime_ns == NOW
        assert layer.by_number(inode.number) is inode
        layer.set_attributes(inode, now_ns=NOW + 1, mode=0o400)
        assert layer.stat(inode).mode == stat.S_IFREG | 0o400
        with pytest.raises(NotFoundError):
            layer.link(inode, layer.root, b"back", NOW)
        after = killed(layer, store, f"after{name.decode()}")
        with pytest.raises(KeyError):
            after.by_number(inode.number)
        after.close()
        assert handle.read(0, 10) == (b"base" if name == b"x" else b"")
        handle.close()
        layer.forget(inode, 1)
        number = inode.number
        del inode, handle
        with pytest.raises(KeyError):
            layer.by_number(number)


def test_set_group_id_directories(layer: Layer) -> None:
    """In a set-group-ID directory new entries get its group, and directories the bit."""
    top = layer.make(layer.root, b"d", EntryType.DIRECTORY, 0o2775, 1, 77, NOW)
    inner, plain = mkdir(layer, top, b"inner"), file(layer, top, b"f", 0o644)
    assert (layer.stat(inner).gid, layer.stat(inner).mode & 0o7777) == (77, 0o2755)
    assert (layer.stat(plain).gid, layer.stat(plain).mode & 0o7777) == (77, 0o644)
    assert layer.stat(mkdir(layer, layer.root, b"e")).gid == 2


def test_chown_takes_set_ids_away(layer: Layer) -> None:
    inode = file(layer, layer.root, b"f", 0o6755)
    layer.set_attributes(inode, now_ns=NOW, uid=5)
    assert layer.stat(inode).mode & 0o7777 == 0o755
    layer.set_attributes(inode, now_ns=NOW, uid=5, mode=0o4755)
    assert layer.stat(inode).mode & 0o7777 == 0o4755
    locking = file(layer, layer.root, b"g", 0o2644)
    layer.set_attributes(locking, now_ns=NOW, gid=5)
    assert layer.stat(locking).mode & 0o7777 == 0o2644


def test_virtual_names_are_taken(layer: Layer) -> None:
    """No name that begins with @ can be made at the root; elsewhere it can."""
    directory, inode = mkdir(layer, layer.root, b"d"), file(layer, layer.root, b"f")
    for change in (
        lambda: file(layer, layer.root, b"@latest"),
        lambda: mkdir(layer, layer.root, b"@x"),
        lambda: layer.link(inode, layer.root, b"@versions", NOW),
        lambda: layer.rename(layer.root, b"f", layer.root, b"@y", NOW),
    ):
        with pytest.raises(NotPermittedError):
            change()
    file(layer, directory, b"@latest")
    assert layer.names_in(layer.root) == [b"d", b"f"]


def test_names_have_limits(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    inode = file(layer, layer.root, b"n" * 255)
    for call in (
        lambda: file(layer, layer.root, b"n" * 256),
        lambda: layer.lookup(layer.root, b"n" * 256),
        lambda: layer.rename(layer.root, b"n" * 255, layer.root, b"n" * 256, NOW),
    ):
        with pytest.raises(NameTooLongError):
            call()
    monkeypatch.setattr(changes, "LINKS", 3)
    layer.link(inode, layer.root, b"2", NOW)
    layer.link(inode, layer.root, b"3", NOW)
    with pytest.raises(TooManyLinksError):
        layer.link(inode, layer.root, b"4", NOW)
    assert layer.stat(inode).nlink == 3


def test_extended_attributes(store: Store, opened: Callable[[], Layer]) -> None:
    publish(store, "a", {"x": File(b"123", xattrs={b"user.old": b"1"})})
    layer = opened()
    inode = layer.resolve(b"a/x")
    assert layer.xattr(inode, b"user.moonclip.snapshot") == b"a"
    assert layer.xattr(inode, b"user.moonclip.version") == b"1"
    assert len(layer.xattr(inode, b"user.moonclip.object")) == 64
    assert int(layer.xattr(inode, b"user.moonclip.stored_size")) > 0
    with pytest.raises(NotCachedError):
        layer.xattr(inode, b"user.moonclip.stored_size", wait=False)
    with pytest.raises(ExistsError):
        layer.set_xattr(inode, b"user.old", b"2", NOW, create=True)
    with pytest.raises(NotFoundError):
        layer.set_xattr(inode, b"user.new", b"2", NOW, replace=True)
    with pytest.raises(NotPermittedError):
        layer.set_xattr(inode, b"user.moonclip.snapshot", b"2", NOW)
    with pytest.raises(MoonclipError):
        layer.set_xattr(inode, b"user.long", bytes(limits.XATTR_BYTES + 1), NOW)
    layer.set_xattr(inode, b"user.new", b"2", NOW, create=True)
    layer.remove_xattr(inode, b"user.old", NOW)
    with pytest.raises(NotFoundError):
        layer.remove_xattr(inode, b"user.old", NOW)
    inode = opened().resolve(b"a/x")
    assert layer.xattr_names(inode) == [b"user.new"]


def test_a_layer_has_one_holder(store: Store, layer: Layer) -> None:
    """A layer is held by one process: another is told by whom, and about --layer."""
    with pytest.raises(BusyError, match=rf"{os.getpid()}.*--layer"):
        Layer.open(store, "host")
    other = Layer.open(store, "other")
    file(other, other.root, b"theirs")
    assert layer.names_in(layer.root) == []
    other.close()


def test_nothing_waits_unless_told(store: Store, opened: Callable[[], Layer]) -> None:
    publish(store, "a", {"d": {"x": b"1"}})
    layer = opened()
    top = layer.resolve(b"a", wait=False)
    calls: list[Callable[[bool], object]] = [
        lambda wait: layer.names_in(top, wait=wait),
        lambda wait: layer.stat(layer.lookup(top, b"d"), wait=wait),
        lambda wait: layer.make(layer.lookup(top, b"d"), b"n", EntryType.FILE, 0o644, 0, 0, NOW, wait=wait),
    ]
    for call in calls:
        with pytest.raises(NotCachedError):
            call(False)
        call(True)
    for call in calls[:2]:
        call(False)


def test_what_the_kernel_forgets_is_forgotten(store: Store, opened: Callable[[], Layer]) -> None:
    """What is only looked at takes memory only while the kernel remembers it."""
    publish(store, "a", {"d": {f"f{i}": b"" for i in range(100)}})
    layer = opened()
    directory = layer.resolve(b"a/d")
    found = [pair[0] for pair in layer.children(directory, layer.names_in(directory)) if pair]
    for inode in found:
        layer.remember(inode)
    del inode
    assert len(layer.state.seen) == 102
    assert layer.by_number(found[0].number) is found[0]
    while found:
        layer.forget(found.pop(), 1)
    assert len(layer.state.seen) == 2 and not layer.state.remembered
    del directory
    assert len(layer.state.own) == 1 and not layer.state.seen


def test_temporary_names_leave_nothing(layer: Layer) -> None:
    directory = mkdir(layer, layer.root, b"d")
    for index in range(50):
        file(layer, directory, b"tmp%d" % index)
        layer.rename(directory, b"tmp%d" % index, directory, b"kept", NOW)
    assert len(directory.names_changed) == 1 and len(layer.state.own) == 3 and not directory.removed


def test_damage_stays_where_it_is(store: Store, opened: Callable[[], Layer]) -> None:
    """A damaged directory of the base takes nothing away from what the layer has in it."""
    version = publish(store, "a", {"d": {"x": b"1"}, "f": b"2"})
    layer = opened()
    damaged = layer.resolve(b"a/d")
    file(layer, damaged, b"own")
    child = store.lookup(version, b"d").child
    layer = opened()
    real = store.directory

    def directory(object_id: bytes) -> object:
        if object_id == child:
            raise CorruptError("damaged")
        return real(object_id)

    store.directory = directory  # type: ignore[method-assign,assignment]
    found = layer.resolve(b"a/d/own")
    assert layer.stat(layer.resolve(b"a/d")).nlink == 2
    for call in (lambda: layer.names_in(layer.resolve(b"a/d")), lambda: layer.resolve(b"a/d/x")):
        with pytest.raises(CorruptError):
            call()
    layer.unlink(layer.resolve(b"a/d"), b"own", NOW)
    assert layer.stat(found).nlink == 0
    assert layer.names_in(layer.resolve(b"a")) == [b"d", b"f"]


def test_a_record_that_is_not_written_changes_nothing(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = mkdir(layer, layer.root, b"d")
    inode = file(layer, directory, b"f")

    def append(*_: object) -> None:
        raise MoonclipError("the disk is gone")

    monkeypatch.setattr(layer.journal, "append", append)
    before = layer.stat(directory), layer.stat(inode), layer.stat(layer.root)
    for call in (
        lambda: file(layer, directory, b"g"),
        lambda: layer.unlink(directory, b"f", NOW + 5),
        lambda: layer.link(inode, directory, b"h", NOW + 5),
        lambda: layer.rename(directory, b"f", layer.root, b"f", NOW + 5),
        lambda: layer.rmdir(layer.root, b"d", NOW + 5),
        lambda: layer.set_attributes(inode, now_ns=NOW + 5, mode=0),
        lambda: layer.set_xattr(inode, b"user.k", b"", NOW + 5),
    ):
        with pytest.raises(MoonclipError):
            call()
    assert before == (layer.stat(directory), layer.stat(inode), layer.stat(layer.root))
    assert layer.names_in(directory) == [b"f"] and layer.names_in(layer.root) == [b"d"]


def test_many_threads_change_one_directory(opened: Callable[[], Layer]) -> None:
    layer = opened()
    directory = mkdir(layer, layer.root, b"d")

    def work(mine: int) -> None:
        for index in range(60):
            name = b"%d-%d" % (mine, index)
            file(layer, directory, name)
            layer.rename(directory, name, directory, name + b"!", NOW)
            if index % 2:
                layer.unlink(directory, name + b"!", NOW)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    layer = opened()
    assert len(layer.names_in(layer.resolve(b"d"))) == 4 * 30
    with pytest.raises(UsageError):
        layer.rename(layer.root, b"d", layer.resolve(b"d"), b"in", NOW)


def test_root_snapshot_attributes(store: Store, opened: Callable[[], Layer]) -> None:
    publish(store, "a", {"p": Fifo(), "l": "t"})
    layer = opened()
    status = layer.stat(layer.resolve(b"a"))
    assert (status.mode, status.mtime_ns, status.atime_ns) == (stat.S_IFDIR | 0o750, MTIME, MTIME)
    with pytest.raises(UsageError):
        layer.readlink(layer.resolve(b"a/p"))
    assert layer.readlink(layer.resolve(b"a/l")) == b"t"
