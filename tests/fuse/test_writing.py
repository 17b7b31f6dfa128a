"""Writing through a real mount: what programs do that save checkpoints, and what has been reported to go wrong."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonclipfs.fuse.control import ask
from moonclipfs.store.store import Store
from tests.fuse.conftest import SMALL_FILES, Mounted, Mounter, eventually, is_running, patched_server
from tests.fuse.sides import Sides
from tests.layers.publish import publish
from tests.nobody import Nobody

MIB = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
NOREPLACE, EXCHANGE = 1, 2


def rename2(old: Path, new: Path, flags: int) -> None:
    """renameat2(2)."""
    if LIBC.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def errno_of(call: object, *args: object) -> int:
    """The errno that a call ends with."""
    with pytest.raises(OSError) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value.errno or 0


def child(code: str, *args: object) -> subprocess.Popen[str]:
    """A Python process; it says a line when it is ready."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def sides(anywhere: Mounted, tmp_path: Path) -> Sides:
    """A new directory on a mount beside one on the plain disk."""
    (anywhere.path / "work").mkdir()
    (tmp_path / "plain").mkdir()
    return Sides(anywhere.path / "work", tmp_path / "plain")


def test_a_mount_takes_files_and_gives_them_back(live: Mounted) -> None:
    """Programs write to a mount as to any directory; what they wrote is read back, at once, by everybody."""
    data = os.urandom(3 * MIB + 5)
    (live.path / "new").write_bytes(data)
    (live.path / "run1/a/config.json").write_text("changed")
    (live.path / "run1/a/sub/more").mkdir()
    (live.path / "run1/a/sub/more/x").write_bytes(b"x")
    assert (live.path / "new").read_bytes() == data
    assert (live.path / "run1/a/config.json").read_text() == "changed"
    assert sorted(os.listdir(live.path / "run1/a/sub")) == ["deep", "more", "y"]
    assert (live.path / "@versions/run1/a/1/config.json").read_bytes() == SMALL_FILES["config.json"]
    assert "ERROR" not in live.log_text()


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that other users can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_o_creat_of_a_name_that_somebody_else_made_honours_its_mode(
    store: Store, fuse: None, nobody: Nobody, reachable: Path
) -> None:
    """The kernel believes for a while that a name is not there; who opens it with O_CREAT then is asked for rights."""
    patch = """
from moonclipfs.errors import ExistsError
from moonclipfs.fuse.writing import LiveOperations
from moonclipfs.types import EntryType
make, made = LiveOperations._make, set()
async def overtaken(self, parent, name, *args):
    if name.startswith(b"taken") and name not in made:
        made.add(name)
        inode, _ = await make(self, parent, name, *args)
        self.layer.set_attributes(inode, mode=0o600, uid=0, gid=0, now_ns=1)
    return await make(self, parent, name, *args)
LiveOperations._make = overtaken
"""
    if os.geteuid() != 0:
        pytest.skip("being another user takes root")
    store.path.chmod(0o700)
    with patched_server(store.path, reachable / "mnt", patch, read_only=False, allow_other=True) as mounted:
        mounted.path.chmod(0o777)

        def refused() -> None:
            for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDONLY):
                assert errno_of(os.open, mounted.path / "taken", os.O_CREAT | flags) == errno.EACCES
            assert errno_of(os.open, mounted.path / "taken-too", os.O_CREAT | os.O_EXCL) == errno.EEXIST

        nobody.run(refused)
        os.close(os.open(mounted.path / "taken-again", os.O_CREAT | os.O_RDWR))


