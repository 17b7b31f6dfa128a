"""Locks, watches and limits between processes of one host, on a mount as in a plain directory."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonclipfs import limits
from tests.fuse.conftest import Mounted
from tests.posix.conftest import Shared
from tests.posix.users import OTHER, outcome, run_as

FORK = multiprocessing.get_context("fork")
_FLOCK = "hhqqi4x"
"""struct flock: type, whence, start, length, pid."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_IN_EVENTS = 0x00000FFF


@pytest.fixture(params=["mounted", "empty_overlay", "plain"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory of a mount, of an overlay, and of the disk: the tests say the same of all."""
    directory: Path = (tmp_path if request.param == "plain" else request.getfixturevalue(request.param).path) / "here"
    directory.mkdir()
    return directory


def in_child(call: Callable[..., Any], *arguments: Any) -> Any:
    """The outcome of a call in another process."""
    theirs, ours = FORK.Pipe()

    def work() -> None:
        theirs.send(outcome(call, *arguments))

    process = FORK.Process(target=work)
    process.start()
    try:
        assert ours.poll(20)
        return ours.recv()
    finally:
        process.join()
        ours.close()
        theirs.close()
        process.close()


def lock(fd: int, kind: int, start: int, length: int, command: int = fcntl.F_SETLK) -> tuple[int, ...]:
    """fcntl(2) with a struct flock; returns what the kernel has made of it."""
    asked = struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)
    answer = fcntl.fcntl(fd, command, asked)
    return struct.unpack(_FLOCK, answer)


def lock_path(path: Path, kind: int, start: int, length: int, command: int = fcntl.F_SETLK) -> tuple[int, ...]:
    fd = os.open(path, os.O_RDWR)
    try:
        return lock(fd, kind, start, length, command)
    finally:
        os.close(fd)


def test_record_locks_hold_ranges_and_tell_their_holder(place: Path) -> None:
    """Record locks of processes exclude each other by range, are split and joined, and name their holder."""
    path = place / "f"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    lock(fd, fcntl.F_WRLCK, 0, 100)
    lock(fd, fcntl.F_UNLCK, 40, 20)
    assert in_child(lock_path, path, fcntl.F_WRLCK, 40, 20)[0] == "ok"
    for start, length in ((0, 1), (39, 1), (60, 40), (30, 20), (0, 0)):
        assert in_child(lock_path, path, fcntl.F_RDLCK, start, length) in (("error", "EAGAIN"), ("error", "EACCES"))
    kind, _, start, length, pid = in_child(lock_path, path, fcntl.F_WRLCK, 50, 0, fcntl.F_GETLK)[1]
    assert (kind, start, length, pid) == (fcntl.F_WRLCK, 60, 40, os.getpid())
    lock(fd, fcntl.F_RDLCK, 0, 100)
    assert in_child(lock_path, path, fcntl.F_RDLCK, 0, 100)[0] == "ok"
    os.close(os.open(path, os.O_RDONLY))  # closing any descriptor of a file ends the locks of a process
    assert in_child(lock_path, path, fcntl.F_WRLCK, 0, 0)[0] == "ok"
    os.close(fd)


def test_waiting_for_a_lock_ends_when_its_holder_is_killed(place: Path) -> None:
    path = place / "f"
    path.touch()
    for call in (fcntl.flock, fcntl.lockf):
        theirs, ours = FORK.Pipe()
        fd = os.open(path, os.O_RDWR)

        def hold(call: Callable[[int, int], object] = call, theirs: Any = theirs) -> None:
            fd = os.open(path, os.O_RDWR)
            call(fd, fcntl.LOCK_EX)
            theirs.send("held")
            time.sleep(600)

        holder = FORK.Process(target=hold)
        holder.start()
        assert ours.poll(20) and ours.recv() == "held"
        with pytest.raises(BlockingIOError):
            call(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)
        call(fd, fcntl.LOCK_EX)
        os.close(fd)
        holder.join()
        holder.close()
        ours.close()
        theirs.close()


def test_two_processes_that_wait_for_each_other_are_told(place: Path) -> None:
    """A deadlock of record locks is EDEADLK for one of the two."""
    path = place / "f"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    lock(fd, fcntl.F_WRLCK, 0, 1)
    theirs, ours = FORK.Pipe()

    def other() -> None:
        fd = os.open(path, os.O_RDWR)
        lock(fd, fcntl.F_WRLCK, 1, 1)
        theirs.send("held")
        theirs.send(outcome(lock, fd, fcntl.F_WRLCK, 0, 1, fcntl.F_SETLKW))

    process = FORK.Process(target=other)
    process.start()
    assert ours.poll(20) and ours.recv() == "held"
    time.sleep(0.2)
    mine = outcome(lock, fd, fcntl.F_WRLCK, 1, 1, fcntl.F_SETLKW)
    os.close(fd)
    assert ours.poll(20)
    results = [mine, ours.recv()]
    process.join()
    process.close()
    ours.close()
    theirs.close()
    assert [what for what, _ in results].count("error") == 1
    assert ("error", "EDEADLK") in results or ("error", "EDEADLOCK") in results


def test_locks_of_descriptors_belong_to_those(place: Path) -> None:
    """An open file description has its locks for itself, within one process too; flock is shared by duplicates."""
    path = place / "f"
    path.touch()
    one, two = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    lock(one, fcntl.F_WRLCK, 0, 0, fcntl.F_OFD_SETLK)
    assert outcome(lock, two, fcntl.F_WRLCK, 0, 0, fcntl.F_OFD_SETLK)[1] in ("EAGAIN", "EACCES")
    lock(one, fcntl.F_UNLCK, 0, 0, fcntl.F_OFD_SETLK)
    fcntl.flock(one, fcntl.LOCK_EX)
    twin = os.dup(one)
    assert outcome(fcntl.flock, two, fcntl.LOCK_SH | fcntl.LOCK_NB) == ("error", "EAGAIN")
    os.close(one)
    assert outcome(fcntl.flock, two, fcntl.LOCK_SH | fcntl.LOCK_NB) == ("error", "EAGAIN")
    fcntl.flock(twin, fcntl.LOCK_SH)
    fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(twin)
    os.close(two)


@pytest.fixture
def watch() -> Iterator[Callable[[Path], Callable[[], list[tuple[int, str]]]]]:
    """Watch a directory; what is returned gives the events since it was called last."""
    fd = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert fd >= 0

    def start(directory: Path) -> Callable[[], list[tuple[int, str]]]:
        assert _LIBC.inotify_add_watch(fd, os.fsencode(directory), _IN_EVENTS) >= 0
        return events

    def events() -> list[tuple[int, str]]:
        found, data = [], b""
        while select.select([fd], [], [], 0.2)[0]:
            data += os.read(fd, 65536)
        while data:
            _, mask, _, length = struct.unpack_from("iIII", data)
            found.append((mask, data[16 : 16 + length].rstrip(b"\0").decode()))
            data = data[16 + length :]
        return found

    yield start
    os.close(fd)


def test_watchers_are_told_what_programs_do(
    mounted: Mounted, tmp_path: Path, watch: Callable[[Path], Callable[[], list[tuple[int, str]]]]
) -> None:
    """inotify tells of changes through a mount what it tells of those in a plain directory, in the same order."""
    told = []
    for directory in (tmp_path / "plain", mounted.path / "live"):
        directory.mkdir()
        events = watch(directory)
        with (directory / "f").open("wb") as file:
            file.write(b"1")
        os.chmod(directory / "f", 0o600)
        os.rename(directory / "f", directory / "g")
        os.link(directory / "g", directory / "h")
        os.truncate(directory / "g", 5)
        os.symlink("x", directory / "s")
        (directory / "d").mkdir()
        os.listdir(directory / "d")
        (directory / "g").read_bytes()
        os.unlink(directory / "h")
        (directory / "d").rmdir()
        os.setxattr(directory / "g", "user.a", b"1")
        told.append(events())
    assert told[0] == told[1]
    assert len(told[0]) > 15


def test_files_end_where_the_disk_lets_them_end(mounted: Mounted) -> None:
    """A write past the longest file is EFBIG, wherever that limit is, and no error of the mount."""
    with (mounted.path / "f").open("w+b", buffering=0) as file:
        file.write(b"kept")
        for offset in (limits.FILE_BYTES - 1, limits.FILE_BYTES, (1 << 62) - 1):
            assert outcome(os.pwrite, file.fileno(), b"xx", offset) == ("error", "EFBIG")
            assert outcome(os.pwrite, file.fileno(), b"x" * (1 << 20), offset) == ("error", "EFBIG")
        assert outcome(os.truncate, mounted.path / "f", limits.FILE_BYTES + 1) == ("error", "EFBIG")
        assert outcome(os.pwrite, file.fileno(), b"x", (1 << 63) - 1)[0] == "error"
        os.pwrite(file.fileno(), b"end", (1 << 40) - 3)
        assert os.fstat(file.fileno()).st_size == 1 << 40
        assert os.pread(file.fileno(), 10, (1 << 40) - 5) == b"\0\0end"
        assert os.fstat(file.fileno()).st_blocks < 1 << 20
    assert "ERROR" not in mounted.log_text()


def limited(path: str) -> list[Any]:
    """Write up to, over and past the limit of a process."""

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    said = [outcome(os.pwrite, fd, b"x" * length, offset) for length, offset in ((10, 4990), (100, 4950), (1, 5000))]
    said += [outcome(os.ftruncate, fd, size) for size in (5000, 5001, 0)]
    os.close(fd)
    return said


def test_the_limit_of_a_process_for_files_holds(shared: Shared) -> None:
    assert run_as(OTHER, limited, [str(shared.mount / "f")]) == run_as(OTHER, limited, [str(shared.plain / "f")])
