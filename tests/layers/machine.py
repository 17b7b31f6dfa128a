"""A reference model of a writable tree, and a state machine that drives a layer and the model side by side."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonclipfs.errors import (
    DirectoryError,
    ExistsError,
    MoonclipError,
    NameTooLongError,
    NoDirectoryError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    UsageError,
)
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.lookup import Status
from moonclipfs.layers.seal import Sealer
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.layers.filekit import encode, read_all
from tests.layers.publish import Fifo, File, publish
from tests.layers.sealkit import LocalEncoder


@dataclass(eq=False)
class Node:
    """A file or directory of the model. `number` is the inode number that it was first seen with."""

    type: EntryType
    mode: int
    uid: int = 0
    gid: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    data: bytes = b""
    links: int = 1
    target: bytes = b""
    bound: bool = False
    number: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    entries: dict[bytes, Node] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.target or self.data)

    @property
    def is_directory(self) -> bool:
        return self.type is EntryType.DIRECTORY

    def touch(self, now: int) -> None:
        self.mtime_ns = self.ctime_ns = now

    def nlink(self) -> int:
        if not self.is_directory:
            return self.links
        return 2 + sum(child.is_directory for child in self.entries.values())

    def walk(self, path: bytes = b"") -> Iterator[tuple[bytes, Node, Node, bytes]]:
        """(path, node, directory, name) of everything below."""
        for name, child in list(self.entries.items()):
            at = path + b"/" + name if path else name
            yield at, child, self, name
            if child.is_directory:
                yield from child.walk(at)

    def holds(self, node: Node) -> bool:
        return self is node or any(child is node for _, child, _, _ in self.walk())

    def has_bound(self) -> bool:
        return self.bound or any(child.bound for _, child, _, _ in self.walk())


class Model:
    """What POSIX says of a tree: each method changes it, or raises what the layer has to raise."""

    def __init__(self) -> None:
        self.root = Node(EntryType.DIRECTORY, 0o755)

    def _new(self, directory: Node, name: bytes) -> None:
        if not directory.is_directory:
            raise NoDirectoryError
        if len(name) > 255:
            raise NameTooLongError
        if directory is self.root and name.startswith(b"@"):
            raise NotPermittedError

    def make(
        self, directory: Node, name: bytes, type_: EntryType, mode: int, uid: int, gid: int, now: int, target: bytes
    ) -> None:
        self._new(directory, name)
        if name in directory.entries:
            raise ExistsError
        node = Node(type_, mode, uid, gid, now, now, now, target=target)
        if directory.mode & 0o2000:
            node.gid = directory.gid
            node.mode |= 0o2000 if node.is_directory else 0
        directory.entries[name] = node
        directory.touch(now)

    def link(self, node: Node, directory: Node, name: bytes, now: int) -> None:
        self._new(directory, name)
        if name in directory.entries:
            raise ExistsError
        if node.is_directory:
            raise NotPermittedError
        directory.entries[name] = node
        node.links += 1
        node.ctime_ns = now
        directory.touch(now)

    def _get(self, directory: Node, name: bytes) -> Node:
        if not directory.is_directory:
            raise NoDirectoryError
        if len(name) > 255:
            raise NameTooLongError
        if name not in directory.entries:
            raise NotFoundError
        return directory.entries[name]

    def unlink(self, directory: Node, name: bytes, now: int) -> None:
        node = self._get(directory, name)
        if node.is_directory:
            raise DirectoryError
        self._leave(directory, name, now)
        directory.touch(now)

    def rmdir(self, directory: Node, name: bytes, now: int) -> None:
        node = self._get(directory, name)
        if not node.is_directory:
            raise NoDirectoryError
        if node.entries:
            raise NotEmptyError
        self._leave(directory, name, now)
        directory.touch(now)

    def _leave(self, directory: Node, name: bytes, now: int) -> None:
        node = directory.entries.pop(name)
        node.links -= 1
        node.ctime_ns = now

    def rename(
        self, directory: Node, name: bytes, new: Node, new_name: bytes, now: int, replace: bool, exchange: bool
    ) -> None:
        node = self._get(directory, name)
        self._new(new, new_name)
        victim = new.entries.get(new_name)
        self._check_rename(node, directory, victim, new, replace, exchange)
        if victim is node:
            return
        if exchange:
            assert victim is not None
            if node.is_directory and victim.is_directory and node.has_bound() and victim.has_bound():
                raise UsageError
            directory.entries[name] = victim
            victim.ctime_ns = now
        else:
            if victim is not None:
                self._leave(new, new_name, now)
            del directory.entries[name]
        new.entries[new_name] = node
        node.ctime_ns = now
        directory.touch(now)
        new.touch(now)

    def _check_rename(
        self, node: Node, directory: Node, victim: Node | None, new: Node, replace: bool, exchange: bool
    ) -> None:
        if exchange and victim is None:
            raise NotFoundError
        if victim is not None and not (replace or exchange):
            raise ExistsError
        if node.is_directory and node.holds(new):
            raise UsageError
        if victim is None or victim is node:
            return
        if victim.holds(directory):
            raise UsageError if exchange else NotEmptyError
        if exchange:
            return
        if node.is_directory and not victim.is_directory:
            raise NoDirectoryError
        if victim.is_directory and not node.is_directory:
            raise DirectoryError
        if victim.entries:
            raise NotEmptyError

    def set_attributes(
        self, node: Node, now: int, mode: int | None, uid: int | None, gid: int | None, mtime: int | None
    ) -> None:
        if mode is None and (uid is not None or gid is not None) and not node.is_directory:
            mode = node.mode & ~0o4000
            mode &= ~0o2000 if node.mode & 0o010 else ~0
        node.mode = node.mode if mode is None else mode
        node.uid = node.uid if uid is None else uid
        node.gid = node.gid if gid is None else gid
        node.mtime_ns = node.mtime_ns if mtime is None else mtime
        node.ctime_ns = now

    def write(self, node: Node, offset: int, data: bytes, now: int) -> None:
        node.data = node.data.ljust(offset, b"\0")
        node.data = node.data[:offset] + data + node.data[offset + len(data) :]
        self._wrote(node, now)

    def truncate(self, node: Node, size: int, now: int) -> None:
        node.data = node.data[:size].ljust(size, b"\0")
        self._wrote(node, now)

    def _wrote(self, node: Node, now: int) -> None:
        node.mode &= ~0o4000
        node.mode &= ~0o2000 if node.mode & 0o010 else ~0
        node.touch(now)

    def set_xattr(self, node: Node, name: bytes, value: bytes | None, now: int) -> None:
        if name.startswith(b"user.moonclip."):
            raise NotPermittedError
        if value is not None:
            node.xattrs[name] = value
        elif node.xattrs.pop(name, None) is None:
            raise NotFoundError
        node.ctime_ns = now


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
        assert status.nlink == node.nlink(), path
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
        """Nothing that the layer shows changes by it."""
        path, node = self._node(pick, directory=True)
        if not node.is_directory or not path:
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
