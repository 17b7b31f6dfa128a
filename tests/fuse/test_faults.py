"""What must not take a mount down, and what must not be left behind: hostile places, failing parts, hasty signals."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import FUSEError, InodeT

from moonclipfs import limits
from moonclipfs.errors import CorruptError, FuseUnavailableError
from moonclipfs.fuse import server
from moonclipfs.fuse.control import ControlServer, ask, runtime_path, server_pid
from moonclipfs.fuse.handles import FileHandle
from moonclipfs.fuse.mount import unmount
from moonclipfs.fuse.mounts import mount_at
from moonclipfs.fuse.operations import Operations
from moonclipfs.fuse.prepare import MountOptions
from moonclipfs.fuse.reading import Reads
from moonclipfs.fuse.refresh import NameRefresher
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.tree import Tree
from moonclipfs.store.gc import collect
from moonclipfs.store.leases import LeaseState, live_leases
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually, is_running, patched_server, processes_of
from tests.fuse.test_parts import NoReader, node
from tests.layers.publish import publish
from tests.layers.test_holds import FakeLease
from tests.store.kit import noise

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
CONTEXT: Any = None


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a module in it by any name that a server imports leaves the file that is returned."""
    directory, marker = tmp_path / "hostile", tmp_path / "executed"
    directory.mkdir()
    for name in ("json", "trio", "pyfuse3", "numpy", "logging", "moonclipfs"):
        (directory / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.chdir(directory)
    return marker


def test_mount_runs_nothing_from_the_current_directory(store: Store, mounter: Mounter, hostile: Path) -> None:
    """mount runs no code from the current directory."""
    publish(store, "run1/a", {"x": b"1"})
    mounted = mounter(store.path)
    assert (mounted.path / "run1/a/x").read_bytes() == b"1"
    assert not hostile.exists()


def test_the_server_is_of_the_same_package_as_the_command(
    store: Store, tmp_path: Path, hostile: Path, fuse: None
) -> None:
    """Wherever the command found the package: here on its own search path, which no server inherits."""
    publish(store, "run1/a", {"x": b"1"})
    site, place = tmp_path / "site", tmp_path / "mnt"
    shutil.copytree(ROOT / "moonclipfs", site / "moonclipfs", ignore=shutil.ignore_patterns("__pycache__"))
    place.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from moonclipfs.fuse.mount import mount; sys.exit(mount(*sys.argv[1:]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        subprocess.run([sys.executable, "-P", "-c", code, store.path, place], env=environment, check=True)
        assert f" {site}/moonclipfs/_codec" in Path(f"/proc/{server_pid(str(place))}/maps").read_text()
        assert not hostile.exists()
    finally:
        if mount_at(str(place)) is not None:
            unmount(place)


FOREGROUND = (
    "import sys; from moonclipfs.fuse.mount import *; sys.exit(mount(*sys.argv[1:], MountOptions(foreground=True)))"
)


@pytest.mark.parametrize("pause", [0.0005, 0.05])
def test_a_hail_of_signals_unmounts(store: Store, tmp_path: Path, fuse: None, pause: float) -> None:
    """However often it is told to stop, the server unmounts first and exits with 0."""
    publish(store, "run1/a", {"x": b"1"})
    place = tmp_path / "mnt"
    place.mkdir()
    for number in (signal.SIGTERM, signal.SIGINT):
        command = [sys.executable, "-c", FOREGROUND, store.path, place]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        try:
            eventually((place / "run1/a/x").exists)
            deadline = time.monotonic() + 20
            while process.poll() is None and time.monotonic() < deadline:
                process.send_signal(number)
                time.sleep(pause)
            assert process.returncode == 0
            assert mount_at(str(place)) is None
        finally:
            process.kill()
            process.wait()
            if mount_at(str(place)) is not None:
                subprocess.run(["fusermount3", "-uz", place], check=True)


def test_a_mount_that_fails_leaves_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No control socket, no changed handler of a signal."""

    def refuse(*_: object, **__: object) -> None:
        raise FuseUnavailableError("not today")

    monkeypatch.setattr(server, "_mount", refuse)
    before = [signal.getsignal(number) for number in server.SIGNALS]
    with pytest.raises(FuseUnavailableError):
        server.serve(str(store.path), str(tmp_path / "mnt"), MountOptions(), lambda: None)
    assert not runtime_path(str(tmp_path / "mnt"), "sock").exists()
    assert [signal.getsignal(number) for number in server.SIGNALS] == before


def test_a_new_mount_keeps_its_socket(small: Mounted, mounter: Mounter) -> None:
    """A server that was detached takes its own control socket away when it ends, not that of the next one."""
    with open(small.path / "run1/a/model.bin", "rb"):
        unmount(small.path, lazy=True)
        again = mounter(small.store)
        assert ask(str(small.path), "ping")["pid"] == again.pid != small.pid
    eventually(lambda: not Path(f"/proc/{small.pid}").exists())
    assert ask(str(small.path), "ping")["pid"] == again.pid
    unmount(small.path)
    assert not runtime_path(str(small.path), "sock").exists()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_detached_server_that_is_told_to_stop_leaves_the_next_mount_alone(
    store: Store, mounter: Mounter, read_only: bool
) -> None:
    """It neither unmounts nor syncs what is at its place by then."""
    publish(store, "run1/a", {"x": b"1"})
    first = mounter(store.path, read_only=read_only)
    descriptor = os.open(first.path / "run1/a/x", os.O_RDONLY)
    unmount(first.path, lazy=True)
    again = mounter(store.path)
    before = again.stats()["requests"]
    os.kill(first.pid, signal.SIGTERM)
    eventually(lambda: not is_running(first.pid))
    with suppress(OSError):  # the server that would be told of the close is gone
        os.close(descriptor)
    assert again.stats()["requests"] == before
    assert (again.path / "run1/a/x").read_bytes() == b"1"


def talk(path: Path, *lines: bytes) -> list[Mapping[str, Any]]:
    """Say lines to a control socket, each in a talk of its own; the answers, {} where the talk was ended."""
    answers = []
    for line in lines:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(path))
            try:
                client.sendall(line + b"\n")
                answer = client.makefile("rb").readline()
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            answers.append(json.loads(answer or b"{}"))
    return answers


def test_nothing_that_is_said_ends_the_control_socket(tmp_path: Path, expect_log: Callable[[str], None]) -> None:
    """Nor an operation that fails: other clients are answered."""

    def fail() -> Mapping[str, Any]:
        raise MemoryError

    async def task() -> list[Mapping[str, Any]]:
        with ControlServer(tmp_path / "sock", {"fail": fail, "ping": lambda: {"pid": 1}}) as control:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(control.serve)
                lines = [b"[" * 50_000, b'{"a":' * 10_000, b" " * limits.CONTROL_LINE_BYTES, b'{"op": "fail"}']
                answers = await trio.to_thread.run_sync(talk, control.path, *lines, b'{"op": "ping"}')
                nursery.cancel_scope.cancel()
        return answers

    expect_log("ERROR moonclipfs.fuse.control: unexpected error at the control socket")
    nested, open_ended, too_long, failing, ping = trio.run(task)
    assert "error" in nested
    assert "error" in open_ended
    assert too_long == failing == {}
    assert ping == {"pid": 1}
    assert not (tmp_path / "sock").exists()


def test_a_verb_that_takes_long_is_in_no_other_ones_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do clients stay that say nothing for long."""
    monkeypatch.setattr(limits, "CONTROL_IDLE_SECONDS", 0.3)
    done = threading.Event()

    def wait(_: Mapping[str, Any]) -> Mapping[str, Any]:
        done.wait(20)
        return {}

    def ask_all(path: Path) -> Mapping[str, Any]:
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(limits.CONTROL_CLIENTS + 4)]
        for client in waiting:
            client.settimeout(10)
            client.connect(str(path))
            client.sendall(b'{"op": "flush"}\n')
        time.sleep(1)
        (answer,) = talk(path, b'{"op": "status"}')
        done.set()
        for client in waiting:
            assert client.recv(100) == b"{}\n"
            assert client.recv(100) == b"", "it was silent"
            client.close()
        return answer

    async def task() -> Mapping[str, Any]:
        with ControlServer(tmp_path / "sock", {}, {"flush": wait, "status": lambda _: {"staged": 1}}) as control:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(control.serve)
                answer = await trio.to_thread.run_sync(ask_all, control.path)
                nursery.cancel_scope.cancel()
        return answer

    assert trio.run(task) == {"staged": 1}


def test_an_error_that_was_answered_holds_nothing(tmp_path: Path) -> None:
    """What a request held that failed, staged files say, is let go of without the help of the garbage collector."""

    class Held:
        pass

    asked: list[weakref.ref[Held]] = []

    def fail(_: Mapping[str, Any]) -> Mapping[str, Any]:
        held = Held()
        asked.append(weakref.ref(held))
        raise CorruptError(f"{held} is damaged")

    async def task() -> list[Mapping[str, Any]]:
        with ControlServer(tmp_path / "sock", {}, {"fail": fail}) as control:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(control.serve)
                answers = await trio.to_thread.run_sync(talk, control.path, b'{"op": "fail"}')
                nursery.cancel_scope.cancel()
        return answers

    gc.disable()
    try:
        (answer,) = trio.run(task)
        assert answer["error"] == "CorruptError"
        eventually(lambda: asked[0]() is None)
    finally:
        gc.enable()


class Reader(NoReader):
    """A file of 1 GiB, every byte decoded; read-ahead is counted."""

    def __init__(self, error: Exception | None = None) -> None:
        self.size = 1 << 30
        self.ahead = 0
        self._error = error

    def cached(self, offset: int, length: int) -> bytes:
        return bytes(length)

    def prefetch(self, offset: int, length: int) -> None:
        self.ahead += length
        if self._error is not None:
            raise self._error


def opened(reader: Reader) -> FileHandle:
    handle = FileHandle(node("f"), reader, 1)
    handle.users = 1
    return handle


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "gone"), CorruptError("damaged")])
def test_a_read_ahead_that_fails_ends_nothing(error: Exception, expect_log: Callable[[str], None]) -> None:
    """The work goes on with the next one."""

    async def task() -> None:
        reads, reader = Reads(256 * MIB, 1), Reader(error)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reads.work)
            await reads.read(opened(reader), 0, MIB)
            while reader.ahead < 3 * limits.PREFETCH_STEP_BYTES:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    if not isinstance(error, CorruptError):
        expect_log("ERROR moonclipfs.fuse.reading: read-ahead of /f at [0-9]+: unexpected error")
    trio.run(task)