def test_what_was_written_is_there_after_a_remount(live: Mounted, mounter: Mounter) -> None:
    """What was written is there, with its attributes and inode numbers, when the store is mounted again."""
    (live.path / "d").mkdir(mode=0o750)
    (live.path / "d/f").write_bytes(b"abc" * 100_000)
    os.chmod(live.path / "d/f", 0o640)
    os.utime(live.path / "d/f", ns=(1, 2))
    os.symlink("nowhere", live.path / "d/l")
    os.link(live.path / "d/f", live.path / "d/g")
    os.setxattr(live.path / "d/f", "user.note", b"kept")
    os.remove(live.path / "run1/a/empty")
    before = {name: os.lstat(live.path / "d" / name) for name in ("f", "g", "l")}
    subprocess.run(["fusermount3", "-u", live.path], check=True)
    eventually(lambda: not is_running(live.pid), 30)
    again = mounter(live.store, read_only=False)
    for name, status in before.items():
        now = os.lstat(again.path / "d" / name)
        for field in ("st_ino", "st_mode", "st_nlink", "st_size", "st_mtime_ns", "st_uid", "st_gid"):
            assert getattr(now, field) == getattr(status, field), (name, field)
    assert (again.path / "d/g").read_bytes() == b"abc" * 100_000
    assert os.getxattr(again.path / "d/f", "user.note") == b"kept"
    assert not (again.path / "run1/a/empty").exists()


def test_r013_a_reader_of_an_empty_file_sees_what_is_appended(anywhere: Mounted) -> None:
    path = anywhere.path / "f"
    path.write_bytes(b"")
    with path.open("rb", buffering=0) as reader, path.open("ab", buffering=0) as writer:
        assert reader.read() == b""
        writer.write(b"abc")
        assert os.pread(reader.fileno(), 10, 0) == b"abc"
        writer.write(b"d" * 5000)
        assert os.pread(reader.fileno(), 6000, 0) == b"abc" + b"d" * 5000


def test_r017_the_sequence_of_safetensors(anywhere: Mounted) -> None:
    target, temporary = anywhere.path / "model.safetensors", anywhere.path / ".tmpAb"
    target.write_bytes(b"old" * 1000)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(descriptor, 3 * MIB)
    for value in range(3):
        assert os.write(descriptor, bytes([value]) * MIB) == MIB
    os.rename(temporary, target)
    os.close(descriptor)
    assert target.read_bytes() == b"".join(bytes([value]) * MIB for value in range(3))
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert not temporary.exists()


def test_r019_chmod_utime_and_replace_persist(live: Mounted, mounter: Mounter) -> None:
    path, temporary = live.path / "run1/a/model.bin", live.path / "run1/a/tmp"
    temporary.write_bytes(b"new")
    os.replace(temporary, path)
    os.chmod(path, 0o640)
    os.utime(path, ns=(1, 2))
    subprocess.run(["fusermount3", "-u", live.path], check=True)
    eventually(lambda: not is_running(live.pid), 30)
    again = mounter(live.store, read_only=False)
    status = (again.path / "run1/a/model.bin").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_atime_ns) == (0o640, 2, 1)
    assert (again.path / "run1/a/model.bin").read_bytes() == b"new"
    assert (again.path / "@versions/run1/a/1/model.bin").read_bytes() == SMALL_FILES["model.bin"]


def test_r021_a_map_keeps_the_bytes_of_a_file_that_is_replaced(anywhere: Mounted) -> None:
    path = anywhere.path / "p"
    path.write_bytes(b"A" * 8192)
    for access in (mmap.ACCESS_READ, mmap.ACCESS_COPY):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=access) as mapped:
            (anywhere.path / "tmp").write_bytes(b"B" * 8192)
            os.replace(anywhere.path / "tmp", path)
            assert mapped[:] == b"A" * 8192
            assert path.read_bytes() == b"B" * 8192
        path.write_bytes(b"A" * 8192)


def test_r023_random_writes_anywhere(sides: Sides) -> None:
    def write(directory: Path) -> bytes:
        with (directory / "f").open("wb", buffering=0) as file:
            file.write(os.urandom(0) + b"q" * MIB)
            os.pwrite(file.fileno(), b"X", 524_288)
            os.pwrite(file.fileno(), b"Y", 3 * MIB)
            os.pwrite(file.fileno(), b"header!!", 0)
        return (directory / "f").read_bytes()

    sides.call(write)
    sides.compare()


