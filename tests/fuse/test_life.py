"""Section G of the public reports: the life of a mount."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moonclipfs.errors import (
    BusyError,
    FormatVersionError,
    FuseUnavailableError,
    MountError,
    NotFoundError,
    PermissionDeniedError,
    ReadOnlyError,
    UsageError,
)
from moonclipfs.fuse import prepare
from moonclipfs.fuse.control import ask, runtime_path
from moonclipfs.fuse.mount import MountOptions, find_mounts, mount, unmount
from moonclipfs.fuse.mounts import mount_at
from moonclipfs.fuse.prepare import check_device
from moonclipfs.store.leases import live_leases
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually
from tests.layers.publish import publish

ROOT = Path(__file__).parents[2]


def is_running(pid: int) -> bool:
    """False for a process that ended, also while nobody has collected it."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_mount_and_unmount_leave_nothing(small: Mounted) -> None:
    """mount comes back when the mount answers, umount when the server is gone."""
    assert [found.store for found in find_mounts() if found.mountpoint == str(small.path)] == [str(small.store)]
    assert (small.path / "run1/a/config.json").read_bytes() == b'{"layers": 2}'
    purposes = [lease.purpose for lease in live_leases(small.store)]
    assert any(str(runtime_path(str(small.path), "sock")) in purpose for purpose in purposes)
    unmount(small.path)
    assert mount_at(str(small.path)) is None
    assert not is_running(small.pid)
    assert not runtime_path(str(small.path), "sock").exists()
    assert not [lease for lease in live_leases(small.store) if lease.purpose.startswith("mount")]
    assert small.log_text() == ""
    with pytest.raises(NotFoundError, match="no store is mounted"):
        unmount(small.path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_r095_signals_unmount(small: Mounted, number: int) -> None:
    """SIGTERM and SIGINT unmount; no dead mount stays, even with a file open."""
    file = os.open(small.path / "run1/a/model.bin", os.O_RDONLY)
    os.read(file, 10)
    os.kill(small.pid, number)
    eventually(lambda: not is_running(small.pid))
    assert mount_at(str(small.path)) is None
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        os.close(file)


def test_r095_the_server_exits_0_on_sigterm(store: Store, tmp_path: Path, fuse: None) -> None:
    """A mount in the foreground serves until it is unmounted or signalled, and exits with 0."""
    publish(store, "run1/a", {"x": b"1"})
    place = tmp_path / "mnt"
    place.mkdir()
    command = (
        "import sys; from moonclipfs.fuse.mount import *; sys.exit(mount(*sys.argv[1:], MountOptions(foreground=True)))"
    )
    for stop in ("signal", "unmount"):
        server = subprocess.Popen([sys.executable, "-c", command, store.path, place], cwd=ROOT, stderr=subprocess.PIPE)
        try:
            eventually((place / "run1/a/x").exists)
            if stop == "signal":
                server.terminate()
            else:
                unmount(place)
            assert server.wait(10) == 0
        finally:
            server.kill()
            said = server.communicate()[1].decode()
        assert ("SIGTERM" in said) == (stop == "signal")
        assert mount_at(str(place)) is None


def test_r095_a_killed_server_leaves_a_mount_that_is_cleared(
    small: Mounted, mounter: Mounter, expect_log: Callable[[str], None]
) -> None:
    """After kill -9 of the server, mount on the same directory works: our own dead mount is cleared first."""
    os.kill(small.pid, signal.SIGKILL)
    eventually(lambda: not is_running(small.pid))
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        os.listdir(small.path)
    expect_log("cleared a dead mount of .* at ")
    again = mounter(small.store)
    assert (again.path / "run1/a/config.json").read_bytes() == b'{"layers": 2}'
    unmount(small.path)
    assert mount_at(str(small.path)) is None


def test_r095_a_mount_right_after_a_kill(
    small: Mounted, mounter: Mounter, expect_log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks a server that is being killed gets ECONNABORTED: the mount is dead a moment later."""
    os.kill(small.pid, signal.SIGKILL)
    eventually(lambda: not is_running(small.pid))
    answer, asked = os.statvfs, []

    def aborted(place: str) -> os.statvfs_result:
        asked.append(place)
        if len(asked) == 1:
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        return answer(place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", aborted)
        prepare.check_mountpoint(str(small.store), str(small.path))
    expect_log("cleared a dead mount of .* at ")
    assert (mounter(small.store).path / "run1/a/config.json").read_bytes() == b'{"layers": 2}'


def test_r095_a_dead_mount_can_be_unmounted(small: Mounted) -> None:
    """umount clears a dead mount too, and the socket of its server."""
    os.kill(small.pid, signal.SIGKILL)
    eventually(lambda: not is_running(small.pid))
    unmount(small.path)
    assert mount_at(str(small.path)) is None
    assert not runtime_path(str(small.path), "sock").exists()


FOREIGN_SERVER = """
import pyfuse3, sys, trio
pyfuse3.init(pyfuse3.Operations(), sys.argv[1], {"fsname=other", "subtype=otherfs"})
print("ready", flush=True)
trio.run(pyfuse3.main)
"""


def test_r095_a_foreign_dead_mount_is_refused(store: Store, tmp_path: Path, fuse: None) -> None:
    """A dead mount of another file system is not touched: mounting over it is refused."""
    place = tmp_path / "mnt"
    place.mkdir()
    server = subprocess.Popen([sys.executable, "-c", FOREIGN_SERVER, place], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        server.kill()
        server.communicate()
        with pytest.raises(MountError, match=r"dead mount \(fuse.otherfs, other\)"):
            mount(store.path, place)
        with pytest.raises(NotFoundError, match="no store is mounted"):
            unmount(place)
        assert mount_at(str(place)) is not None
    finally:
        server.kill()
        subprocess.run(["fusermount3", "-uz", place], check=True)


def test_r097_a_busy_unmount_names_the_holders(small: Mounted) -> None:
    """umount of a mount in use fails, naming pid and path of who uses it."""
    with open(small.path / "run1/a/model.bin", "rb"):
        with pytest.raises(BusyError) as caught:
            unmount(small.path)
        assert f"pid {os.getpid()}" in str(caught.value)
        assert str(small.path / "run1/a/model.bin") in str(caught.value)
    with open(small.path / "run1/a/model.bin", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with pytest.raises(BusyError, match=rf"pid {os.getpid()} .*/run1/a/model.bin"):
        unmount(small.path)
    mapped.close()
    sleeper = subprocess.Popen(["sleep", "60"], cwd=small.path / "run1")
    try:
        with pytest.raises(BusyError, match=rf"pid {sleeper.pid} \(sleep\): {small.path}/run1"):
            unmount(small.path)
    finally:
        sleeper.kill()
        sleeper.wait()
    unmount(small.path)


def test_r097_lazy_unmount_serves_what_is_open(small: Mounted) -> None:
    """umount --lazy detaches at once; open files are served until they are closed, then the server ends."""
    with open(small.path / "run1/a/model.bin", "rb", buffering=0) as file:
        head = file.read(10)
        unmount(small.path, lazy=True)
        assert mount_at(str(small.path)) is None
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        assert file.read(10) == head
        assert is_running(small.pid)
    eventually(lambda: not is_running(small.pid))


def test_a_server_that_hangs_is_told_and_detached(small: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount whose server hangs is found out without hanging; umount --lazy takes it away."""
    monkeypatch.setattr(prepare, "_ANSWER_SECONDS", 0.5)
    os.kill(small.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BusyError, match="its server does not answer"):
            mount(small.store, small.path)
        with pytest.raises(MountError, match="does not answer"):
            ask(str(small.path), "ping", timeout=0.2)
        unmount(small.path, lazy=True)
        assert mount_at(str(small.path)) is None
    finally:
        os.kill(small.pid, signal.SIGCONT)
    eventually(lambda: not is_running(small.pid))


def test_what_cannot_be_mounted_on(store: Store, tmp_path: Path, mounter: Mounter) -> None:
    """A mountpoint must be an empty directory, apart from the store, with nothing of ours mounted on it."""
    publish(store, "run1/a", {"x": b"1"})
    with pytest.raises(NotFoundError, match="make the directory first"):
        mount(store.path, tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="not a directory"):
        mount(store.path, tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_bytes(b"")
    with pytest.raises(UsageError, match="not empty"):
        mount(store.path, tmp_path / "full")
    with pytest.raises(UsageError):
        mount(store.path, tmp_path)
    (store.path / "mnt").mkdir()
    with pytest.raises(UsageError, match="inside the store"):
        mount(store.path, store.path / "mnt")
    (store.path / "mnt").rmdir()
    with pytest.raises(NotFoundError):
        (tmp_path / "m").mkdir()
        mount(tmp_path / "nostore", tmp_path / "m")
    with pytest.raises(FormatVersionError, match="not a store"):
        (tmp_path / "plain").mkdir()
        mount(tmp_path / "plain", tmp_path / "m")
    with pytest.raises(NotFoundError, match="cannot write the log"):
        mount(store.path, tmp_path / "m", MountOptions(log=str(tmp_path / "none/log")))
    mounted = mounter(store.path)
    with pytest.raises(BusyError, match="mounted there already"):
        mount(store.path, mounted.path)
    os.symlink(mounted.path, tmp_path / "alias")
    with pytest.raises(BusyError, match="mounted there already"):
        mount(store.path, tmp_path / "alias")
    unmount(tmp_path / "alias")
    assert mount_at(str(mounted.path)) is None


def test_a_store_below_its_mountpoint_is_refused(tmp_path: Path) -> None:
    """A store below its own mountpoint is refused."""
    from moonclipfs.fuse.prepare import _check_apart

    with pytest.raises(UsageError, match="below its own mountpoint"):
        _check_apart("/data/store", "/data")
    with pytest.raises(UsageError, match="below its own mountpoint"):
        _check_apart("/data", "/data")
    _check_apart("/data/store", "/data/store2")


def test_r099_no_fuse_device(store: Store, tmp_path: Path) -> None:
    """Without /dev/fuse, mount fails with its own error and says what to do."""
    publish(store, "run1/a", {"x": b"1"})
    (tmp_path / "mnt").mkdir()
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("hiding /dev/fuse takes root, and a /dev/fuse to hide")
    code = (
        "import sys; from moonclipfs.errors import *; from moonclipfs.fuse.mount import mount\n"
        "try: mount(*sys.argv[1:])\n"
        "except FuseUnavailableError as error: print(error); sys.exit(error.exit_code)"
    )
    command = 'mount --bind /dev/null /dev/fuse && exec "$@"'
    arguments = ["unshare", "-m", "sh", "-c", command, "sh", sys.executable, "-c", code, store.path, tmp_path / "mnt"]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == FuseUnavailableError.exit_code == 10, result.stderr
    assert "--device /dev/fuse --cap-add SYS_ADMIN" in result.stdout
    assert "moonclipfs export" in result.stdout


def test_r099_device_checks(tmp_path: Path) -> None:
    with pytest.raises(FuseUnavailableError, match="No such file"):
        check_device(str(tmp_path / "fuse"))
    with pytest.raises(FuseUnavailableError, match="not the FUSE device"):
        check_device("/dev/null")


def test_r099_without_the_right_to_mount(store: Store, tmp_path: Path, fuse: None) -> None:
    """Without the capability to mount, the error holds what libfuse says, and the hint."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("dropping capabilities takes root and setpriv")
    publish(store, "run1/a", {"x": b"1"})
    (tmp_path / "mnt").mkdir()
    code = (
        "import sys; from moonclipfs.errors import *; from moonclipfs.fuse.mount import mount\n"
        "try: mount(*sys.argv[1:])\n"
        "except FuseUnavailableError as error: print(error); sys.exit(error.exit_code)"
    )
    drop = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    arguments = [*drop, sys.executable, "-c", code, store.path, tmp_path / "mnt"]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 10, result.stderr + result.stdout
    assert "ermi" in result.stdout  # "Operation not permitted" or "Permission denied", as libfuse has it
    assert "--cap-add SYS_ADMIN" in result.stdout


def as_nobody(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python code as a user without rights, with whichever Python that user can run."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user takes root and setpriv")
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    words = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    probe = "import subprocess, sys, moonclipfs.fuse.server; subprocess.run([sys.executable, '-c', ''], check=True)"
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command = [*drop, python, "-c"]
        if os.path.exists(python) and subprocess.run([*command, probe], env=words, capture_output=True).returncode == 0:
            return subprocess.run([*command, code, *arguments], env=words, capture_output=True, text=True, check=False)
    pytest.skip("another user cannot run this Python")


def test_a_user_mounts_or_is_told_why_not() -> None:
    """A user without root mounts a store of their own, or is told that /dev/fuse is not open to them."""
    code = """if True:
        import os, sys
        from moonclipfs.errors import MoonclipError
        from moonclipfs.fuse.mount import MountOptions, mount, unmount
        from moonclipfs.store.store import Store
        os.umask(0o077)
        os.environ.pop("XDG_RUNTIME_DIR", None)
        os.environ["HOME"] = sys.argv[1]
        os.makedirs(sys.argv[1] + "/mnt")
        Store.create(sys.argv[1] + "/store").close()
        try:
            mount(sys.argv[1] + "/store", sys.argv[1] + "/mnt", MountOptions(allow_other=len(sys.argv) > 2))
        except MoonclipError as error:
            print(type(error).__name__, error)
            sys.exit(error.exit_code)
        print(os.listdir(sys.argv[1] + "/mnt"), os.statvfs(sys.argv[1] + "/mnt").f_namemax)
        unmount(sys.argv[1] + "/mnt")
    """
    home = Path("/tmp", f"moonclipfs-test-{os.getpid()}")
    try:
        for more in ([], ["allow-other"]):
            home.mkdir()
            os.chown(home, 65534, 65534)
            result = as_nobody(code, home, *more)
            if more and result.returncode == PermissionDeniedError.exit_code:
                assert "user_allow_other" in result.stdout
            elif os.stat("/dev/fuse").st_mode & 0o006 == 0o006:
                assert result.returncode == 0, result.stdout + result.stderr
                assert result.stdout == "[] 255\n"
            else:
                assert result.returncode == FuseUnavailableError.exit_code, result.stdout + result.stderr
                assert "no permission to open /dev/fuse" in result.stdout
            shutil.rmtree(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def test_allow_other_refuses_a_store_that_others_can_read(store: Store, mounter: Mounter) -> None:
    """--allow-other is refused for a store that others can get at, and lets other users in otherwise."""
    publish(store, "run1/a", {"x": b"1"})
    store.path.chmod(0o705)
    with pytest.raises(PermissionDeniedError, match="chmod o-rwx"):
        mounter(store.path, allow_other=True)
    store.path.chmod(0o700)
    mounted = mounter(store.path, allow_other=True)
    (line,) = [line for line in Path("/proc/mounts").read_text().splitlines() if str(mounted.path) in line]
    assert "allow_other" in line


def test_r029_one_device_and_read_only(small: Mounted, tmp_path: Path) -> None:
    """The whole mount has one st_dev; with --read-only every change of it is refused with EROFS."""
    device = os.stat(small.path).st_dev
    places = ["run1", "run1/a", "run1/a/sub/deep/x", "@versions", "@versions/run1/a/1", "@latest"]
    assert {os.stat(small.path / place).st_dev for place in places} == {device}
    file, new = small.path / "run1/a/model.bin", small.path / "run1/a/new"
    attempts = {
        "rename": lambda: os.rename(file, new),
        "unlink": lambda: os.unlink(file),
        "mkdir": lambda: os.mkdir(new),
        "rmdir": lambda: os.rmdir(small.path / "run1/a/sub"),
        "symlink": lambda: os.symlink("x", new),
        "link": lambda: os.link(file, new),
        "create": lambda: os.open(new, os.O_CREAT | os.O_WRONLY),
        "open": lambda: os.open(file, os.O_RDWR),
        "truncate": lambda: os.truncate(file, 0),
        "chmod": lambda: os.chmod(file, 0o600),
        "utime": lambda: os.utime(file),
        "setxattr": lambda: os.setxattr(file, "user.x", b"1"),
        "removexattr": lambda: os.removexattr(file, "user.x"),
        "mknod": lambda: os.mkfifo(new),
        "mkdir at the root": lambda: os.mkdir(small.path / "@mine"),
    }
    for name, attempt in attempts.items():
        with pytest.raises(OSError, match="Read-only file system"):
            attempt()
            pytest.fail(f"{name} was not refused")
    assert os.access(file, os.R_OK)
    assert not os.access(file, os.W_OK)


def test_statfs_tells_of_the_stores_disk(small: Mounted) -> None:
    """statfs gives size and free space of the disk that the store is on, and 255 bytes for names."""
    here, there = os.statvfs(small.path), os.statvfs(small.store)
    assert (here.f_blocks, here.f_frsize, here.f_namemax) == (there.f_blocks, there.f_frsize, 255)
    assert abs(here.f_bavail - there.f_bavail) * there.f_frsize < 4 << 30


def test_inode_numbers_survive_a_remount(small: Mounted, mounter: Mounter) -> None:
    paths = [small.path, *sorted(small.path.rglob("*")), small.path / "@versions/run1/a/1/sub"]
    before = [os.lstat(path).st_ino for path in paths]
    unmount(small.path)
    mounter(small.store)
    assert [os.lstat(path).st_ino for path in paths] == before


def test_odd_paths(tmp_path: Path, fuse: None) -> None:
    """Stores and mountpoints may have any name: blanks, commas, backslashes, bytes that are not UTF-8."""
    base = tmp_path / "a b,c\\d=\udce9\u00e9\n!"
    (base / "mnt").mkdir(parents=True)
    with Store.create(base / "store") as store:
        publish(store, "run1/a", {"x": b"1"})
    mount(base / "store", base / "mnt", MountOptions(log=str(tmp_path / "log")))
    try:
        assert (base / "mnt/run1/a/x").read_bytes() == b"1"
        (found,) = [found for found in find_mounts() if found.store == str(base / "store")]
        assert found.mountpoint == str(base / "mnt")
    finally:
        unmount(base / "mnt")


def test_a_server_that_cannot_start_is_reported(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the server before it answers is the command's own error, with its exit code."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'moonclipfs/fuse' in str(sys.orig_argv): sys.exit('bad luck')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MountError, match="bad luck"):
        mount(store.path, tmp_path / "mnt")


def test_two_mounts_of_one_store(store: Store, mounter: Mounter, tmp_path: Path) -> None:
    """A store may be mounted several times at once."""
    publish(store, "run1/a", {"x": b"1"})
    first, second = mounter(store.path), mounter(store.path, tmp_path / "mnt2")
    assert (first.path / "run1/a/x").read_bytes() == (second.path / "run1/a/x").read_bytes() == b"1"
    unmount(first.path)
    assert (second.path / "run1/a/x").read_bytes() == b"1"


def test_a_store_that_cannot_be_written_to_is_mounted(store: Store, tmp_path: Path, fuse: None) -> None:
    """A store in a read-only directory can be mounted with --read-only; it has no lease then."""
    publish(store, "run1/a", {"x": b"1"})
    store.close()
    if os.geteuid() != 0:
        pytest.skip("a read-only bind mount takes root")
    view, place = tmp_path / "view", tmp_path / "mnt"
    view.mkdir()
    place.mkdir()
    subprocess.run(["mount", "--bind", "-o", "ro", store.path, view], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", view], check=True)
    try:
        with pytest.raises(ReadOnlyError, match="--read-only"):
            mount(view, place)
        mount(view, place, MountOptions(read_only=True))
        assert (place / "run1/a/x").read_bytes() == b"1"
        unmount(place)
    finally:
        subprocess.run(["umount", "--lazy", view], check=True)


def test_the_lease_names_the_server(small: Mounted) -> None:
    assert [lease.pid for lease in live_leases(small.store) if "mount" in lease.purpose] == [small.pid]