async def queued(reads: Reads, handle: FileHandle, offset: int, mib: int) -> int:
    """How many steps of read-ahead a sequential read from `offset` on leads to."""
    for at in range(offset, offset + mib * MIB, MIB):
        await reads.read(handle, at, MIB)
    count = reads._steps.qsize()
    for _ in range(count):
        reads._steps.get_nowait()
    return count


@pytest.mark.parametrize("others", [1, 31, 33, 200])
def test_files_that_are_merely_open_take_no_read_ahead_from_others(others: int) -> None:
    """Neither those of which the head was read, nor those that were read for long, a second ago."""

    async def task(clock: trio.testing.MockClock) -> tuple[int, int, int]:
        reads = Reads(256 * MIB, 1)
        handles = [opened(Reader()) for _ in range(others)]
        heads = sum([await queued(reads, handle, 0, 1) for handle in handles])
        last = handles[-1]
        after_heads = await queued(reads, last, MIB, 32)
        for handle in handles:
            await queued(reads, handle, 33 * MIB if handle is last else MIB, 3)
        clock.jump(1.5)
        return heads, after_heads, await queued(reads, last, 36 * MIB, 32)

    clock = trio.testing.MockClock()
    heads, after_heads, after_pause = trio.run(task, clock, clock=clock)
    assert after_heads >= 16
    assert after_pause >= 16
    assert heads * limits.PREFETCH_STEP_BYTES <= 256 * MIB