def test_r025_a_file_is_readable_while_it_is_written(anywhere: Mounted) -> None:
    data = os.urandom(300 * 1024)
    with (anywhere.path / "f").open("wb", buffering=0) as writer:
        writer.write(data)
        code = "import os, sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
        read = subprocess.run([sys.executable, "-c", code, anywhere.path / "f"], capture_output=True, check=True).stdout
        assert read == data
        assert (anywhere.path / "f").stat().st_size == 307_200


@pytest.mark.parametrize("call", ["flock", "lockf"])
def test_r027_locks_exclude_and_end_with_their_holder(anywhere: Mounted, call: str) -> None:
    path = anywhere.path / "lock"
    path.touch()
    holder = child(
        """
        import fcntl, sys, time
        file = open(sys.argv[1], "r+b")
        getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX)
        print("held", flush=True)
        time.sleep(60)
        """,
        path,
        call,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with path.open("r+b") as file:
        with pytest.raises(BlockingIOError):
            getattr(fcntl, call)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.kill()
        holder.communicate()
        getattr(fcntl, call)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_r029_one_device_and_no_way_out_of_a_version(live: Mounted) -> None:
    (live.path / "one").mkdir()
    (live.path / "two").mkdir()
    (live.path / "one/f").write_bytes(b"x")
    os.rename(live.path / "one/f", live.path / "two/f")
    os.rename(live.path / "two", live.path / "one/two")
    assert (live.path / "one/two/f").read_bytes() == b"x"
    version = live.path / "@versions/run1/a/1"
    devices = {os.stat(path).st_dev for path in (live.path, version, live.path / "run1/a", live.path / "one")}
    assert len(devices) == 1
    assert errno_of(os.rename, version / "config.json", live.path / "stolen") == errno.EROFS
    assert errno_of(os.rename, live.path / "one", version / "one") == errno.EROFS
    assert errno_of(os.link, version / "config.json", live.path / "linked") == errno.EXDEV
    assert (version / "config.json").read_bytes() == SMALL_FILES["config.json"]
    assert errno_of(os.remove, version / "config.json") == errno.EROFS
    assert errno_of(os.mkdir, version / "d") == errno.EROFS
    assert errno_of((version / "config.json").write_bytes, b"") == errno.EROFS


def test_r031_directory_renames_have_the_errnos_of_posix(sides: Sides) -> None:
    def make(directory: Path) -> None:
        for name in ("a/sub", "empty", "full/x"):
            (directory / name).mkdir(parents=True)
        (directory / "f").write_bytes(b"")

    sides.call(make)
    for old, new in (
        ("a", "full"), ("missing", "b"), ("a", "a/sub/b"), ("a", "f"), ("f", "a"), ("a", "b"), ("b", "empty"),
        ("empty", "empty"), ("f", "empty/sub/f"), ("empty", "x/y"),
    ):  # fmt: skip
        sides.call(lambda directory, old=old, new=new: os.rename(directory / old, directory / new))  # type: ignore[misc]
        sides.compare()
    for flags in (NOREPLACE, EXCHANGE, NOREPLACE | EXCHANGE, 64):
        for old, new in (("full", "empty"), ("empty", "nothing"), ("missing", "f")):
            sides.call(
                lambda directory, old=old, new=new, flags=flags: rename2(directory / old, directory / new, flags)
            )  # type: ignore[misc]
            sides.compare()


def test_r031_a_lister_sees_exactly_one_name(anywhere: Mounted) -> None:
    (anywhere.path / "d/tmp-checkpoint-1").mkdir(parents=True)
    names = [anywhere.path / "d/tmp-checkpoint-1", anywhere.path / "d/checkpoint-1"]
    seen: list[list[str]] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(os.listdir(anywhere.path / "d"))

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(1000):
        os.rename(names[number % 2], names[1 - number % 2])
    done.set()
    thread.join()
    assert {len(found) for found in seen} == {1}
    assert len(seen) > 20


def test_r033_fallocate_is_not_supported_and_its_emulation_works(anywhere: Mounted) -> None:
    with (anywhere.path / "f").open("w+b", buffering=0) as file:
        file.write(b"kept")
        assert LIBC.fallocate(file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(MIB)) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP
        os.posix_fallocate(file.fileno(), 0, MIB)
        assert os.fstat(file.fileno()).st_size == MIB
        began = time.monotonic()
        with mmap.mmap(file.fileno(), 0) as mapped:
            assert mapped[:4] == b"kept"
            mapped[:] = b"m" * MIB
            mapped.flush()
        assert time.monotonic() - began < 5
    assert (anywhere.path / "f").read_bytes() == b"m" * MIB
    assert errno_of(os.open, anywhere.path, os.O_TMPFILE | os.O_RDWR) == errno.EOPNOTSUPP


def test_r043_names_change_on_a_full_disk(anywhere: Mounted) -> None:
    os.symlink("step_7", anywhere.path / "LATEST")
    os.symlink("step_8", anywhere.path / "L.tmp")
    os.replace(anywhere.path / "L.tmp", anywhere.path / "LATEST")
    assert os.readlink(anywhere.path / "LATEST") == "step_8"


def test_r101_blocks_and_links_are_filled_in(anywhere: Mounted) -> None:
    for size, least in ((0, 0), (12, 1), (513, 2), (5 * MIB, 5 * MIB // 512)):
        path = anywhere.path / f"f{size}"
        path.write_bytes(b"x" * size)
        status = path.stat()
        assert status.st_blocks == least
        assert status.st_nlink == 1
        assert status.st_blksize >= 4096
    (anywhere.path / "d/e").mkdir(parents=True)
    assert (anywhere.path / "d").stat().st_nlink == 3
    with (anywhere.path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"x")
    status = (anywhere.path / "sparse").stat()
    assert status.st_size == 1 << 40
    assert 0 < status.st_blocks < 1000


def test_r103_watchers_are_told_of_local_changes(live: Mounted, store: Store) -> None:
    (live.path / "d").mkdir()
    descriptor = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    create, moved_to = 0x100, 0x80
    assert LIBC.inotify_add_watch(descriptor, os.fsencode(live.path / "d"), create | moved_to) >= 0
    (live.path / "d/tmp").write_bytes(b"x")
    os.rename(live.path / "d/tmp", live.path / "d/final")
    assert select.select([descriptor], [], [], 5)[0]
    data, events = os.read(descriptor, 4096), []
    while data:
        _, mask, _, length = struct.unpack_from("iIII", data)
        events.append((mask, data[16 : 16 + length].rstrip(b"\0")))
        data = data[16 + length :]
    os.close(descriptor)
    assert events == [(create, b"tmp"), (moved_to, b"final")]
    before = (live.path / "run1").stat().st_mtime_ns
    publish(store, "run1/b", {"x": b"1"})
    eventually(lambda: (live.path / "run1").stat().st_mtime_ns > before, 3)


@pytest.mark.parametrize("home", ["snapshot", "written", "open"])
def test_r001_every_file_can_be_mapped_shared(anywhere: Mounted, home: str) -> None:
    path, data = anywhere.path / "f", os.urandom(16_384)
    if home == "snapshot":
        path, data = anywhere.path / "run1/a/model.bin", bytes(SMALL_FILES["model.bin"])  # type: ignore[arg-type]
    else:
        path.write_bytes(data)
    with path.open("r+b" if home == "open" else "rb", buffering=0) as file:
        if home == "open":
            data = os.urandom(16_384)
            file.write(data)
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            with mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == data == os.pread(file.fileno(), len(data), 0)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC])
def test_maps_and_readers_see_what_is_written(anywhere: Mounted, flags: int) -> None:
    """Maps, cached reads, direct reads and writes of one file see each other, however it was opened."""
    path = anywhere.path / "f"
    path.write_bytes(b"a" * 65_536)
    with path.open("rb", buffering=0) as reader, path.open("r+b", buffering=0) as mapper:
        assert reader.read() == b"a" * 65_536
        with mmap.mmap(mapper.fileno(), 65_536) as mapped:
            assert mapped[:4] == b"aaaa"
            writer = os.open(path, flags)
            if flags & os.O_TRUNC:
                os.write(writer, b"a" * 65_536)
            os.pwrite(writer, b"b" * 8192, 4096)
            assert mapped[4096:12_288] == b"b" * 8192
            assert os.pread(reader.fileno(), 8192, 4096) == b"b" * 8192
            mapped[100:104] = b"cccc"
            assert os.pread(reader.fileno(), 4, 100) == b"cccc"
            if flags & os.O_ACCMODE == os.O_RDWR:
                assert os.pread(writer, 4, 100) == b"cccc"
            os.pwrite(writer, b"d", 101)
            assert mapped[100:104] == b"cdcc"
            mapped[20_000] = 1
            mapped.flush()
            assert path.read_bytes()[20_000] == 1
            os.ftruncate(writer, 70_000)
            os.pwrite(writer, b"e", 69_999)
            assert os.pread(reader.fileno(), 10_000, 65_536) == bytes(70_000 - 65_536 - 1) + b"e"
            os.close(writer)
    assert path.read_bytes()[100:104] == b"cdcc"


def test_appends_of_two_processes_are_all_there(anywhere: Mounted) -> None:
    """Two processes append to one file, and no line is lost or torn."""
    code = """
        import os, sys
        descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for number in range(500):
            os.write(descriptor, b"%s %d %s\\n" % (sys.argv[2].encode(), number, b"x" * 100))
    """
    both = [child(code, anywhere.path / "log", name) for name in ("one", "two")]
    for process in both:
        process.communicate()
        assert process.returncode == 0
    lines = (anywhere.path / "log").read_bytes().splitlines()
    assert len(lines) == 1000
    assert {line.split()[2] for line in lines} == {b"x" * 100}
    assert sorted(lines) == sorted(
        b"%s %d %s" % (name, number, b"x" * 100) for name in (b"one", b"two") for number in range(500)
    )


def test_direct_io(anywhere: Mounted) -> None:
    """O_DIRECT reads and writes work beside cached ones."""
    buffer = mmap.mmap(-1, 1 << 20)
    buffer[:] = b"d" * (1 << 20)
    descriptor = os.open(anywhere.path / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert os.write(descriptor, buffer) == 1 << 20
    assert (anywhere.path / "f").read_bytes() == b"d" * (1 << 20)
    buffer[:] = bytes(1 << 20)
    assert os.preadv(descriptor, [buffer], 0) == 1 << 20
    assert buffer[:] == b"d" * (1 << 20)
    os.close(descriptor)
    buffer.close()


def test_what_is_removed_stays_for_those_who_have_it_open(anywhere: Mounted) -> None:
    """An open file outlives its name, also one of a snapshot, and can be written to still."""
    for path in (anywhere.path / "new", anywhere.path / "run1/a/model.bin"):
        if not path.exists():
            path.write_bytes(b"n" * 300_000)
        data = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            path.unlink()
            assert not path.exists()
            assert os.fstat(file.fileno()).st_nlink == 0
            assert file.read() == data
            os.pwrite(file.fileno(), b"more", len(data))
            assert os.fstat(file.fileno()).st_size == len(data) + 4
            assert os.pread(file.fileno(), 4, len(data)) == b"more"


def test_fifos_and_sockets_are_nodes(live: Mounted) -> None:
    """Fifos and sockets can be made, and work between processes of the host; devices are refused."""
    os.mkfifo(live.path / "fifo")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(live.path / "s"))
        server.listen()
        client.connect(str(live.path / "s"))
    assert stat.S_ISSOCK((live.path / "s").stat().st_mode)
    writer = child("import sys; open(sys.argv[1], 'w').write('through')", live.path / "fifo")
    assert (live.path / "fifo").read_text() == "through"
    writer.communicate()
    assert errno_of(os.mknod, live.path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3)) == errno.EPERM


