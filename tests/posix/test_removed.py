"""What can be done with what has no name any more, and what a process meets whose directory moved or went."""

from __future__ import annotations

import mmap
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuse.conftest import Mounted
from tests.posix.test_locks import in_child
from tests.posix.users import outcome


def removed_directory() -> list[Any]:
    os.mkdir("d")
    fd = os.open("d", os.O_RDONLY)
    os.chdir("d")
    os.rmdir("../d")
    status = os.fstat(fd)
    said: list[Any] = [status.st_nlink, oct(status.st_mode), sorted(os.listdir(fd)), sorted(os.listdir("."))]
    said += [
        outcome(call, *arguments)
        for call, *arguments in (
            (os.mkdir, "x"),
            (os.open, "x", os.O_CREAT),
            (os.symlink, "t", "x"),
            (os.mkfifo, "x"),
            (os.link, "../f", "x"),
            (os.rename, "../f", "x"),
            (os.stat, "x"),
            (os.getcwd,),
            (os.fchmod, fd, 0o700),
            (os.setxattr, fd, "user.a", b"1"),
            (os.getxattr, fd, "user.a"),
            (os.rmdir, "../d"),
            (os.mkdir, "../d"),
            (os.listdir, "."),
            (os.fsync, fd),
            (os.access, ".", os.W_OK),
        )
    ]
    said += [outcome(os.fstat, fd)[0], os.fstat(fd).st_nlink, os.listdir("../d")]
    os.close(fd)
    return said


def removed_file() -> list[Any]:
    fd = os.open("g", os.O_CREAT | os.O_RDWR, 0o644)
    os.write(fd, b"bytes")
    os.unlink("g")
    said = [
        outcome(call, *arguments)
        for call, *arguments in (
            (os.fchmod, fd, 0o600),
            (os.fchown, fd, 5, 6),
            (os.ftruncate, fd, 10),
            (os.pwrite, fd, b"more", 20),
            (os.pread, fd, 100, 0),
            (os.setxattr, fd, "user.a", b"1"),
            (os.listxattr, fd),
            (os.utime, fd),
            (os.fsync, fd),
            (os.link, f"/proc/self/fd/{fd}", "again"),
            (os.stat, "g"),
        )
    ]
    status = os.fstat(fd)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    said += [status.st_nlink, status.st_size, oct(status.st_mode), os.pread(again, 5, 0)]
    os.ftruncate(again, 0)
    said += [os.fstat(fd).st_size, os.pread(fd, 10, 0)]
    os.close(again)
    os.close(fd)
    return said


def moved_directory() -> list[Any]:
    os.makedirs("one/two/three")
    os.mkdir("other")
    os.chdir("one/two/three")
    before = os.stat(".").st_ino
    os.rename("../../../one/two", "../../../other/moved")
    here = os.getcwd().split("/")[-3:]
    os.mkdir("made")
    said = [here, os.stat(".").st_ino == before, sorted(os.listdir("../.."))]
    return [*said, outcome(os.rename, "../../moved", "made/inside"), outcome(os.rmdir, "../../../other/moved")]


def replaced_by_rename() -> list[Any]:
    Path("old").write_bytes(b"old" * 50_000)
    Path("new").write_bytes(b"new")
    fd = os.open("old", os.O_RDWR)
    mapped = mmap.mmap(fd, 0)
    os.rename("new", "old")
    mapped[:3] = b"MAP"
    os.pwrite(fd, b"end", 150_000)
    said = [os.pread(fd, 3, 0), os.fstat(fd).st_size, os.fstat(fd).st_nlink, Path("old").read_bytes(), mapped[3:6]]
    mapped.close()
    os.close(fd)
    return said


def listing_in_steps() -> list[Any]:
    """What is there throughout is listed once, whatever comes and goes while the listing is read."""
    os.mkdir("many")
    names = {f"{number:05}" for number in range(3000)}
    for name in names:
        os.close(os.open(f"many/{name}", os.O_CREAT))
    seen, gone = [], set()
    with os.scandir("many") as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number % 10 == 0:
                os.close(os.open(f"many/new{number}", os.O_CREAT))
            if number % 7 == 0:
                os.unlink(f"many/{entry.name}")
                gone.add(entry.name)
    old = [name for name in seen if name in names]
    return [len(old), len(set(old)), len(set(seen)) == len(seen), set(os.listdir("many")) & names == names - gone]


def touch_past_the_end(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 3 * mmap.PAGESIZE)
    mapped = mmap.mmap(fd, 3 * mmap.PAGESIZE)
    os.ftruncate(fd, 10)
    assert mapped[5] == 0 and mapped[20] == 0
    mapped[2 * mmap.PAGESIZE] = 1


def maps_and_sizes() -> list[Any]:
    fd = os.open("m", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, mmap.PAGESIZE)
    mapped = mmap.mmap(fd, mmap.PAGESIZE)
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"0123456789", 0)
    mapped[20] = 7  # past the end, in the last page: nobody sees it
    said: list[Any] = [os.pread(fd, 100, 0)]
    os.ftruncate(fd, 30)
    said += [os.pread(fd, 10, 10), os.fstat(fd).st_size]
    os.ftruncate(fd, 3)
    os.ftruncate(fd, 10)
    said += [os.pread(fd, 10, 0), bytes(mapped[:12])]
    private = mmap.mmap(fd, 10, flags=mmap.MAP_PRIVATE)
    private[0] = 1
    os.pwrite(fd, b"AB", 1)
    said += [os.pread(fd, 4, 0), bytes(mapped[:4])]
    child = os.fork()
    if not child:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        touch_past_the_end("bus")
        os._exit(0)
    said.append(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGBUS)
    mapped.close()
    private.close()
    os.close(fd)
    return said


CASES = (
    removed_directory, removed_file, moved_directory, replaced_by_rename, listing_in_steps, maps_and_sizes,
)  # fmt: skip


def _in(directory: str, case: Callable[[], Any]) -> Any:
    os.chdir(directory)
    Path("f").touch()
    return case()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_as_on_ext4(writable: Mounted, tmp_path: Path, case: Callable[[], Any]) -> None:
    said = []
    for directory in (tmp_path / "plain", writable.path / "live"):
        directory.mkdir()
        what, value = in_child(_in, str(directory), case)
        assert what == "ok", value
        said.append(value)
    assert said[1] == said[0]
    assert stat.S_ISDIR(os.stat(writable.path / "live").st_mode)
    assert "ERROR" not in writable.log_text()
