"""The file system without FUSE, over a real store."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

import pytest

from moonclipfs.errors import CorruptError, NotFoundError
from moonclipfs.layers.names import Area
from moonclipfs.layers.tree import ROOT_INODE, Node, NotCachedError, Tree
from moonclipfs.store.store import Store
from moonclipfs.types import Entry, EntryType, ObjectId
from tests.layers.publish import MTIME, Fifo, File, publish


def at(tree: Tree, path: str, area: Area = Area.LIVE) -> Node:
    return tree.resolve(area, path.encode("utf-8", "surrogateescape"))


def read(tree: Tree, path: str, area: Area = Area.LIVE) -> bytes:
    reader = tree.open(at(tree, path, area))
    return reader.read(0, reader.size)


def follow_log(tree: Tree) -> set[tuple[str, bytes]]:
    """Adopt what is new; return (directory, name) of what changed."""
    before, view = tree.view, tree.look(123)
    assert view is not None
    tree.adopt(view)
    return {(node.place, name) for node, name in tree.changed(before)}


def test_a_snapshot_is_a_directory_at_its_path(store: Store) -> None:
    """Every bound snapshot is a directory at its path."""
    publish(store, "run1/a", {"x": b"hello", "sub": {"y": b"deep"}, "link": "sub/y"})
    tree = Tree(store)
    assert tree.names_in(tree.root) == [b"run1"]
    assert tree.names_in(at(tree, "run1")) == [b"a"]
    assert tree.names_in(at(tree, "run1/a")) == [b"link", b"sub", b"x"]
    assert read(tree, "run1/a/x") == b"hello"
    assert read(tree, "run1/a/sub/y") == b"deep"
    assert at(tree, "run1/a/link").entry.target == b"sub/y"
    with pytest.raises(NotFoundError, match="'z'"):
        at(tree, "run1/a/z")
    with pytest.raises(NotFoundError):
        at(tree, "run1/a/x/below")


def test_stat_gives_what_was_stored(store: Store) -> None:
    """Modes, owners, times, symlinks, named pipes and names come back as they were added."""
    publish(store, "a", {"f": File(b"12345", 0o4751), "l": "target", "p": Fifo(), "d": {"in": b""}, "e": b""})
    tree = Tree(store)
    file = tree.stat(at(tree, "a/f"))
    assert (file.mode, file.size, file.nlink) == (stat.S_IFREG | 0o4751, 5, 1)
    assert (file.mtime_ns, file.ctime_ns, file.uid) == (MTIME, MTIME, 0)
    assert tree.stat(at(tree, "a/l")).mode == stat.S_IFLNK | 0o755
    assert tree.stat(at(tree, "a/l")).size == len("target")
    assert stat.S_ISFIFO(tree.stat(at(tree, "a/p")).mode)
    assert tree.stat(at(tree, "a/d")).mode == stat.S_IFDIR | 0o755
    assert tree.stat(at(tree, "a/e")).size == 0
    assert tree.stat(at(tree, "a")).mode == stat.S_IFDIR | 0o750
    assert tree.stat(at(tree, "a")).nlink == 3
    assert tree.stat(tree.root).nlink == 3


def test_a_name_bound_inside_a_snapshot_wins(store: Store) -> None:
    """A name bound below another snapshot is seen there, and wins over an entry of the same name."""
    publish(store, "a", {"b": {"own": b"a's", "c": b"hidden"}, "f": b"file"})
    publish(store, "a/b/c", {"inner": b"c's"})
    publish(store, "a/f/g", {"x": b"under a file's name"})
    publish(store, "a/new/deep", {"x": b"1"})
    tree = Tree(store)
    assert tree.names_in(at(tree, "a")) == [b"b", b"f", b"new"]
    assert tree.names_in(at(tree, "a/b")) == [b"c", b"own"]
    assert read(tree, "a/b/own") == b"a's"
    assert read(tree, "a/b/c/inner") == b"c's"
    assert read(tree, "a/f/g/x") == b"under a file's name"
    assert at(tree, "a/f").version is None
    assert tree.stat(at(tree, "a")).nlink == 2 + 3
    assert tree.stat(at(tree, "a/b")).nlink == 2 + 1


def test_whole_snapshot_wins_over_the_entry_of_its_name(store: Store) -> None:
    publish(store, "a", {"b": {"old": b"1"}})
    publish(store, "a/b", {"new": b"2"})
    tree = Tree(store)
    assert tree.names_in(at(tree, "a/b")) == [b"new"]


def test_versions_are_all_there(store: Store) -> None:
    """@versions/PATH/NUMBER holds every kept version, removed names too."""
    publish(store, "run/a", {"x": b"first"})
    publish(store, "run/a", {"x": b"second"})
    publish(store, "gone", {"x": b"removed"})
    store.log.unbind(["gone"])
    tree = Tree(store)
    assert tree.names_in(tree.root) == [b"run"]
    assert tree.names_in(at(tree, "", Area.VERSIONS)) == [b"gone", b"run"]
    assert tree.names_in(at(tree, "run/a", Area.VERSIONS)) == [b"1", b"2"]
    assert read(tree, "run/a/1/x", Area.VERSIONS) == b"first"
    assert read(tree, "run/a/2/x", Area.VERSIONS) == b"second"
    assert read(tree, "gone/1/x", Area.VERSIONS) == b"removed"
    assert read(tree, "run/a/x") == b"second"


def test_virtual_names_resolve_but_are_not_listed(store: Store) -> None:
    """Names that begin with @ at the root resolve, and are listed with --show-virtual only."""
    publish(store, "run/a", {"x": b"1"})
    tree = Tree(store)
    assert tree.names_in(tree.root) == [b"run"]
    assert tree.lookup(tree.root, b"@versions").area is Area.VERSIONS
    assert tree.lookup(tree.root, b"@latest").area is Area.LATEST
    assert Tree(store, show_virtual=True).names_in(tree.root) == [b"@experts", b"@latest", b"@versions", b"run"]
    with pytest.raises(NotFoundError):
        tree.lookup(at(tree, "run"), b"@versions")


def test_latest_is_a_relative_link(store: Store) -> None:
    """@latest/PARENT is a symlink to the newest complete snapshot below PARENT."""
    publish(store, "run/step-2", {"x": b"1"})
    publish(store, "run/step-10", {"x": b"1"})
    tree = Tree(store)
    link = at(tree, "run", Area.LATEST)
    assert link.entry.type is EntryType.SYMLINK
    assert link.entry.target == b"../run/step-10"
    publish(store, "run/step-1", {"x": b"2"})
    changes = follow_log(tree)
    assert ("/@latest", b"run") in changes
    newer = at(tree, "run", Area.LATEST)
    assert newer.entry.target == b"../run/step-1"
    assert newer.inode != link.inode


def test_inode_numbers_are_the_same_at_every_mount(store: Store) -> None:
    """Inode numbers stay the same from mount to mount; a new version of a name has new ones."""
    publish(store, "a", {"x": b"1", "d": {"y": b"2"}})
    first, second = Tree(store), Tree(store)
    paths = ["", "a", "a/x", "a/d", "a/d/y"]
    numbers = [at(first, path).inode for path in paths]
    assert numbers == [at(second, path).inode for path in paths]
    assert numbers[0] == ROOT_INODE
    assert len(set(numbers)) == len(numbers)
    assert all(1 < number < 1 << 63 for number in numbers[1:])
    assert at(first, "a/1/x", Area.VERSIONS).inode not in numbers
    publish(store, "a", {"x": b"1", "d": {"y": b"2"}, "z": b""})
    follow_log(first)
    assert not {at(first, path).inode for path in paths[1:]} & set(numbers)


def test_hard_links_share_an_inode(store: Store) -> None:
    """Hard links of one snapshot have one inode number and count each other."""
    publish(store, "a", {"x": File(b"1", link_group=7), "d": {"y": File(b"1", link_group=7), "z": b"1"}})
    publish(store, "b", {"x": File(b"1", link_group=7)})
    tree = Tree(store)
    assert at(tree, "a/x").inode == at(tree, "a/d/y").inode
    assert at(tree, "a/x").inode not in (at(tree, "b/x").inode, at(tree, "a/d/z").inode)
    assert tree.stat(at(tree, "a/x")).nlink == 2
    assert tree.stat(at(tree, "b/x")).nlink == 1


def damage(store: Store, tree: Tree, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a directory object be unreadable."""
    bad, real = at(tree, path).entry.child, store.directory

    def directory(object_id: ObjectId) -> Mapping[bytes, Entry]:
        if object_id == bad:
            raise CorruptError(f"a flipped bit in {path}")
        return real(object_id)

    monkeypatch.setattr(store, "directory", directory)


