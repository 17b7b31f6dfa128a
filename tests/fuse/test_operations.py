"""What the kernel is answered, through a real mount, and by handlers called without one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyfuse3
import pytest
import trio
from pyfuse3 import FileHandleT, FUSEError, InodeT, RequestContext

from moonclipfs.errors import MissingObjectError
from moonclipfs.fuse.operations import Operations, ReadOnlyOperations
from moonclipfs.fuse.reading import Reads
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.tree import Node, Tree
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually
from tests.layers.publish import File, publish

MIB = 1 << 20
CONTEXT = cast(RequestContext, None)


def errno_of(path: Path | str, name: str) -> int:
    """What getxattr says is wrong."""
    with pytest.raises(OSError) as caught:
        os.getxattr(path, name)
    return caught.value.errno or 0


def test_extended_attributes(store: Store, mounter: Mounter) -> None:
    """Stored user.* attributes are listed and read; user.moonclip.* are read only; security.* are not supported."""
    publish(store, "run/a", {"x": File(b"1" * 5000, xattrs={b"user.note": b"mine", b"user.empty": b""})})
    mounted = mounter(store.path)
    path = mounted.path / "run/a/x"
    assert sorted(os.listxattr(path)) == ["user.empty", "user.note"]
    assert os.getxattr(path, "user.note") == b"mine"
    assert os.getxattr(path, "user.empty") == b""
    assert os.getxattr(path, "user.moonclip.snapshot") == b"run/a"
    assert os.getxattr(path, "user.moonclip.version") == b"1"
    assert os.getxattr(path, "user.moonclip.store") == os.fsencode(store.path)
    assert len(os.getxattr(path, "user.moonclip.object")) == 64
    assert int(os.getxattr(path, "user.moonclip.stored_size")) > 0
    assert errno_of(path, "user.none") == errno.ENODATA
    assert errno_of(path, "trusted.none") == errno.ENODATA
    for name in ("security.capability", "security.selinux", "system.posix_acl_access"):
        assert errno_of(path, name) == errno.EOPNOTSUPP
    assert os.getxattr(mounted.path, "user.moonclip.store") == os.fsencode(store.path)


def test_shown_virtual_names(store: Store, mounter: Mounter) -> None:
    publish(store, "run/a", {"x": b"1"})
    mounted = mounter(store.path, show_virtual=True)
    assert sorted(os.listdir(mounted.path)) == ["@experts", "@latest", "@versions", "run"]
    assert "user.moonclip.snapshot" in os.listxattr(mounted.path / "run/a/x")
    assert (mounted.path / "@latest/run/x").read_bytes() == b"1"
    assert os.readlink(mounted.path / "@latest/run") == "../run/a"


def test_a_large_directory_is_listed_once(store: Store, mounter: Mounter) -> None:
    """A listing gives each name once, however long it is."""
    names = {f"file-{number:05d}-{'x' * (number % 200)}": b"" for number in range(3000)}
    publish(store, "run/a", {**names, "d": {str(number): {} for number in range(300)}})
    mounted = mounter(store.path)
    assert sorted(os.listdir(mounted.path / "run/a")) == sorted([*names, "d"])
    with os.scandir(mounted.path / "run/a/d") as entries:
        assert all(entry.is_dir(follow_symlinks=False) for entry in entries)


def test_a_listing_that_is_open_stays_as_it_was(store: Store, mounter: Mounter) -> None:
    """A listing that is being read is not disturbed by names that go away meanwhile."""
    names = [f"{number:03d}-{'x' * 200}" for number in range(100)]
    version = publish(store, f"run/{names[0]}", {"x": b"1"})
    for name in names[1:]:
        store.log.bind(f"run/{name}", version.root, version.metadata)
    mounted = mounter(store.path)
    with os.scandir(mounted.path / "run") as entries:
        first = next(entries).name
        store.log.unbind([f"run/{name}" for name in names[::2]])
        eventually(lambda: len(os.listdir(mounted.path / "run")) == 50, 3)
        rest = [entry.name for entry in entries]
    assert {*names[1::2]} <= {first, *rest}
    assert len({first, *rest}) == 1 + len(rest)


def test_names_appear_vanish_and_move_within_a_second(store: Store, mounter: Mounter) -> None:
    """Snapshots that are bound, moved or forgotten while mounted appear and vanish within a second."""
    publish(store, "run/a", {"x": b"1"})
    mounted = mounter(store.path)
    assert os.listdir(mounted.path) == ["run"]
    assert not (mounted.path / "run/b/x").exists()
    publish(store, "run/b", {"x": b"2"})
    eventually(lambda: (mounted.path / "run/b/x").exists(), 1.5)
    store.log.move("run", "old")
    eventually(lambda: (mounted.path / "old/b/x").exists() and not (mounted.path / "run").exists(), 1.5)
    assert (mounted.path / "@latest/old/x").read_bytes() == b"2"
    store.log.unbind(["old/a", "old/b"])
    eventually(lambda: os.listdir(mounted.path) == [], 1.5)
    assert (mounted.path / "@versions/old/a/1/x").read_bytes() == b"1"


def test_a_name_that_appears_inside_a_snapshot_is_seen(store: Store, mounter: Mounter) -> None:
    """What the kernel remembers as absent inside a snapshot appears when a name is bound there."""
    publish(store, "a", {"d": {"y": b"1"}})
    mounted = mounter(store.path)
    for _ in range(3):
        assert not (mounted.path / "a/d/new").exists()
    assert mounted.stats()["requests"]["lookup"] <= 6  # absence is remembered: asked once
    assert os.stat(mounted.path / "a/d").st_nlink == 2
    publish(store, "a/d/new/b", {"x": b"2"})
    eventually(lambda: (mounted.path / "a/d/new/b/x").exists(), 1.5)
    assert sorted(os.listdir(mounted.path / "a/d")) == ["new", "y"]
    eventually(lambda: os.stat(mounted.path / "a/d").st_nlink == 3, 1.5)
    store.log.unbind(["a/d/new/b"])
    eventually(lambda: os.listdir(mounted.path / "a/d") == ["y"], 1.5)
    assert not (mounted.path / "a/d/new").exists()


def test_contents_are_asked_for_once(store: Store, mounter: Mounter) -> None:
    """stat of what lies inside a snapshot is answered by the kernel after the first time."""
    publish(store, "a", {"d": {"y": b"1"}})
    mounted = mounter(store.path)
    os.stat(mounted.path / "a/d/y")
    before = mounted.stats()["requests"]
    for _ in range(100):
        os.stat(mounted.path / "a/d/y")
    after = mounted.stats()["requests"]
    assert after["lookup"] - before["lookup"] <= 4
    assert after.get("getattr", 0) - before.get("getattr", 0) <= 4


def damage(store: Path, how: str) -> None:
    """Harm the pack with the most bytes."""
    pack = max((store / "packs").iterdir(), key=lambda path: path.stat().st_size)
    size = pack.stat().st_size
    if how == "missing":
        pack.unlink()
    elif how == "short":
        os.truncate(pack, size // 2)
    else:
        with open(pack, "r+b") as file:
            file.seek(size // 2)
            byte = file.read(1)
            file.seek(size // 2)
            file.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
def test_r079_damage_is_eio_and_nothing_else(store: Store, mounter: Mounter, how: str) -> None:
    """Damaged or missing data is EIO, and a log line names path, offset and object; all else stays readable."""
    data = os.urandom(8 * MIB)
    publish(store, "run/a", {"w.bin": data})
    publish(store, "run/b", {"x": b"not harmed" * 1000})
    damage(store.path, how)
    mounted = mounter(store.path)
    assert (mounted.path / "run/b/x").read_bytes() == b"not harmed" * 1000
    wrong = []
    try:
        file = os.open(mounted.path / "run/a/w.bin", os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        assert how in ("missing", "short")  # not even the recipe can be read
        assert error.errno == errno.EIO
        assert "/run/a/w.bin" in mounted.log_text() or "/run/a" in mounted.log_text()
        return
    try:
        for at in range(0, len(data), 64 << 10):
            try:
                assert os.pread(file, 64 << 10, at) == data[at : at + (64 << 10)]
            except OSError as error:
                assert error.errno == errno.EIO
                wrong.append(at)
    finally:
        os.close(file)
    assert 1 <= len(wrong) < 128
    line = next(line for line in mounted.log_text().splitlines() if f"at offset {wrong[0]}," in line)
    assert " ERROR " in line
    assert "read of /run/a/w.bin" in line
    assert "object " in line
    assert (mounted.path / "run/b/x").read_bytes() == b"not harmed" * 1000


def test_a_damaged_directory_can_still_be_seen_from_above(store: Store, mounter: Mounter) -> None:
    """A directory whose own object is damaged is listed in its parent; opening it is EIO."""
    publish(store, "run/a", {"d": {"y": b"1"}, "x": b"fine"})
    entry = store.lookup(store.resolve("run/a"), b"d")
    location = store.index.find(entry.child)
    assert location is not None
    with open(store.path / "packs" / f"{location.pack}.pack", "r+b") as file:
        file.seek(location.offset)
        file.write(bytes(location.encoded_length))
    mounted = mounter(store.path)
    assert sorted(os.listdir(mounted.path / "run/a")) == ["d", "x"]
    assert (mounted.path / "run/a/x").read_bytes() == b"fine"
    with pytest.raises(OSError, match="Input/output error"):
        os.listdir(mounted.path / "run/a/d")
    assert "opendir of /run/a/d" in mounted.log_text()


@pytest.fixture
def operations(store: Store) -> Iterator[Operations]:
    """Handlers over a store with run/a/x, without a kernel."""
    publish(store, "run/a", {"x": b"12345"})
    tree, holds = Tree(store), Holds(store.lease)
    holds.add(tree.view.sequence)
    yield ReadOnlyOperations(tree, holds, Reads(64 * MIB, 2), store.path)


async def walk_to(operations: Operations, *names: bytes) -> InodeT:
    inode = pyfuse3.ROOT_INODE
    for name in names:
        inode = (await operations.lookup(inode, pyfuse3.FileNameT(name), CONTEXT)).st_ino
    return inode


def run(operations: Operations, task: Any) -> Any:
    """Run one coroutine function with the operations' handlers."""
    return trio.run(task, operations)