def test_files_that_are_read_at_once_share_the_read_ahead() -> None:
    """Together they are not so far ahead that decoded blocks would leave the cache before they are read."""

    async def task() -> int:
        reads = Reads(256 * MIB, 1)
        handles, steps = [opened(Reader()) for _ in range(64)], 0
        for part in range(8):
            for handle in handles:
                steps += await queued(reads, handle, part * MIB, 1)
        return steps

    assert trio.run(task) * limits.PREFETCH_STEP_BYTES <= 256 * MIB


@pytest.fixture
def held(store: Store) -> tuple[Operations, Holds, FakeLease]:
    """Handlers over run/a with ten files, without a kernel; their view is held by a lease that tells what it holds."""
    publish(store, "run/a", {f"f{number}": b"12345" for number in range(10)})
    tree, lease = Tree(store), FakeLease()
    holds = Holds(lease)  # type: ignore[arg-type]
    holds.add(tree.view.sequence)
    return Operations(tree, holds, Reads(64 * MIB, 2), store.path), holds, lease


async def walk_to(operations: Operations, *names: bytes) -> InodeT:
    inode = pyfuse3.ROOT_INODE
    for name in names:
        inode = (await operations.lookup(inode, pyfuse3.FileNameT(name), CONTEXT)).st_ino
    return inode


