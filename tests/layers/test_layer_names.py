"""A layer and the names of the log: what is removed and moved here, and what others publish."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs.errors import BackendError, MoonclipError, NotEmptyError, NotFoundError, UsageError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.seal import Sealer
from moonclipfs.layers.tree import NotCachedError
from moonclipfs.store.leases import live_leases
from moonclipfs.store.log import Log
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.layers.filekit import overwrite, read_all
from tests.layers.publish import publish
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


def file(layer: Layer, directory: Inode, name: bytes) -> Inode:
    return layer.make(directory, name, EntryType.FILE, 0o644, 0, 0, NOW)


def remove(layer: Layer, path: bytes) -> None:
    """rm -rf"""
    above, _, name = path.rpartition(b"/")
    directory = layer.resolve(above)
    inode = layer.lookup(directory, name)
    if not inode.is_directory:
        layer.unlink(directory, name, NOW)
        return
    for child in layer.names_in(inode):
        remove(layer, path + b"/" + child)
    layer.rmdir(directory, name, NOW)


def paths(layer: Layer, path: bytes = b"") -> list[bytes]:
    """All that is below a path."""
    found = []
    for name in layer.names_in(layer.resolve(path)):
        place = path + b"/" + name if path else name
        found.append(place)
        if layer.resolve(place).is_directory:
            found += paths(layer, place)
    return found


def bound(store: Store) -> list[str]:
    with Store.open(store.path) as other:
        return sorted(other.names().bound())


def test_removing_a_snapshot_removes_its_name(store: Store, opened: Callable[[], Layer]) -> None:
    """Removing the directory of a snapshot hides its name at once and takes it from all mounts; @versions keeps it."""
    publish(store, "run/a", {"x": b"1"})
    publish(store, "run/a/best", {"x": b"2"})
    publish(store, "run/b", {"x": b"3"})
    layer = opened()
    with pytest.raises(NotEmptyError):
        layer.rmdir(layer.root, b"run", NOW)
    remove(layer, b"run/a")
    assert paths(layer) == [b"run", b"run/b", b"run/b/x"]
    assert bound(store) == ["run/a", "run/a/best", "run/b"]
    layer = opened()
    assert paths(layer) == [b"run", b"run/b", b"run/b/x"]
    assert layer.push_names() == 2 and layer.push_names() == 0
    assert bound(store) == ["run/b"]
    assert len(store.names().versions("run/a")) == 1
    for _ in range(2):
        assert paths(layer) == [b"run", b"run/b", b"run/b/x"]
        layer = opened()


def test_a_parent_outlives_its_snapshots(store: Store, opened: Callable[[], Layer]) -> None:
    """A directory that only names made stays when the last of them is removed here."""
    publish(store, "run/a", {"x": b"1"})
    layer = opened()
    number = layer.resolve(b"run").number
    remove(layer, b"run/a")
    layer.push_names()
    for _ in range(2):
        assert paths(layer) == [b"run"] and layer.resolve(b"run").number == number
        assert layer.stat(layer.resolve(b"run")).nlink == 2
        layer = opened()
    layer.rmdir(layer.root, b"run", NOW)
    assert paths(layer) == []


def test_a_name_removed_here_and_bound_anew(store: Store, opened: Callable[[], Layer]) -> None:
    """A snapshot removed here and published anew by others before the log was told is there, as the new version."""
    publish(store, "run/a", {"x": b"1"})
    layer = opened()
    remove(layer, b"run/a")
    publish(store, "run/a", {"y": b"2"})
    layer.refresh(NOW)
    assert paths(layer) == [b"run", b"run/a", b"run/a/y"]
    layer.push_names()
    assert bound(store) == ["run/a"]
    assert paths(layer) == [b"run", b"run/a", b"run/a/y"]


def test_a_new_directory_in_the_place_of_a_removed_snapshot(store: Store, opened: Callable[[], Layer]) -> None:
    publish(store, "run/a", {"x": b"1"})
    layer = opened()
    remove(layer, b"run/a")
    file(layer, layer.make(layer.resolve(b"run"), b"a", EntryType.DIRECTORY, 0o755, 0, 0, NOW), b"new")
    for step in (lambda: None, layer.push_names, lambda: layer.refresh(NOW)):
        step()
        assert paths(layer) == [b"run", b"run/a", b"run/a/new"]
    assert layer.conflicts() == []
    assert paths(opened()) == [b"run", b"run/a", b"run/a/new"]


def test_moving_a_directory_moves_its_snapshots(store: Store, opened: Callable[[], Layer]) -> None:
    """Renaming a directory moves the snapshots in it: one step, one log record, for all mounts."""
    for index in range(100):
        publish(store, f"run/{index:03}", {"x": b"1"})
    publish(store, "run/000/best/nested", {"y": b"2"})
    layer = opened()
    file(layer, layer.resolve(b"run/000"), b"own")
    before, sequence, size = paths(layer), store.log.refresh().sequence, layer.journal.size
    numbers = {path: layer.resolve(path).number for path in before}
    with pytest.raises(NotCachedError):
        layer.rename(layer.root, b"run", layer.root, b"moved", NOW, wait=False)
    layer.rename(layer.root, b"run", layer.root, b"moved", NOW)
    assert layer.journal.size - size < 1000
    records = store.log.refresh().sequence - sequence
    assert records == 1 + (sequence // 64 != (sequence + 1) // 64) or records == 1
    for _ in range(2):
        assert paths(layer) == [path.replace(b"run", b"moved") for path in before]
        for path, number in numbers.items():
            assert layer.resolve(path.replace(b"run", b"moved")).number == number
        layer = opened()
    assert bound(store)[:2] == ["moved/000", "moved/000/best/nested"]
    assert layer.conflicts() == []


def test_moving_one_snapshot(store: Store, opened: Callable[[], Layer]) -> None:
    publish(store, "run/a", {"x": b"1", "sub": {"y": b"2"}})
    layer = opened()
    number = layer.resolve(b"run/a/sub/y").number
    file(layer, layer.root, b"plain")
    layer.rename(layer.resolve(b"run"), b"a", layer.root, b"\xffz", NOW)
    for _ in range(2):
        assert paths(layer) == [b"plain", b"run", b"\xffz", b"\xffz/sub", b"\xffz/sub/y", b"\xffz/x"]
        assert layer.resolve(b"\xffz/sub/y").number == number
        layer = opened()
    layer.rename(layer.root, b"\xffz", layer.resolve(b"run"), b"a", NOW)
    assert bound(store) == ["run/a"]
    assert [version.number for version in store.names().versions("run/a")] == [2]


def test_moving_onto_an_empty_directory(store: Store, opened: Callable[[], Layer]) -> None:
    publish(store, "a", {"x": b"1"})
    publish(store, "b", {})
    publish(store, "full", {"x": b"2"})
    layer = opened()
    with pytest.raises(NotEmptyError):
        layer.rename(layer.root, b"a", layer.root, b"full", NOW)
    layer.rename(layer.root, b"a", layer.root, b"b", NOW)
    assert paths(layer) == [b"b", b"b/x", b"full", b"full/x"]
    layer.make(layer.root, b"plain", EntryType.DIRECTORY, 0o755, 0, 0, NOW)
    layer.rename(layer.root, b"b", layer.root, b"plain", NOW)
    for _ in range(2):
        assert paths(layer) == [b"full", b"full/x", b"plain", b"plain/x"]
        assert bound(store) == ["full", "plain"]
        layer = opened()


def test_a_plain_directory_over_an_empty_snapshot(store: Store, opened: Callable[[], Layer]) -> None:
    publish(store, "b", {})
    layer = opened()
    file(layer, layer.make(layer.root, b"d", EntryType.DIRECTORY, 0o755, 0, 0, NOW), b"x")
    layer.rename(layer.root, b"d", layer.root, b"b", NOW)
    assert paths(layer) == [b"b", b"b/x"]
    assert layer.push_names() == 1 and bound(store) == []
    assert paths(opened()) == [b"b", b"b/x"]


def test_exchanging_snapshots(store: Store, opened: Callable[[], Layer]) -> None:
    """A directory with snapshots can be exchanged with anything that holds none; with another such one it is EINVAL."""
    publish(store, "run/a", {"x": b"1"})
    publish(store, "other", {"y": b"1"})
    layer = opened()
    with pytest.raises(UsageError):
        layer.rename(layer.root, b"run", layer.root, b"other", NOW, exchange=True)
    file(layer, layer.make(layer.root, b"d", EntryType.DIRECTORY, 0o755, 0, 0, NOW), b"f")
    layer.rename(layer.root, b"d", layer.root, b"run", NOW, exchange=True)
    assert paths(layer) == [b"d", b"d/a", b"d/a/x", b"other", b"other/y", b"run", b"run/f"]
    layer.rename(layer.resolve(b"run"), b"f", layer.root, b"other", NOW, exchange=True)
    for _ in range(2):
        assert paths(layer) == [b"d", b"d/a", b"d/a/x", b"other", b"run", b"run/f", b"run/f/y"]
        assert bound(store) == ["d/a", "run/f"]
        layer = opened()


class _Killed(Exception):
    pass


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "applied"])
def test_a_move_survives_a_kill(
    store: Store, opened: Callable[[], Layer], monkeypatch: pytest.MonkeyPatch, when: str, exchange: bool
) -> None:
    """Snapshots whose move was cut short by a kill are all at the old place or all at the new one afterwards."""
    publish(store, "run/a", {"x": b"1"})
    publish(store, "run/b", {"x": b"1"})
    layer = opened()
    plain = layer.make(layer.root, b"d", EntryType.DIRECTORY, 0o755, 0, 0, NOW)
    if exchange:
        file(layer, plain, b"f")
    file(layer, layer.resolve(b"run/a"), b"own")
    number, real, layers = layer.resolve(b"run/a/x").number, Log.move, Path(store.path) / "layers"

    def move(log: Log, old: str, new: str) -> int:
        if when == "before":
            shutil.copytree(layers / "host", layers / "after")
            raise _Killed
        sequence = real(log, old, new)
        if when == "after":
            shutil.copytree(layers / "host", layers / "after")
            raise _Killed
        return sequence

    monkeypatch.setattr(Log, "move", move)
    try:
        if exchange:
            layer.rename(layer.root, b"d", layer.root, b"run", NOW, exchange=True)
        else:
            layer.rename(layer.root, b"run", layer.root, b"d", NOW)
    except _Killed:
        pass
    else:
        shutil.copytree(layers / "host", layers / "after")
    after = Layer.open(store, "after")
    try:
        below = [b"/a", b"/a/own", b"/a/x", b"/b", b"/b/x"]
        old, new = [b"run", *(b"run" + path for path in below)], [b"d", *(b"d" + path for path in below)]
        plain_at = {False: ([b"d"], []), True: ([b"d", b"d/f"], [b"run", b"run/f"])}[exchange]
        expected = [*plain_at[0], *old] if when == "before" else [*new, *plain_at[1]]
        assert paths(after) == expected
        assert after.resolve(b"run/a/x" if when == "before" else b"d/a/x").number == number
        assert after.state.moving is None
    finally:
        after.close()


def test_a_move_whose_outcome_is_unknown(
    store: Store, opened: Callable[[], Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error of the log, a move has happened or not, and the layer finds out."""
    publish(store, "run/a", {"x": b"1"})
    layer = opened()
    real = Log.move

    def fail_after(log: Log, old: str, new: str) -> int:
        real(log, old, new)
        raise BackendError("the network is gone")

    def fail_before(log: Log, old: str, new: str) -> int:
        raise BackendError("the network is gone")

    monkeypatch.setattr(Log, "move", fail_after)
    layer.rename(layer.root, b"run", layer.root, b"new", NOW)
    assert paths(layer) == [b"new", b"new/a", b"new/a/x"]
    monkeypatch.setattr(Log, "move", fail_before)
    with pytest.raises(BackendError):
        layer.rename(layer.root, b"new", layer.root, b"newer", NOW)
    assert paths(layer) == [b"new", b"new/a", b"new/a/x"] and layer.state.moving is None
    monkeypatch.undo()
    layer.rename(layer.root, b"new", layer.root, b"newer", NOW)
    assert paths(opened()) == [b"newer", b"newer/a", b"newer/a/x"]


