"""What a mount holds is bounded, however much is asked of it."""

from __future__ import annotations

import concurrent.futures
import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, drop_names, eventually, kept_names, patched_server
from tests.layers.publish import publish

MIB = 1 << 20
DIRECTORIES = 50


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def page_faults(pid: int) -> int:
    """Minor page faults of a process so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def many_files(count: int) -> Mapping[str, Mapping[str, bytes]]:
    """`count` empty files in DIRECTORIES directories."""
    each = count // DIRECTORIES
    return {f"d{number:02d}": {f"file-{file:05d}": b"" for file in range(each)} for number in range(DIRECTORIES)}


def stat_all(mounted: Mounted, count: int) -> None:
    for number in range(DIRECTORIES):
        with os.scandir(mounted.path / f"many/d{number:02d}") as entries:
            assert sum(entry.stat(follow_symlinks=False).st_size == 0 for entry in entries) >= count // DIRECTORIES


def check_nothing_stays(store: Store, mounter: Mounter, count: int, rounds: int) -> None:
    publish(store, "many", many_files(count))
    mounted = mounter(store.path)
    sizes = []
    for _ in range(rounds):
        stat_all(mounted, count)
        assert mounted.stats()["nodes"] > count
        eventually(lambda: drop_names() or mounted.stats()["nodes"] <= 100, 30)
        sizes.append(resident(mounted.pid))
    assert sizes[-1] - sizes[0] < 20 * MIB


def test_r085_a_few_forgotten_names_leave_nothing(store: Store, mounter: Mounter) -> None:
    """What the kernel forgets, the server forgets too."""
    check_nothing_stays(store, mounter, 2000, 3)


@pytest.mark.slow
def test_r085_forgotten_names_leave_nothing(store: Store, mounter: Mounter) -> None:
    check_nothing_stays(store, mounter, 50_000, 5)


def test_the_kernel_is_asked_to_forget(store: Store, tmp_path: Path, fuse: None) -> None:
    """Names that the kernel keeps for long are taken back from it before they are too many."""
    publish(store, "many", many_files(3000))
    patch = "from moonclipfs import limits\nlimits.NODES = 4000"
    with kept_names(), patched_server(store.path, tmp_path / "mnt", patch) as mounted:
        for _ in range(3):
            stat_all(mounted, 3000)
        eventually(lambda: mounted.stats()["nodes"] <= 1000, 20)
        assert mounted.stats()["nodes"] > 500
        stat_all(mounted, 100)


def test_names_of_a_listing_that_failed_are_not_kept(store: Store, tmp_path: Path, fuse: None) -> None:
    """A listing that passes the bound tells the kernel what there was room for; all of that is forgotten again."""
    publish(store, "many", many_files(1000))
    patch = "from moonclipfs import limits\nlimits.NODES = 400"
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=False) as mounted:
        with pytest.raises(OSError, match="Too many open files in system"):
            stat_all(mounted, 1000)

        def known() -> int:
            drop_names()
            return int(mounted.stats()["known"])

        eventually(lambda: known() == 1, 20)


@pytest.mark.parametrize("read_only", [True, False])
def test_one_more_open_file_than_can_be_is_told(store: Store, tmp_path: Path, fuse: None, read_only: bool) -> None:
    """ENFILE, for files as for directories; a close makes room."""
    publish(store, "run", {f"f{number}": b"x" for number in range(4)})
    patch = "from moonclipfs import limits\nlimits.OPEN_HANDLES = 3"
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=read_only) as mounted:
        files = [mounted.path / "run" / f"f{number}" for number in range(4)]
        opened = [os.open(path, os.O_RDONLY) for path in files[:3]]
        for path in (files[3], mounted.path / "run"):
            with pytest.raises(OSError) as caught:
                os.open(path, os.O_RDONLY)
            assert caught.value.errno == errno.ENFILE
        os.close(opened.pop())
        eventually(lambda: mounted.stats()["requests"].get("release", 0) > 0)
        opened.append(os.open(files[3], os.O_RDONLY))
        for descriptor in opened:
            os.close(descriptor)


def test_a_file_that_could_not_be_told_to_the_kernel_is_not_open(store: Store, tmp_path: Path, fuse: None) -> None:
    patch = """
from moonclipfs.errors import LimitError
from moonclipfs.fuse.writing import LiveOperations
async def full(self, inode, served):
    raise LimitError("full")
LiveOperations._mention_new = full
"""
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=False) as mounted:
        with pytest.raises(OSError, match="too large"):
            (mounted.path / "f").touch()
        assert mounted.stats()["open_files"] == 0


def test_an_error_in_a_forget_does_not_end_the_mount(store: Store, tmp_path: Path, fuse: None) -> None:
    patch = """
from moonclipfs.layers.layer import Layer
def forget(self, inode, count):
    raise RuntimeError("no")
Layer.forget = forget
"""
    publish(store, "many", many_files(10))
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=False) as mounted:
        stat_all(mounted, 10)
        drop_names()
        eventually(lambda: mounted.stats()["requests"].get("forget", 0) > 0)
        stat_all(mounted, 10)


def test_memory_stays_bounded_while_a_large_file_is_read(store: Store, mounter: Mounter) -> None:
    """Reading costs the block cache and little more, whatever is read."""
    part = os.urandom(MIB)
    data = b"".join(bytes([number]) + part for number in range(64))
    publish(store, "big", {"w.bin": data})
    mounted = mounter(store.path, cache_bytes=8 * MIB)
    before = resident(mounted.pid)

    def read(seed: int) -> bool:
        with open(mounted.path / "big/w.bin", "rb", buffering=0) as file:
            file.seek(seed * 8 * MIB)
            parts = b"".join(iter(lambda: file.read(4 * MIB), b""))
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return parts == data[seed * 8 * MIB :]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))
    assert resident(mounted.pid) - before < 80 * MIB
    stats = mounted.stats()
    assert (stats["in_work"], stats["waiting"]) == (0, 0)


def test_reading_reuses_memory(store: Store, mounter: Mounter) -> None:
    """Buffers of decoded blocks are used again, not given back to the kernel and fetched by page faults."""
    publish(store, "big", {"w.bin": os.urandom(64 * MIB)})
    mounted = mounter(store.path, cache_bytes=8 * MIB)
    with open(mounted.path / "big/w.bin", "rb", buffering=0) as file:
        for _ in range(2):
            before = page_faults(mounted.pid)
            file.seek(0)
            assert sum(len(part) for part in iter(lambda: file.read(MIB), b"")) == 64 * MIB
            faults = page_faults(mounted.pid) - before
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert faults < 64 * 25  # a tenth of one fault for each page that was read


def test_many_open_files(store: Store, mounter: Mounter) -> None:
    """Handles are given back when files are closed."""
    publish(store, "many", {f"f{number}": str(number).encode() for number in range(500)})
    mounted = mounter(store.path)
    for _ in range(2):
        files = [os.open(mounted.path / f"many/f{number}", os.O_RDONLY) for number in range(500)]
        assert [os.read(file, 100) for file in files] == [str(number).encode() for number in range(500)]
        assert mounted.stats()["handles"] == 500
        for file in files:
            os.close(file)
        eventually(lambda: mounted.stats()["handles"] == 0)