def test_names_with_an_at_sign_are_kept_for_the_mount(live: Mounted) -> None:
    """Names that begin with @ can be made anywhere but at the root, where that is EPERM."""
    (live.path / "f").write_bytes(b"")
    for name in ("@new", "@versions", "@latest"):
        assert errno_of(os.mkdir, live.path / name) in (errno.EPERM, errno.EEXIST)
        assert errno_of(os.rename, live.path / "f", live.path / name) in (errno.EPERM, errno.EISDIR)
        assert errno_of(os.rename, live.path / name, live.path / "g") in (errno.EPERM, errno.ENOENT)
    assert errno_of(os.mkdir, live.path / "@new") == errno.EPERM
    assert errno_of((live.path / "@new").write_bytes, b"") == errno.EPERM
    assert errno_of(os.symlink, "x", live.path / "@new") == errno.EPERM
    assert errno_of(os.rmdir, live.path / "@versions") == errno.EPERM
    (live.path / "run1/@mine").mkdir()
    assert os.listdir(live.path / "run1") in (["a", "@mine"], ["@mine", "a"])


def test_a_listing_that_is_rewound_shows_what_is_new(anywhere: Mounted) -> None:
    """rewinddir shows the names that have come and gone meanwhile."""
    (anywhere.path / "d").mkdir()
    descriptor = os.open(anywhere.path / "d", os.O_RDONLY)
    assert os.listdir(descriptor) == []
    (anywhere.path / "d/x").touch()
    assert os.listdir(descriptor) == ["x"]
    os.close(descriptor)


