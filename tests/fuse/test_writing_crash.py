"""Killed servers and programs, full disks: what was promised to a program is there, all else is old or new."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs.errors import MountError, NoSpaceError
from moonclipfs.fuse.control import ask
from moonclipfs.store.store import Store
from tests.fuse.conftest import SMALL_FILES, Mounted, Mounter, eventually, is_running, patched_server
from tests.layers.publish import publish

MIB = 1 << 20

ExpectLog = Callable[[str], None]
CLEARED = "cleared a dead mount"


def kill(mounted: Mounted) -> None:
    """kill -9 of the server."""
    os.kill(mounted.pid, signal.SIGKILL)
    eventually(lambda: not is_running(mounted.pid))


def staging_of(store: Path) -> list[Path]:
    """The staging files of all layers."""
    return [path for path in store.glob("layers/*/staging/*") if path.is_file()]


@pytest.fixture(params=["live", "overlay"])
def place(request: pytest.FixtureRequest, live: Mounted) -> Path:
    """Where programs write to the mount `live`: its root, or an overlay, which is there when it is mounted again."""
    if request.param == "live":
        return live.path
    (live.path / "@overlays/work").mkdir()
    return live.path / "@overlays/work"


def test_r035_fsync_survives_the_server_and_nothing_leaks(
    live: Mounted, place: Path, mounter: Mounter, expect_log: ExpectLog
) -> None:
    expect_log(CLEARED)
    data = os.urandom(MIB)
    descriptors = [os.open(place / name, os.O_WRONLY | os.O_CREAT) for name in ("synced", "loose")]
    for descriptor in descriptors:
        assert os.write(descriptor, data) == MIB
    os.fsync(descriptors[0])
    kill(live)
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fsync(descriptor)
        with pytest.raises(OSError):
            os.close(descriptor)
    again = mounter(live.store, read_only=False)
    assert (place / "synced").read_bytes() == data
    if (place / "loose").exists():
        assert data.startswith((place / "loose").read_bytes())
        (place / "loose").unlink()
    assert again.log_text().count("are to be encoded") == 1
    if place != live.path:
        ask(str(again.path), "overlay_flush", None, name=place.name)
    eventually(lambda: not staging_of(live.store), 30)


def test_r041_a_kill_while_overwriting_keeps_the_version_before(
    live: Mounted, mounter: Mounter, expect_log: ExpectLog
) -> None:
    expect_log(CLEARED)
    before = os.urandom(MIB)
    (live.path / "run").mkdir()
    (live.path / "run/run.pt").write_bytes(before)
    assert ask(str(live.path), "seal", None, path="run")["number"] == 1
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import sys, time
                file = open(sys.argv[1], "wb", buffering=0)
                file.write(b"v2" * 150_000)
                print("written", flush=True)
                time.sleep(60)
                """
            ),
            live.path / "run/run.pt",
        ],
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    kill(live)
    writer.kill()
    writer.communicate()
    again = mounter(live.store, read_only=False)
    assert (again.path / "@versions/run/1/run.pt").read_bytes() == before
    assert (again.path / "run/run.pt").read_bytes() in (before, (b"v2" * 150_000))


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_database_survives_kills(
    live: Mounted, place: Path, mounter: Mounter, mode: str, expect_log: ExpectLog
) -> None:
    """An SQLite database, with a rollback journal and in WAL mode, is whole after kill -9 of program and server."""
    code = """
        import sqlite3, sys
        base = sqlite3.connect(sys.argv[1])
        base.execute("pragma journal_mode=" + sys.argv[2])
        base.execute("pragma synchronous=full")
        base.execute("create table if not exists t (n integer primary key, x blob)")
        base.commit()
        while True:
            with base:
                base.execute("insert into t (x) values (randomblob(2000))")
            print(base.execute("select max(n) from t").fetchone()[0], flush=True)
    """
    expect_log(CLEARED)
    mounted, said = live, 0
    for _ in range(3 if place == live.path else 1):
        program = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), place / "db", mode], stdout=subprocess.PIPE
        )
        assert program.stdout is not None
        for _ in range(30):
            said = int(program.stdout.readline())
        kill(mounted)
        program.kill()
        rest, _ = program.communicate()
        said = max([said, *map(int, rest.split()[:-1])])
        mounted = mounter(live.store, read_only=False)
        with sqlite3.connect(place / "db") as base:
            assert base.execute("pragma integrity_check").fetchall() == [("ok",)]
            assert base.execute("select count(*) from t").fetchone()[0] >= said
        base.close()
    assert "ERROR" not in mounted.log_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 MiB."""
    if os.geteuid() != 0:
        pytest.skip("a small file system takes root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
def test_files_of_an_overlay_can_be_removed_whenever_the_disk_is_full(small_disk: Path, mounter: Mounter) -> None:
    """After a commit that failed for it, too: they give their space back at once, however often the disk is full."""
    Store.create(small_disk / "store").close()
    mounted = mounter(small_disk / "store", read_only=False)
    ask(str(mounted.path), "overlay_create", None, name="exp")
    path, block = mounted.path / "@overlays/exp", os.urandom(4 * MIB)
    empty = shutil.disk_usage(small_disk).used

    def fill() -> None:
        with pytest.raises(OSError, match="No space"):
            for number in range(64):
                (path / f"{number}").write_bytes(block)

    for _ in range(2):
        fill()
        with pytest.raises(NoSpaceError):
            ask(str(mounted.path), "overlay_commit", None, name="exp")
        for file in list(path.iterdir()):
            file.unlink()
        eventually(lambda: shutil.disk_usage(small_disk).used < empty + 8 * MIB, 10)
        eventually((small_disk / "store/reserve").exists, 10)
        open_files = [os.readlink(one) for one in Path(f"/proc/{mounted.pid}/fd").iterdir() if one.is_symlink()]
        assert not [one for one in open_files if "/staging/" in one and one.endswith("(deleted)")]


def test_r039_a_full_disk_is_enospc_and_room_makes_everything_work_again(small_disk: Path, mounter: Mounter) -> None:
    Store.create(small_disk / "store").close()
    with Store.open(small_disk / "store", write=True) as store:
        publish(store, "run1/a", SMALL_FILES)
    mounted = mounter(small_disk / "store", read_only=False)
    (mounted.path / "kept").write_bytes(os.urandom(MIB))
    kept = (mounted.path / "kept").read_bytes()
    with pytest.raises(OSError) as caught, (mounted.path / "partial").open("wb", buffering=0) as file:
        for _ in range(256):
            file.write(os.urandom(MIB))
    assert caught.value.errno == errno.ENOSPC
    os.symlink("step_8", mounted.path / "L.tmp")
    os.replace(mounted.path / "L.tmp", mounted.path / "LATEST")
    assert (mounted.path / "kept").read_bytes() == kept
    assert (mounted.path / "run1/a/model.bin").read_bytes() == SMALL_FILES["model.bin"]
    (mounted.path / "partial").unlink()
    data = os.urandom(MIB)

    def save() -> bool:
        try:
            (mounted.path / "saved").write_bytes(data)
        except OSError:
            return False
        return True

    eventually(save, 30)
    assert (mounted.path / "saved").read_bytes() == data


def test_past_the_staging_limit_a_writer_waits(store: Store, mounter: Mounter) -> None:
    """Past the limit of what is staged a writer waits until some is encoded, and never sees an error."""
    mounted = mounter(store.path, read_only=False, staging_limit=8 * MIB)
    data = os.urandom(40 * MIB)
    with (mounted.path / "f").open("wb", buffering=0) as file:
        for at in range(0, len(data), MIB):
            assert file.write(data[at : at + MIB]) == MIB
    for number in range(8):
        (mounted.path / f"g{number}").write_bytes(data[number * MIB : (number + 3) * MIB])
    assert (mounted.path / "f").read_bytes() == data
    assert (mounted.path / "g3").read_bytes() == data[3 * MIB : 6 * MIB]
    assert "ERROR" not in mounted.log_text()


def test_a_writer_does_not_wait_for_ever_when_nothing_can_be_stored(store: Store, tmp_path: Path) -> None:
    """Where nothing that is staged can be stored, a writer that waited for long gets ENOSPC, and the mount goes on."""
    (store.path / "packs").rename(tmp_path / "away")
    (store.path / "packs").write_bytes(b"no directory")
    patch = "from moonclipfs import limits\nlimits.STAGING_PATIENCE_SECONDS = 1.0"
    options = {"read_only": False, "staging_limit": 4 * MIB, "seal_after": None}
    with patched_server(store.path, tmp_path / "mnt", patch, ends=MountError.exit_code, **options) as mounted:
        with pytest.raises(OSError) as caught, (mounted.path / "f").open("wb", buffering=0) as file:
            for _ in range(8):
                file.write(os.urandom(MIB))
        assert caught.value.errno == errno.ENOSPC
        os.mkdir(mounted.path / "d")
        assert len((mounted.path / "f").read_bytes()) >= 3 * MIB