def test_a_damaged_directory_takes_nothing_from_its_neighbours(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged directory takes nothing away from what lies outside it."""
    link = File(b"123", link_group=1)
    publish(store, "run", {"good": {"a": link, "b": link}, "bad": {"c": link, "d": b""}})
    damage(store, Tree(store), "run/bad", monkeypatch)
    tree = Tree(store)
    found = tree.children(at(tree, "run/good"), [b"a", b"b"])
    assert [child and child[1].nlink for child in found] == [2, 2]
    assert tree.names_in(at(tree, "run")) == [b"bad", b"good"]
    with pytest.raises(CorruptError):
        tree.children(at(tree, "run/bad"), [b"c"])


def test_names_below_a_damaged_snapshot_are_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, "run", {"x": b"1", "deep": {"y": b""}})
    publish(store, "run/5", {"w": b"5"})
    publish(store, "run/deep/6", {"w": b"6"})
    damage(store, Tree(store), "run", monkeypatch)
    tree = Tree(store)
    assert [child is not None for child in tree.children(tree.root, [b"run"])] == [True]
    assert [child is not None for child in tree.children(at(tree, "run"), [b"5", b"deep", b"..", b"."])] == [True] * 4
    assert read(tree, "run/5/w") == b"5"
    assert read(tree, "run/deep/6/w") == b"6"
    for ask in (tree.names_in, lambda node: tree.children(node, [b"5", b"x"]), lambda node: tree.lookup(node, b"x")):
        with pytest.raises(CorruptError):
            ask(at(tree, "run"))
    store.log.unbind(["run/deep/6"])
    publish(store, "other", {})
    assert ("/", b"other") in follow_log(tree)


def test_nothing_waits_for_the_store_unasked(store: Store) -> None:
    publish(store, "a", {"d": {"y": b"2", "s": {}}, "h": File(b"1", link_group=1)})
    tree = Tree(store)
    assert tree.lookup(tree.root, b"a", wait=False).version is not None
    snapshot = at(tree, "a")
    with pytest.raises(NotCachedError):
        tree.lookup(snapshot, b"d", wait=False)
    directory = tree.lookup(snapshot, b"d")
    assert tree.names_in(snapshot, wait=False) == [b"d", b"h"]
    with pytest.raises(NotCachedError):
        tree.stat(directory, wait=False)
    with pytest.raises(NotCachedError):
        tree.stat(tree.lookup(snapshot, b"h", wait=False), wait=False)
    with pytest.raises(NotCachedError):
        tree.names_in(tree.lookup(tree.root, b"@versions", wait=False), wait=False)
    tree.children(snapshot, [b"d", b"h"])
    children = tree.children(snapshot, [b".", b"..", b"d", b"gone", b"h"], wait=False)
    assert [child[1].nlink if child else None for child in children] == [3, 3, 3, None, 1]


def test_names_that_appear_vanish_or_move_are_told(store: Store) -> None:
    publish(store, "run/a", {"x": b"1", "d": {"y": b"1"}})
    tree = Tree(store)
    assert tree.look(0) is None
    publish(store, "run/b", {"x": b"2"})
    assert follow_log(tree) == {("/run", b"b")}
    assert read(tree, "run/b/x") == b"2"
    store.log.move("run", "old")
    assert ("/", b"run") in follow_log(tree)
    assert tree.names_in(tree.root) == [b"old"]
    store.log.unbind(["old/a", "old/b"])
    assert follow_log(tree) == {("/", b"old")}
    assert tree.names_in(tree.root) == []


def test_a_name_that_appears_inside_a_snapshot_is_told(store: Store) -> None:
    publish(store, "a", {"d": {"y": b"1"}})
    tree = Tree(store)
    publish(store, "a/d/new/b", {"x": b"2"})
    assert ("/a/d", b"new") in follow_log(tree)
    assert tree.names_in(at(tree, "a/d")) == [b"new", b"y"]
    assert tree.stat(at(tree, "a/d")).mtime_ns > MTIME


def test_an_open_old_version_does_not_gain_new_names(store: Store) -> None:
    publish(store, "a", {"d": {"y": b"1"}})
    tree = Tree(store)
    old = at(tree, "a/d")
    publish(store, "a", {"d": {"z": b"2"}})
    publish(store, "a/d/b", {"x": b"3"})
    follow_log(tree)
    assert tree.names_in(old) == [b"y"]
    assert tree.open(tree.lookup(old, b"y")).read(0, 1) == b"1"
    assert tree.names_in(at(tree, "a/d")) == [b"b", b"z"]


def test_r103_a_directory_whose_children_appear_is_modified(store: Store) -> None:
    """A directory of names is modified when a snapshot appears in it or goes away."""
    publish(store, "run/a", {"x": b"1"})
    tree = Tree(store)
    first = tree.stat(at(tree, "run")).mtime_ns
    assert first > MTIME
    publish(store, "run/b", {"x": b"1"})
    follow_log(tree)
    second = tree.stat(at(tree, "run")).mtime_ns
    assert second > first


def test_computed_attributes_say_where_a_file_comes_from(store: Store) -> None:
    """user.moonclip.* tell store, snapshot, version, object and stored_size; a copy does not carry them."""
    publish(store, "run/a", {"x": File(os.urandom(5000), xattrs={b"user.note": b"mine"}), "d": {}})
    tree = Tree(store)
    node = at(tree, "run/a/x")
    assert tree.xattr_names(node) == [b"user.note"]
    assert tree.xattr(node, b"user.note") == b"mine"
    assert tree.xattr(node, b"user.moonclip.store") == os.fsencode(store.path)
    assert tree.xattr(node, b"user.moonclip.snapshot") == b"run/a"
    assert tree.xattr(node, b"user.moonclip.version") == b"1"
    assert tree.xattr(node, b"user.moonclip.object") == node.entry.child.hex().encode()
    assert 5000 < int(tree.xattr(node, b"user.moonclip.stored_size")) < 6000
    assert tree.xattr(at(tree, "run/a/d"), b"user.moonclip.snapshot") == b"run/a"
    assert tree.xattr(at(tree, "run"), b"user.moonclip.store") == os.fsencode(store.path)
    for absent, name in (
        (node, b"user.none"),
        (at(tree, "run"), b"user.moonclip.snapshot"),
        (at(tree, "run/a/d"), b"user.moonclip.stored_size"),
    ):
        with pytest.raises(NotFoundError):
            tree.xattr(absent, name)
    shown = Tree(store, show_virtual=True)
    assert b"user.moonclip.object" in shown.xattr_names(at(shown, "run/a/x"))


def test_names_are_bytes(store: Store) -> None:
    odd = "caf\udce9 \n\U0001f600"
    publish(store, "run/" + odd.replace("\n", ""), {odd: b"1"})
    tree = Tree(store)
    (name,) = tree.names_in(at(tree, "run"))
    assert name == odd.replace("\n", "").encode("utf-8", "surrogateescape")
    snapshot = tree.lookup(at(tree, "run"), name)
    assert tree.names_in(snapshot) == [odd.encode("utf-8", "surrogateescape")]


def test_the_root_is_its_own_parent(store: Store) -> None:
    publish(store, "run/a", {"d": {"x": b"1"}})
    tree = Tree(store)
    assert tree.parent(tree.root).inode == ROOT_INODE
    assert tree.lookup(at(tree, "run/a/d"), b"..").inode == at(tree, "run/a").inode
    assert tree.parent(at(tree, "", Area.VERSIONS)).inode == ROOT_INODE
    assert at(tree, "run/a/d/x").place == "/run/a/d/x"
    assert at(tree, "run/a/1", Area.VERSIONS).place == "/@versions/run/a/1"