def test_only_fuse_errors_leave_a_handler(
    operations: Operations, expect_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a handler raises, the kernel gets an errno, and the mount lives on."""

    async def task(operations: Operations) -> None:
        inode = await walk_to(operations, b"run", b"a", b"x")
        with pytest.raises(FUSEError) as caught:
            await operations.getattr(InodeT(12345), CONTEXT)
        assert caught.value.errno == errno.EIO
        info = await operations.open(inode, pyfuse3.FlagT(os.O_RDONLY), CONTEXT)
        assert bytes(await operations.read(info.fh, 1, 10)) == b"2345"
        assert bytes(await operations.read(info.fh, 100, 10)) == b""

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(operations.reads, "read", broken)
        with pytest.raises(FUSEError) as caught:
            await operations.read(info.fh, 0, 5)
        assert caught.value.errno == errno.EIO
        await operations.release(info.fh)
        assert len(operations.handles) == 0
        await operations.forget([(InodeT(999), 5), (inode, 1)])
        assert inode not in [operations.nodes.find(node) for node in operations.nodes.oldest(100)]

    expect_log(r"ERROR moonclipfs.fuse.operations: getattr with \(12345, None\): unexpected error")
    expect_log(r"ERROR moonclipfs.fuse.operations: read of /run/a/x at offset 0, 5 bytes: unexpected error")
    run(operations, task)
    assert operations.in_work == 0


def test_what_was_forgotten_is_stale(
    operations: Operations, store: Store, monkeypatch: pytest.MonkeyPatch, expect_log: Any
) -> None:
    """What is missing of a forgotten snapshot is stale, not damaged: ESTALE, and no log line."""

    def missing(node: Node) -> None:
        raise MissingObjectError(f"{node.place} is in no pack")

    def forget(tree: Tree) -> None:
        store.log.unbind(["run/a"])
        store.log.forget([("run/a", 1)])
        view = tree.look(0)
        assert view is not None
        tree.adopt(view)

    async def task(operations: Operations) -> None:
        inode = await walk_to(operations, b"run", b"a", b"x")
        monkeypatch.setattr(operations.tree, "open", missing)
        for expected in (errno.EIO, errno.ESTALE):
            with pytest.raises(FUSEError) as caught:
                await operations.open(inode, pyfuse3.FlagT(os.O_RDONLY), CONTEXT)
            assert caught.value.errno == expected
            if expected == errno.EIO:
                forget(operations.tree)

    expect_log("ERROR moonclipfs.fuse.operations: open of /run/a/x: /run/a/x is in no pack")
    run(operations, task)


def test_every_change_is_refused(operations: Operations) -> None:
    async def task(operations: Operations) -> None:
        inode = await walk_to(operations, b"run", b"a", b"x")
        for name in (
            "setattr", "mknod", "mkdir", "unlink", "rmdir", "symlink", "rename", "link", "create", "write", "setxattr",
            "removexattr",
        ):  # fmt: skip
            with pytest.raises(FUSEError) as caught:
                await getattr(operations, name)(inode, b"x", CONTEXT)
            assert caught.value.errno == errno.EROFS
        with pytest.raises(FUSEError) as caught:
            await operations.open(inode, pyfuse3.FlagT(os.O_RDWR), CONTEXT)
        assert caught.value.errno == errno.EROFS

    run(operations, task)


def test_handles_are_by_inode_and_counted(operations: Operations) -> None:
    """A file that is opened twice is closed by its second release, in whatever order these come."""

    async def task(operations: Operations) -> None:
        inode = await walk_to(operations, b"run", b"a", b"x")
        first = await operations.open(inode, pyfuse3.FlagT(os.O_RDONLY), CONTEXT)
        second = await operations.open(inode, pyfuse3.FlagT(os.O_RDONLY), CONTEXT)
        assert first.fh == second.fh == FileHandleT(inode)
        await operations.release(first.fh)
        assert bytes(await operations.read(second.fh, 0, 5)) == b"12345"
        await operations.release(second.fh)
        assert len(operations.handles) == 0

    run(operations, task)


def test_the_number_of_open_files_is_bounded(
    operations: Operations, monkeypatch: pytest.MonkeyPatch, expect_log: Any
) -> None:
    from moonclipfs import limits

    monkeypatch.setattr(limits, "OPEN_HANDLES", 2)
    expect_log("2 files are open already")

    async def task(operations: Operations) -> None:
        first = await operations.opendir(pyfuse3.ROOT_INODE, CONTEXT)
        await operations.opendir(pyfuse3.ROOT_INODE, CONTEXT)
        with pytest.raises(FUSEError):
            await operations.opendir(pyfuse3.ROOT_INODE, CONTEXT)
        await operations.releasedir(first)
        await operations.opendir(pyfuse3.ROOT_INODE, CONTEXT)

    run(operations, task)


def test_an_unreachable_store_is_logged_once(small: Mounted) -> None:
    """While the log cannot be read, the mount goes on with the names it knows, and says so once."""
    shutil.move(small.store / "log", small.store / "away")
    try:
        eventually(lambda: "names may be out of date" in small.log_text(), 5)
        assert (small.path / "run1/a/config.json").read_bytes() == b'{"layers": 2}'
        eventually(lambda: small.stats()["sequence"] == 1)
        assert small.log_text().count("names may be out of date") == 1
    finally:
        shutil.move(small.store / "away", small.store / "log")
