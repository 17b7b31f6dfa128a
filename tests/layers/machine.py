"""A state machine that drives a layer and the reference model side by side."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonclipfs.errors import MoonclipError, UsageError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.lookup import Status
from moonclipfs.layers.seal import Sealer
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.layers.filekit import encode, read_all
from tests.layers.model import Model, Node
from tests.layers.publish import Fifo, File, publish
from tests.layers.sealkit import LocalEncoder

NAMES = st.sampled_from([b"a", b"b", b"c", b"sub", b"\xff\xfe", b"n" * 255, b"x" * 256, b"@latest"])
PICK = st.integers(0, 1 << 16)
MODES = st.sampled_from([0o644, 0o755, 0o600, 0o4755, 0o2755, 0o2770, 0o6711, 0o1777])
TYPES = st.sampled_from([EntryType.FILE, EntryType.DIRECTORY, EntryType.DIRECTORY, EntryType.SYMLINK, EntryType.FIFO])

BASE = {
    "x": b"hello",
    "sub": {"y": b"deep", "hard": File(b"shared", link_group=7), "empty": {}},
    "hard": File(b"shared", link_group=7),
    "tool": File(b"#!", 0o4755, xattrs={b"user.k": b"v"}),
    "link": "sub/y",
    "pipe": Fifo(),
}


class LayerMachine(RuleBasedStateMachine):
    """Random changes of a layer over snapshots, with reopening and crashes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="machine"))
        self.now = 2_000_000_000_000_000_000
        self.layers = 0
        self.foreign = 0
        self.twice = False
        self.model = Model()
        self.kept: list[Inode] = []
        Store.create(self.path / "store").close()
        self.store = Store.open(self.path / "store", write=True, index_path=self.path / "index.sqlite")

    @initialize(base=st.booleans())
    def begin(self, base: bool) -> None:
        if base:
            publish(self.store, "run1/a", BASE)
            publish(self.store, "run1/b", {"z": b"other", "sub": {"w": b"1"}})
            publish(self.store, "run1/a/sub/inner", {"deep": b"nested"})
            publish(self.store, "c", {})
        self.layer = Layer.open(self.store, "layer0")
        self.model.root = self._see(self.layer.root)
        self._note_bound()

    def teardown(self) -> None:
        self.layer.close()
        self.store.close()
        shutil.rmtree(self.path)

    # What the layer shows

    def _see(self, inode: Inode, known: dict[int, Node] | None = None) -> Node:
        """A part of the layer as a part of the model."""
        known = {} if known is None else known
        status = self.layer.stat(inode)
        node = known.get(inode.number)
        if node is not None:
            node.links += 1
            return node
        node = known[inode.number] = Node(
            inode.type, status.mode & 0o7777, status.uid, status.gid, status.atime_ns, status.mtime_ns, status.ctime_ns,
            read_all(self.layer, inode) if inode.is_file else b"", target=inode.target, number=inode.number,
            xattrs={name: self.layer.xattr(inode, name) for name in self.layer.xattr_names(inode)},
        )  # fmt: skip
        if node.is_directory:
            for name in self.layer.names_in(inode):
                node.entries[name] = self._see(self.layer.lookup(inode, name), known)
        return node

    def _note_bound(self) -> None:
        for path in self.store.log.refresh().bound():
            self._at(path.encode("utf-8", "surrogateescape")).bound = True

    def _at(self, path: bytes) -> Node:
        node = self.model.root
        for name in path.split(b"/"):
            node = node.entries[name]
        return node

    def compare(self) -> None:
        """The whole tree is what the model says."""
        numbers: dict[int, Node] = {}
        todo = [(b"", self.layer.root, self.model.root)]
        while todo:
            path, inode, node = todo.pop()
            self._compare_one(path, inode, node, self.layer.stat(inode))
            assert numbers.setdefault(inode.number, node) is node, path
            if not node.is_directory:
                continue
            names = self.layer.names_in(inode)
            assert names == sorted(node.entries), path
            found = self.layer.children(inode, names)
            for name, pair in zip(names, found, strict=True):
                assert pair is not None
                assert not pair[0].is_directory or self.layer.lookup(pair[0], b"..") is inode
                todo.append((path + b"/" + name, pair[0], node.entries[name]))

    def _compare_one(self, path: bytes, inode: Inode, node: Node, status: Status) -> None:
        assert inode.type is node.type, path
        assert status.mode & 0o7777 == node.mode, path
        assert (status.uid, status.gid) == (node.uid, node.gid), path
        if inode.is_directory and not inode.own:
            # Names of the log make it newer, by the time that they were found at.
            node.atime_ns, node.mtime_ns, node.ctime_ns = status.atime_ns, status.mtime_ns, status.ctime_ns
        assert (status.atime_ns, status.mtime_ns, status.ctime_ns) == (
            node.atime_ns, node.mtime_ns, node.ctime_ns
        ), path  # fmt: skip
        # In the base, names count that a snapshot bound in their place hides.
        hidden = inode.group and not inode.own and status.nlink > node.nlink()
        assert hidden or status.nlink == node.nlink(), (path, inode)
        if not node.is_directory:
            assert status.size == node.size, path
        if inode.is_file:
            assert read_all(self.layer, inode) == node.data, path
        assert inode.target == node.target
        assert {name: self.layer.xattr(inode, name) for name in self.layer.xattr_names(inode)} == node.xattrs, path
        node.number = node.number or inode.number
        assert inode.number == node.number, path

    # Changing both

    def _time(self) -> int:
        self.now += 1_000
        return self.now

    def _node(self, pick: int, *, directory: bool = False) -> tuple[bytes, Node]:
        found = [(b"", self.model.root)]
        found += [(path, node) for path, node, _, _ in self.model.root.walk()]
        # Where a directory is needed it mostly is one.
        if directory and pick % 16:
            found = [(path, node) for path, node in found if node.is_directory]
        return found[pick % len(found)]

    def _entry(self, pick: int, name: bytes) -> tuple[bytes, Node, bytes]:
        """A directory and a name in it: mostly one that is there."""
        found = [(path.rpartition(b"/")[0], parent, called) for path, _, parent, called in self.model.root.walk()]
        if not found or pick % 8 == 0:
            return (*self._node(pick // 8, directory=True), name)
        return found[pick % len(found)]

    def _both(self, model: Callable[[], object], layer: Callable[[], object]) -> None:
        """Do the same to both: with the same outcome."""
        expected: type[MoonclipError] | None = None
        try:
            model()
        except MoonclipError as error:
            expected = type(error)
        try:
            layer()
        except MoonclipError as error:
            assert type(error) is expected, f"{error!r} instead of {expected}"
        else:
            assert expected is None, f"the layer did what is {expected}"

    @rule(pick=PICK, name=NAMES, type_=TYPES, mode=MODES, gid=st.sampled_from([0, 5]))
    def make(self, pick: int, name: bytes, type_: EntryType, mode: int, gid: int) -> None:
        (path, node), now = self._node(pick, directory=True), self._time()
        target = b"to/there" if type_ is EntryType.SYMLINK else b""
        inode = self.layer.resolve(path)
        self._both(
            lambda: self.model.make(node, name, type_, mode, 3, gid, now, target),
            lambda: self.layer.make(inode, name, type_, mode, 3, gid, now, target),
        )

    @rule(pick=PICK, to=PICK, name=NAMES)
    def link(self, pick: int, to: int, name: bytes) -> None:
        (path, node), (to_path, directory), now = self._node(pick), self._node(to, directory=True), self._time()
        inode, to_inode = self.layer.resolve(path), self.layer.resolve(to_path)
        self._both(
            lambda: self.model.link(node, directory, name, now), lambda: self.layer.link(inode, to_inode, name, now)
        )

    @rule(pick=PICK, name=NAMES, known=st.booleans())
    def unlink(self, pick: int, name: bytes, known: bool) -> None:
        (path, node, name), now = self._entry(pick, name), self._time()
        inode = self.layer.resolve(path)
        if known and node.is_directory and name in node.entries:
            self.kept.append(self.layer.lookup(inode, name))
            self.layer.remember(self.kept[-1])
        self._both(lambda: self.model.unlink(node, name, now), lambda: self.layer.unlink(inode, name, now))

    @rule(pick=PICK, name=NAMES)
    def rmdir(self, pick: int, name: bytes) -> None:
        (path, node, name), now = self._entry(pick, name), self._time()
        inode = self.layer.resolve(path)
        self._both(lambda: self.model.rmdir(node, name, now), lambda: self.layer.rmdir(inode, name, now))

    @rule(pick=PICK, name=NAMES, to=PICK, to_name=NAMES, how=st.sampled_from(["", "", "noreplace", "exchange"]))
    def rename(self, pick: int, name: bytes, to: int, to_name: bytes, how: str) -> None:
        (path, node, name), now = self._entry(pick, name), self._time()
        to_path, to_node, to_name = self._entry(to, to_name) if to % 3 else (*self._node(to, directory=True), to_name)
        inode, to_inode = self.layer.resolve(path), self.layer.resolve(to_path)
        replace, exchange = how != "noreplace", how == "exchange"
        self._both(
            lambda: self.model.rename(node, name, to_node, to_name, now, replace, exchange),
            lambda: self.layer.rename(inode, name, to_inode, to_name, now, replace=replace, exchange=exchange),
        )

    @rule(
        pick=PICK, mode=st.none() | MODES, uid=st.none() | st.just(9), gid=st.none() | st.just(5),
        mtime=st.none() | st.just(-1_234_567_891),
    )  # fmt: skip
    def set_attributes(self, pick: int, mode: int | None, uid: int | None, gid: int | None, mtime: int | None) -> None:
        (path, node), now = self._node(pick), self._time()
        inode = self.layer.resolve(path)
        self._both(
            lambda: self.model.set_attributes(node, now, mode, uid, gid, mtime),
            lambda: self.layer.set_attributes(inode, now_ns=now, mode=mode, uid=uid, gid=gid, mtime_ns=mtime),
        )

    @rule(
        pick=PICK,
        name=st.sampled_from([b"user.k", b"user.\xff", b"user.moonclip.store"]),
        value=st.none() | st.binary(max_size=3),
    )
    def set_xattr(self, pick: int, name: bytes, value: bytes | None) -> None:
        (path, node), now = self._node(pick), self._time()
        inode = self.layer.resolve(path)
        self._both(
            lambda: self.model.set_xattr(node, name, value, now),
            lambda: (
                self.layer.remove_xattr(inode, name, now)
                if value is None
                else self.layer.set_xattr(inode, name, value, now)
            ),
        )

    # Contents

    @rule(
        pick=PICK,
        offset=st.sampled_from([0, 1, 5, 4096, 70_000]),
        data=st.binary(max_size=3),
        times=st.sampled_from([1, 1, 30_000]),
    )
    def write(self, pick: int, offset: int, data: bytes, times: int) -> None:
        (path, node), now = self._node(pick), self._time()
        if node.type is not EntryType.FILE or not data:
            return
        file = self.layer.open_file(self.layer.resolve(path), write=True)
        file.write(offset, data * times, now)
        file.close()
        self.model.write(node, offset, data * times, now)

    @rule(pick=PICK, size=st.sampled_from([0, 1, 4, 4096, 100_000]))
    def truncate(self, pick: int, size: int) -> None:
        (path, node), now = self._node(pick), self._time()
        if node.type is EntryType.FILE:
            self.layer.truncate(self.layer.resolve(path), size, now)
            self.model.truncate(node, size, now)

    @rule()
    def encode(self) -> None:
        encode(self.layer, *self.layer.take_jobs(0.0, urgent=True))

    # The log

    @rule(pick=PICK)
    def seal(self, pick: int) -> None:
        """Nothing that the layer shows changes by it, unless it merges what others bound meanwhile."""
        path, node = self._node(pick, directory=True)
        if not node.is_directory or not path or self.layer.conflicts():
            return
        try:
            Sealer(self.layer, LocalEncoder(self.layer), seal_after=None).seal(path)
        except UsageError:
            return  # there is nothing to seal in it
        node.bound = True

    @rule()
    def push_names(self) -> None:
        self.layer.push_names()
        bound = {path.encode("utf-8", "surrogateescape") for path in self.store.log.refresh().bound()}
        assert bound == {path for path, node, _, _ in self.model.root.walk() if node.bound}

    @rule(pick=PICK)
    def others_publish(self, pick: int) -> None:
        path, node = self._node(pick, directory=True)
        if not node.is_directory or len(path) > 1000:
            return
        self.foreign += 1
        name = b"f%d" % self.foreign
        where = path + b"/" + name if path else name
        publish(self.store, where.decode("utf-8", "surrogateescape"), BASE if self.foreign % 2 else {})
        self.layer.refresh(self._time())
        new = node.entries[name] = self._see(self.layer.resolve(where))
        new.bound = True

    def _bound(self, pick: int) -> tuple[bytes, Node] | None:
        """A snapshot, and not one that hides something in the base of a directory around it."""
        found = [
            (path, node) for path, node, _, _ in self.model.root.walk() if node.bound and not self._is_nested(path)
        ]
        return found[pick % len(found)] if found else None

    def _is_nested(self, path: bytes) -> bool:
        while path := path.rpartition(b"/")[0]:
            if self.layer.resolve(path).lower is not None:
                return True
        return False

    def _others(self, path: bytes, change: Callable[[str], object]) -> bool:
        """Let others change a name; returns whether it is as it was here, since there are changes at or below it."""
        self.layer.push_names()
        inode = self.layer.resolve(path)
        dirty = inode.own and inode.below > 0
        change(path.decode("utf-8", "surrogateescape"))
        told = self.layer.refresh(self._time())
        if dirty:
            return True
        before = {place: node.number for place, node, _, _ in self.model.root.walk() if not place.startswith(path)}
        self.model.root = self._see(self.layer.root)
        self._note_bound()
        after = {place: node.number for place, node, _, _ in self.model.root.walk()}
        if not self.twice:
            assert [place for place, number in before.items() if after.get(place, number) != number] == [], path
        assert told or path.count(b"/") > 0  # the directory may be gone with it
        return False

    @rule(pick=PICK)
    def others_bind(self, pick: int) -> None:
        if found := self._bound(pick):
            self.foreign += 1
            kept = self._others(found[0], lambda path: publish(self.store, path, {f"v{self.foreign}": b"new"}))
            names = self.layer.names_in(self.layer.resolve(found[0]))
            assert (b"v%d" % self.foreign in names) is not kept
            assert (os.fsdecode(found[0]) in self.layer.conflicts()) is kept

    @rule(pick=PICK)
    def others_remove(self, pick: int) -> None:
        if (found := self._bound(pick)) and self._others(found[0], lambda path: self.store.log.unbind([path])):
            found[1].bound = False

    @rule(pick=PICK)
    def others_move(self, pick: int) -> None:
        found = self._bound(pick)
        if found is None or any(child.bound for _, child, _, _ in found[1].walk()):
            return
        self.foreign += 1
        name = b"f%d" % self.foreign
        if self._others(found[0], lambda path: self.store.log.move(path, os.fsdecode(name))):
            found[1].bound = False
            self.twice = True  # one of the two has other numbers, for as long as the other is there
            self.model.root.entries[name] = self._see(self.layer.lookup(self.layer.root, name))
            self.model.root.entries[name].bound = True

    # Ends and beginnings

    @rule()
    def forget(self) -> None:
        for inode in self.kept:
            self.layer.forget(inode, 1)
        self.kept.clear()

    @rule()
    def reopen(self) -> None:
        self.kept.clear()
        self.layer.close()
        self.layer = Layer.open(self.store, self.layer.name)
        self.compare()

    @rule()
    def crash(self) -> None:
        """What a killed process leaves is a layer with the same tree."""
        self.kept.clear()
        self.layers += 1
        layers = self.path / "store" / "layers"
        shutil.copytree(layers / self.layer.name, layers / f"layer{self.layers}")
        old = self.layer
        self.layer = Layer.open(self.store, f"layer{self.layers}")
        old.close()
        shutil.rmtree(layers / old.name)
        self.compare()

    @rule()
    def rewrite(self) -> None:
        self.layer.files.checkpoint()

    @invariant()
    def same(self) -> None:
        self.compare()