def test_removing_while_listing_misses_nothing(anywhere: Mounted) -> None:
    """rm -r of a large directory removes everything in it."""
    (anywhere.path / "d").mkdir()
    for number in range(1500):
        (anywhere.path / f"d/{number}").touch()
    with os.scandir(anywhere.path / "d") as entries:
        for entry in entries:
            os.unlink(entry.path)
    os.rmdir(anywhere.path / "d")


def test_absence_is_remembered_until_a_name_comes(live: Mounted, store: Store) -> None:
    """What the kernel remembers as absent in the live tree appears when it is made here or published elsewhere."""
    path = live.path / "run1/b"
    for _ in range(20):
        assert not path.exists()
    assert live.stats()["requests"]["lookup"] < 10
    publish(store, "run1/b", {"x": b"1"})
    eventually((path / "x").exists, 2)
    assert not (live.path / "new").exists()
    (live.path / "new").touch()
    assert (live.path / "new").exists()


def test_a_version_that_others_publish_replaces_a_clean_one(live: Mounted, store: Store) -> None:
    """A snapshot that nobody changed here shows the newest version that others publish, an open file its own bytes."""
    path = live.path / "run1/a/config.json"
    with path.open("rb") as file:
        publish(store, "run1/a", {"config.json": b"second"})
        eventually(lambda: path.read_bytes() == b"second", 2)
        assert file.read() == SMALL_FILES["config.json"]