def test_what_a_move_touches_waits_for_it(
    store: Store, opened: Callable[[], Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sees or changes a half of a move: listings show the old place, and changes there wait."""
    publish(store, "run/a", {"x": b"1"})
    layer = opened()
    into = layer.make(layer.root, b"into", EntryType.DIRECTORY, 0o755, 0, 0, NOW)
    real, errors, made = Log.move, [], []

    def late() -> None:
        try:
            layer.make(layer.root, b"new", EntryType.FILE, 0o644, 0, 0, NOW)
        except MoonclipError as error:
            made.append(error)

    waiting = threading.Thread(target=late)

    def move(log: Log, old: str, new: str) -> int:
        assert paths(layer) == [b"into", b"run", b"run/a", b"run/a/x"]
        file(layer, into, b"meanwhile")
        for change in (
            lambda: layer.make(layer.root, b"new", EntryType.FILE, 0o644, 0, 0, NOW, wait=False),
            lambda: layer.rmdir(layer.root, b"into", NOW, wait=False),
            lambda: layer.rename(layer.root, b"into", layer.root, b"run", NOW, wait=False),
        ):
            try:
                change()
            except NotCachedError:
                errors.append(change)
        waiting.start()
        sequence = real(log, old, new)
        assert paths(layer) == [b"into", b"into/meanwhile", b"run", b"run/a", b"run/a/x"]
        return sequence

    monkeypatch.setattr(Log, "move", move)
    layer.rename(layer.root, b"run", layer.root, b"new", NOW)
    waiting.join()
    assert len(errors) == 3 and [type(error).__name__ for error in made] == ["ExistsError"]
    assert paths(layer) == [b"into", b"into/meanwhile", b"new", b"new/a", b"new/a/x"]


def test_what_others_publish_shows_up(store: Store, opened: Callable[[], Layer]) -> None:
    """What others bind, move and remove shows up in a layer, and the kernel is told which names that concerns."""
    publish(store, "run/a", {"x": b"1"})
    layer = opened()
    run, old = layer.resolve(b"run"), layer.resolve(b"run/a")
    publish(store, "run/b", {"y": b"2"})
    publish(store, "run/a", {"z": b"2"})
    assert sorted(name for directory, name in layer.refresh(NOW) if directory is run) == [b"a", b"b"]
    assert paths(layer) == [b"run", b"run/a", b"run/a/z", b"run/b", b"run/b/y"]
    assert layer.resolve(b"run/a").number != old.number
    assert layer.stat(run).mtime_ns == NOW
    with pytest.raises(NotFoundError):
        file(layer, old, b"late")
    store.log.unbind(["run/a"])
    number = layer.resolve(b"run/b/y").number
    store.log.move("run/b", "other")
    assert {name for _, name in layer.refresh(NOW)} >= {b"other", b"run"}
    assert paths(layer) == [b"other", b"other/y"]
    assert layer.resolve(b"other/y").number == number
    assert layer.refresh(NOW) == []


def test_live_wins_over_what_others_publish(store: Store, opened: Callable[[], Layer]) -> None:
    """Where a layer has unsealed changes, live wins over what others publish, and status names the conflict."""
    publish(store, "a", {"x": b"1"})
    layer = opened()
    inode = file(layer, layer.resolve(b"a"), b"own")
    publish(store, "a", {"z": b"2"})
    publish(store, "a/sub", {"w": b"2"})
    file(layer, layer.root, b"f")
    publish(store, "f", {"w": b"2"})
    for _ in range(2):
        layer.refresh(NOW)
        assert paths(layer) == [b"a", b"a/own", b"a/sub", b"a/sub/w", b"a/x", b"f"]
        assert layer.conflicts() == ["a", "f"]
        assert layer.resolve(b"a/own").number == inode.number
        layer = opened()
    assert [version.number for version in store.names().versions("a")] == [1, 2]


def test_clean_own_entries_give_way(store: Store, opened: Callable[[], Layer]) -> None:
    publish(store, "a", {"d": {"x": b"1"}})
    layer = opened()
    layer.adopt(layer.resolve(b"a/d/x"))
    held = layer.resolve(b"a/d/x")
    layer.remember(held)
    handle = layer.open_file(held, write=False)
    publish(store, "a", {"z": b"2"})
    layer.refresh(NOW)
    assert paths(layer) == [b"a", b"a/z"] and layer.conflicts() == []
    assert handle.read(0, 10) == b"1" and layer.stat(held).nlink == 0
    handle.close()
    assert paths(opened()) == [b"a", b"a/z"]
    publish(store, "a", {"y": b"3"})
    assert paths(opened()) == [b"a", b"a/y"]


def test_a_publish_while_the_layer_was_closed(store: Store, opened: Callable[[], Layer]) -> None:
    publish(store, "a", {"d": {"x": b"1"}})
    publish(store, "b", {"x": b"1"})
    layer = opened()
    layer.adopt(layer.resolve(b"a/d/x"))
    file(layer, layer.resolve(b"b"), b"own")
    layer.close()
    publish(store, "a", {"z": b"2"})
    publish(store, "b", {"z": b"2"})
    layer = opened()
    assert paths(layer) == [b"a", b"a/z", b"b", b"b/own", b"b/x"]
    assert layer.conflicts() == ["b"]


def test_two_layers_move_and_remove(store: Store, opened: Callable[[], Layer]) -> None:
    """What one layer moves or removes is moved and removed in others, within a refresh."""
    publish(store, "run/a", {"x": b"1"})
    publish(store, "run/b", {"y": b"1"})
    layer = opened()
    with Store.open(store.path, write=True) as second:
        other = Layer.open(second, "second")
        try:
            numbers = [other.resolve(b"run/a").number, other.resolve(b"run/a/x").number]
            layer.rename(layer.root, b"run", layer.root, b"new", NOW)
            remove(layer, b"new/b")
            layer.push_names()
            other.refresh(NOW)
            assert paths(other) == [b"new", b"new/a", b"new/a/x"]
            assert [other.resolve(b"new/a").number, other.resolve(b"new/a/x").number] == numbers
        finally:
            other.close()


def test_names_that_are_bound_at_what_is_moved_away(store: Store, opened: Callable[[], Layer]) -> None:
    """A move over a name that others bound meanwhile is refused, and everything stays where it was."""
    publish(store, "a", {"x": b"1"})
    layer = opened()
    publish(store, "b", {"theirs": b"2"})
    with pytest.raises(NotEmptyError):
        layer.rename(layer.root, b"a", layer.root, b"b", NOW)
    layer.refresh(NOW)
    assert paths(layer) == [b"a", b"a/x", b"b", b"b/theirs"]
    assert paths(opened()) == [b"a", b"a/x", b"b", b"b/theirs"]


def test_the_lease_waits_for_the_layer(store: Store, opened: Callable[[], Layer]) -> None:
    """gc is not told that this process has seen new names while the layer relies on the ones before."""
    publish(store, "a", {"x": b"1"})
    layer = opened()
    with Store.open(store.path, write=True) as second:
        publish(second, "b", {"x": b"1"})

    def seen() -> int:
        assert store.lease is not None
        return {state.name: state.seen for state in live_leases(store.path)}[store.lease.name]

    store.names()
    assert seen() == layer.view.sequence == 1
    layer.refresh(NOW)
    assert seen() == layer.view.sequence == 2
    layer.close()
    publish(store, "c", {"x": b"1"})
    store.names()
    assert seen() == 3


def test_what_others_removed_and_changes_keep_stays(store: Store, opened: Callable[[], Layer]) -> None:
    """A directory with unsealed changes stays when others remove its snapshot, also after a part of it was sealed."""
    publish(store, "a", {"d": {"x": b"1"}, "f": b"2"})
    layer = opened()
    file(layer, layer.resolve(b"a/d"), b"own")
    store.log.unbind(["a"])
    layer.refresh(NOW)
    shown = [b"a", b"a/d", b"a/d/own", b"a/d/x", b"a/f"]
    assert paths(layer) == shown and layer.conflicts() == []
    layer = opened()
    version = Sealer(layer, LocalEncoder(layer), seal_after=None).seal(b"a/d")
    assert version is not None and bound(store) == ["a/d"]
    for _ in range(2):
        assert paths(layer) == shown
        layer = opened()


def test_a_number_that_the_kernel_knows_gets_no_other_bytes(store: Store, opened: Callable[[], Layer]) -> None:
    """What the kernel remembers of a file is never another file, also where others move an old version of it."""
    publish(store, "a", {"x": b"old"})
    layer = opened()
    inode = layer.resolve(b"a/x")
    layer.remember(inode)
    overwrite(layer, inode, b"new")
    sealer = Sealer(layer, LocalEncoder(layer), seal_after=None)
    store.log.move("a", "b")
    layer.refresh(NOW)
    assert sealer.seal(b"a") is not None
    store.log.unbind(["a"])
    layer.refresh(NOW)
    assert paths(layer) == [b"b", b"b/x"]
    other = layer.resolve(b"b/x")
    assert other.number != inode.number and layer.stat(other).size == 3
    assert read_all(layer, other) == b"old"
    assert layer.by_number(inode.number) is inode