@pytest.mark.parametrize("way", ["open", "opendir"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_opened_is_held_while_the_names_change(
    held: tuple[Operations, Holds, FakeLease], monkeypatch: pytest.MonkeyPatch, way: str, fails: bool
) -> None:
    """The names go on, twice, while the store is asked; what fails to open holds nothing."""
    operations, holds, lease = held
    tree, first = operations.tree, operations.tree.view.sequence
    asked = "open" if way == "open" else "names_in"
    real = getattr(tree, asked)

    def slow(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        holds.add(first + 1)
        holds.unpin(first)
        holds.sweep()
        if fails:
            raise CorruptError("damaged")
        return result

    async def task() -> None:
        inode = await walk_to(operations, b"run", b"a", *([b"f0"] if way == "open" else []))
        monkeypatch.setattr(tree, asked, slow)
        if fails:
            monkeypatch.setattr(tree, "is_kept", lambda _: False)  # so that nothing is logged
            with pytest.raises(FUSEError):
                await (
                    operations.open(inode, pyfuse3.FlagT(0), CONTEXT)
                    if way == "open"
                    else operations.opendir(inode, CONTEXT)
                )
        elif way == "open":
            handle = (await operations.open(inode, pyfuse3.FlagT(0), CONTEXT)).fh
            assert lease.held == [first, first + 1]
            await operations.release(handle)
        else:
            directory = await operations.opendir(inode, CONTEXT)
            assert lease.held == [first, first + 1]
            await operations.releasedir(directory)
        holds.sweep()
        assert lease.held == [first + 1]

    trio.run(task)


def test_a_listing_that_fails_leaves_no_mentions(
    held: tuple[Operations, Holds, FakeLease], monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    """The kernel is told of what was listed before, and forgets that; then it is told of the error."""
    operations, _, _ = held
    real, told = operations.tree.children, []
    monkeypatch.setattr(limits, "LISTING_BATCH", 4)

    def damaged(directory: Any, names: list[bytes], *, wait: bool = True) -> Any:
        if b"f5" in names:
            raise CorruptError("f5 is damaged")
        return real(directory, names, wait=wait)

    def reply(_: Any, name: bytes, attributes: pyfuse3.EntryAttributes, following: int) -> bool:
        told.append((name, attributes.st_ino, following))
        return True

    async def task() -> None:
        inode = await walk_to(operations, b"run", b"a")
        known = len(operations.nodes)
        monkeypatch.setattr(operations.tree, "children", damaged)
        monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
        handle: Any = await operations.opendir(inode, CONTEXT)
        token: Any = None
        await operations.readdir(handle, 0, token)
        assert [name for name, _, _ in told] == [b".", b"..", b"f0", b"f1"]
        with pytest.raises(FUSEError) as caught:
            await operations.readdir(handle, told[-1][2], token)
        assert caught.value.errno == errno.EIO
        assert len(told) == 4
        await operations.forget([(number, 1) for name, number, _ in told if name not in (b".", b"..")])
        assert len(operations.nodes) == known

    expect_log("readdir of /run/a: f5 is damaged")
    trio.run(task)


def test_attributes_that_cannot_be_told_leave_no_mention(
    held: tuple[Operations, Holds, FakeLease], monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    operations, _, _ = held
    real = operations.tree.children

    def odd(directory: Any, names: Any, *, wait: bool = True) -> Any:
        return [found and (found[0], found[1]._replace(size=1 << 70)) for found in real(directory, names, wait=wait)]

    async def task() -> None:
        inode = await walk_to(operations, b"run", b"a")
        known = len(operations.nodes)
        monkeypatch.setattr(operations.tree, "children", odd)
        with pytest.raises(FUSEError):
            await operations.lookup(inode, pyfuse3.FileNameT(b"f0"), CONTEXT)
        assert len(operations.nodes) == known

    expect_log("lookup of .*: unexpected error")
    trio.run(task)


def leases_of(mounted: Mounted) -> list[LeaseState]:
    return [lease for lease in live_leases(mounted.store) if lease.pid == mounted.pid]


def test_what_is_open_for_long_is_not_in_the_way_of_gc(store: Store, mounter: Mounter) -> None:
    """A checkpoint that a server keeps mapped for weeks must not keep the space of all that is forgotten meanwhile."""
    publish(store, "run1/a", {"x": noise(1, 50_000)})
    publish(store, "run1/b", {"x": noise(2, 50_000)})
    mounted = mounter(store.path)
    with open(mounted.path / "run1/a/x", "rb") as kept, open(mounted.path / "run1/b/x", "rb") as gone:
        store.log.forget([("run1/b", 1)])
        assert collect(store, wait_seconds=5).waiting_packs == 1
        assert gone.read() == noise(2, 50_000)
        gone.close()
        assert collect(store, wait_seconds=5).waiting_packs == 0
        assert kept.read() == noise(1, 50_000)


def test_a_lost_lease_is_replaced(store: Store, mounter: Mounter) -> None:
    """A mount that others took for dead has a new lease within a second, which holds what is open; it says so once."""
    first = publish(store, "run1/a", {"x": b"1"})
    mounted = mounter(store.path)
    with open(mounted.path / "run1/a/x", "rb"):
        store.log.forget([("run1/a", 1)])  # only what was forgotten is held as of the time when it was opened
        eventually(lambda: mounted.stats()["sequence"] > first.sequence)
        (lost,) = leases_of(mounted)
        (store.path / "leases" / f"{lost.name}.lease").unlink()
        eventually(lambda: [lease.seen for lease in leases_of(mounted)] == [lost.seen])
        (lease,) = leases_of(mounted)
        assert lease.name != lost.name
        assert (lease.hold, lease.purpose) == (first.sequence, lost.purpose)
    eventually(lambda: [lease.hold for lease in leases_of(mounted)] == [lost.seen])
    assert mounted.log_text().count("others took this mount for dead; it has a new lease") == 1


def test_a_mount_without_a_lease_takes_one_when_it_can(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was made while the disk was full, for example."""
    from moonclipfs.errors import NoSpaceError
    from moonclipfs.store.leases import Lease

    def full(*_: object) -> None:
        raise NoSpaceError("no space")

    publish(store, "run1/a", {"x": b"1"})
    with monkeypatch.context() as patched:
        patched.setattr(Lease, "acquire", full)
        reader = Store.open(store.path, purpose="mount")
        tree, holds = Tree(reader), Holds(reader.lease)
        holds.add(tree.view.sequence)
        operations = Operations(tree, holds, Reads(MIB, 1), store.path)
        refresher = NameRefresher(reader, tree, operations.nodes, operations.handles, holds)
        refresher._look()
        assert reader.lease is None
    with reader:
        refresher._look()
        states = [lease for lease in live_leases(store.path) if lease.purpose == "mount"]
        assert [(lease.seen, lease.hold) for lease in states] == [(tree.view.sequence, tree.view.sequence)]


def test_names_are_told_later_when_that_fails(store: Store, tmp_path: Path, fuse: None) -> None:
    """What a mount that is written to knows of names is believed for long: no change may be passed over."""
    failing = tmp_path / "failing"
    patch = f"""
from pathlib import Path
from moonclipfs.errors import BackendError
from moonclipfs.layers.tree import Tree
real = Tree.changed
def changed(self, *arguments):
    if Path({str(failing)!r}).exists():
        raise BackendError("the disk is slow today")
    return real(self, *arguments)
Tree.changed = changed
"""
    failing.touch()
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=False) as mounted:
        assert not (mounted.path / "run").exists()
        publish(store, "run/a", {"x": b"1"})
        sequence = store.names().sequence
        eventually(lambda: mounted.stats()["sequence"] == sequence)
        time.sleep(2 * limits.LEASE_REFRESH_SECONDS)
        failing.unlink()
        eventually((mounted.path / "run/a/x").exists)


def test_many_who_wait_for_room_stop_nobody_else(store: Store, mounter: Mounter) -> None:
    """The process that encodes takes nothing for a while, and staging is full: the mount answers all else."""
    mounted = mounter(store.path, read_only=False, staging_limit=2 * MIB)
    (mounted.path / "first").write_bytes(b"1" * MIB)
    ask(str(mounted.path), "flush", None)
    encoding = [pid for pid in processes_of(mounted.store) if pid != mounted.pid]
    code = "import os, sys\nwith open(sys.argv[1], 'wb', 0) as f:\n for _ in range(8): f.write(os.urandom(1 << 20))"
    for pid in encoding:
        os.kill(pid, signal.SIGSTOP)
    try:
        writers = [subprocess.Popen([sys.executable, "-c", code, mounted.path / f"{n}"]) for n in range(20)]
        time.sleep(4)
        assert any(writer.poll() is None for writer in writers)
        assert ask(str(mounted.path), "ping")["pid"] == mounted.pid
        assert (mounted.path / "first").read_bytes() == b"1" * MIB
    finally:
        for pid in encoding:
            os.kill(pid, signal.SIGCONT)
    assert [writer.wait(60) for writer in writers] == [0] * 20