def test_changes_here_win_over_what_others_publish(live: Mounted, store: Store) -> None:
    """A directory that was changed here stays as it is when others publish its name."""
    (live.path / "run1/a/config.json").write_bytes(b"mine")
    publish(store, "run1/a", {"config.json": b"theirs"})
    eventually(lambda: (live.path / "@versions/run1/a/2").exists(), 3)
    assert (live.path / "run1/a/config.json").read_bytes() == b"mine"
    assert (live.path / "@versions/run1/a/2/config.json").read_bytes() == b"theirs"


def test_a_signal_unmounts_and_keeps_what_was_written(live: Mounted, mounter: Mounter) -> None:
    """SIGTERM stores what was written, through a map too, and unmounts."""
    descriptor = os.open(live.path / "f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 8192)
    mapped = mmap.mmap(descriptor, 8192)
    mapped[:] = b"m" * 8192
    os.kill(live.pid, signal.SIGTERM)
    eventually(lambda: not is_running(live.pid), 30)
    assert errno_of(os.fsync, descriptor) == errno.ENOTCONN
    mapped.close()
    assert errno_of(os.close, descriptor) == errno.ENOTCONN
    again = mounter(live.store, read_only=False)
    assert (again.path / "f").read_bytes() == b"m" * 8192


def test_another_mount_of_the_same_layer_is_refused(live: Mounted, mounter: Mounter, tmp_path: Path) -> None:
    """A second mount of a layer is refused with who holds it; another layer of the store can be mounted beside it."""
    from moonclipfs.errors import BusyError

    with pytest.raises(BusyError, match=f"(?s){live.pid}.*--layer"):
        mounter(live.store, tmp_path / "second", read_only=False)
    other = mounter(live.store, tmp_path / "third", read_only=False, layer="other")
    (live.path / "mine").write_bytes(b"1")
    assert not (other.path / "mine").exists()
    assert (other.path / "run1/a/config.json").read_bytes() == SMALL_FILES["config.json"]


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        (2**36, 9223372036),
        (10**10, 9223372036),
        (9223372036, 9223372036),
        (-(2**31) - 1, -(2**31)),
        (-(2**40), -(2**31)),
    ],
)
def test_times_that_no_file_can_have_become_the_nearest(live: Mounted, seconds: int, kept: int) -> None:
    """Times before 1901 and after 2262 become the first and the last one; what has them is sealed as anything is."""
    (live.path / "run").mkdir()
    file = live.path / "run/f"
    file.touch()
    os.utime(file, ns=(seconds * 10**9, seconds * 10**9))
    assert (os.stat(file).st_atime_ns, os.stat(file).st_mtime_ns) == (kept * 10**9, kept * 10**9)
    ask(str(live.path), "seal", None, path="run")
    eventually((live.path / "@versions/run/1").exists)
    assert os.stat(live.path / "@versions/run/1/f").st_mtime_ns == kept * 10**9


