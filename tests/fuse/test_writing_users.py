"""Several users and commands beside a mount that is written to: permissions, privileges, seals, umount."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonclipfs.errors import BusyError, MountError, PermissionDeniedError
from moonclipfs.fuse.control import ask, runtime_path
from moonclipfs.fuse.initflags import DIRECT_IO_ALLOW_MMAP, HANDLE_KILLPRIV_V2
from moonclipfs.fuse.mount import unmount
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually, is_running, patched_server, processes_of
from tests.nobody import Nobody

MIB = 1 << 20
OTHER = 1234


def as_other(code: str, *args: object) -> list[str]:
    """Run Python as another user; return the words that it printed."""
    prelude = f"import os, sys, errno\nos.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})\n"
    command = [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def shared(store: Store, mounter: Mounter) -> Iterator[Mounted]:
    """A mount for all users."""
    if os.geteuid() != 0:
        pytest.skip("being another user takes root")
    place = Path(f"/tmp/moonclipfs-shared-{os.getpid()}")
    mounted = mounter(store.path, place, read_only=False, allow_other=True)
    yield mounted
    unmount(place)
    place.rmdir()


def test_users_are_kept_apart_by_modes(shared: Mounted) -> None:
    """With --allow-other every user has what the modes give: the kernel checks them, as on any disk."""
    os.chmod(shared.path, 0o1777)
    (shared.path / "private").write_bytes(b"mine")
    os.chmod(shared.path / "private", 0o600)
    said = as_other(
        """
        def attempt(call, *args):
            try:
                call(*args)
                print("ok")
            except OSError as error:
                print(errno.errorcode[error.errno])
        os.chdir(sys.argv[1])
        attempt(open, "private")
        attempt(os.unlink, "private")
        attempt(os.chmod, "private", 0o777)
        attempt(os.mkdir, "theirs")
        attempt(open, "theirs/f", "w")
        attempt(os.chown, "theirs/f", 0, 0)
        attempt(os.setxattr, "theirs/f", "user.x", b"1")
        attempt(os.setxattr, "theirs/f", "trusted.x", b"1")
        """,
        shared.path,
    )
    assert said == ["EACCES", "EPERM", "EPERM", "ok", "ok", "EPERM", "ok", "EPERM"]
    status = (shared.path / "theirs/f").stat()
    assert (status.st_uid, status.st_gid) == (OTHER, OTHER)


def test_privileges_end_with_a_change_by_somebody_else(shared: Mounted) -> None:
    """A write, a truncation or a chown takes set-user-ID and set-group-ID off a file, except for root's writes."""
    path = shared.path / "tool"
    changes = {
        "write": "os.pwrite(os.open(sys.argv[1], os.O_WRONLY), b'x', 0)",
        "append": "os.write(os.open(sys.argv[1], os.O_RDWR | os.O_APPEND), b'x')",
        "truncate": "os.truncate(sys.argv[1], 1)",
        "open": "os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC)",
    }
    os.chmod(shared.path, 0o777)
    for name, code in changes.items():
        path.write_bytes(b"tool")
        os.chown(path, OTHER, OTHER)
        os.chmod(path, 0o6777)
        as_other(code, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o777, name
    os.chmod(path, 0o6777)
    with path.open("ab") as file:
        file.write(b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o6777
    os.chown(path, 0, -1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777


def test_the_extension_is_used_where_it_was_built(live: Mounted) -> None:
    pytest.importorskip("moonclipfs._fuseinit")
    flags = live.stats()["init_flags"]
    assert flags & HANDLE_KILLPRIV_V2
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 6):
        assert flags & DIRECT_IO_ALLOW_MMAP


def test_a_seal_leaves_those_who_work_in_the_directory_alone(live: Mounted) -> None:
    """A seal and what others see of it disturb no working directory and no open file in the live tree."""
    (live.path / "run").mkdir()
    (live.path / "run/model.bin").write_bytes(os.urandom(100_000))
    code = """
        import os, sys
        os.chdir(sys.argv[1])
        file = open("model.bin", "rb")
        print("in", flush=True)
        sys.stdin.readline()
        print(os.getcwd(), len(file.read()), len(os.listdir(".")), flush=True)
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), live.path / "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "in\n"
    assert ask(str(live.path), "seal", None, path="run")["number"] == 1
    eventually(lambda: (live.path / "@versions/run/1/model.bin").exists())
    said, _ = worker.communicate("\n")
    assert said.split() == [str(live.path / "run"), "100000", "1"]


def test_umount_stores_what_was_written_and_tells_what_is_left(live: Mounted, mounter: Mounter) -> None:
    """umount comes back when what was written is stored, also what nobody synced; a busy one changes nothing."""
    data = os.urandom(8 * MIB)
    with (live.path / "f").open("wb") as file:
        with pytest.raises(BusyError, match=f"pid {os.getpid()}"):
            unmount(live.path)
        file.write(data)
    unmount(live.path)
    assert not is_running(live.pid)
    again = mounter(live.store, read_only=False)
    assert (again.path / "f").read_bytes() == data
    assert "are to be encoded" not in again.log_text()
    eventually(lambda: ask(str(again.path), "status")["staged_bytes"] == 0)


def test_what_cannot_be_stored_is_told_by_umount(store: Store, mounter: Mounter) -> None:
    """What cannot be stored stays staged: umount says so, and the next mount has it."""
    mounted = mounter(store.path, read_only=False)
    (mounted.path / "f").write_bytes(b"f" * 200_000)
    packs = store.path / "packs"
    moved = packs.rename(store.path / "away")
    packs.write_bytes(b"no directory")
    try:
        with pytest.raises(MountError, match="stays staged"):
            unmount(mounted.path)
    finally:
        packs.unlink()
        moved.rename(packs)
    assert "ERROR" in mounted.log_text()
    again = mounter(store.path, read_only=False)
    assert (again.path / "f").read_bytes() == b"f" * 200_000
    ask(str(again.path), "flush", None)
    assert ask(str(again.path), "status")["staged_bytes"] == 0


def stop_encoding(mounted: Mounted) -> list[int]:
    """Stop the processes that encode for a mount, as if they took long."""
    (mounted.path / "first").write_bytes(b"1" * MIB)
    ask(str(mounted.path), "flush", None)
    pids = [pid for pid in processes_of(mounted.store) if pid != mounted.pid]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def test_umount_tells_that_the_server_was_killed_before_all_was_stored(live: Mounted) -> None:
    pids = stop_encoding(live)
    (live.path / "f").write_bytes(b"f" * MIB)
    killer = threading.Timer(2.0, os.kill, (live.pid, signal.SIGKILL))
    killer.start()
    try:
        with pytest.raises(MountError, match=r"killed before everything was stored.*stays staged"):
            unmount(live.path)
    finally:
        killer.join()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert not runtime_path(str(live.path), "sock").exists()


def test_umount_waits_for_a_server_that_it_cannot_ask(
    live: Mounted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started in another environment, or by another user."""
    pids = stop_encoding(live)
    (live.path / "f").write_bytes(b"f" * MIB)
    going_on = threading.Timer(2.0, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids])
    going_on.start()
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        unmount(live.path)
    assert time.monotonic() - began > 1.5
    going_on.join()
    eventually(lambda: not is_running(live.pid))
    assert "ERROR" not in live.log_text()


def test_umount_tells_of_an_unexpected_error_at_the_end(store: Store, tmp_path: Path, fuse: None) -> None:
    patch = """
from moonclipfs.fuse import initflags
initflags.load()
from moonclipfs.layers.live import Live
def close(self):
    raise RuntimeError("closing fails")
Live.close = close
"""
    place = tmp_path / "mnt"
    with (
        patched_server(store.path, place, patch, ends=MountError.exit_code, read_only=False),
        pytest.raises(MountError, match="closing fails"),
    ):
        unmount(place)


def test_umount_of_another_users_mount_names_that_user(shared: Mounted, nobody: Nobody) -> None:
    def refused() -> None:
        for lazy in (False, True):
            with pytest.raises(PermissionDeniedError, match=r"was mounted by root \(user 0\)"):
                unmount(shared.path, lazy=lazy)

    nobody.run(refused)
    assert (shared.path / "@versions").is_dir()


def test_a_layer_whose_mount_was_detached_is_told(live: Mounted, mounter: Mounter) -> None:
    """There is nothing to unmount any more: its server ends with the last close."""
    with open(live.path / "f", "wb") as file:
        file.write(b"x")
        unmount(live.path, lazy=True)
        with pytest.raises(BusyError, match=f"process {live.pid}, which serves what is still open"):
            mounter(live.store, read_only=False)
    eventually(lambda: not is_running(live.pid), 30)
    again = mounter(live.store, read_only=False)
    assert (again.path / "f").read_bytes() == b"x"


def test_errors_of_commands_come_back_as_themselves(live: Mounted) -> None:
    from moonclipfs.errors import NotFoundError, UsageError

    with pytest.raises(NotFoundError):
        ask(str(live.path), "seal", None, path="nowhere")
    with pytest.raises(UsageError):
        ask(str(live.path), "seal")


def test_statfs_counts_what_can_be_reclaimed_as_free(live: Mounted) -> None:
    """statfs gives the size of the store's disk, and counts what can be reclaimed as free."""
    disk, shown = os.statvfs(live.store), os.statvfs(live.path)
    assert (shown.f_blocks, shown.f_frsize, shown.f_namemax) == (disk.f_blocks, disk.f_frsize, 255)
    reclaimable = ask(str(live.path), "status")["reclaimable"]
    slack = 64 * MIB // disk.f_frsize
    assert abs(shown.f_bavail - disk.f_bavail - reclaimable // disk.f_frsize) < slack


def test_special_families_of_attributes(anywhere: Mounted) -> None:
    path = anywhere.path / "f"
    path.touch()
    os.setxattr(path, "trusted.x", b"1")
    assert os.listxattr(path) == ["trusted.x"]
    for name, expected in (
        ("security.x", errno.EOPNOTSUPP),
        ("system.posix_acl_access", errno.EOPNOTSUPP),
        ("user.moonclip.object", errno.EPERM),
    ):
        with pytest.raises(OSError) as caught:
            os.setxattr(path, name, b"\2\0\0\0")
        assert caught.value.errno == expected, name
    for number in range(2000):
        try:
            os.setxattr(path, f"user.{number}", b"v" * 100)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            break
    else:
        pytest.fail("attributes without end")
    with pytest.raises(OSError) as caught:
        os.removexattr(path, "user.none")
    assert caught.value.errno == errno.ENODATA