def test_times_never_go_back(anywhere: Mounted) -> None:
    """Times that the kernel gives and those that the mount gives are of one clock: later changes are not earlier."""
    path, before = anywhere.path / "f", 0
    for _ in range(50):
        for change in (path.touch, lambda: path.write_bytes(b"x"), lambda: os.utime(path)):
            change()
            now = path.stat().st_mtime_ns
            assert now >= before
            before = now


def test_shown_virtual_names_stand_beside_live_ones(store: Store, mounter: Mounter) -> None:
    publish(store, "run/a", {"x": b"1"})
    mounted = mounter(store.path, read_only=False, show_virtual=True)
    (mounted.path / "new").touch()
    with os.scandir(mounted.path) as entries:
        found = {entry.name: entry.is_dir() for entry in entries}
    virtual = ("@experts", "@latest", "@overlays", "@versions")
    assert found == {"run": True, "new": False, **dict.fromkeys(virtual, True)}
    assert os.listdir(mounted.path / "@versions/run/a") == ["1"]


def test_who_opens_a_file_that_is_replaced_meanwhile_has_old_or_new_bytes(live: Mounted) -> None:
    """The kernel may have found a file before it was replaced, and ask to open it after."""
    path, stop = live.path / "latest", threading.Event()
    path.write_bytes(bytes(1000))
    lengths: set[int] = set()

    def read() -> None:
        while not stop.is_set():
            lengths.add(len(path.read_bytes()))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    end = time.monotonic() + 4
    while time.monotonic() < end:
        (live.path / "new").write_bytes(bytes(1000))
        os.replace(live.path / "new", path)
    stop.set()
    for reader in readers:
        reader.join()
    assert lengths == {1000}
